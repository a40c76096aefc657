"""Ray's actors with a pool each, in a real local Ray. Skipped where Ray is not installed."""

import os
import pathlib
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

#: An actor without a part of a GPU sees none.
GPUS = 0 if os.environ["VPMM_DEVICE"].startswith("sim") else 0.25


def plain_class():
    """In a function, so that it goes to the workers whole: they know nothing of this file."""

    class Holder:
        """An actor's class."""

        def __init__(self, least=0):
            # What this answers is from before anything here asked for the pool.
            self.at_first = vpmm.snapshot()["segments"]
            self.least = least

        def pid(self):
            return os.getpid()

        def hold(self, size):
            self.buffer = vpmm.DeviceBuffer.from_bytes(bytes([size % 256]) * size)
            return self.buffer.to_bytes().count(bytes([size % 256])) + self.least

        def let_go(self):
            self.buffer.free()

        def ask_too_much(self):
            try:
                vpmm.DeviceBuffer(64 << 20)
            except MemoryError as error:
                return str(error)

        def held_at_first(self):
            return sum(segment["total_size"] for segment in self.at_first)

        def gpus(self):
            """Those that the process saw when its pool was made, and sees now."""
            return getattr(vpmm.ray, "seen", None), os.environ.get("CUDA_VISIBLE_DEVICES")

    return Holder


def actor_class(**settings):
    return ray.remote(num_cpus=0, num_gpus=GPUS)(vpmm.ray.actor(**settings)(plain_class()))


@pytest.fixture(scope="module", autouse=True)
def cluster():
    # Two GPUs by Ray's books.
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_an_actor_has_the_pool_that_it_asked_for(tmp_path):
    with pytest.raises(TypeError):
        vpmm.ray.actor(colour="blue")
    with pytest.raises(TypeError):
        vpmm.ray.options(colour="blue")
    first = actor_class(
        limit="32 MiB",
        pool_size="8 MiB",
        history=100,
        snapshot=str(tmp_path),
        log=str(tmp_path / "calls.csv"),
    )
    runtime_env = {"env_vars": {"OURS": "1"}}
    options = vpmm.ray.options(limit="48 MiB", runtime_env=runtime_env)
    assert options["runtime_env"]["env_vars"]["OURS"] == "1" and list(runtime_env["env_vars"]) == ["OURS"]
    actor, other = first.remote(), actor_class().options(**options).remote(least=10)
    assert ray.get(actor.held_at_first.remote()) >= 8 << 20
    assert ray.get([actor.hold.remote(200_000), other.hold.remote(3000)]) == [200_000, 3010]
    assert "at most 32 MiB" in ray.get(actor.ask_too_much.remote())
    assert "at most 48 MiB" in ray.get(other.ask_too_much.remote())
    # Ray checks arguments by the signature that the class has.
    with pytest.raises(TypeError):
        first.remote(most=1)
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


def test_an_option_has_the_last_word():
    holder = actor_class(limit="32 MiB", history=10)
    actor = holder.options(**vpmm.ray.options(limit="48 MiB")).remote()
    assert "at most 48 MiB" in ray.get(actor.ask_too_much.remote())


def test_a_pool_is_made_on_the_gpu_that_ray_gives():
    """A process that has just started does not know it yet."""

    # Beside the class, which goes to the process with it.
    def watch(begin):
        def watched(self, name):
            vpmm.ray.seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            begin(self, name)

        return watched

    class Watched(vpmm.ray.actor(limit="32 MiB")(plain_class())):
        def __new__(cls):
            from vpmm import _worker

            _worker.Worker.begin = watch(_worker.Worker.begin)
            return super().__new__(cls)

    holder = ray.remote(num_gpus=1, num_cpus=0)(Watched)
    actors = [holder.remote() for _ in range(2)]
    seen = ray.get([actor.gpus.remote() for actor in actors])
    assert sorted(seen) == [("0", "0"), ("1", "1")]


def test_an_actor_without_has_what_the_library_gives():
    actor = ray.remote(num_cpus=0, num_gpus=GPUS)(plain_class()).remote()
    assert ray.get(actor.ask_too_much.remote()) is None


def test_every_worker_of_a_job(tmp_path):
    """A Ray of its own, beside that of the other tests."""
    program = f"""
import os, pathlib, time
import ray, vpmm.ray
folder = pathlib.Path({str(tmp_path)!r})
ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, address="local",
         **vpmm.ray.job(limit="40 MiB", history=10, snapshot=str(folder)))

def share(what):
    return ray.remote(num_gpus={GPUS})(what)

def pools():
    return len(vpmm.snapshot()["segments"])

def ask_too_much():
    try:
        vpmm.DeviceBuffer(64 << 20)
    except MemoryError as error:
        return str(error)

def hold():
    return vpmm.DeviceBuffer(1000).size

@share
class Actor:
    def do(self, what):
        return what()

# Nothing is made before it is asked for.
assert ray.get(share(pools).remote()) == 0
assert "at most 40 MiB" in ray.get(share(ask_too_much).remote())
one = Actor.options(**vpmm.ray.options(limit="50 MiB")).remote()
assert "at most 50 MiB" in ray.get(one.do.remote(ask_too_much))

# Without a begin of its own.
@share
@vpmm.ray.actor(limit="60 MiB", pool_size="4 MiB")
class Other:
    def do(self, what):
        return what()

two = Other.remote()
assert "at most 60 MiB" in ray.get(two.do.remote(ask_too_much))
assert ray.get(two.do.remote(pools)) == 1
assert ray.get(one.do.remote(hold)) == 1000
pid = ray.get(one.do.remote(os.getpid))
one.__ray_terminate__.remote()
end = time.monotonic() + 30
while time.monotonic() < end and not (folder / f"vpmm-{{pid}}.pickle").exists():
    time.sleep(0.1)
assert (folder / f"vpmm-{{pid}}.pickle").exists()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_what_a_job_cannot_have():
    with pytest.raises(ValueError, match="hook"):
        vpmm.ray.job(runtime_env={"worker_process_setup_hook": "ours.setup"})
    with pytest.raises(ValueError, match="pool_size"):
        vpmm.ray.job(limit="1 GB", pool_size="1 MB")
    made = vpmm.ray.job(limit="1 GB")["runtime_env"]
    assert made["worker_process_setup_hook"] == "vpmm.ray.prepare"
    assert list(made["env_vars"]) == ["VPMM_RAY_JOB"]
    # Nothing that is Ray's own.
    made = vpmm.ray.options(limit="1 GB", log=pathlib.Path("a.csv"))["runtime_env"]
    assert made == {"env_vars": {"VPMM_RAY_ACTOR": '{"limit": "1 GB", "log": "a.csv"}'}}
