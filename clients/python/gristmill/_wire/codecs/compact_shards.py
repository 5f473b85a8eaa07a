"""Shards without their padding, as they travel and rest; docs/compact-shards.md describes the bytes.

A shard's file is a row of parts: bytes as they are (its header, what it has one of a row), and tensors, of which only
what padding and lengths do not say is written. `head` describes the parts, `restore` makes the file's bytes of them.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill.errors import InvalidArgumentError

VERSION = 1
COUNTING_VERSION = 2
"""That of shards with a part of form `COUNTING`, which those who know version 1 alone cannot read."""
PACKED = -1
"""The width of tensors whose rows stand one after another, each as wide as its sequence."""

SCOPES = ("sequence", "response")

PART = np.dtype(
    [
        ("form", "u1"),
        ("scope", "u1"),
        ("itemsize", "u1"),
        ("reserved", "u1"),
        ("begin", "<u4"),
        ("end", "<u4"),
        ("width", "<i4"),
        ("inner", "<u4"),
        ("reserved_too", "<u4"),
        ("fill", "<u8"),
        ("nbytes", "<u8"),
    ]
)
"""A part's entry in the table. scope: an index of `SCOPES`. begin, end: which rows. width: elements of a row, or
`PACKED`. inner: numbers of an element, each of `itemsize` bytes. fill: the bits of the numbers before a row's own
elements. nbytes: its own bytes in the compact form."""

_MAGIC = b"GMSHARD"
_HEAD = struct.Struct("<7sBIIIIQ")
FIRST_BYTES = _HEAD.size
_UNSIGNED: dict[int, Any] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}

# Rows shorter than this on average are placed by a mask over the whole tensor, longer ones slice by slice.
_SHORT = 512


class Form(IntEnum):
    """The ways in which a part travels."""

    VERBATIM = 0
    """Bytes of the file as they are."""
    VALUES = 1
    """Each row's own values, one row after another."""
    CONSTANTS = 2
    """A value per row, which stands on each of its own positions."""
    POSITIONS = 3
    """Nothing: a row's own values are 0, 1, 2, ..."""
    SPARSE = 4
    """Per row how many values it has (uint32), then of all of them how far before the row's end they stand (uint32, 1
    is the last position), then the values; 0 elsewhere."""
    COUNTING = 5
    """Per row its first value and the one after it (int32 each); the others count up from there."""


def head(parts: NDArray[Any], lengths: Int64s, responses: Int64s, size: int) -> bytes:
    """The bytes before those of the parts.

    parts: of dtype `PART`, in the file's order. lengths, responses: (rows,) tokens of the row and of its response.
    size: bytes of the whole file.
    """
    table = parts.tobytes() + lengths.astype("<u4").tobytes() + responses.astype("<u4").tobytes()
    version = COUNTING_VERSION if (parts["form"] == Form.COUNTING).any() else VERSION
    fixed = (_MAGIC, version, len(parts), len(lengths))
    return _HEAD.pack(*fixed, zlib.crc32(_HEAD.pack(*fixed, 0, 0, size) + table), 0, size) + table


def restore(pieces: Sequence[bytes | memoryview]) -> NDArray[np.uint8]:
    """The bytes of a shard's safetensors file, from its compact form cut into pieces anywhere; uint8 (size,).

    Padding of zeros is memory that is never touched. Raises InvalidArgumentError saying what is wrong with bytes that
    are cut short, damaged, or of a newer version.
    """
    source = _Pieces(pieces)
    found = _read_parts(source)
    data = np.zeros(found.size, np.uint8)
    for part, rows, begin, end in found.parts:
        if begin < end:
            _WRITERS[part.form](source, part, rows, data[begin:end])
    return data


class Part(NamedTuple):
    """As `PART` has it. at: the place of its bytes."""

    form: int
    scope: int
    itemsize: int
    begin: int
    end: int
    width: int
    inner: int
    fill: int
    nbytes: int
    at: int

    @property
    def element_bytes(self) -> int:
        return self.itemsize * self.inner


