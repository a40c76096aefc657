"""Device memory with an owner."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

from . import _dlpack
from ._errors import Error, PointerError
from ._library import address, but_in_a_child, call, ffi, handle, integer, lib, within
from ._stream import raw_stream
from .mr import DeviceMemoryResource, PoolMemoryResource
from .mr._current import current_or_none

#: The legacy default stream where a number may not be 0.
_LEGACY = 1


#: The per-thread default stream, which is another one in every thread.
_PER_THREAD = 2

_this_thread = threading.local()


def _token() -> object:
    """What stands for this thread; no other one's is the same, as it would be of numbers."""
    if not hasattr(_this_thread, "token"):
        _this_thread.token = object()
    return _this_thread.token


def _as_seen_here(stream: int, thread: object) -> int:
    """A stream for a call by this thread. Another thread's default one cannot be named; the legacy one
    comes after all that is enqueued there, and before all that will be."""
    return stream if stream != _PER_THREAD or thread is _token() else _LEGACY


def _free(memory: Any, streams: dict[int, Any]) -> None:
    """`streams` are those that it was used on, as their owners know them, which must not end before."""
    call(lib.vpmm_python_free_memory, memory)
    streams.clear()


def _deallocate(
    mr: DeviceMemoryResource,
    pointer: int,
    size: int,
    stream: int,
    thread: object,
    streams: dict[int, Any],
    unnoted: set[int],
) -> None:
    """`unnoted` are further streams that the resource takes no notes of."""
    stream = _as_seen_here(stream, thread)
    with but_in_a_child():
        for other in unnoted:
            call(lib.vpmm_process_wait_for, mr.device, handle(stream), handle(other))
        mr.deallocate(pointer, size, stream)
    streams.clear()


