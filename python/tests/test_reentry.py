"""What the garbage collector frees, and what signal handlers do, while the package is at work itself."""

import subprocess
import sys

import pytest

#: A program that waits for itself ends, and says where it stands.
_BEGIN = """
import faulthandler
faulthandler.dump_traceback_later(60, exit=True)
import gc, itertools, random, signal
import vpmm
from vpmm._mem_pool import HeapMemPool
vpmm.configure(addresses="4 GiB", limit="1 GiB")

class Ring:
    def __init__(self, what):
        self.what, self.itself = what, self

def collect_soon(at):
    # Each time at another place.
    gc.set_threshold(1 + at % 97)

def interrupt(handler):
    # Again and again, wherever the program is, until it answers true.
    def called(*_):
        if not handler():
            signal.setitimer(signal.ITIMER_REAL, random.random() * 1e-4 + 1e-6)
    signal.signal(signal.SIGALRM, called)
    called()
"""

_FREED_BY_THE_COLLECTOR = """
vpmm.record_history(1000)
for at in range(20_000):
    collect_soon(at)
    Ring(vpmm.DeviceBuffer(100))
"""

_FREED_UNDER_A_LOCK = """
vpmm.record_history(1000)
resource = vpmm.mr.ThreadSafeResourceAdaptor(vpmm.mr.PoolMemoryResource.of_process())
for at in range(5000):
    collect_soon(at)
    Ring(vpmm.DeviceBuffer(100, mr=resource))
"""

_ALLOCATED_BY_A_HANDLER = """
vpmm.record_history(1000)
done = 0
def handler(*_):
    global done
    vpmm.DeviceBuffer(100)
    done += 1
    return done == 2000
interrupt(handler)
while done < 2000:
    vpmm.DeviceBuffer(100)
"""

_HEAPS_BY_THE_COLLECTOR = """
for at in range(5000):
    collect_soon(at)
    Ring(HeapMemPool())
gc.set_threshold(700)
gc.collect()
# All of them served again: there are no more at a time than the collector lets garbage grow.
assert HeapMemPool().id[1] < 97
"""

_REPORTED_BY_A_HANDLER = """
done = 0
def handler(*_):
    global done
    with vpmm.profile("handler"):
        done += 1
    vpmm.report()
    return done == 2000
interrupt(handler)
for at in itertools.count():
    with vpmm.profile(f"loop {at % 10}"):
        pass
    vpmm.records()
    if done == 2000:
        break
"""

_SET_BY_A_HANDLER = """
from vpmm._library import answer, lib
from vpmm._pool import _driver
from vpmm.mr._names import of_handle
other = vpmm.mr.CudaMemoryResource()
done = 0
def handler(*_):
    global done
    with vpmm.mr.using(other):
        done += 1
    return done == 2000
interrupt(handler)
def check():
    # The library's is the same.
    made = answer("vpmm_resource *", lib.vpmm_resource_current, _driver(), 0)
    assert of_handle(made, 0).is_equal(vpmm.mr.get_current_device_resource())
while done < 2000:
    with vpmm.mr.using(other):
        check()
    check()
"""

_FREED_WHILE_FUNCTIONS_ARE_CALLED = """
import threading
pool = vpmm.Pool.of_process()
def make_resource():
    def allocate(size, stream):
        return pool.malloc(size, stream)
    def deallocate(pointer, size, stream):
        pool.free(pointer, stream)
    # It calls them with a lock.
    return vpmm.mr.ThreadSafeResourceAdaptor(vpmm.mr.CallbackMemoryResource(allocate, deallocate))
def work():
    resource = make_resource()
    for at in range(3000):
        collect_soon(at)
        Ring(vpmm.DeviceBuffer(100, mr=resource))
threads = [threading.Thread(target=work) for _ in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
gc.set_threshold(700)
gc.collect()
assert vpmm.statistics().live_count == 0
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_FREED_BY_THE_COLLECTOR, id="history, freed by the collector"),
        pytest.param(_FREED_UNDER_A_LOCK, id="history, freed by the collector under a lock"),
        pytest.param(_ALLOCATED_BY_A_HANDLER, id="history, allocated by a handler"),
        pytest.param(_HEAPS_BY_THE_COLLECTOR, id="heaps, given up by the collector"),
        pytest.param(_REPORTED_BY_A_HANDLER, id="profiles, by a handler"),
        pytest.param(_SET_BY_A_HANDLER, id="resources, set by a handler"),
        pytest.param("THREADS = 1\n" + _FREED_WHILE_FUNCTIONS_ARE_CALLED, id="functions, of a resource"),
        pytest.param("THREADS = 3\n" + _FREED_WHILE_FUNCTIONS_ARE_CALLED, id="functions, of several"),
    ],
)
def test_nothing_waits_for_itself(program):
    done = subprocess.run([sys.executable, "-c", _BEGIN + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