class _Rows:
    """The places where the rows of a tensor have their own values, in elements.

    own: int64 (rows,) how many. ends: int64 (rows,) where they end. elements: of the whole tensor.
    """

    def __init__(self, own: Int64s, extents: Int64s, width: int) -> None:
        self.own, self.elements = own, int(extents.sum()) if width == PACKED else width * len(own)
        self.ends: Int64s = np.cumsum(extents)
        self.starts: Int64s = self.ends - own
        self.leads: Int64s = extents - own
        self.total = int(own.sum())

    @property
    def is_dense(self) -> bool:
        return self.total == self.elements

    @property
    def are_short(self) -> bool:
        return self.elements < _SHORT * len(self.own)

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """(elements,) whether a row's own value stands there."""
        counts = np.stack([self.leads, self.own], axis=1)
        return np.repeat(np.tile(np.array([False, True]), len(self.own)), counts.ravel())


_NONE = np.empty(0, np.int64)
_NO_ROWS = _Rows(_NONE, _NONE, 0)


class _Pieces:
    """Bytes in pieces that are never joined as a whole."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._views = [memoryview(piece).cast("B") for piece in pieces]
        self._edges = [0, *accumulate(map(len, self._views))]
        self.size = self._edges[-1]

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes `begin:end` in order, as views, each with where it begins."""
        index = bisect_right(self._edges, begin) - 1
        while begin < end:
            low, high = self._edges[index], min(self._edges[index + 1], end)
            if begin < high:
                yield begin, self._views[index][begin - low : high - low]
                begin = high
            index += 1

    def take(self, begin: int, count: int) -> bytes | memoryview:
        """Bytes in one; copied only where they stand in several pieces."""
        spans = [view for _, view in self.spans(begin, begin + count)]
        return spans[0] if len(spans) == 1 else b"".join(spans)

    def array(self, begin: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(self.take(begin, count * dtype.itemsize), dtype)

    def copy(self, begin: int, target: NDArray[np.uint8]) -> None:
        into = target.data
        for low, view in self.spans(begin, begin + len(into)):
            into[low - begin : low - begin + len(view)] = view

    def copy_rows(self, begin: int, lengths: Int64s, target: NDArray[np.uint8], starts: Int64s) -> None:
        """Copies rows that stand one after another from `begin` on, to their `starts` in `target`; all in bytes."""
        into = target.data
        ends = begin + np.cumsum(lengths)
        begins = ends - lengths
        for low, view in self.spans(begin, int(ends[-1])):
            # What of the rows is in this piece: all of most, the end of the first, the beginning of the last.
            some = slice(ends.searchsorted(low, "right"), begins.searchsorted(low + len(view)))
            first, last = np.maximum(begins[some], low), np.minimum(ends[some], low + len(view))
            to = starts[some] + first - begins[some]
            for at, here, there in zip(to.tolist(), (first - low).tolist(), (last - low).tolist(), strict=True):
                into[at : at + there - here] = view[here:there]


class Description(NamedTuple):
    """What the head says. parts: each with its rows and which bytes of the file it makes. lengths: uint32 (2, rows),
    tokens of each row and of its response. size: of the file; compact_size: of its compact form."""

    parts: list[tuple[Part, _Rows, int, int]]
    lengths: NDArray[np.uint32]
    size: int
    compact_size: int


def head_size(first: bytes) -> int:
    """Bytes of the head. first: its first `FIRST_BYTES`."""
    _, _, parts, rows, *_ = _HEAD.unpack(first)
    return _HEAD.size + int(parts) * PART.itemsize + 2 * 4 * int(rows)


def describe(head: bytes) -> Description:
    """What a head says, all of it checked. Raises InvalidArgumentError as `restore`."""
    return _describe(_Pieces([head]))


def _read_parts(source: _Pieces) -> Description:
    found = _describe(source)
    if found.compact_size != source.size:
        raise _wrong(f"it has {source.size} bytes and describes {found.compact_size}")
    return found


def _describe(source: _Pieces) -> Description:
    table, lengths, size = _read_head(source)
    known: dict[tuple[int, int, int, int], _Rows] = {}
    found = []
    at, begin = _HEAD.size + table.nbytes + lengths.nbytes, 0
    for form, scope, itemsize, _, first, last, width, inner, _, fill, nbytes in table.tolist():
        part = Part(form, scope, itemsize, first, last, width, inner, fill, nbytes, at)
        rows, count = _NO_ROWS, nbytes
        if form != Form.VERBATIM:
            _check_part(part, lengths.shape[1])
            key = (scope, first, last, width)
            if key not in known:
                known[key] = _rows_of(part, lengths)
            rows = known[key]
            _check_bytes(part, rows)
            count = rows.elements * part.element_bytes
        found.append((part, rows, begin, begin + count))
        at, begin = at + nbytes, begin + count
    if begin != size:
        raise _wrong(f"its parts make {begin} bytes, and its file has {size}")
    return Description(found, lengths, size, at)


def _read_head(source: _Pieces) -> tuple[NDArray[Any], NDArray[np.uint32], int]:
    """The table of parts, tokens per scope and row, and the size of the file."""
    if source.size < _HEAD.size:
        raise _wrong(f"it has {source.size} bytes, less than its head")
    magic, version, parts, rows, checksum, reserved, size = _HEAD.unpack(source.take(0, _HEAD.size))
    if magic != _MAGIC:
        raise _wrong(f"it begins with {magic!r}")
    if version not in (VERSION, COUNTING_VERSION):
        raise InvalidArgumentError(
            f"a compact shard of version {version} came, and this gristmill reads versions {VERSION} and "
            f"{COUNTING_VERSION}; upgrade it"
        )
    nbytes = parts * PART.itemsize + 2 * 4 * rows
    if source.size < _HEAD.size + nbytes:
        raise _wrong(f"it has {source.size} bytes, less than the head and the table of {parts} parts and {rows} rows")
    described = source.take(_HEAD.size, nbytes)
    if zlib.crc32(described, zlib.crc32(_HEAD.pack(magic, version, parts, rows, 0, reserved, size))) != checksum:
        raise _wrong("its table does not have the checksum that it should have")
    table = np.frombuffer(described, PART, parts)
    return table, np.frombuffer(described, "<u4", offset=table.nbytes).reshape(2, rows), size


def _check_part(part: Part, rows: int) -> None:
    if part.form not in _WRITERS:
        raise _wrong(f"a part has the unknown form {part.form}")
    is_known = part.itemsize in _UNSIGNED and part.scope < len(SCOPES)
    if not is_known or part.width < PACKED or not part.inner:
        raise _wrong(
            f"a part has scope {part.scope}, elements of {part.inner} numbers of {part.itemsize} bytes and width "
            f"{part.width}"
        )
    if not part.begin <= part.end <= rows:
        raise _wrong(f"a part has the rows {part.begin} to {part.end} of {rows}")
    if part.form in (Form.POSITIONS, Form.COUNTING) and part.element_bytes != 4:
        raise _wrong(f"a part of form {part.form} has elements of {part.element_bytes} bytes")
    if part.fill >= 1 << (8 * part.itemsize):
        raise _wrong(f"a part is filled with {part.fill}, in {part.itemsize} bytes each")


def _rows_of(part: Part, lengths: NDArray[np.uint32]) -> _Rows:
    here = lengths[:, part.begin : part.end].astype(np.int64)
    own = here[part.scope]
    extents = here[0] if part.width == PACKED else np.full(len(own), part.width, np.int64)
    if (own > extents).any():
        row = int((own > extents).argmax())
        raise _wrong(f"row {part.begin + row} has {own[row]} tokens where its tensor has room for {extents[row]}")
    return _Rows(own, extents, part.width)


def _check_bytes(part: Part, rows: _Rows) -> None:
    count, item = len(rows.own), part.element_bytes
    if part.form == Form.SPARSE:
        is_right = part.nbytes >= 4 * count and (part.nbytes - 4 * count) % (4 + item) == 0
    else:
        needed = {Form.VALUES: rows.total * item, Form.CONSTANTS: count * item, Form.POSITIONS: 0}
        needed[Form.COUNTING] = 8 * count
        is_right = part.nbytes == needed[Form(part.form)]
    if not is_right:
        raise _wrong(f"a part of form {part.form} with {count} rows of {rows.total} tokens has {part.nbytes} bytes")


def _write_verbatim(source: _Pieces, part: Part, rows: _Rows, target: NDArray[np.uint8]) -> None:
    source.copy(part.at, target)


def _write_values(source: _Pieces, part: Part, rows: _Rows, target: NDArray[np.uint8]) -> None:
    tensor = _elements(part, target)
    if rows.is_dense:
        source.copy(part.at, target)
    elif rows.are_short:
        if part.fill:
            tensor.fill(part.fill)
        tensor[rows.mask] = _array(source, part, part.at, rows.total)
    else:
        if part.fill:
            for start, end in zip((rows.starts - rows.leads).tolist(), rows.starts.tolist(), strict=True):
                tensor[start:end] = part.fill
        item = part.element_bytes
        source.copy_rows(part.at, item * rows.own, target, item * rows.starts)


def _write_constants(source: _Pieces, part: Part, rows: _Rows, target: NDArray[np.uint8]) -> None:
    tensor = _elements(part, target)
    values = _array(source, part, part.at, len(rows.own))
    if rows.are_short:
        tensor[rows.mask] = np.repeat(values, rows.own, axis=0)
    else:
        for start, end, value in zip(rows.starts.tolist(), rows.ends.tolist(), values, strict=True):
            tensor[start:end] = value


def _write_positions(source: _Pieces, part: Part, rows: _Rows, target: NDArray[np.uint8]) -> None:
    tensor = _elements(part, target)[:, 0]
    if rows.are_short:
        own = np.arange(rows.total) - np.repeat(np.cumsum(rows.own) - rows.own, rows.own)
        tensor[rows.mask] = own
    else:
        counting = np.arange(rows.own.max(), dtype=tensor.dtype)
        for start, count in zip(rows.starts.tolist(), rows.own.tolist(), strict=True):
            tensor[start : start + count] = counting[:count]


def _write_counting(source: _Pieces, part: Part, rows: _Rows, target: NDArray[np.uint8]) -> None:
    tensor = _elements(part, target)[:, 0]
    firsts, seconds = source.array(part.at, 2 * len(rows.own), _UNSIGNED[4]).reshape(-1, 2).T
    starts, counts = rows.starts[rows.own > 0], rows.own[rows.own > 0]
    counted = np.arange(rows.total) - np.repeat(np.cumsum(counts) - counts, counts)
    counted += np.repeat(seconds[rows.own > 0].astype(np.int64), counts) - 1
    tensor[rows.mask] = counted
    tensor[starts] = firsts[rows.own > 0]


def _write_sparse(source: _Pieces, part: Part, rows: _Rows, target: NDArray[np.uint8]) -> None:
    count = len(rows.own)
    values = (part.nbytes - 4 * count) // (4 + part.element_bytes)
    counts = source.array(part.at, count, _UNSIGNED[4]).astype(np.int64)
    before = source.array(part.at + 4 * count, values, _UNSIGNED[4])
    if int(counts.sum()) != values:
        raise _wrong(f"its rows count {counts.sum()} values, and {values} are there")
    if not ((before > 0) & (before <= np.repeat(rows.own, counts))).all():
        raise _wrong("a value stands outside of its row")
    at = part.at + 4 * (count + values)
    _elements(part, target)[np.repeat(rows.ends, counts) - before] = _array(source, part, at, values)


def _elements(part: Part, target: NDArray[np.uint8]) -> NDArray[Any]:
    """The tensor as (elements, inner)."""
    found: NDArray[Any] = target.view(_UNSIGNED[part.itemsize]).reshape(-1, part.inner)
    return found


def _array(source: _Pieces, part: Part, at: int, count: int) -> NDArray[Any]:
    """So many elements from `at` on; (count, inner)."""
    numbers = source.array(at, count * part.inner, _UNSIGNED[part.itemsize])
    found: NDArray[Any] = numbers.reshape(-1, part.inner)
    return found


_WRITERS: dict[int, Callable[[_Pieces, Part, _Rows, NDArray[np.uint8]], None]] = {
    Form.VERBATIM: _write_verbatim,
    Form.VALUES: _write_values,
    Form.CONSTANTS: _write_constants,
    Form.POSITIONS: _write_positions,
    Form.SPARSE: _write_sparse,
    Form.COUNTING: _write_counting,
}


def _wrong(reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"these bytes are no whole compact shard: {reason}; read it again")