class DeviceBuffer:
    """Bytes on a device: freed on their stream when the buffer goes. From the resource ``mr``, else from the
    device's current one, which is the process's pool unless another one was set.

    NumPy, CuPy, Numba and PyTorch take it for an array of bytes, by ``__cuda_array_interface__`` and
    DLPack, without a copy. A stream is a number (a ``cudaStream_t``), or an object of those libraries,
    which the buffer then keeps; one given as a number must outlive the buffer. So must one that borrows it by
    DLPack, which hands on a number: :meth:`record_stream` with the object, before, keeps that. The per-thread
    default stream is that of the thread that makes the buffer; other threads' calls come after it, on the
    legacy one.

    >>> buffer = DeviceBuffer.from_bytes(b"abc")
    >>> buffer.to_bytes()
    b'abc'
    """

    def __init__(
        self,
        size: int,
        *,
        stream: Any = None,
        device: int | None = None,
        mr: DeviceMemoryResource | None = None,
    ):
        if not 0 <= size < 1 << 64:
            raise ValueError(f"a buffer of {size} bytes")
        if device is None:
            device = 0 if mr is None else mr.device
        else:
            within("device", device, 32)
        if mr is None:
            mr = current_or_none(device)
        elif mr.device != device:
            raise ValueError(f"a buffer on device {device}, of a resource of device {mr.device}")
        self._size, self._device, self._mr = size, device, mr
        self._stream, self._thread = raw_stream(stream), _token()
        # By what tells objects apart, not streams: one of two for the same stream may own it.
        self._streams: dict[int, Any] = {id(stream): stream}
        self._unnoted: set[int] = set()
        self._end: weakref.finalize[Any, Any] | None = None
        #: Of the process's pool: it goes back with the last reference, without a step of Python's.
        self._memory: Any = None
        if mr is None:
            made = ffi.gc(ffi.new("vpmm_python_memory *"), lib.vpmm_python_end_memory)
            made.device, made.stream = device, handle(self._stream)
            call(lib.vpmm_python_make_memory, made, size)
            self._memory, self._pointer = made, address(made.pointer)
            self._keep(stream)
        else:
            self._pointer = mr.allocate(size, self._stream)
            about = mr, self._pointer, size, self._stream, self._thread
            self._end_by(_deallocate, *about, self._streams, self._unnoted)

    def _keep(self, stream: Any) -> None:
        """Keeps a stream until the end. A number keeps nothing, nor does PyTorch's object, of which each
        question for the current stream makes a new one; default streams do not end."""
        if hasattr(stream, "__index__") or hasattr(stream, "cuda_stream"):
            return
        if raw_stream(stream) <= _PER_THREAD:
            return
        if self._memory is not None and self._end is None:
            # By its bare address: it goes back with the buffer, whatever becomes of this.
            self._end_by(_free, ffi.cast("vpmm_python_memory *", self._memory), self._streams)
        self._streams[id(stream)] = stream

    def _end_by(self, function: Callable[..., None], *arguments: Any) -> None:
        self._end = weakref.finalize(self, function, *arguments)
        # The driver takes everything back when the process ends.
        self._end.atexit = False

    @classmethod
    def from_bytes(
        cls,
        data: Any,
        *,
        stream: Any = None,
        device: int | None = None,
        mr: DeviceMemoryResource | None = None,
    ) -> DeviceBuffer:
        """A buffer with the contents of whatever has them in one piece on the host: bytes, a memoryview, a
        NumPy array. Waits for the copy."""
        view = _contiguous(data)
        made = cls(view.nbytes, stream=stream, device=device, mr=mr)
        made.copy_from(view)
        return made

    # The same for who looks for the name.
    from_numpy = from_bytes

    @property
    def ptr(self) -> int:
        """The address of the first byte; 0 for a buffer without any."""
        return self._pointer

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self._size

    nbytes = size

    @property
    def device(self) -> int:
        """The device's number."""
        return self._device

    @property
    def mr(self) -> DeviceMemoryResource:
        """The resource that the memory is from, and goes back to."""
        return self._mr or PoolMemoryResource.of_process(self._device)

    @property
    def stream(self) -> int:
        """The stream that it was allocated on, and is freed on, as a number."""
        return self._stream

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"DeviceBuffer(size={self._size}, ptr={self._pointer:#x}, device={self._device})"

    def copy_from(self, data: Any, offset: int = 0) -> None:
        """Copies from the host, from ``offset`` on; waits for it."""
        view = _contiguous(data)
        self._check(offset, view.nbytes)
        if view.nbytes:
            source = ffi.from_buffer(view)
            if self._is_the_host_s():
                ffi.memmove(handle(self._pointer + offset), source, view.nbytes)
            else:
                self._do(lib.vpmm_process_upload, self._pointer + offset, source, view.nbytes)

    def copy_to(self, out: Any, offset: int = 0) -> None:
        """Copies to the host, into whatever has room for bytes and can be written; waits for it."""
        view = _contiguous(out)
        self._check(offset, view.nbytes)
        if view.nbytes:
            target = ffi.from_buffer(view, require_writable=True)
            if self._is_the_host_s():
                ffi.memmove(target, handle(self._pointer + offset), view.nbytes)
                return
            call(
                lib.vpmm_process_download,
                self._device,
                target,
                handle(self._pointer + offset),
                view.nbytes,
                handle(self._here()),
            )

    def copy_from_device(self, source: Any) -> None:
        """Copies from a buffer, or from anything with ``__cuda_array_interface__`` in one piece, on this
        buffer's stream. What wrote the source must come before on that stream; the source must last until
        the copy is done, unless it is a buffer, whose memory does."""
        pointer, size = _device_bytes(source)
        if size > self._size:
            raise ValueError(f"{size} bytes into a buffer of {self._size}")
        if not size:
            return
        from_the_host = isinstance(source, DeviceBuffer) and source._is_the_host_s()
        here, there = handle(self._pointer), handle(pointer)
        if self._is_the_host_s():
            if from_the_host:
                ffi.memmove(here, there, size)
            else:
                call(lib.vpmm_process_download, self._device, here, there, size, handle(self._here()))
        elif from_the_host:
            self._do(lib.vpmm_process_upload, self._pointer, there, size)
        else:
            self._do(lib.vpmm_process_copy, self._pointer, there, size)
            if isinstance(source, DeviceBuffer) and source._here() != self._here():
                # The first is its own, with what owns it.
                source.record_stream(next(iter(self._streams.values())) or self._here())

    def fill(self, value: int = 0) -> None:
        """Sets every byte, on the buffer's stream."""
        if not 0 <= value <= 255:
            raise ValueError(f"{value} is no byte")
        if self._is_the_host_s():
            ctypes.memset(self._pointer, value, self._size)
        elif self._size:
            self._do(lib.vpmm_process_fill, self._pointer, value, self._size)

    def to_bytes(self) -> bytes:
        """The contents, copied to the host."""
        out = bytearray(self._size)
        self.copy_to(out)
        return bytes(out)

    def to_numpy(self, dtype: Any = "uint8", shape: Any = -1) -> Any:
        """The contents as a NumPy array."""
        import numpy

        out = numpy.empty(self._size, numpy.uint8)
        self.copy_to(out)
        return out.view(dtype).reshape(shape)

    def record_stream(self, stream: Any) -> None:
        """Notes that the buffer is used on a further stream: after its end the memory is not handed out
        before what is enqueued there until then has finished. The buffer keeps the stream until then; one
        given as a number must last as long. Where the buffer's resource takes no such notes the buffer's
        stream waits for the other at the end."""
        if not self._pointer:
            return
        raw = raw_stream(stream)
        if self._mr is None:
            call(lib.vpmm_process_record_stream, handle(self._pointer), handle(raw))
        elif self._mr.facts.records_streams:
            self._mr.record_stream(self._pointer, raw)
        else:
            self._unnoted.add(_as_seen_here(raw, None))
        self._keep(stream)

    def free(self) -> None:
        """Frees it now, once everything enqueued on its stream has finished. Where that is refused, as on a
        stream that captures, the buffer is as before, and may be freed later."""
        before = self._pointer, self._size
        if self._memory is not None:
            self._pointer = self._size = 0
            try:
                call(lib.vpmm_python_free_memory, self._memory)
            finally:
                # Of several threads the one that came first knows what it was.
                if before[0] and self._memory.is_there:
                    self._pointer, self._size = before
            self._streams.clear()
            return
        ending = None if self._end is None else self._end.detach()
        if ending is None:
            return
        _, function, arguments, _ = ending
        self._pointer = self._size = 0
        try:
            function(*arguments)
        except Error as error:
            # A wrong pointer may be somebody else's by now; and what a function of Python's has raised came
            # after others had freed it.
            if not isinstance(error, PointerError) and not error._is_of_function:
                self._pointer, self._size = before
                self._end_by(function, *arguments)
            raise

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.free()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._is_the_host_s():
            # So that who asks finds none, and a kernel does not fail the device for good.
            raise AttributeError("a GPU does not reach this memory: it is lent by DLPack, as the host's")
        return {
            "data": (self._pointer, False),
            "shape": (self._size,),
            "strides": None,
            "typestr": "|u1",
            "stream": self._here(),
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        facts = None if self._mr is None else self._mr.facts
        if facts is None or not facts.host_accessible:
            return (_dlpack.CUDA, self._device)
        if facts.managed:
            return (_dlpack.MANAGED, self._device)
        return (_dlpack.PINNED if facts.device_accessible else _dlpack.CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        own_device = self.__dlpack_device__()
        device = own_device if dl_device is None else (dl_device[0], dl_device[1])
        # What the host reaches is its memory, too.
        is_for_the_host = device == (_dlpack.CPU, 0) and own_device[0] != _dlpack.CUDA
        if device != own_device and not is_for_the_host:
            raise BufferError("a buffer is lent on its own device only")
        if copy:
            raise BufferError("a buffer is lent, not copied")
        if stream is None and self._pointer and own_device[0] != _dlpack.CUDA:
            # Whoever names no stream may read on the host at once, as NumPy does.
            call(lib.vpmm_process_synchronize, self._device, handle(self._here()))
        # None stands for the legacy default stream, -1 for no order at all.
        consumer = _LEGACY if stream is None else stream
        if consumer != -1 and self._pointer:
            own = self._here()
            if consumer != own:
                call(lib.vpmm_process_wait_for, self._device, handle(consumer, "stream"), handle(own))
                # Its work may still run when the consumer lets go. By the number alone: nothing is there
                # to be kept.
                self.record_stream(consumer)
        # Without a version borrowers such as NumPy take the memory for read-only.
        is_versioned = max_version is not None and max_version[0] >= 1
        return _dlpack.capsule(self, self._pointer, self._size, device, is_versioned=is_versioned)

    def __copy__(self) -> DeviceBuffer:
        """A buffer of its own with the contents, on the same device and stream, of the same resource."""
        stream = next(iter(self._streams.values()), None)
        made = type(self)(self._size, stream=stream, device=self._device, mr=self._mr)
        # The per-thread default stream may be another thread's here.
        if self._size and made._here() != self._here():
            call(lib.vpmm_process_wait_for, self._device, handle(made._here()), handle(self._here()))
        made.copy_from_device(self)
        return made

    def __deepcopy__(self, _: dict[int, Any]) -> DeviceBuffer:
        return self.__copy__()

    def __reduce__(self) -> Any:
        return (type(self).from_bytes, (self.to_bytes(),))

    def _do(self, function: Any, pointer: int, *arguments: Any) -> None:
        call(function, self._device, handle(pointer), *arguments, handle(self._here()))

    def _is_the_host_s(self) -> bool:
        """Whether no device reaches the memory, so that no copy of the driver's does."""
        return self._mr is not None and not self._mr.facts.device_accessible

    def _here(self) -> int:
        return _as_seen_here(self._stream, self._thread) or _LEGACY

    def _check(self, offset: int, size: int) -> None:
        integer("offset", offset)
        if offset < 0 or offset + size > self._size:
            raise ValueError(f"bytes {offset} to {offset + size} of a buffer of {self._size}")


def _contiguous(data: Any) -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("the data is not in one piece")
    return view


def _device_bytes(source: Any) -> tuple[int, int]:
    if isinstance(source, DeviceBuffer):
        return source.ptr, source.size
    interface = source.__cuda_array_interface__
    size, is_contiguous = int(interface["typestr"][2:]), True
    shape, strides = interface["shape"], interface.get("strides")
    for extent, stride in zip(reversed(shape), reversed(strides or (None,) * len(shape)), strict=True):
        # There is no step to another one where there is one alone.
        is_contiguous &= extent == 1 or stride in (None, size)
        size *= extent
    if size and not is_contiguous:
        raise ValueError("the source is not in one piece")
    return interface["data"][0], size
