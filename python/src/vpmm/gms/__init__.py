"""The client of the GPU memory service (``vpmm serve``): memory that another process owns.

The names are those of the Python service's own client, so that a program written for that one runs with
another import, against either server::

    from vpmm.gms import GMSClientMemoryManager, RequestedLockType

    manager = GMSClientMemoryManager("/tmp/gms.sock", device=0)
    manager.connect(RequestedLockType.RW_OR_RO)

``vpmm.gms.torch`` publishes a module's tensors and attaches them in other processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._errors import DisconnectedError, LockTimeoutError, RefusedError, StaleMemoryLayoutError
from .._library import NULL, Raised, answer, call, encoded, ffi, interrupts, lib, within
from .._pool import _driver

__all__ = [
    "DisconnectedError",
    "GMSClientMemoryManager",
    "GetAllocationResponse",
    "GrantedLockType",
    "LayoutCommit",
    "LocalMapping",
    "LockTimeoutError",
    "RefusedError",
    "RequestedLockType",
    "StaleMemoryLayoutError",
]


class RequestedLockType(str, enum.Enum):
    """The locks that a client may ask for."""

    RW = "rw"
    """To write a new layout. Whatever was published before is gone."""
    RO = "ro"
    """To read the published layout, with others."""
    RW_OR_RO = "rw_or_ro"
    """To read if something is published, else to write."""
    RW_DATA_OR_RW = "rw_data_or_rw"
    """To write to the memory of a sealed layout, else to write a new one."""


class GrantedLockType(str, enum.Enum):
    """The locks that a client has."""

    RW = "rw"
    RO = "ro"
    RW_DATA = "rw_data"


_LOCKS = {"rw": 0, "ro": 1, "rw_or_ro": 2, "rw_data_or_rw": 3}
_GRANTS = {0: None, 1: GrantedLockType.RW, 2: GrantedLockType.RO, 3: GrantedLockType.RW_DATA}


@dataclasses.dataclass(frozen=True)
class GetAllocationResponse:
    """An allocation, as the server knows it."""

    allocation_id: str
    size: int
    aligned_size: int
    tag: str
    layout_slot: int


@dataclasses.dataclass(frozen=True)
class LocalMapping:
    """What is mapped in this process, or an address is kept for."""

    allocation_id: str
    va: int
    size: int
    aligned_size: int
    tag: str
    layout_slot: int
    is_mapped: bool

    @property
    def handle(self) -> int:
        """What stands for the memory; 0 while only the address is kept."""
        return self.va if self.is_mapped else 0


@dataclasses.dataclass(frozen=True)
class LayoutCommit:
    """What :meth:`GMSClientMemoryManager.commit_layout` did."""

    memory_layout_hash: str
    granted_lock_type: GrantedLockType


def _milliseconds(timeout_ms: int | None) -> int:
    """As the library has them: below 0 is for ever."""
    return -1 if timeout_ms is None or timeout_ms < 0 else within("timeout_ms", timeout_ms, 63)


def _text(text: Any) -> str:
    return ffi.string(text).decode()


def _allocation(raw: Any) -> GetAllocationResponse:
    return GetAllocationResponse(_text(raw.id), raw.bytes, raw.aligned_bytes, _text(raw.tag), raw.layout_slot)


class _Seen:
    """What a function of the library calls back with. An exception in a callback cannot pass through the
    library, so nothing is done there but to take down what came."""

    def __init__(self, signature: str, visit: str, take: Any):
        self._all: list[Any] = []
        self._raised = Raised()
        note = self._raised.note
        self._function = ffi.callback(
            signature, lambda *values: self._all.append(take(*values)), onerror=note
        )
        #: What the library is given: by a function of its own, as the interpreter may end meanwhile.
        self.by = ffi.addressof(lib, visit), ffi.cast("void *", self._function)

    @property
    def all(self) -> list[Any]:
        """All that came, once the call is over; what a signal's handler has raised meanwhile goes on here."""
        self._raised.go_on()
        return self._all


def _allocations(take: Any = _allocation) -> _Seen:
    return _Seen("void(*)(const vpmm_gms_allocation *)", "vpmm_python_visit_allocation", take)


def _keys() -> _Seen:
    return _Seen("void(*)(const char *)", "vpmm_python_visit_key", _text)


