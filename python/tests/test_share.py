"""Memory that is lent to another process."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

import vpmm

MIB = 1 << 20

#: The other process: it is told by a line what to do, and answers by one.
_RECEIVER = """
import socket, sys, vpmm
end = socket.socket(fileno=int(sys.argv[1]))
one = vpmm.Imported.receive(end)
mine = vpmm.DeviceBuffer(one.nbytes)
mine.copy_from_device(one)
assert one.__cuda_array_interface__["data"] == (one.ptr, True)
print(one.nbytes, mine.to_bytes() == bytes(range(256)) * 4096, flush=True)
with vpmm.Imported.receive(end, access="read and write") as other:
    assert other.__cuda_array_interface__["data"] == (other.ptr, False)
whole = vpmm.Imported.receive(end, access="read and write")
assert whole.ptr is None and not hasattr(whole, "__cuda_array_interface__")
before = whole.nbytes
whole.receive_more(end)
print(whole.nbytes - before, whole.translate(int(input())) != 0, flush=True)
try: whole.translate(1)
except vpmm.PointerError: print("refused", flush=True)
with whole: pass
one.close()
one.close()
try: one.nbytes
except ValueError as error: print(error, flush=True)
"""


@contextlib.contextmanager
def a_receiver():
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with own, others:
        number = others.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", _RECEIVER, str(number)],
            pass_fds=[number],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        others.close()
        with process:
            try:
                yield own, process
            except BaseException:
                process.kill()
                raise


def test_another_process_has_an_allocation_and_a_pool_that_grows():
    pool = vpmm.Pool(sharing="descriptors", addresses="1 GiB")
    data = vpmm.DeviceBuffer.from_bytes(bytes(range(256)) * 4096, mr=resource_of(pool))
    with a_receiver() as (own, process):
        pool.export(data.ptr, own)
        assert process.stdout.readline() == f"{MIB} True\n"
        pool.export(data.ptr, own)
        export = pool.export_all()
        export.send(own)
        more = pool.malloc(64 * MIB)
        export.send(own)
        process.stdin.write(f"{more}\n")
        process.stdin.flush()
        grown, found = process.stdout.readline().split()
        assert int(grown) >= 32 * MIB and found == "True"
        assert process.stdout.readline() == "refused\n"
        assert process.stdout.readline() == "the memory was closed\n"
        assert process.wait(timeout=60) == 0
    pool.free(more)


def test_one_that_is_closed_while_another_thread_waits_for_more():
    pool = vpmm.Pool(sharing="descriptors", addresses="1 GiB")
    first = pool.malloc(MIB)
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with own, others, concurrent.futures.ThreadPoolExecutor() as threads:
        export = pool.export_all()
        sent = threads.submit(export.send, own)
        imported = vpmm.Imported.receive(others)
        sent.result()
        waits = threads.submit(imported.receive_more, others)
        # In the call, as far as can be told.
        time.sleep(0.2)
        imported.close()
        with pytest.raises(ValueError, match="closed"):
            _ = imported.nbytes
        more = pool.malloc(64 * MIB)
        export.send(own)
        assert waits.result() is None
    pool.free(first)
    pool.free(more)


class Enough(Exception):
    """Raised by the handler of a signal."""


def test_what_a_signal_s_handler_raises_ends_the_wait_for_what_is_sent():
    def handler(*_):
        raise Enough

    pool = vpmm.Pool(sharing="descriptors", addresses="1 GiB")
    first = pool.malloc(MIB)
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    former = signal.signal(signal.SIGALRM, handler)
    try:
        with own, others, concurrent.futures.ThreadPoolExecutor() as threads:

            def ended_soon(wait):
                # What nobody heeds ends all the same.
                late = threading.Timer(10, own.shutdown, [socket.SHUT_RDWR])
                late.start()
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(Enough):
                    wait()
                late.cancel()
                late.join()

            ended_soon(lambda: vpmm.Imported.receive(others))
            ended_soon(lambda: vpmm.Imported.receive(others.fileno()))
            # What comes after that is whole.
            sent = threads.submit(pool.export_all().send, own)
            with vpmm.Imported.receive(others) as imported:
                sent.result()
                ended_soon(lambda: imported.receive_more(others))
                assert imported.translate(first)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    pool.free(first)


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_a_signal_s_handler_raises_ends_the_wait_for_who_receives(is_whole):
    def handler(*_):
        raise Enough

    pool = vpmm.Pool(sharing="descriptors", addresses="1 GiB")
    first = pool.malloc(MIB)
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    former = signal.signal(signal.SIGALRM, handler)
    late = threading.Timer(10, others.shutdown, [socket.SHUT_RDWR])
    late.start()
    try:
        with own, others:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            begin = time.monotonic()
            with pytest.raises(Enough):
                pool.export_all().send(own) if is_whole else pool.export(first, own.fileno())
            assert time.monotonic() - begin < 8
            # Nobody takes what comes late for something else.
            with pytest.raises(vpmm.InputOutputError):
                pool.export(first, own)
    finally:
        late.cancel()
        late.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    pool.free(first)


def test_a_wait_that_was_left_never_comes_to_another_file_of_the_same_number():
    def handler(*_):
        raise Enough

    left, done = threading.Event(), threading.Event()

    def late(number):
        # In the place of one of the library's, before it has come to the socket.
        left.wait()
        with contextlib.suppress(OSError):
            os.write(number, b"a pool")
        done.set()
        return 0

    read, write = os.pipe()
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    former = signal.signal(signal.SIGALRM, handler)
    try:
        with own, others:
            number = own.fileno()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Enough):
                vpmm._share.send(late, number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    os.dup2(write, number)
    left.set()
    assert done.wait(10)
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 100)
    for descriptor in (read, write, number):
        os.close(descriptor)


def test_a_time_limit_of_the_socket_s_is_kept():
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with own, others:
        others.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 200_000))
        begin = time.monotonic()
        with pytest.raises(vpmm.InputOutputError):
            vpmm.Imported.receive(others)
        assert time.monotonic() - begin < 10


def test_what_is_no_socket_is_left_as_it_was():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    read, write = os.pipe()
    os.write(write, b"x")
    before = descriptors()
    for _ in range(3):
        with pytest.raises(vpmm.InputOutputError):
            vpmm.Imported.receive(read)
    assert descriptors() == before
    os.close(read)
    os.close(write)


def resource_of(pool):
    resource = vpmm.mr.PoolMemoryResource.__new__(vpmm.mr.PoolMemoryResource)
    resource._of(pool)
    return resource


def test_mistakes():
    pool, other = vpmm.Pool(sharing="descriptors", addresses="1 GiB"), vpmm.Pool(addresses="1 GiB")
    own, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pointer, private = pool.malloc(1000), other.malloc(1000)
    with own, others:
        with pytest.raises(vpmm.PointerError):
            pool.export(0x1000, own)
        with pytest.raises(vpmm.InvalidArgumentError):
            pool.export(pointer, -1)
        with pytest.raises(vpmm.Error):
            other.export(private, own)
        with pytest.raises(ValueError, match="access cannot be"):
            vpmm.Imported.receive(own, access="all")
        own.settimeout(1)
        with pytest.raises(ValueError, match="has to block"):
            vpmm.Imported.receive(own)
        own.settimeout(None)
        others.close()
        with pytest.raises(vpmm.InputOutputError):
            pool.export_all().send(own)
    with pytest.raises(ValueError, match="sharing cannot be"):
        vpmm.Pool(sharing="post")
    pool.free(pointer)
    other.free(private)
