"""Memory resources and adaptors, by RMM's names.

>>> import vpmm
>>> pool = vpmm.mr.PoolMemoryResource(initial_pool_size="1 GiB")
>>> counted = vpmm.mr.StatisticsResourceAdaptor(vpmm.mr.LimitingResourceAdaptor(pool, "8 GiB"))
>>> print(counted)
statistics
└─ limiting(limit=8 GiB)
   └─ vpmm(profile=default device=0)
>>> with vpmm.mr.using(counted):
...     buffer = vpmm.DeviceBuffer(1000)

What makes memory: :class:`PoolMemoryResource`, :class:`CudaMemoryResource`,
:class:`CudaAsyncMemoryResource`, :class:`ManagedMemoryResource`, :class:`PinnedHostMemoryResource`,
:class:`HostMemoryResource`, :class:`CallbackMemoryResource`. What divides that of another resource:
:class:`CoalescingMemoryResource`, :class:`FixedSizeMemoryResource`, :class:`BinningMemoryResource`,
:class:`ArenaMemoryResource`, :class:`CachingMemoryResource`. What does more with one: the adaptors. Any of
them stands on any other, and :func:`open` makes whole stacks of a text.

A resource ends with the last reference to it, to what stands on it, and to the buffers of it. Sizes are
numbers, or texts such as ``"20 GB"``; streams are numbers or other libraries' objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from . import _pool
from ._library import NULL, address, answer, call, ffi, handle, lib, text_of
from ._stream import raw_stream

__all__ = [
    "AlignedResourceAdaptor",
    "ArenaMemoryResource",
    "BinningMemoryResource",
    "CachingMemoryResource",
    "CallbackMemoryResource",
    "CoalescingMemoryResource",
    "Counters",
    "CudaAsyncMemoryResource",
    "CudaMemoryResource",
    "DeviceMemoryResource",
    "Facts",
    "FailureCallbackResourceAdaptor",
    "FixedSizeMemoryResource",
    "HostMemoryResource",
    "LimitingResourceAdaptor",
    "LoggingResourceAdaptor",
    "ManagedMemoryResource",
    "PinnedHostMemoryResource",
    "PoolMemoryResource",
    "PrefetchResourceAdaptor",
    "StatisticsResourceAdaptor",
    "ThreadSafeResourceAdaptor",
    "TrackingResourceAdaptor",
    "UpstreamResourceAdaptor",
    "get_current_device_resource",
    "open",
    "reset_current_device_resource",
    "set_current_device_resource",
    "using",
]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a resource is able to do."""

    device_accessible: bool
    """Work on the device can use the memory."""
    host_accessible: bool
    """The host can use the memory through its address."""
    managed: bool
    """The memory moves between host and device as it is used."""
    stream_ordered: bool
    """Both calls are in the order of their stream, and do not wait for the GPU."""
    records_streams: bool
    """Uses on further streams can be noted."""
    checks: str
    """Which wrong frees are found: ``"nothing"``, ``"pointers"``, ``"pointers and sizes"``."""
    min_align: int
    """Every address is a multiple of this."""
    max_align: int
    """The greatest alignment that can be asked for."""
    max_bytes: int | None
    """The longest request that can ever be served, where that is fixed."""


@dataclasses.dataclass(frozen=True)
class Counters:
    """What a :class:`StatisticsResourceAdaptor` has counted. What was allocated before counters were pushed
    and freed since makes the current ones negative."""

    current_bytes: int
    current_count: int
    peak_bytes: int
    peak_count: int
    total_bytes: int
    total_count: int


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _settings(name: str, **settings: Any) -> str:
    """A text as the library reads it, of the settings that are there."""
    given = [f"{key}={value}" for key, value in settings.items() if value is not None]
    return f"{name}({','.join(given)})" if given else name


def _bytes(size: int | str | None) -> int | None:
    return None if size is None else _pool.bytes_of(size)


