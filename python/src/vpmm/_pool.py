"""Pools and what they hold."""

from __future__ import annotations

import dataclasses
import fractions
import functools
import os
import re
import threading
from typing import Any, ClassVar, TypedDict

from . import _share, _snapshot
from ._errors import InUseError
from ._library import (
    EVERY_DEVICE,
    NULL,
    address,
    answer,
    call,
    encoded,
    ffi,
    handle,
    lib,
    lock_of_each_process,
    text_of,
    within,
)
from ._stream import raw_stream
from ._typing import Unpack

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def bytes_of(size: int | float | str) -> int:
    """A number of bytes, given as such or as in ``"20 GB"``, ``"1.5GiB"``."""
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGT]i?)?B|)\s*", size, re.IGNORECASE)
        if not found or found[2].upper() not in _UNITS:
            raise ValueError(f"{size!r} is no size: a number, and B, KB, KiB and so on")
        if _UNITS[found[2].upper()] > 1:
            return int(fractions.Fraction(found[1]) * _UNITS[found[2].upper()])
        size = int(found[1]) if "." not in found[1] else float(found[1])
    whole: int | None
    try:
        whole = int(size)
    except (OverflowError, ValueError):
        # Infinity, or what is no number.
        whole = None
    # A part is as others have it, of the device's memory.
    if whole is None or whole != size:
        raise ValueError(f"{size} is no size: bytes are whole")
    if whole < 0:
        raise ValueError(f"{size} is no size: less than nothing")
    if whole >= 1 << 64:
        raise ValueError(f"{size} is no size: more bytes than there are addresses")
    return whole


_GPU_DIRECT_RDMA = 1
_SHARING = {None: 0, "descriptors": 1, "fabric": 2}

_ACCESS = {"none": 0, "read": 1, "read_write": 3}
_ACCESS_NAMES = {number: name for name, number in _ACCESS.items()}

#: What becomes of what memory holds while it sleeps; a file is apart.
_CONTENTS = {"discard": 0, "keep": 1, "keep buffers": 2}
_SAVE = 3


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a pool holds and has done. Bytes unless a name says otherwise."""

    live_bytes: int
    """In the hands of callers, without small requests of the paged profile."""
    peak_live_bytes: int
    """The most of that since the pool was made or its peaks were reset."""
    cached_bytes: int
    """Freed, and kept for their stream's next requests."""
    idle_bytes: int
    """Free to every stream."""
    pending_bytes: int
    """Freed, and still in use by a stream as far as is known; with what is deferred."""
    deferred_bytes: int
    """The part of that which no stream may have yet, as further streams that it was noted for may still be
    using it."""
    mapped_bytes: int
    """Physical memory held, without what the driver holds for small requests."""
    peak_mapped_bytes: int
    """The most of that."""
    reserved_bytes: int
    """Addresses reserved."""
    small_live_bytes: int
    """In the hands of callers of the paged profile's small requests."""
    small_mapped_bytes: int
    """What the driver holds for them."""
    peak_small_mapped_bytes: int
    """The most of that."""
    live_count: int
    """Allocations in the hands of callers, without small ones."""
    small_live_count: int
    """Small ones of the paged profile."""
    extent_count: int
    """Physical handles held."""
    extents_created: int
    """Physical handles made so far."""
    extents_moved: int
    """Physical handles moved to other addresses so far."""
    device_waits: int
    """Waits that streams were made to do so far."""
    host_waits: int
    """Waits of the host so far."""


_FIELDS = [field.name for field in dataclasses.fields(Statistics)]

#: Of a pool that was not made yet.
NOTHING = Statistics(*(0 for _ in _FIELDS))


def statistics_by(function: Any, *arguments: Any) -> Statistics:
    """Calls a function that fills what something holds."""
    stats = ffi.new("vpmm_stats *")
    lib.vpmm_stats_init(stats, ffi.sizeof("vpmm_stats"))
    call(function, *arguments, stats)
    return Statistics(*(getattr(stats, name) for name in _FIELDS))


class PoolOptions(TypedDict, total=False):
    """What :class:`Pool` and :func:`configure` take by name."""

    limit: int | str | None
    profile: str
    addresses: int | str | None
    release_threshold: int | str | None
    moves_per_second: int | None
    patience: float | None
    background: float | None
    ahead: int | str | None
    wait: float | None
    initial_pages: int
    page_size: int | str | None
    prefer: str | None
    sharing: str | None
    gpu_direct_rdma: bool


