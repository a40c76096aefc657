"""Ray's actors with a pool each, in a real local Ray. Skipped where Ray is not installed."""

import os
import pickle
import subprocess
import sys
import time

import pytest

import vpmm
import vpmm.ray

# No token is written into the home folder, and nothing is told to anybody.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray")


def actor_class():
    """In a function, so that it goes to the workers whole: they know nothing of this file."""

    class Holder:
        """An actor's class."""

        def pid(self):
            return os.getpid()

        def hold(self, size):
            self.buffer = vpmm.DeviceBuffer.from_bytes(bytes([size % 256]) * size)
            return self.buffer.to_bytes().count(bytes([size % 256]))

        def let_go(self):
            self.buffer.free()

        def ask_too_much(self):
            try:
                vpmm.DeviceBuffer(64 << 20)
            except MemoryError as error:
                return str(error)

        def held(self):
            return vpmm.statistics().mapped_bytes

    return ray.remote(num_cpus=0)(Holder)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_an_actor_has_the_pool_that_it_asked_for(tmp_path):
    with pytest.raises(TypeError):
        vpmm.ray.options(colour="blue")
    options = vpmm.ray.options(
        limit="32 MiB",
        pool_size="8 MiB",
        history=100,
        snapshot=str(tmp_path),
        log=str(tmp_path / "calls.csv"),
        runtime_env={"env_vars": {"OURS": "1"}},
    )
    assert options["runtime_env"]["env_vars"]["OURS"] == "1"
    actor = actor_class().options(**options).remote()
    other = actor_class().options(**vpmm.ray.options(limit="48 MiB")).remote()
    assert ray.get(actor.held.remote()) >= 8 << 20
    assert ray.get([actor.hold.remote(200_000), other.hold.remote(3000)]) == [200_000, 3000]
    assert "at most 32 MiB" in ray.get(actor.ask_too_much.remote())
    assert "at most 48 MiB" in ray.get(other.ask_too_much.remote())
    pid = ray.get(actor.pid.remote())
    ray.get(actor.let_go.remote())
    actor.__ray_terminate__.remote()
    snapshot, log = tmp_path / f"vpmm-{pid}.pickle", tmp_path / f"calls-{pid}.dev0.csv"
    end = time.monotonic() + 30
    while time.monotonic() < end and not snapshot.exists():
        time.sleep(0.1)
    events = pickle.loads(snapshot.read_bytes())["device_traces"][0]
    assert {event["action"] for event in events} >= {"alloc", "free_completed", "oom"}
    rows = log.read_text().rstrip("\0").splitlines()
    assert rows[0] == "Thread,Time,Action,Pointer,Size,Stream"
    assert [row.split(",")[2] for row in rows[1:]] == ["allocate", "allocate failure", "free"]


def test_an_actor_without_has_what_the_library_gives():
    actor = actor_class().remote()
    assert ray.get(actor.ask_too_much.remote()) is None


def test_every_worker_of_a_job():
    """A Ray of its own, beside that of the other tests."""
    program = """
import ray, vpmm.ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, address="local",
         **vpmm.ray.job(limit="40 MiB"))

@ray.remote
def ask_too_much():
    try:
        vpmm.DeviceBuffer(64 << 20)
    except MemoryError as error:
        return str(error)

assert "at most 40 MiB" in ray.get(ask_too_much.remote())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_hook_of_one_s_own_is_not_taken_away():
    with pytest.raises(ValueError, match="hook"):
        vpmm.ray.options(runtime_env={"worker_process_setup_hook": "ours.setup"})
    made = vpmm.ray.job(limit="1 GB")["runtime_env"]
    assert made["worker_process_setup_hook"] == "vpmm.ray.setup"
    assert list(made["env_vars"]) == ["VPMM_RAY_WORKER"]