class GMSClientMemoryManager:
    """A session with a server, and what this process has mapped through it. Does not connect by itself.

    The device's primary context is taken part in. The order of the process's own work on the memory is
    the process's to see to: what takes memory away here waits for the device first. May be used from any
    thread, by one at a time.

    In the main thread handlers of signals run while a call waits for the server, as of Ctrl-C. What one raises
    ends the call; and the connection, as :meth:`abort` does, where the answer has not come within half a
    second: it is still to come then. A handler cannot use the manager whose call it has come into:
    :class:`vpmm.InUseError`.

    With a ``tag``, and the server at the device's usual place for it, that place is found anew by the first
    :meth:`connect` after each :meth:`abort`: a process that was moved to another GPU meanwhile finds that
    one's server. A path of one's own stays.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        device: int = 0,
        tag: str | None = None,
        scratch_size: int = 512 << 20,
    ):
        self.socket_path, self.device, self.tag = str(socket_path), device, tag
        self.scratch_size = scratch_size
        path = encoded(str(pathlib.Path(socket_path)))
        raw = answer("vpmm_gms *", lib.vpmm_gms_open, _driver(), within("device", device, 32), path)
        self._handle = ffi.gc(raw, lib.vpmm_gms_release)
        # So that handlers of signals run, as of Ctrl-C, however long a lock or an answer takes.
        call(lib.vpmm_gms_set_check, self._handle, *interrupts())
        self._scratch_size_is_set = False
        self._is_closed = False
        if tag is not None:
            call(lib.vpmm_gms_set_tag, self._handle, encoded(tag))

    def __enter__(self) -> GMSClientMemoryManager:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close(best_effort=True)

    def _state(self) -> Any:
        state = ffi.new("vpmm_gms_state *")
        lib.vpmm_gms_state_init(state, ffi.sizeof("vpmm_gms_state"))
        call(lib.vpmm_gms_state_of, self._handle, state)
        return state

    @property
    def granted_lock_type(self) -> GrantedLockType | None:
        """The lock that it has."""
        return _GRANTS[self._state().grant]

    @property
    def is_connected(self) -> bool:
        """Whether it has a lock."""
        return self.granted_lock_type is not None

    @property
    def is_unmapped(self) -> bool:
        """Whether the memory was given up and only the addresses are kept."""
        return bool(self._state().is_unmapped)

    @property
    def total_bytes(self) -> int:
        """Bytes of all mappings, whether the memory is there or not."""
        return self._state().total_bytes

    @property
    def granularity(self) -> int:
        """What sizes are rounded up to."""
        return self._state().granularity

    @property
    def mappings(self) -> Mapping[int, LocalMapping]:
        """What is mapped, or an address is kept for, by address."""

        def take(raw: Any) -> LocalMapping:
            about = _allocation(raw)
            return LocalMapping(va=raw.address, is_mapped=bool(raw.is_mapped), **vars(about))

        seen = _allocations(take)
        call(lib.vpmm_gms_list_mappings, self._handle, *seen.by)
        return {mapping.va: mapping for mapping in seen.all}

    # The connection.

    def connect(self, lock_type: RequestedLockType | str, timeout_ms: int | None = None) -> None:
        """Waits for a lock, for ever if no time is said or one below 0, and half a minute for a server to be
        there.

        :raises LockTimeoutError: (a ``TimeoutError``) the one failure to simply try again after.
        :raises DisconnectedError: (a ``ConnectionError``) no server is there, or it does not answer.
        :raises RuntimeError: it is connected already.
        """
        lock = _LOCKS[RequestedLockType(lock_type).value]
        try:
            call(lib.vpmm_gms_connect, self._handle, lock, _milliseconds(timeout_ms), NULL)
        finally:
            if self.tag is not None:
                seen = _keys()
                call(lib.vpmm_gms_socket_path, self._handle, *seen.by)
                self.socket_path = seen.all[0]

    def set_answer_timeout(self, timeout_ms: int | None) -> None:
        """How long a server that is there may take for an answer, from the next :meth:`connect` on, before it
        counts as stopped or stuck: a minute, if nothing is set; None or below 0 is for ever. Locks, and
        memory that there is too little of, are waited for longer, as long as the server is alive."""
        call(lib.vpmm_gms_set_answer_timeout, self._handle, _milliseconds(timeout_ms))

    def abort(self) -> None:
        """Gives the lock up; a writer's layout is void then. What is mapped stays mapped."""
        call(lib.vpmm_gms_abort, self._handle)

    def close(self, best_effort: bool = False) -> None:
        """Gives everything up: memory, addresses, the lock. With ``best_effort`` without an error."""
        self._is_closed = True
        try:
            call(lib.vpmm_gms_close, self._handle)
        except RuntimeError:
            if not best_effort:
                raise

    # Allocations at the server.

    def allocate_handle(self, size: int, tag: str = "default") -> tuple[str, int]:
        """Makes an allocation, of whole granules: its name and its place in the layout. Maps nothing."""
        seen = _allocations()
        number = within("size", size, 64)
        call(lib.vpmm_gms_allocate_handle, self._handle, number, encoded(tag), *seen.by)
        return seen.all[0].allocation_id, seen.all[0].layout_slot

    def export_handle(self, allocation_id: str) -> int:
        """A descriptor of an allocation's memory, for the caller to close."""
        return answer("int", lib.vpmm_gms_export_handle, self._handle, encoded(allocation_id))

    def get_handle_info(self, allocation_id: str) -> GetAllocationResponse:
        """An allocation."""
        seen = _allocations()
        name = encoded(allocation_id)
        call(lib.vpmm_gms_handle_info, self._handle, name, *seen.by)
        return seen.all[0]

    def free_handle(self, allocation_id: str) -> bool:
        """Gives an allocation back. What is mapped of it stays mapped."""
        name = encoded(allocation_id)
        if not answer("uint32_t", lib.vpmm_gms_free_handle, self._handle, name):
            raise RefusedError(f"Unknown allocation: {allocation_id}", "VPMM_REFUSED")
        return True

    def list_handles(self, tag: str | None = None) -> list[GetAllocationResponse]:
        """All allocations, or those of a tag, in the order of their slots."""
        seen = _allocations()
        of = NULL if tag is None else encoded(tag)
        call(lib.vpmm_gms_list_handles, self._handle, of, *seen.by)
        return seen.all

    def commit(self) -> bool:
        """Publishes the layout: waits for the device, takes the memory away here and keeps the addresses,
        publishes, and ends the session."""
        call(lib.vpmm_gms_commit, self._handle)
        return True

    def commit_layout(self) -> LayoutCommit:
        """Seals the layout: its allocations outlive this process. Session and mappings stay, but the lock is
        to write contents only from now on."""
        seen = _keys()
        call(lib.vpmm_gms_commit_layout, self._handle, *seen.by)
        granted = self.granted_lock_type
        assert granted is not None
        return LayoutCommit(seen.all[0], granted)

    def get_memory_layout_hash(self) -> str:
        """The hash of the published or sealed layout."""
        seen = _keys()
        call(lib.vpmm_gms_layout_hash, self._handle, *seen.by)
        return seen.all[0]

    # Addresses.

    def reserve_va(self, size: int) -> int:
        """Reserves addresses for so many bytes, in whole granules."""
        return answer("uint64_t", lib.vpmm_gms_reserve, self._handle, within("size", size, 64))

    def map_va(
        self,
        fd: int,
        va: int,
        size: int = 0,
        allocation_id: str = "",
        tag: str = "default",
        layout_slot: int = 0,
    ) -> int:
        """Maps an allocation's memory at an address that was reserved for it, for reading, or also for
        writing if the lock is a writer's. The descriptor is closed. Size, tag and slot are the server's to
        know. Answers the address, which stands for the memory."""
        numbers = within("fd", fd, 31), within("va", va, 64)
        call(lib.vpmm_gms_map, self._handle, *numbers, encoded(allocation_id))
        return va

    def unmap_va(self, va: int) -> None:
        """Takes the memory at an address away and keeps the address. Waits for the device first."""
        call(lib.vpmm_gms_unmap, self._handle, within("va", va, 64))

    def free_va(self, va: int) -> None:
        """Gives an address back; memory that is there still is taken away first, after waiting for the
        device."""
        self.unmap_va(va)
        call(lib.vpmm_gms_free_address, self._handle, va)

    # Metadata.

    def metadata_put(self, key: str, allocation_id: str, offset_bytes: int, value: bytes) -> bool:
        """Puts an entry."""
        name = encoded(allocation_id)
        buffer = ffi.from_buffer(value)
        call(
            lib.vpmm_gms_metadata_put,
            self._handle,
            encoded(key),
            name,
            within("offset_bytes", offset_bytes, 64),
            buffer,
            len(buffer),
        )
        return True

    def metadata_get(self, key: str) -> tuple[str, int, bytes] | None:
        """An entry, if there is one: the allocation, where in it, the value."""

        def take(name: Any, offset: int, value: Any, length: int) -> tuple[str, int, bytes]:
            return _text(name), offset, bytes(ffi.buffer(value, length)) if length else b""

        signature = "void(*)(const char *, uint64_t, const void *, size_t)"
        seen = _Seen(signature, "vpmm_python_visit_value", take)
        call(lib.vpmm_gms_metadata_get, self._handle, encoded(key), *seen.by)
        return seen.all[0] if seen.all else None

    def metadata_list(self, prefix: str = "") -> list[str]:
        """The keys that begin so, sorted."""
        seen = _keys()
        call(lib.vpmm_gms_metadata_list, self._handle, encoded(prefix), *seen.by)
        return seen.all

    def metadata_delete(self, key: str) -> bool:
        """Takes an entry away; whether there was one."""
        return bool(answer("uint32_t", lib.vpmm_gms_metadata_delete, self._handle, encoded(key)))

    # Everything together.

    def create_mapping(self, allocation_id: str | None = None, size: int = 0, tag: str = "default") -> int:
        """Makes an allocation and maps it, or maps the one that is named: its address."""
        name = NULL if allocation_id is None else encoded(allocation_id)
        number = within("size", size, 64)
        return answer("uint64_t", lib.vpmm_gms_create_mapping, self._handle, name, number, encoded(tag))

    def create_mappings(self, sizes: Sequence[int], tag: str = "default") -> list[int]:
        """Makes many allocations at once, side by side: the address of each. Not in the Python client."""
        addresses = ffi.new("uint64_t[]", len(sizes))
        asked = ffi.new("uint64_t[]", [within("a size", size, 64) for size in sizes])
        call(
            lib.vpmm_gms_create_mappings,
            self._handle,
            asked,
            len(sizes),
            encoded(tag),
            addresses,
        )
        return list(addresses)

    def import_all(self, tag: str | None = None) -> dict[str, int]:
        """Maps every allocation of the layout, or of a tag, side by side and at once: the address of each.
        Not in the Python client."""
        seen = _allocations(lambda raw: (_text(raw.id), raw.address))
        of = NULL if tag is None else encoded(tag)
        call(lib.vpmm_gms_import_all, self._handle, of, *seen.by)
        return dict(seen.all)

    def destroy_mapping(self, va: int) -> None:
        """Takes a mapping away with its address, and, as a writer, with its allocation."""
        call(lib.vpmm_gms_destroy_mapping, self._handle, within("va", va, 64))

    def unmap_all_vas(self) -> None:
        """Gives all memory up and keeps the addresses. Waits for the device first."""
        call(lib.vpmm_gms_unmap_all, self._handle)

    def remap_all_vas(self) -> None:
        """Brings the memory back at the same addresses.

        :raises StaleMemoryLayoutError: the layout is another now.
        """
        call(lib.vpmm_gms_remap_all, self._handle)

    def reallocate_all_handles(self, tag: str = "default") -> None:
        """As a writer of a new layout, makes an allocation for every address that is kept;
        :meth:`remap_all_vas` maps them."""
        call(lib.vpmm_gms_reallocate_all, self._handle, encoded(tag))

    def begin_torch(self, tag: str, scratch: bool = False) -> None:
        """Has PyTorch's pools that this thread uses allocate here, until ``vpmm_gms_torch_end``:
        :func:`vpmm.gms.torch.gms_use_mem_pool` does both."""
        if scratch:
            self._set_scratch_size()
        call(lib.vpmm_gms_torch_begin, self._handle, encoded(tag), int(scratch))

    @contextlib.contextmanager
    def _block_of_torch(self, tag: str, scratch: bool) -> Iterator[None]:
        """The same in a block."""
        if scratch:
            self._set_scratch_size()
        with ffi.gc(ffi.new("uint64_t *"), lib.vpmm_python_end_torch) as this_block:
            call(lib.vpmm_python_begin_torch, this_block, self._handle, encoded(tag), int(scratch))
            yield

    # Addresses before there is memory for them.

    def create_scratch_mapping(self, size: int, tag: str = "kv_cache") -> int:
        """Reserves addresses for a cache to come, with one block of ``scratch_size`` bytes behind all such
        addresses, so that tensors can be made and graphs captured: the address. Needs no server. What is
        written there is lost.

        A worker that takes over then calls :meth:`unmap_all_vas`, :meth:`connect`,
        :meth:`prepare_scratch_for_reallocation`, :meth:`reallocate_all_handles` and
        :meth:`remap_all_vas`, and has memory at the same addresses.
        """
        self._set_scratch_size()
        create = lib.vpmm_gms_create_scratch_mapping
        return answer("uint64_t", create, self._handle, within("size", size, 64), encoded(tag))

    def _set_scratch_size(self) -> None:
        # Not before it is needed: sizes that cannot be are refused here.
        if not self._scratch_size_is_set:
            size = within("scratch_size", self.scratch_size, 64)
            call(lib.vpmm_gms_set_scratch_block, self._handle, size)
            self._scratch_size_is_set = True

    def destroy_scratch_mapping(self, base_va: int) -> bool:
        """Gives a scratch mapping up, with its address; whether there was one."""
        number = within("base_va", base_va, 64)
        return bool(answer("uint32_t", lib.vpmm_gms_destroy_scratch_mapping, self._handle, number))

    def scratch_summary(self) -> tuple[int, int, int]:
        """How many scratch mappings there are, their bytes, and the bytes of memory behind them."""
        numbers = ffi.new("uint64_t[3]")
        call(lib.vpmm_gms_scratch_summary, self._handle, numbers, numbers + 1, numbers + 2)
        return numbers[0], numbers[1], numbers[2]

    def prepare_scratch_for_reallocation(self) -> None:
        """Makes scratch mappings, whose block :meth:`unmap_all_vas` has given up, mappings that
        :meth:`reallocate_all_handles` makes allocations for."""
        call(lib.vpmm_gms_prepare_scratch, self._handle)