class DeviceMemoryResource:
    """What gives out memory. ``str`` is its stack as a tree."""

    _upstream: DeviceMemoryResource | None = None
    _handle: Any = None
    device: int
    """The device that the memory is for."""

    def _take(self, raw: Any, device: int) -> None:
        self._handle, self.device = ffi.gc(raw, lib.vpmm_resource_release), device

    def _open(self, text: str, device: int = 0, upstream: DeviceMemoryResource | None = None) -> None:
        below = NULL if upstream is None else _handle_of(upstream)
        made = answer(
            "vpmm_resource *", lib.vpmm_resource_open, _pool._driver(), device, text.encode(), below
        )
        self._upstream = upstream
        self._take(made, device)

    def allocate(self, nbytes: int, stream: Any = None, *, alignment: int = 0) -> int:
        """Allocates bytes for use on a stream, and answers the address; 0 for 0 bytes. ``alignment`` is a
        power of two, or the resource's own. :class:`vpmm.OutOfMemoryError` where there is none."""
        if nbytes < 0:
            raise ValueError(f"an allocation of {nbytes} bytes")
        on = handle(raw_stream(stream))
        made = _forwarded(answer, "void *", lib.vpmm_resource_allocate, self._handle, nbytes, alignment, on)
        return address(made)

    def deallocate(self, ptr: int, nbytes: int, stream: Any = None, *, alignment: int = 0) -> None:
        """Frees an allocation once everything enqueued on the stream so far has finished. Bytes and
        alignment are those of the allocation."""
        on = handle(raw_stream(stream))
        _forwarded(call, lib.vpmm_resource_deallocate, self._handle, handle(ptr), nbytes, alignment, on)

    def record_stream(self, ptr: int, stream: Any) -> None:
        """Notes that an allocation is used on a further stream; :class:`vpmm.UnsupportedError` where the
        resource takes no such notes."""
        call(lib.vpmm_resource_record_stream, self._handle, handle(ptr), handle(raw_stream(stream)))

    @property
    def facts(self) -> Facts:
        """What it is able to do."""
        out = ffi.new("vpmm_facts *")
        lib.vpmm_facts_init(out, ffi.sizeof("vpmm_facts"))
        call(lib.vpmm_resource_facts, self._handle, out)
        return Facts(
            device_accessible=bool(out.device_accessible),
            host_accessible=bool(out.host_accessible),
            managed=bool(out.managed),
            stream_ordered=bool(out.stream_ordered),
            records_streams=bool(out.records_streams),
            checks=("nothing", "pointers", "pointers and sizes")[out.checks],
            min_align=out.min_align,
            max_align=out.max_align,
            max_bytes=None if out.max_bytes == 2**64 - 1 else out.max_bytes,
        )

    def held_bytes(self) -> int | None:
        """The bytes that it holds of the device or of what is below it, allocated or not; ``None`` for one
        that holds nothing of its own."""
        from ._errors import UnsupportedError

        try:
            return answer("uint64_t", lib.vpmm_resource_held_bytes, self._handle)
        except UnsupportedError:
            return None

    def is_equal(self, other: DeviceMemoryResource) -> bool:
        """Whether each may deallocate what the other has allocated."""
        return bool(answer("uint32_t", lib.vpmm_resource_is_equal, self._handle, _handle_of(other)))

    def __str__(self) -> str:
        return text_of(lib.vpmm_resource_describe, self._handle)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {' on '.join(_names(str(self)))}>"


def _names(tree: str) -> list[str]:
    return [line.lstrip(" │├└─") for line in tree.splitlines()]


def _handle_of(resource: Any) -> Any:
    if not isinstance(resource, DeviceMemoryResource):
        raise TypeError(f"{resource!r} is no memory resource")
    if resource._handle is None:
        raise TypeError(f"{type(resource).__name__}.__init__ was not called")
    return resource._handle


class UpstreamResourceAdaptor(DeviceMemoryResource):
    """What stands on another resource."""

    @property
    def upstream_mr(self) -> DeviceMemoryResource:
        """What it stands on."""
        if self._upstream is None:
            made = answer("vpmm_resource *", lib.vpmm_resource_upstream, self._handle)
            self._upstream = _of_handle(made, self.device)
        return self._upstream

    def get_upstream(self) -> DeviceMemoryResource:
        """What it stands on."""
        return self.upstream_mr


