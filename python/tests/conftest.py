"""The suite runs on the simulated device, unless VPMM_DEVICE says otherwise."""

import os

os.environ.setdefault("VPMM_DEVICE", "sim")

import pytest

import vpmm

# Few addresses: a check of the pool's books looks at all of them. Tags' heaps have twice the limit.
vpmm.configure(addresses="4 GiB", limit="1 GiB")


@pytest.fixture(autouse=True)
def pool_is_whole():
    """Every test leaves the process's pool as it was, and whole."""
    before = vpmm.statistics().live_count
    yield
    assert vpmm.statistics().live_count == before
    vpmm.Pool.of_process().validate()
