"""Memory that is given to the device for a while, and comes back at the same addresses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ._library import EVERY_DEVICE, block, call, encoded, lib
from ._pool import Pool


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    """What this thread allocates from the process's pools in the block, by whichever library, can be
    suspended by this name.

    >>> with vpmm.tag("weights"):
    ...     model.cuda()
    >>> vpmm.suspend("weights")        # the GPU's memory is others' now
    >>> vpmm.resume("weights")         # and back, at the same addresses, with its contents
    """
    with block() as this_block:
        call(lib.vpmm_python_push_tag, this_block, encoded(name), EVERY_DEVICE)
        yield


def suspend(
    name: str,
    *,
    contents: str = "keep",
    path: str | os.PathLike[str] | None = None,
    stream: Any = None,
    device: int = 0,
) -> int:
    """Gives all memory with a tag back to the device. Addresses stay as they are, but nothing may use them
    until :func:`resume`. All work that uses the memory must come before on the stream, which is waited for.

    ``contents``: ``"keep"`` in page-locked memory of the host, ``"keep buffers"`` the same, with that memory
    kept for the next time, or ``"discard"``. With a ``path`` they are written to that file instead.
    Answers the bytes that the device has again.
    """
    return Pool.of_process(device).suspend(name, contents=contents, path=path, stream=stream)


def resume(name: str, *, empty: bool = False, stream: Any = None, device: int = 0) -> int:
    """Brings memory with a tag back, with what it held; with ``empty`` that is given up. Work enqueued on the
    stream afterwards finds it there; other streams must be ordered after. Answers its bytes."""
    return Pool.of_process(device).resume(name, empty=empty, stream=stream)