class CudaMemoryResource(DeviceMemoryResource):
    """``cudaMalloc`` and ``cudaFree``."""

    def __init__(self, *, device: int = 0):
        self._open("cuda-malloc", device)


class ManagedMemoryResource(DeviceMemoryResource):
    """``cudaMallocManaged``: memory that moves between host and device as it is used."""

    def __init__(self, *, device: int = 0):
        self._open("managed", device)


class PinnedHostMemoryResource(DeviceMemoryResource):
    """Page-locked memory of the host, which the device reaches."""

    def __init__(self, *, device: int = 0):
        self._open("pinned", device)


class HostMemoryResource(DeviceMemoryResource):
    """The program's own memory, which a GPU does not reach: for tests."""

    def __init__(self, *, device: int = 0):
        self._open("host", device)


class CudaAsyncMemoryResource(DeviceMemoryResource):
    """A pool of the driver's: ``cudaMallocFromPoolAsync``. ``release_threshold`` is what it keeps when the
    host has waited, all where nothing is said; ``maximum_pool_size`` the most that it may hold."""

    def __init__(
        self,
        initial_pool_size: int | str | None = None,
        release_threshold: int | str | None = None,
        *,
        maximum_pool_size: int | str | None = None,
        device: int = 0,
    ):
        initial, threshold = _bytes(initial_pool_size), _bytes(release_threshold)
        most = _bytes(maximum_pool_size)
        self._open(_settings("cuda-async", initial=initial, max=most, threshold=threshold), device)


class PoolMemoryResource(DeviceMemoryResource):
    """A pool of this library's, with the options of :class:`vpmm.Pool`.

    It takes its memory from the device: with an ``upstream`` that is no :class:`CudaMemoryResource` use
    :class:`CoalescingMemoryResource`, which does as RMM's pool does. ``initial_pool_size`` is mapped when the
    pool is made; ``maximum_pool_size`` is its limit.
    """

    def __init__(
        self,
        upstream: DeviceMemoryResource | None = None,
        initial_pool_size: int | str | None = None,
        maximum_pool_size: int | str | None = None,
        *,
        device: int | None = None,
        **options: Any,
    ):
        if upstream is not None and not isinstance(upstream, CudaMemoryResource):
            raise TypeError(
                f"a PoolMemoryResource takes its memory from the device, not from {upstream!r}: "
                "CoalescingMemoryResource stands on any resource"
            )
        if device is None:
            device = 0 if upstream is None else upstream.device
        if maximum_pool_size is not None:
            options["limit"] = maximum_pool_size
        pool = _pool.Pool(device, **options)
        initial = _bytes(initial_pool_size)
        if initial:
            pool.free(pool.malloc(initial))
        self._of(pool)

    def _of(self, pool: _pool.Pool) -> None:
        self._take(answer("vpmm_resource *", lib.vpmm_resource_of_pool, pool._handle), pool.device)

    @classmethod
    def of_process(cls, device: int = 0) -> PoolMemoryResource:
        """The process's pool on a device, which PyTorch, CuPy and Numba share."""
        resource = cls.__new__(cls)
        resource._of(_pool.Pool.of_process(device))
        return resource

    @property
    def pool(self) -> _pool.Pool:
        """The pool itself."""
        pool = _pool.Pool.__new__(_pool.Pool)
        pool._take(answer("vpmm_pool *", lib.vpmm_resource_pool, self._handle), self.device)
        return pool

    def pool_size(self) -> int:
        """The bytes that it holds of the device."""
        now = self.pool.statistics()
        return now.mapped_bytes + now.small_mapped_bytes


class CachingMemoryResource(UpstreamResourceAdaptor):
    """PyTorch's scheme, over anything; settings as in ``PYTORCH_CUDA_ALLOC_CONF``, such as
    ``max_split_size_mb=64``. Over :class:`CudaMemoryResource` where nothing is said."""

    def __init__(
        self, upstream: DeviceMemoryResource | None = None, *, device: int | None = None, **settings: Any
    ):
        upstream = _or_cuda(upstream, device)
        self._open(_settings("caching", **settings), upstream.device, upstream)


