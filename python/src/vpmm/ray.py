"""One pool for each of Ray's actors, sized and logged.

>>> import ray, vpmm.ray
>>> @ray.remote(num_gpus=1)
... @vpmm.ray.actor(limit="60 GB", pool_size="20 GB", torch=True)
... class Trainer: ...

The actor's process makes its pool before it makes the actor, with settings of the names that Dask's workers
have (:class:`vpmm.dask.VpmmPlugin`). Ray has shown the process its own GPU by then, which is device 0.

>>> Trainer.options(**vpmm.ray.options(limit="80 GB")).remote()     # another limit for this one
>>> ray.init(**vpmm.ray.job(limit="60 GB", cupy=True))              # every process of a job

A process that Ray has just started does not know its GPU yet. So what is asked for by a job is prepared when
a process starts, and the pool is made with the first request. :func:`setup` is for a function of one's own
that Ray calls, as a loop of Ray Train is.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
from collections.abc import Callable
from typing import Any

from . import _snapshot
from ._typing import Unpack
from ._worker import Settings, Worker

#: What a process is told by: of the job, and of its actor.
_OF_JOB, _OF_ACTOR = "VPMM_RAY_JOB", "VPMM_RAY_ACTOR"
_HOOK = "vpmm.ray.prepare"

#: What only a process that knows its GPU can do.
_NEEDS_DEVICE = ("pool_size", "log", "log_directory")

_is_set_up = _is_prepared = False


def actor(cls: type | None = None, /, **settings: Unpack[Settings]) -> Any:
    """A decorator of a class, below ``ray.remote``: a process that makes an object of it makes its pool
    before.

    ``limit`` and whatever else :class:`vpmm.Pool` takes; ``pool_size``, what it holds from the begin;
    ``torch``, ``cupy`` and ``numba`` have these libraries allocate from the pool; ``history`` is how many
    requests are kept; with ``snapshot``, a folder, the process writes what its pool held there when it ends;
    ``log`` is a file, before whose ending the process's number goes, for a row for each allocation of
    buffers, CuPy and Numba, in RMM's format. :func:`options` has the last word.
    """
    Worker.check(**settings)

    def decorate(cls: Any) -> Any:
        init: Callable[..., None] = cls.__init__

        def __init__(self: Any, *arguments: Any, **named: Any) -> None:
            setup(**settings)
            init(self, *arguments, **named)

        # Ray checks arguments by its signature, and takes what it finds behind it for written in Python.
        if inspect.isfunction(init):
            functools.update_wrapper(__init__, init)
        cls.__init__ = __init__
        return cls

    return decorate if cls is None else decorate(cls)


def options(runtime_env: dict[str, Any] | None = None, **settings: Unpack[Settings]) -> dict[str, Any]:
    """For ``Trainer.options(**vpmm.ray.options(…))``, and among ``ray.remote``'s own: settings of an actor
    whose class has :func:`actor`, in place of those that it has there. An actor whose class has not follows
    them where the job has :func:`job`, but for what needs the device at once. A ``runtime_env`` that is given
    is kept beside them."""
    return {"runtime_env": _with_variable(runtime_env, _OF_ACTOR, settings)}


def job(runtime_env: dict[str, Any] | None = None, **settings: Unpack[Settings]) -> dict[str, Any]:
    """For ``ray.init(**vpmm.ray.job(…))``: every worker process of the job has these settings, those of
    :func:`actor`, for the pool that it makes with its first request. ``pool_size`` and ``log`` are for
    actors: which GPU is to hold what, a process does not know when it starts."""
    for name in _NEEDS_DEVICE:
        if settings.get(name):
            raise ValueError(f"{name} is for a class with vpmm.ray.actor, or vpmm.ray.setup")
    made = _with_variable(runtime_env, _OF_JOB, settings)
    if made.get("worker_process_setup_hook", _HOOK) != _HOOK:
        raise ValueError("the runtime environment has a hook: have its function call vpmm.ray.prepare()")
    made["worker_process_setup_hook"] = _HOOK
    return {"runtime_env": made}


def setup(**settings: Unpack[Settings]) -> None:
    """Makes the process's pool: with these settings, and where they say nothing those of the job. Nothing
    once it has done so. For code that Ray calls in a process that knows its GPU."""
    global _is_set_up
    if _is_set_up:
        return
    name = str(os.getpid())
    worker = Worker(**{**_told(_OF_JOB), **settings, **_told(_OF_ACTOR)})
    worker.begin(name)
    # Not before: what failed may be asked for otherwise.
    _is_set_up = True
    atexit.register(worker.end, name)


def prepare() -> None:
    """Has the process's pool be as its environment says once it is made, and libraries allocate from it.
    Touches no device. Ray calls it in each process of a :func:`job` that it starts."""
    global _is_prepared
    if _is_prepared or not {_OF_JOB, _OF_ACTOR} & os.environ.keys():
        return
    _is_prepared = True
    told = {**_told(_OF_JOB), **_told(_OF_ACTOR)}
    worker = Worker(**{name: value for name, value in told.items() if name not in _NEEDS_DEVICE})
    worker.prepare()
    if worker.history:
        _snapshot.record_history(worker.history)
    atexit.register(_end, worker)


def _end(worker: Worker) -> None:
    # Without a pool there is nothing to tell of, and none is made for that. One that was set up has told.
    if not _is_set_up and _snapshot.snapshot()["segments"]:
        worker.end(str(os.getpid()))


def _told(variable: str) -> dict[str, Any]:
    return json.loads(os.environ.get(variable, "{}"))


def _with_variable(runtime_env: dict[str, Any] | None, variable: str, settings: Settings) -> dict[str, Any]:
    made = dict(runtime_env or {})
    # A mistake is told here, and not by every process.
    Worker.check(**settings)
    told = json.dumps(settings, default=os.fspath)
    made["env_vars"] = {**made.get("env_vars", {}), variable: told}
    return made
