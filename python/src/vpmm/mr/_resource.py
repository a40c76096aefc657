"""What all resources can do."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _pool
from .._errors import UnsupportedError
from .._library import NULL, address, answer, call, encoded, ffi, handle, lib, text_of, within
from .._stream import raw_stream
from ._functions import forwarded


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


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def settings_text(name: str, **settings: Any) -> str:
    """A text as the library reads it, of the settings that are there."""
    given = [f"{key}={value}" for key, value in settings.items() if value is not None]
    return f"{name}({','.join(given)})" if given else name


def bytes_or_none(size: int | str | None) -> int | None:
    return None if size is None else _pool.bytes_of(size)


def _release(raw: Any, forwarded: Any = forwarded, release: Any = lib.vpmm_resource_release) -> None:
    """cffi tells what is raised here. By arguments, as modules may be empty when the last ones end."""
    forwarded(release, raw)


def opened(text: str, device: int, below: Any) -> Any:
    """The resource of a text, on another or on nothing."""
    number = within("device", device, 32)
    request = lib.vpmm_resource_open, _pool._driver(), number, encoded(text), below
    return forwarded(answer, "vpmm_resource *", *request, back=lib.vpmm_resource_release)


class DeviceMemoryResource:
    """What gives out memory. ``str`` is its stack as a tree."""

    _upstream: DeviceMemoryResource | None = None
    _handle: Any = None
    device: int
    """The device that the memory is for."""

    def _take(self, raw: Any, device: int) -> None:
        self._handle, self.device = ffi.gc(raw, _release), device

    def _open(self, text: str, device: int = 0, upstream: DeviceMemoryResource | None = None) -> None:
        below = NULL if upstream is None else handle_of(upstream)
        made = opened(text, device, below)
        self._upstream = upstream
        self._take(made, device)

    def allocate(self, nbytes: int, stream: Any = None, *, alignment: int = 0) -> int:
        """Allocates bytes for use on a stream, and answers the address; 0 for 0 bytes. ``alignment`` is a
        power of two, or the resource's own. :class:`vpmm.OutOfMemoryError` where there is none."""
        if not 0 <= nbytes < 1 << 64:
            raise ValueError(f"an allocation of {nbytes} bytes")
        on, below = handle(raw_stream(stream)), self._handle
        within("alignment", alignment, 64)

        def back(made: Any) -> None:
            lib.vpmm_resource_deallocate(below, made, nbytes, alignment, on)

        request = lib.vpmm_resource_allocate, below, nbytes, alignment, on
        return address(forwarded(answer, "void *", *request, back=back))

    def deallocate(self, ptr: int, nbytes: int, stream: Any = None, *, alignment: int = 0) -> None:
        """Frees an allocation once everything enqueued on the stream so far has finished. Where it is not the
        allocation's own stream, that one's work until the allocation, and all uses, must be ordered before.
        Bytes and alignment are those of the allocation."""
        about = handle(ptr), within("nbytes", nbytes, 64), within("alignment", alignment, 64)
        on = handle(raw_stream(stream))
        forwarded(call, lib.vpmm_resource_deallocate, self._handle, *about, on)

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
        try:
            return answer("uint64_t", lib.vpmm_resource_held_bytes, self._handle)
        except UnsupportedError:
            return None

    def is_equal(self, other: DeviceMemoryResource) -> bool:
        """Whether each may deallocate what the other has allocated."""
        return bool(answer("uint32_t", lib.vpmm_resource_is_equal, self._handle, handle_of(other)))

    def __str__(self) -> str:
        return text_of(lib.vpmm_resource_describe, self._handle)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {' on '.join(lines_of(str(self)))}>"


def lines_of(tree: str) -> list[str]:
    return [line.lstrip(" │├└─") for line in tree.splitlines()]


def handle_of(resource: Any) -> Any:
    if not isinstance(resource, DeviceMemoryResource):
        raise TypeError(f"{resource!r} is no memory resource")
    if resource._handle is None:
        raise TypeError(f"{type(resource).__name__}.__init__ was not called")
    return resource._handle


def device_of(upstream: DeviceMemoryResource) -> int:
    handle_of(upstream)
    return upstream.device


def device_over(upstream: DeviceMemoryResource | None, device: int | None) -> int:
    """The device of what is to stand on a resource, or on nothing: that one's, whether it is said or not."""
    if upstream is None:
        return 0 if device is None else device
    own = device_of(upstream)
    if device is not None and within("device", device, 32) != own:
        raise ValueError(f"a resource on device {device}, over one of device {own}")
    return own


class UpstreamResourceAdaptor(DeviceMemoryResource):
    """What stands on another resource."""

    @property
    def upstream_mr(self) -> DeviceMemoryResource:
        """What it stands on."""
        if self._upstream is None:
            made = answer("vpmm_resource *", lib.vpmm_resource_upstream, self._handle)
            from ._names import of_handle

            self._upstream = of_handle(made, self.device)
        return self._upstream

    def get_upstream(self) -> DeviceMemoryResource:
        """What it stands on."""
        return self.upstream_mr