class CoalescingMemoryResource(UpstreamResourceAdaptor):
    """RMM's pool, over anything: best fit, free neighbours become one."""

    def __init__(
        self,
        upstream: DeviceMemoryResource,
        initial_pool_size: int | str | None = None,
        maximum_pool_size: int | str | None = None,
    ):
        text = _settings("coalescing", initial=_bytes(initial_pool_size), max=_bytes(maximum_pool_size))
        self._open(text, _device_of(upstream), upstream)


class FixedSizeMemoryResource(UpstreamResourceAdaptor):
    """Blocks of one size, so many taken at a time; a longer request finds none."""

    def __init__(
        self,
        upstream: DeviceMemoryResource,
        block_size: int | str = 1 << 20,
        blocks_to_preallocate: int | None = None,
    ):
        text = _settings("fixed-size", block=_bytes(block_size), blocks=blocks_to_preallocate)
        self._open(text, _device_of(upstream), upstream)


class BinningMemoryResource(UpstreamResourceAdaptor):
    """Sends each request to the bin of the least size that suffices, and longer ones to ``upstream``. Bins
    are of 2 to the exponents, both included; without exponents there is none before :meth:`add_bin`."""

    def __init__(
        self,
        upstream: DeviceMemoryResource,
        min_size_exponent: int | None = None,
        max_size_exponent: int | None = None,
    ):
        if (min_size_exponent is None) != (max_size_exponent is None):
            raise TypeError("both exponents, or none")
        text = _settings("binning", least=min_size_exponent, most=max_size_exponent)
        self._open(text, _device_of(upstream), upstream)

    def add_bin(self, allocation_size: int | str, bin_resource: DeviceMemoryResource | None = None) -> None:
        """Adds a bin for requests of up to so many bytes: blocks of that size, or another resource."""
        size = _pool.bytes_of(allocation_size)
        own = NULL if bin_resource is None else _handle_of(bin_resource)
        call(lib.vpmm_resource_add_bin, self._handle, size, own)


class ArenaMemoryResource(UpstreamResourceAdaptor):
    """One piece of memory, divided among streams: half of what is free where no size is said."""

    def __init__(self, upstream: DeviceMemoryResource, arena_size: int | str | None = None):
        self._open(_settings("arena", bytes=_bytes(arena_size)), _device_of(upstream), upstream)


class LimitingResourceAdaptor(UpstreamResourceAdaptor):
    """Refuses what would have more than so many bytes allocated."""

    def __init__(self, upstream: DeviceMemoryResource, allocation_limit: int | str):
        limit = _pool.bytes_of(allocation_limit)
        self._open(f"limiting({limit})", _device_of(upstream), upstream)

    def get_allocated_bytes(self) -> int:
        """What is allocated, each rounded up to 256 bytes."""
        return answer("uint64_t", lib.vpmm_resource_allocated_bytes, self._handle)

    def get_allocation_limit(self) -> int:
        """The limit in bytes."""
        return answer("uint64_t", lib.vpmm_resource_limit_bytes, self._handle)


class StatisticsResourceAdaptor(UpstreamResourceAdaptor):
    """Counts bytes and allocations: now, at most, in total; nested."""

    def __init__(self, upstream: DeviceMemoryResource):
        self._open("statistics", _device_of(upstream), upstream)

    @property
    def allocation_counts(self) -> Counters:
        """What was counted since it was made, or since counters were pushed."""
        return self._counters(lib.vpmm_resource_counters)

    def push_counters(self) -> Counters:
        """Counts from 0 until :meth:`pop_counters`; answers what was counted before."""
        return self._counters(lib.vpmm_resource_push_counters)

    def pop_counters(self) -> Counters:
        """Ends what the last :meth:`push_counters` has begun, and answers what was counted since; it is added
        to what was counted before. :class:`vpmm.StateError` where nothing was pushed."""
        return self._counters(lib.vpmm_resource_pop_counters)

    def _counters(self, function: Any) -> Counters:
        out = ffi.new("vpmm_counters *")
        lib.vpmm_counters_init(out, ffi.sizeof("vpmm_counters"))
        call(function, self._handle, out)
        return Counters(
            *(
                getattr(getattr(out, what), which)
                for which in ("current", "peak", "total")
                for what in ("bytes", "allocations")
            )
        )


