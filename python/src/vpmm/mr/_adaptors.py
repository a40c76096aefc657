"""What stands on one other resource and does more."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from .. import _pool
from .._library import NULL, answer, call, ffi, lib, text_of
from ._resource import (
    DeviceMemoryResource,
    UpstreamResourceAdaptor,
    bytes_or_none,
    device_of,
    quoted,
    settings_text,
)


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


class LimitingResourceAdaptor(UpstreamResourceAdaptor):
    """Refuses what would have more than so many bytes allocated."""

    def __init__(self, upstream_mr: DeviceMemoryResource, allocation_limit: int | str):
        limit = _pool.bytes_of(allocation_limit)
        self._open(f"limiting({limit})", device_of(upstream_mr), upstream_mr)

    def get_allocated_bytes(self) -> int:
        """What is allocated, each rounded up to 256 bytes."""
        return answer("uint64_t", lib.vpmm_resource_allocated_bytes, self._handle)

    def get_allocation_limit(self) -> int:
        """The limit in bytes."""
        return answer("uint64_t", lib.vpmm_resource_limit_bytes, self._handle)


class StatisticsResourceAdaptor(UpstreamResourceAdaptor):
    """Counts bytes and allocations: now, at most, in total; nested."""

    def __init__(self, upstream_mr: DeviceMemoryResource):
        self._open("statistics", device_of(upstream_mr), upstream_mr)

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

    def __init__(self, upstream_mr: DeviceMemoryResource, capture_stacks: bool = False):
        text = settings_text("tracking", backtraces="on" if capture_stacks else None)
        self._open(text, device_of(upstream_mr), upstream_mr)

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
        upstream_mr: DeviceMemoryResource,
        log_file_name: str | bytes | os.PathLike[str] | os.PathLike[bytes] | None = None,
        *,
        format: str = "rmm",
    ):
        name = os.environ.get("RMM_LOG_FILE") if log_file_name is None else os.fsdecode(log_file_name)
        if not name:
            raise ValueError("a log file's name, or the environment variable RMM_LOG_FILE, has to be given")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"a log file's name is a text, and {name!r} is not UTF-8") from None
        device = device_of(upstream_mr)
        path = pathlib.Path(name)
        path = path.with_name(f"{path.stem}.dev{device}{path.suffix}")
        self._open(settings_text("logging", file=quoted(str(path)), format=format), device, upstream_mr)

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
        upstream_mr: DeviceMemoryResource,
        alignment: int | str = 256,
        alignment_threshold: int | str = 0,
    ):
        text = settings_text(
            "aligned", alignment=bytes_or_none(alignment), **{"from": bytes_or_none(alignment_threshold)}
        )
        self._open(text, device_of(upstream_mr), upstream_mr)


class ThreadSafeResourceAdaptor(UpstreamResourceAdaptor):
    """One call at a time, for resources of one's own; all of this library's are safe without."""

    def __init__(self, upstream_mr: DeviceMemoryResource):
        self._open("thread-safe", device_of(upstream_mr), upstream_mr)


class PrefetchResourceAdaptor(UpstreamResourceAdaptor):
    """Has managed memory moved to the device when it is allocated; nothing with other memory."""

    def __init__(self, upstream_mr: DeviceMemoryResource):
        self._open("prefetch", device_of(upstream_mr), upstream_mr)
