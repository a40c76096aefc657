"""Streams, as other libraries have them."""

from __future__ import annotations

import operator
from typing import Any

from ._library import within


def raw_stream(stream: Any) -> int:
    """A stream as a number: an ``int`` or what stands for one, as NumPy's, or an object of PyTorch's, CuPy's,
    Numba's or with ``__cuda_stream__``. ``None`` is the default stream."""
    number = 0 if stream is None else _number_of(stream)
    return number if 0 <= number < 1 << 64 else within("stream", number, 64)


def _number_of(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for name in ("cuda_stream", "ptr"):
        if isinstance(getattr(stream, name, None), int):
            return getattr(stream, name)
    raw = getattr(stream, "handle", None)
    if raw is not None:
        return int(getattr(raw, "value", raw) or 0)
    try:
        return operator.index(stream)
    except TypeError:
        raise TypeError(f"{stream!r} is no stream") from None