class TrackingResourceAdaptor(UpstreamResourceAdaptor):
    """Knows every allocation until it is freed: refuses wrong frees, and says on the standard error stream
    what was never freed. With ``capture_stacks`` the library's stack of calls is noted for each."""

    def __init__(self, upstream: DeviceMemoryResource, capture_stacks: bool = False):
        text = _settings("tracking", backtraces="on" if capture_stacks else None)
        self._open(text, _device_of(upstream), upstream)

    def get_allocated_bytes(self) -> int:
        """What is allocated, as it was asked for."""
        return answer("uint64_t", lib.vpmm_resource_allocated_bytes, self._handle)

    def get_outstanding_allocations_str(self) -> str:
        """What is allocated, one line for each allocation."""
        return text_of(lib.vpmm_resource_outstanding, self._handle, after=(NULL,))

    def get_outstanding_allocations_count(self) -> int:
        """How many allocations there are."""
        count = ffi.new("uint64_t *")
        call(lib.vpmm_resource_outstanding, self._handle, NULL, 0, NULL, count)
        return count[0]


class LoggingResourceAdaptor(UpstreamResourceAdaptor):
    """Writes a row for every call to a file, which ``vpmm replay`` and RMM's own tools read.

    Without a name it is what the environment variable ``RMM_LOG_FILE`` says; as RMM does, ``.dev0`` and so on
    goes before the ending of the name. ``format="full"`` has further columns behind RMM's: device, alignment,
    live and held bytes, nanoseconds, date, and why a call failed.
    """

    def __init__(
        self,
        upstream: DeviceMemoryResource,
        log_file_name: str | os.PathLike[str] | None = None,
        *,
        format: str = "rmm",
    ):
        name = os.environ.get("RMM_LOG_FILE") if log_file_name is None else os.fspath(log_file_name)
        if not name:
            raise ValueError("a log file's name, or the environment variable RMM_LOG_FILE, has to be given")
        device = _device_of(upstream)
        path = pathlib.Path(name)
        path = path.with_name(f"{path.stem}.dev{device}{path.suffix}")
        self._open(_settings("logging", file=_quoted(str(path)), format=format), device, upstream)

    def get_file_name(self) -> str:
        """The file."""
        return text_of(lib.vpmm_resource_log_file, self._handle, after=(NULL,))

    def lost_rows(self) -> int:
        """How many rows found no room on the disk."""
        lost = ffi.new("uint64_t *")
        call(lib.vpmm_resource_log_file, self._handle, NULL, 0, NULL, lost)
        return lost[0]

    def flush(self) -> None:
        """Has all rows so far be in the file."""
        call(lib.vpmm_resource_flush_log, self._handle)


class AlignedResourceAdaptor(UpstreamResourceAdaptor):
    """Gives addresses at multiples of ``alignment`` for requests of at least ``alignment_threshold``
    bytes."""

    def __init__(
        self,
        upstream: DeviceMemoryResource,
        alignment: int | str = 256,
        alignment_threshold: int | str = 0,
    ):
        text = _settings("aligned", alignment=_bytes(alignment), **{"from": _bytes(alignment_threshold)})
        self._open(text, _device_of(upstream), upstream)


class ThreadSafeResourceAdaptor(UpstreamResourceAdaptor):
    """One call at a time, for resources of one's own; all of this library's are safe without."""

    def __init__(self, upstream: DeviceMemoryResource):
        self._open("thread-safe", _device_of(upstream), upstream)


class PrefetchResourceAdaptor(UpstreamResourceAdaptor):
    """Has managed memory moved to the device when it is allocated; nothing with other memory."""

    def __init__(self, upstream: DeviceMemoryResource):
        self._open("prefetch", _device_of(upstream), upstream)