def _nanoseconds(name: str, seconds: float) -> int:
    """As the library has them; infinity is longer than anybody waits."""
    # So that what is no number is not taken for one, either.
    if not seconds >= 0:
        raise ValueError(f"{name} cannot be {seconds}: seconds, 0 or more")
    return 2**63 if seconds >= 2**63 / 1e9 else int(seconds * 1e9)


def _options(
    device: int,
    *,
    limit: int | str | None = None,
    profile: str = "default",
    addresses: int | str | None = None,
    release_threshold: int | str | None = None,
    moves_per_second: int | None = None,
    patience: float | None = None,
    background: float | None = None,
    ahead: int | str | None = None,
    wait: float | None = None,
    initial_pages: int = 0,
    page_size: int | str | None = None,
    prefer: str | None = None,
    sharing: str | None = None,
    gpu_direct_rdma: bool = False,
) -> Any:
    options = ffi.new("vpmm_pool_options *")
    lib.vpmm_pool_options_init(options, ffi.sizeof("vpmm_pool_options"))
    profiles = {"default": 0, "paged": 1}
    policies = {None: 0, "grow": 1, "wait": 2}
    if profile not in profiles:
        raise ValueError(f"{profile!r} is no profile; known: default, paged")
    of_paged: dict[str, Any] = {"initial_pages": initial_pages or None, "page_size": page_size}
    of_default: dict[str, Any] = {
        "moves_per_second": moves_per_second,
        "patience": patience,
        "background": background,
        "ahead": ahead,
    }
    other, unfit = ("paged", of_paged) if profile == "default" else ("default", of_default)
    for name, value in unfit.items():
        if value is not None:
            raise ValueError(f"{name} is of the {other} profile, and the pool is of the {profile} one")
    if prefer not in policies:
        raise ValueError(f"prefer cannot be {prefer!r}; known: None, 'grow', 'wait'")
    if sharing not in _SHARING:
        raise ValueError(f"sharing cannot be {sharing!r}; known: None, 'descriptors', 'fabric'")
    options.sharing = _SHARING[sharing]
    options.flags = _GPU_DIRECT_RDMA if gpu_direct_rdma else 0
    options.device, options.profile = within("device", device, 32), profiles[profile]
    options.pending_policy = policies[prefer]
    options.initial_pages = within("initial_pages", initial_pages, 64)
    if limit is not None:
        # 0 stands for none; a limit of nothing is one of a byte.
        options.limit_bytes = max(1, bytes_of(limit))
    if addresses is not None:
        options.va_size_bytes = bytes_of(addresses)
    if moves_per_second is not None:
        options.moves_per_second = max(within("moves_per_second", moves_per_second, 32), 1)
    if patience is not None:
        options.patience_nanoseconds = _nanoseconds("patience", patience)
    if background is not None:
        # 0 stands for no thread; the shortest period is longer than 1.
        options.background_period_nanoseconds = _nanoseconds("background", background) or 1
    if ahead is not None:
        options.background_ahead_bytes = bytes_of(ahead)
    if release_threshold is not None:
        options.release_threshold_bytes = bytes_of(release_threshold)
    if page_size is not None:
        options.page_size_bytes = bytes_of(page_size)
    if wait is not None:
        # The largest number means something else.
        options.wait_nanoseconds = _nanoseconds("wait", wait)
    return options


