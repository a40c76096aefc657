"""One pool for each of Ray's actors, sized and logged.

>>> import ray, vpmm.ray
>>> @ray.remote(num_gpus=1, **vpmm.ray.options(limit="60 GB", pool_size="20 GB", torch=True))
... class Trainer: ...

The actor's process makes its pool before it makes the actor, with options of the names that Dask's workers
have (:class:`vpmm.dask.VpmmPlugin`). Ray shows the process its own GPU, which is then device 0.

Ray runs a hook in each process that it starts for ``ray.init``'s runtime environment, but at present not for
an actor's own. So :func:`options` also sets the variable that Ray makes of such a hook. Two consequences: a
hook of the job's own is not run for these actors, and with a Ray that has another variable the actor has to
call :func:`setup` itself, first. :func:`job` is for all workers of a job, by Ray's documented way.
"""

from __future__ import annotations

import atexit
import json
import os
from typing import Any

from ._worker import Worker

#: What a worker's process is told by.
_VARIABLE = "VPMM_RAY_WORKER"
_HOOK = "vpmm.ray.setup"

_begun: Worker | None = None


def job(runtime_env: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """For ``ray.init(**vpmm.ray.job(…))``: every worker process of the job has a pool. Settings are those of
    :func:`options`."""
    made = dict(runtime_env or {})
    if made.get("worker_process_setup_hook", _HOOK) != _HOOK:
        raise ValueError("the runtime environment has a hook: have its function call vpmm.ray.setup()")
    variable = json.dumps(Worker(**settings).settings())
    made["env_vars"] = {**made.get("env_vars", {}), _VARIABLE: variable}
    made["worker_process_setup_hook"] = _HOOK
    return {"runtime_env": made}


def options(runtime_env: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """For ``@ray.remote(**vpmm.ray.options(…))`` and ``Actor.options(**…)``: the actor's process has a pool.

    ``limit`` and whatever else :class:`vpmm.Pool` takes; ``pool_size``, what it holds from the begin;
    ``torch``, ``cupy`` and ``numba`` have these libraries allocate from the pool; ``history`` is how many
    requests are kept; with ``snapshot``, a folder, the process writes what its pool held there when it ends;
    ``log`` is a file, before whose ending the process's number goes, for a row for each allocation of
    buffers, CuPy and Numba, in RMM's format. A ``runtime_env`` that is given is kept beside them.
    """
    made = job(runtime_env, **settings)
    variable = _hook_s_variable()
    if variable:
        made["runtime_env"]["env_vars"][variable] = _HOOK
    return made


def _hook_s_variable() -> str | None:
    """The variable that Ray itself makes of a job's hook."""
    from ray._private import ray_constants

    return getattr(ray_constants, "WORKER_PROCESS_SETUP_HOOK_ENV_VAR", None)


def setup() -> None:
    """Makes the process's pool as its environment says; nothing without that, and nothing the second time.
    Ray calls it."""
    global _begun
    settings = os.environ.get(_VARIABLE)
    if settings is None or _begun is not None:
        return
    name = str(os.getpid())
    _begun = Worker(**json.loads(settings))
    _begun.begin(name)
    atexit.register(_begun.end, name)