class _Functions:
    """Python's functions behind a resource, as long as that calls them, and what they have raised."""

    _live: ClassVar[dict[int, _Functions]] = {}
    _raised = threading.local()

    def __init__(self, *functions: Callable[..., Any]):
        self.functions = functions
        self.context = ffi.new_handle(self)
        self._live[int(ffi.cast("uintptr_t", self.context))] = self

    def forget(self) -> None:
        """Once nothing calls them."""
        self._live.pop(int(ffi.cast("uintptr_t", self.context)), None)

    @classmethod
    def note(cls, error: BaseException) -> None:
        cls._raised.error = error

    @classmethod
    def take(cls) -> BaseException | None:
        error = getattr(cls._raised, "error", None)
        cls._raised.error = None
        return error


def _forwarded(function: Any, *arguments: Any) -> Any:
    """Calls the library; what a function of Python's has raised in there goes on here."""
    if not _Functions._live:
        return function(*arguments)
    _Functions.take()
    try:
        result = function(*arguments)
    except Exception:
        error = _Functions.take()
        if error is not None:
            raise error from None
        raise
    error = _Functions.take()
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def _called(context: Any) -> Iterator[tuple[Callable[..., Any], ...]]:
    """The functions of a resource, as what stands on it calls them: perhaps with a lock, so that the garbage
    collector may not free a buffer of the same now. What they raise is kept for who called the library."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield ffi.from_handle(context).functions
    except BaseException as error:
        _Functions.note(error)
    finally:
        if was_enabled:
            gc.enable()


@ffi.callback("void *(void *, size_t, size_t, void *)")
def _allocate(context: Any, size: int, align: int, stream: Any) -> Any:
    with _called(context) as (allocate, _):
        return ffi.cast("void *", allocate(size, int(ffi.cast("uintptr_t", stream))))
    return NULL


@ffi.callback("void(void *, void *, size_t, size_t, void *)")
def _deallocate(context: Any, pointer: Any, size: int, align: int, stream: Any) -> None:
    with _called(context) as (_, deallocate):
        deallocate(address(pointer), size, int(ffi.cast("uintptr_t", stream)))


@ffi.callback("uint32_t(void *, size_t)")
def _make_room(context: Any, size: int) -> int:
    with _called(context) as (function,):
        return bool(function(size))
    return 0


@ffi.callback("void(void *)")
def _finish(context: Any) -> None:
    ffi.from_handle(context).forget()


class CallbackMemoryResource(DeviceMemoryResource):
    """Memory from two functions: ``allocate_func(size, stream)`` answers an address at a multiple of 256 (0
    where there is none), ``deallocate_func(ptr, size, stream)`` frees it. Streams come as numbers. They use
    nothing that stands on the resource. What they raise comes out of the call that led to them."""

    def __init__(
        self,
        allocate_func: Callable[[int, int], int],
        deallocate_func: Callable[[int, int, int], None],
        *,
        device: int = 0,
    ):
        functions = _Functions(allocate_func, deallocate_func)
        with _forgotten_if_it_fails(functions):
            made = answer(
                "vpmm_resource *",
                lib.vpmm_resource_callback,
                _pool._driver(),
                device,
                _allocate,
                _deallocate,
                functions.context,
                _finish,
            )
        self._take(made, device)


class FailureCallbackResourceAdaptor(UpstreamResourceAdaptor):
    """Asks ``callback(size)`` when there is no memory, and tries again as long as it answers true."""

    def __init__(self, upstream: DeviceMemoryResource, callback: Callable[[int], bool]):
        below, functions = _handle_of(upstream), _Functions(callback)
        with _forgotten_if_it_fails(functions):
            made = answer(
                "vpmm_resource *",
                lib.vpmm_resource_failure_callback,
                below,
                _make_room,
                functions.context,
                _finish,
            )
        self._upstream = upstream
        self._take(made, upstream.device)


@contextlib.contextmanager
def _forgotten_if_it_fails(functions: _Functions) -> Iterator[None]:
    try:
        yield
    except BaseException:
        functions.forget()
        raise


#: By the names in trees.
_BY_NAME: dict[str, type[DeviceMemoryResource]] = {
    "aligned": AlignedResourceAdaptor,
    "arena": ArenaMemoryResource,
    "binning": BinningMemoryResource,
    "caching": CachingMemoryResource,
    "callback": CallbackMemoryResource,
    "cuda-async": CudaAsyncMemoryResource,
    "device-malloc": CudaMemoryResource,
    "failure-callback": FailureCallbackResourceAdaptor,
    "fixed-size": FixedSizeMemoryResource,
    "host-malloc": HostMemoryResource,
    "limiting": LimitingResourceAdaptor,
    "logging": LoggingResourceAdaptor,
    "managed": ManagedMemoryResource,
    "pinned-host": PinnedHostMemoryResource,
    "pool": CoalescingMemoryResource,
    "prefetch": PrefetchResourceAdaptor,
    "statistics": StatisticsResourceAdaptor,
    "thread-safe": ThreadSafeResourceAdaptor,
    "tracking": TrackingResourceAdaptor,
    "vpmm": PoolMemoryResource,
}


def _of_handle(made: Any, device: int) -> DeviceMemoryResource:
    """A handle of the library's as what it is."""
    resource = DeviceMemoryResource()
    resource._take(made, device)
    # Its own, as all that it has of its kind is asked of the handle.
    resource.__class__ = _BY_NAME.get(_names(str(resource))[0].split("(")[0], DeviceMemoryResource)
    return resource


