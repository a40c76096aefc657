"""What the library calls while an exception, or the interpreter's end, is under way."""

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import vpmm
from vpmm import _dlpack
from vpmm._library import lib, path


def test_a_capsule_that_ends_with_an_exception_under_way():
    before = vpmm.statistics().live_count
    with pytest.raises(ZeroDivisionError):
        # The interpreter clears its stack, with the exception set.
        _ = [vpmm.DeviceBuffer(10).__dlpack__(), 1 / 0]
    assert not _dlpack._LENT and vpmm.statistics().live_count == before


#: As a destructor of C's is called: with the interpreter's lock, and an exception that is not its own.
_DESTRUCTOR = """
extern void *PyExc_KeyError;
void PyErr_SetString(void *, char const *);
void end(void (*function)(void *, long, int, void *), void *argument) {
    PyErr_SetString(PyExc_KeyError, "ours");
    function(argument, 0, 0, 0);
}
"""


@pytest.fixture(scope="module")
def end(tmp_path_factory):
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    source = tmp_path_factory.mktemp("c") / "end.c"
    source.write_text(_DESTRUCTOR)
    made = source.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
    function = ctypes.PyDLL(str(made)).end
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    return function


def test_a_tensor_s_free_is_noted_with_an_exception_under_way(end):
    library = ctypes.CDLL(path())
    vpmm.record_history(10)
    try:
        pointer = vpmm.Pool.of_process().malloc(1000)
        with pytest.raises(KeyError, match="ours"):
            end(ctypes.cast(library.vpmm_torch_free, ctypes.c_void_p), pointer)
        event = vpmm.snapshot()["device_traces"][0][-1]
        assert (event["action"], event["addr"]) == ("free_completed", pointer)
        assert event["frames"][0]["name"] == "test_a_tensor_s_free_is_noted_with_an_exception_under_way"
    finally:
        vpmm.record_history(0)


def test_a_borrower_that_ends_with_an_exception_under_way(end):
    before = vpmm.statistics().live_count
    capsule = vpmm.DeviceBuffer(10).__dlpack__(stream=-1)
    (at,) = _dlpack._LENT
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    used = ctypes.c_char_p(b"used_dltensor")
    rename(capsule, used)
    del capsule
    deleter = ctypes.cast(_dlpack._Managed.from_address(at).deleter, ctypes.c_void_p)
    with pytest.raises(KeyError, match="ours"):
        end(deleter, at)
    assert not _dlpack._LENT and vpmm.statistics().live_count == before


_WITH_FRAMES = """
vpmm.record_history(100)
def work():
    vpmm.DeviceBuffer(1000).free()
"""

_ON_FUNCTIONS = """
below = vpmm.mr.CudaMemoryResource()
resource = vpmm.mr.CallbackMemoryResource(below.allocate, below.deallocate)
def work():
    resource.deallocate(resource.allocate(1000), 1000)
"""

_MAKING_ROOM = """
resource = vpmm.mr.FailureCallbackResourceAdaptor(vpmm.mr.CudaMemoryResource(), lambda size: False)
def work():
    try:
        resource.allocate(1 << 50)
    except MemoryError:
        pass
"""

_SNAPSHOTS = """
def work():
    vpmm.snapshot()
"""


@pytest.mark.parametrize("beginning", [_WITH_FRAMES, _ON_FUNCTIONS, _MAKING_ROOM, _SNAPSHOTS])
def test_threads_that_go_on_until_the_end(beginning):
    """Before Python 3.14 one that asks for the interpreter's lock too late is ended, in the library."""
    program = f"""
import threading, time, vpmm
{beginning}
def for_ever():
    while True:
        work()
for _ in range(4):
    threading.Thread(target=for_ever, daemon=True).start()
time.sleep(0.1)
"""
    crashed = []
    for _ in range(10):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        # Python frees the states of all other threads as it ends. A thread that comes back from a call just then,
        # whatever that was, may look into its own once more: twice in 4,500 runs.
        if done.returncode == -signal.SIGSEGV:
            crashed.append(done)
            continue
        # It may be told that there is no memory, at the last moment.
        assert done.returncode == 0 and "FATAL" not in done.stderr, done
    assert len(crashed) <= 1, crashed


