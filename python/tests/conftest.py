"""The suite runs on the simulated device, unless VPMM_DEVICE says otherwise."""

import gc
import os
import random
import signal

os.environ.setdefault("VPMM_DEVICE", "sim")

import pytest

import vpmm
from vpmm._library import address, answer, call, handle, lib
from vpmm._pool import _driver

# Few addresses: a check of the pool's books looks at all of them. Tags' heaps have twice the limit.
vpmm.configure(addresses="4 GiB", limit="1 GiB")


@pytest.fixture(autouse=True)
def pool_is_whole():
    """Every test leaves the process's pool as it was, and whole."""
    before = vpmm.statistics().live_count
    yield
    assert vpmm.statistics().live_count == before
    vpmm.Pool.of_process().validate()


@pytest.fixture
def make_stream():
    made = []

    def make():
        raw = address(answer("void *", lib.vpmm_stream_create, _driver(), 0))
        made.append(raw)
        return raw

    yield make
    for raw in made:
        call(lib.vpmm_stream_destroy, _driver(), handle(raw))


class Stop(BaseException):
    """Raised by the handler of a signal."""


@pytest.fixture
def stopped():
    """Calls something again and again until a signal has come, some times; it is to be ended by that."""
    has_come = False

    def handler(*_):
        nonlocal has_come
        has_come = True
        raise Stop

    def until_it_comes(work, longest):
        signal.setitimer(signal.ITIMER_REAL, random.random() * longest + 1e-6)
        while not has_come:
            work()

    def stopped(work, turns, longest):
        nonlocal has_come
        for _ in range(turns):
            has_come = False
            # By a call, as Python's newer compilers leave a loop's jump out of the block that it is in.
            with pytest.raises(Stop):
                until_it_comes(work, longest)

    # What is raised where the collector frees something is nobody's to see. What other tests have left, such
    # as Dask's sets of weak references, has functions of its own for that.
    gc.collect()
    before = signal.signal(signal.SIGALRM, handler)
    yield stopped
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