class Pool:
    """A pool of device memory.

    ``limit``: the most bytes that it may hold (a number, or as in ``"20 GB"``). ``profile``: ``"default"``
    or ``"paged"``. ``addresses``: bytes of addresses to reserve. ``release_threshold``: free memory above
    this goes back to the device when the host has waited for it. ``wait``: seconds that a request may wait
    for memory that is in use; 0 not at all. ``prefer``: where only other streams' memory is free, to
    ``"grow"`` or to ``"wait"`` for it on the GPU. ``moves_per_second``: how much driver time goes into
    holding little; 1,000 at first, 3 to 4 % of one thread's time at most, 0 for hardly any. ``patience``:
    seconds that a request may look whether other streams' freed memory becomes ready before the pool
    grows, in sum a 64th of the time at most, and 64 ms and a 1024th; where it is not 0 the stream may wait
    for a block of it on the GPU, too, 128 times and 16 times more each second; both for requests of more
    than 64 KiB. The process's own pools have 0.02, others 0. ``background``: seconds between two looks of
    a thread of the pool's own, which makes freed memory everybody's and unmaps what has moved, so that
    requests need not; none at first. ``ahead``: free memory that it keeps mapped where the pool grew last.
    ``sharing``: with other processes, by ``"descriptors"`` on this machine, or by ``"fabric"`` handles on
    every machine of the NVLink fabric. ``gpu_direct_rdma``: network cards may reach the memory, as they may
    ``cudaMalloc``'s; each mapping takes the driver a tenth longer. ``initial_pages``, ``page_size``: pages that are mapped when the
    pool is made, and their bytes.

    ``initial_pages`` and ``page_size`` are of the paged profile; ``moves_per_second``, ``patience``,
    ``background`` and ``ahead`` of the default one: a pool of the other is not made with them.

    Its methods take a stream as a number (a ``cudaStream_t``), as an object of PyTorch's, CuPy's or Numba's
    or with ``__cuda_stream__``, or as ``None``, the default stream. The pool keeps no such object: the
    stream has to last until what was allocated or used on it is freed.
    """

    def __init__(self, device: int = 0, **options: Unpack[PoolOptions]):
        made = _options(device, **options)
        self._take(answer("vpmm_pool *", lib.vpmm_pool_create, _driver(), made), device)

    def _take(self, raw: Any, device: int) -> None:
        # Given back with the last reference. The pool lives on while something of it is allocated.
        self._handle, self.device = ffi.gc(raw, lib.vpmm_pool_release), device

    @classmethod
    def of_process(cls, device: int = 0) -> Pool:
        """The process's own pool on a device, which PyTorch, CuPy and Numba share. Made when it is first
        asked for."""
        pool = cls.__new__(cls)
        number = within("device", device, 32)
        pool._take(answer("vpmm_pool *", lib.vpmm_process_pool, number), device)
        return pool

    def malloc(self, size: int, stream: Any = None, *, tag: str | None = None) -> int:
        """Allocates bytes for use on a stream; answers the address, 0 for 0 bytes. With a ``tag`` it is in a
        heap of that name, which :meth:`suspend` has sleep."""
        if not 0 <= size < 1 << 64:
            raise ValueError(f"an allocation of {size} bytes")
        on = handle(raw_stream(stream))
        if tag is None:
            return address(answer("void *", lib.vpmm_malloc, self._handle, size, on))
        made = answer("vpmm_tagged *", lib.vpmm_tagged_open, self._handle, encoded(tag))
        heap = ffi.gc(made, lib.vpmm_tagged_release)
        return address(answer("void *", lib.vpmm_tagged_malloc, heap, size, on))

    def free(self, pointer: int, stream: Any = None) -> None:
        """Frees an allocation once everything enqueued on the stream so far has finished. Where it is not the
        allocation's own stream, that one's work until the allocation, and all uses, must be ordered before;
        the default stream orders with no stream that is not blocking."""
        call(lib.vpmm_free, self._handle, handle(pointer), handle(raw_stream(stream)))

    def record_stream(self, pointer: int, stream: Any) -> None:
        """Notes that an allocation is used on a further stream."""
        call(lib.vpmm_record_stream, self._handle, handle(pointer), handle(raw_stream(stream)))

    def trim(self, keep: int | str = 0) -> int:
        """Gives free memory back to the device until so much is held; answers the bytes given back."""
        return answer("uint64_t", lib.vpmm_pool_trim_to, self._handle, bytes_of(keep))

    def limit_to(self, limit: int | str | None) -> None:
        """Changes the most bytes that the pool may hold, at most to what it was made with, which ``None``
        stands for. What it holds beyond that stays until it is free and trimmed."""
        # As when it is made.
        most = 0 if limit is None else max(1, bytes_of(limit))
        call(lib.vpmm_pool_limit_to, self._handle, most)

    def access(self, device: int) -> str:
        """What a device may do with the pool's memory: ``"none"``, ``"read"`` or ``"read_write"``."""
        number = within("device", device, 32)
        return _ACCESS_NAMES[answer("uint32_t", lib.vpmm_pool_access, self._handle, number)]

    def set_access(self, device: int, access: str = "read_write") -> None:
        """Sets what another device may do with all memory of the pool, now and later: ``"none"``, ``"read"`` or
        ``"read_write"``. What uses the memory there must have finished before that is taken away. Pools of
        the process on devices that can reach each other are open to each other from the start, others to
        no device."""
        if access not in _ACCESS:
            raise ValueError(f"access cannot be {access!r}; known: {', '.join(_ACCESS)}")
        call(lib.vpmm_pool_set_access, self._handle, within("device", device, 32), _ACCESS[access])

    def suspend(
        self,
        tag: str,
        *,
        contents: str = "keep",
        path: str | os.PathLike[str] | None = None,
        stream: Any = None,
    ) -> int:
        """Gives all memory with a tag back to the device: as :func:`vpmm.suspend`."""
        if contents not in _CONTENTS:
            raise ValueError(f"contents cannot be {contents!r}; known: {', '.join(_CONTENTS)}")
        way = _CONTENTS[contents] if path is None else _SAVE
        file = NULL if path is None else ffi.new("char[]", encoded(os.fsencode(path)))
        on = handle(raw_stream(stream))
        return answer("uint64_t", lib.vpmm_suspend, self._handle, encoded(tag), on, way, file)

    def resume(self, tag: str, *, empty: bool = False, stream: Any = None) -> int:
        """Brings memory with a tag back: as :func:`vpmm.resume`."""
        on = handle(raw_stream(stream))
        return answer("uint64_t", lib.vpmm_resume, self._handle, encoded(tag), on, empty)

    def export(self, pointer: int, socket: Any) -> None:
        """Sends an allocation to a process that is in :meth:`vpmm.Imported.receive` at the other end of a
        connected Unix stream socket, and waits until it has mapped it. The pool was made with ``sharing``.
        The memory stays where it is from then on, and may be freed when the other process has finished with
        it. What a signal's handler raises in the main thread ends the wait, and shuts the socket down."""
        _share.send(lib.vpmm_export_send, self._handle, handle(pointer), _share.descriptor(socket))

    def export_all(self) -> _share.Export:
        """The whole pool, to be sent to one process, again and again as it grows."""
        return _share.Export(self)

    def snapshot(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """What the pool holds, every block of every heap: as :func:`vpmm.snapshot`, without history."""
        made = _snapshot.taken(lib.vpmm_pool_snapshot, self._handle)
        # One for each device, as the process's have.
        made["device_traces"] = [[] for _ in range(self.device + 1)]
        return _snapshot.written(made, path)

    def statistics(self) -> Statistics:
        """What the pool holds."""
        return statistics_by(lib.vpmm_pool_stats, self._handle)

    def reset_peaks(self) -> None:
        """Sets the peaks to what is held now."""
        call(lib.vpmm_pool_reset_peaks, self._handle)

    def layout(self) -> str:
        """What stands where, in granules: ``[n]`` in use, ``[-n]`` free, ``[~n]`` waiting to be unmapped,
        ``[*n]`` a hole."""
        return text_of(lib.vpmm_pool_layout, self._handle)

    def validate(self) -> None:
        """Checks the pool's books from scratch; raises if something is wrong. No thread may use the pool
        meanwhile."""
        call(lib.vpmm_pool_validate, self._handle)

    def __repr__(self) -> str:
        now = self.statistics()
        return f"Pool(device={self.device}, live={now.live_bytes}, held={now.mapped_bytes})"


@functools.cache
def _driver() -> Any:
    """A handle of the process's driver, kept for ever."""
    return answer("vpmm_driver *", lib.vpmm_process_driver)


def device_count() -> int:
    """How many devices there are."""
    return answer("uint32_t", lib.vpmm_driver_device_count, _driver())


#: The options that were set, by the device they are for.
_configured: dict[int | None, bytes] = {}


def configure(device: int | None = None, **options: Unpack[PoolOptions]) -> None:
    """Sets what the process's pools will be made with: that of a device, or those of all that have no
    settings of their own. Options as :class:`Pool` has them. :class:`vpmm.InUseError` if a pool that it is
    for was made already, with others."""
    made = _options(EVERY_DEVICE if device is None else device, **options)
    same = bytes(ffi.buffer(made))
    try:
        call(lib.vpmm_process_configure, made)
    except InUseError:
        if _configured.get(device) != same:
            raise
    _configured[device] = same


def is_configured_otherwise(device: int | None, **options: Unpack[PoolOptions]) -> bool:
    """Whether :func:`configure` was called for just that, with other options."""
    made = _options(EVERY_DEVICE if device is None else device, **options)
    return device in _configured and _configured[device] != bytes(ffi.buffer(made))


class Peaks:
    """A stretch of time with peaks of its own. The pool knows one peak of each kind; stretches that are
    inside each other begin it anew, and hand what they saw to those around them."""

    _lock = threading.RLock()
    _open: ClassVar[dict[int, list[Peaks]]] = {}
    _KINDS = ("live_bytes", "mapped_bytes", "small_mapped_bytes")

    def __init__(self, device: int, now: Statistics):
        self.device, self.begin = device, now
        self._peaks = {f"peak_{kind}": getattr(now, kind) for kind in self._KINDS}

    @classmethod
    def enter(cls, device: int) -> Peaks:
        with cls._lock:
            pool = Pool.of_process(device)
            now = pool.statistics()
            stretches = cls._open.setdefault(device, [cls(device, now)])
            for stretch in stretches:
                stretch._note(now)
            made = cls(device, now)
            stretches.append(made)
            pool.reset_peaks()
            return made

    def leave(self) -> Statistics:
        """What was seen since the begin."""
        with self._lock:
            now = Pool.of_process(self.device).statistics()
            stretches = self._open[self.device]
            for stretch in stretches:
                stretch._note(now)
            stretches.remove(self)
            return self._as_seen(now)

    def _note(self, now: Statistics) -> None:
        self._peaks = {name: max(peak, getattr(now, name)) for name, peak in self._peaks.items()}

    def _as_seen(self, now: Statistics) -> Statistics:
        peaks = {name: max(peak, getattr(now, name)) for name, peak in self._peaks.items()}
        return dataclasses.replace(now, **peaks)

    @classmethod
    def of_all(cls, device: int, now: Statistics) -> Statistics:
        """What :func:`statistics` says: the first stretch is since the peaks were reset."""
        with cls._lock:
            stretches = cls._open.get(device)
            return stretches[0]._as_seen(now) if stretches else now

    @classmethod
    def reset(cls, device: int) -> None:
        with cls._lock:
            pool = Pool.of_process(device)
            now = pool.statistics()
            stretches = cls._open.get(device, [])
            for stretch in stretches[1:]:
                stretch._note(now)
            if stretches:
                stretches[0] = cls(device, now)
            pool.reset_peaks()


lock_of_each_process(Peaks, "_lock")


def statistics(device: int = 0) -> Statistics:
    """What the process's pool on a device holds."""
    return Peaks.of_all(device, Pool.of_process(device).statistics())


def reset_peaks(device: int = 0) -> None:
    """Sets the peaks of the process's pool to what is held now."""
    Peaks.reset(device)


def device_memory(device: int = 0) -> tuple[int, int]:
    """Free and total bytes of a device, as the driver counts them."""
    total = ffi.new("uint64_t *")
    number = within("device", device, 32)
    free = answer("uint64_t", lib.vpmm_driver_memory, _driver(), number, total)
    return free, total[0]


def trim(keep: int | str = 0, device: int = 0) -> int:
    """Gives free memory of the process's pool back to the device until so much is held; answers the
    bytes given back."""
    return Pool.of_process(device).trim(keep)


def keep_stream(stream: Any, device: int = 0) -> None:
    """Says that a stream, a number or an object as :class:`Pool` takes them, lasts until
    :func:`forget_stream`: the process's pools then serve it without asking the driver about it, and without
    an event at each free."""
    call(lib.vpmm_process_keep_stream, within("device", device, 32), handle(raw_stream(stream)))


def forget_stream(stream: Any, device: int = 0) -> bool:
    """Says that a stream which was kept is about to be destroyed; answers whether the process's pools knew
    it."""
    number, raw = within("device", device, 32), handle(raw_stream(stream))
    return bool(answer("uint32_t", lib.vpmm_process_forget_stream, number, raw))