def test_a_borrower_that_outlasts_the_package():
    """It looks for its deleter when the modules are empty."""
    pytest.importorskip("numpy")
    program = """
import numpy, sys, vpmm
sys.kept = numpy.from_dlpack(vpmm.DeviceBuffer(1000, mr=vpmm.mr.HostMemoryResource()))
"""
    # What is given back is not what it was.
    environment = {**os.environ, "PYTHONMALLOC": "debug"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done


def test_what_runs_at_exit_after_the_package_s_own():
    """Functions that were registered before the package was there."""
    program = """
import atexit
def last():
    resource.deallocate(resource.allocate(1000), 1000)
    assert vpmm.snapshot()["segments"]
    print("done")
atexit.register(last)
import vpmm
below = vpmm.mr.CudaMemoryResource()
resource = vpmm.mr.CallbackMemoryResource(below.allocate, below.deallocate)
kept = vpmm.DeviceBuffer(1000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_does_not_wait_for_its_parents_threads():
    """A thread is in a function as the process forks. At its end the child waits for such ones of its own."""
    is_in, may_end = threading.Event(), threading.Event()

    def allocate(size, stream):
        is_in.set()
        may_end.wait()
        return 0

    resource = vpmm.mr.CallbackMemoryResource(allocate, lambda *_: None)

    def request():
        with contextlib.suppress(MemoryError):
            resource.allocate(1000)

    thread = threading.Thread(target=request)
    thread.start()
    try:
        assert is_in.wait(60)
        waited = []
        for _ in range(5):
            child = os.fork()
            if not child:
                begin = time.monotonic()
                lib.vpmm_python_end()
                # The function's caller, for which the collector rests, is not there.
                os._exit((time.monotonic() - begin >= 1) | 2 * (not gc.isenabled()))
            waited.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        may_end.set()
        thread.join()
    # Now and then a machine that is busy takes as long by itself.
    assert 0 in waited, waited


_FORKED_BESIDE = """
import os, signal, sys, threading
import vpmm
from vpmm.mr import _current
vpmm.configure(addresses="4 GiB", limit="1 GiB")
vpmm.statistics()
other = vpmm.mr.CudaMemoryResource()
locks = [vpmm._pool.Peaks._lock, vpmm._profile._lock, _current._current_lock]
is_over = threading.Event()

def work():
    # As long as it may take: the library is asked under these.
    while not is_over.is_set():
        with vpmm.profile("work"), vpmm.mr.using(other):
            vpmm.records()

def hold(lock):
    while not is_over.is_set():
        with lock:
            is_over.wait(0.01)

threads = [threading.Thread(target=work)]
threads += [threading.Thread(target=hold, args=[lock]) for lock in locks]
for thread in threads:
    thread.start()
waited = []
for _ in range(10):
    child = os.fork()
    if not child:
        signal.alarm(20)
        vpmm.report()
        for refused in (vpmm.profile("child").__enter__, vpmm.mr.reset_current_device_resource):
            try:
                refused()
            except vpmm.Error as error:
                assert error.status == "VPMM_FORKED"
        os._exit(0)
    waited.append(os.waitpid(child, 0)[1])
    if waited[-1]:
        break
is_over.set()
for thread in threads:
    thread.join()
sys.exit(f"children ended with {waited}" if any(waited) else 0)
"""


def test_a_child_waits_for_no_lock_of_its_parents_threads():
    command = [sys.executable, "-W", "ignore", "-c", _FORKED_BESIDE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "block",
    [
        lambda: vpmm.tag("of the parent"),
        lambda: vpmm.profile("of the parent"),
        lambda: vpmm.mr.using(vpmm.mr.CudaMemoryResource()),
        lambda: vpmm.DeviceBuffer(100),
    ],
)
def test_a_child_leaves_its_parents_blocks(block):
    """As where a program in them becomes a daemon: what ends the child is not lost."""
    ended = 1
    try:
        with block():
            child = os.fork()
            if not child:
                raise SystemExit
    except SystemExit:
        ended = 0
    finally:
        if not child:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