def open(text: str, upstream: DeviceMemoryResource | None = None, *, device: int = 0) -> DeviceMemoryResource:
    """A resource, or a stack of them, by the names that the ``vpmm`` command has for them.

    >>> vpmm.mr.open("statistics(limiting(1GiB,cuda-async))")

    With an ``upstream`` the text is of what stands on that: ``vpmm.mr.open("limiting(1GiB)", pool)``.
    """
    below = NULL if upstream is None else _handle_of(upstream)
    device = device if upstream is None else upstream.device
    made = answer("vpmm_resource *", lib.vpmm_resource_open, _pool._driver(), device, text.encode(), below)
    return _of_handle(made, device)


def _device_of(upstream: DeviceMemoryResource) -> int:
    _handle_of(upstream)
    return upstream.device


def _or_cuda(upstream: DeviceMemoryResource | None, device: int | None) -> DeviceMemoryResource:
    return CudaMemoryResource(device=device or 0) if upstream is None else upstream


_current: dict[int, DeviceMemoryResource] = {}
_current_lock = threading.Lock()


def current_or_none(device: int) -> DeviceMemoryResource | None:
    """The resource that was made current, if one was."""
    return _current.get(device)


def get_current_device_resource(device: int = 0) -> DeviceMemoryResource:
    """A device's current resource: the one that was set, else the process's pool. Buffers, and what CuPy and
    Numba allocate, come from it."""
    return _current.get(device) or PoolMemoryResource.of_process(device)


def set_current_device_resource(resource: DeviceMemoryResource, device: int | None = None) -> None:
    """Makes a resource its device's current one, for all threads, and for C and C++ code that asks this
    library. What was allocated before is freed where it came from."""
    raw = _handle_of(resource)
    at = resource.device if device is None else device
    with _current_lock:
        call(lib.vpmm_resource_set_current, _pool._driver(), at, raw)
        _current[at] = resource


def reset_current_device_resource(device: int = 0) -> None:
    """Makes the process's pool the current resource again."""
    with _current_lock:
        call(lib.vpmm_resource_set_current, _pool._driver(), device, NULL)
        _current.pop(device, None)


@contextlib.contextmanager
def using(resource: DeviceMemoryResource, device: int | None = None) -> Iterator[DeviceMemoryResource]:
    """Makes a resource current in a block, for all threads; the former one is current again after it."""
    at = _device_of(resource) if device is None else device
    former = _current.get(at)
    set_current_device_resource(resource, at)
    try:
        yield resource
    finally:
        if former is None:
            reset_current_device_resource(at)
        else:
            set_current_device_resource(former, at)
