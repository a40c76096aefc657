"""The suite runs on the simulated device, unless VPMM_DEVICE says otherwise."""

import os

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
