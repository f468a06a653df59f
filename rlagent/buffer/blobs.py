"""Bytes and arrays as compressed blobs: one blob for all arrays of a call, not a row per token.

A blob is one tag byte and the body: raw, or zstd where that is smaller. 4-byte numbers are stored byte plane by byte
plane, because the high bytes of token ids are mostly alike. Invariant: unpacking gives back the same bits.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

_RAW: Final = b"\x00"
_ZSTD: Final = b"\x01"
_NARROW: Final = b"\x01"
_WIDE: Final = b"\x02"
# Below this zstd's frame and the time to make it cost more than they save.
MIN_COMPRESSED_BYTES: Final = 256
# Level 1: a call's blob is made between the engine's last token and the agent's terminal event.
_LEVEL: Final = 1


def pack(body: bytes) -> bytes:
    """Tag byte + the shorter of the body and its zstd form."""
    if len(body) >= MIN_COMPRESSED_BYTES:
        small = _compressor(threading.get_ident()).compress(body)
        if len(small) < len(body):
            return _ZSTD + small
    return _RAW + body


@functools.lru_cache(maxsize=16)
def _compressor(_thread: int) -> zstandard.ZstdCompressor:
    """One for each thread: none may be used by two at once, and making one costs more than to compress a small body."""
    return zstandard.ZstdCompressor(level=_LEVEL)


def unpack(blob: bytes) -> bytes:
    """The inverse of pack."""
    if blob[:1] == _ZSTD:
        body: bytes = zstandard.ZstdDecompressor().decompress(blob[1:])
        return body
    assert blob[:1] == _RAW, "not a blob of this buffer"
    return blob[1:]


def pack_arrays(arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    """All arrays (4-byte dtypes, any lengths) in one blob; the reader knows lengths and dtypes."""
    body = b"".join([array.tobytes() for array in arrays])
    return pack(b"".join([body[plane::4] for plane in range(4)]))


def pack_small(arrays: Sequence[npt.NDArray[np.int16]]) -> bytes:
    """Arrays of small numbers, each -1 or above, in one blob: a byte each where all are below 255, else two."""
    if not arrays:
        return _RAW + _NARROW
    flat = np.concatenate([np.zeros(0, np.int16), *(array.ravel() for array in arrays)]) + 1
    wide = bool(len(flat)) and int(flat.max()) > np.iinfo(np.uint8).max
    return pack((_WIDE if wide else _NARROW) + flat.astype(np.uint16 if wide else np.uint8).tobytes())


def unpack_small(blob: bytes, shapes: Sequence[tuple[int, ...]]) -> list[npt.NDArray[np.int16]]:
    """The inverse of pack_small, given the arrays' shapes."""
    body = unpack(blob)
    flat = np.frombuffer(body, np.uint16 if body[:1] == _WIDE else np.uint8, offset=1).astype(np.int16) - np.int16(1)
    sizes = [math.prod(shape) for shape in shapes]
    assert sum(sizes) == len(flat), f"a call's experts hold {len(flat)} numbers, its head names {sum(sizes)}"
    pieces = np.split(flat, np.cumsum(sizes)[:-1]) if sizes else []
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def unpack_arrays(blob: bytes, layout: Sequence[tuple[type[np.generic], int]]) -> list[npt.NDArray[Any]]:
    """The inverse of pack_arrays, given (dtype, length) of each array. The arrays are read-only."""
    body = np.frombuffer(unpack(blob), np.uint8).reshape(4, -1).T.tobytes()
    arrays: list[npt.NDArray[Any]] = []
    start = 0
    for dtype, length in layout:
        arrays.append(np.frombuffer(body, dtype, length, start))
        start += 4 * length
    assert start == len(body), f"a call's arrays hold {len(body)} bytes, its head names {start}"
    return arrays
