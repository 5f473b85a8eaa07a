"""Encodes tables of steps: a small description in MessagePack, followed by the raw buffers of the columns.

All numbers are little-endian. Buffers of wider numbers are first, so that each is aligned without a gap. Columns with
the default in every row, such as a mask of ones, are omitted. Reading creates views of the buffers, without copies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from math import prod
from operator import gt
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np

from gristmill._wire.codecs.row_codec import few_of, ones
from gristmill._wire.column_spec import BFLOAT16, DTYPES
from gristmill._wire.columns import Array, Ragged, bytes_of
from gristmill._wire.row_fields import OPTIONAL_STRINGS, PLAIN_FIELDS, ROW_FIELDS, TOKEN_FIELDS
from gristmill._wire.steps import Extra, Steps
from gristmill.errors import InvalidArgumentError, UnavailableError

Stored = Steps | bytes | memoryview
"""A stored table: as bytes, or decoded."""

SIZE_BYTES = 8
"""The size in bytes of the number at the beginning of a table, which is the table's size including this number."""

_ALIGNMENT = 8
FORMAT = 2
"""The format that this version writes and reads."""

_HEAD_BYTES = SIZE_BYTES + 4

# Decoded column descriptions are cached if they have at most this size.
_SHORT = 1 << 10
# A larger table is stored on the heap without encoding, because encoding copies it.
_COPIED_BYTES = 256 << 10
_OTHER_BYTES_OF_A_ROW = 256


class TableBytes(NamedTuple):
    """The bytes of a table, as buffers to concatenate. The first buffer describes the others."""

    buffers: Sequence[bytes | memoryview]
    size: int

    def joined(self) -> bytes:
        return b"".join(self.buffers)


class Column(msgspec.Struct, array_like=True):
    """A ragged column.

    counts: for a declared column, each row's number of values; -1 for a row without the column. None if the column has
    one value per token.
    """

    name: str
    dtype: str
    shape: list[int] = []
    counts: list[int] | None = None

    @property
    def element_bytes(self) -> int:
        item = int(self.dtype[2:])
        return item * prod(self.shape) if self.shape else item

    def values(self, data: bytes | memoryview) -> Array:
        """Returns a view of the bytes as values; (n, *shape)."""
        dtype = np.dtype(self.dtype)
        values = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
        return values.reshape(-1, *self.shape) if self.shape else values


Length = Annotated[int, msgspec.Meta(ge=0)]


NUMBERS: dict[str, tuple[Any, Any]] = {
    **{one.name: (one.dtype, one.default) for one in ROW_FIELDS},
    "prompt_lengths": (np.int64, 0),
    "response_lengths": (np.int64, 0),
    "rewards": (np.float64, 0.0),
    "rewards_pending": (np.bool_, False),
}
OF_SOME = {"advantages": np.float64, "prefix_lengths": np.int64}
OF_RESPONSES = tuple(one.name for one in TOKEN_FIELDS)
PLAIN = {one.name: one for one in PLAIN_FIELDS}


def _kind(name: str, dtype: Any) -> Any:
    kinds = {"i": int, "b": bool, "f": float}
    return list[Length] | None if name.endswith("_lengths") else list[kinds[np.dtype(dtype).kind]] | None  # type: ignore[misc]


if TYPE_CHECKING:
    Numbers = Any
else:
    # One number per row; None if all rows have the default.
    Numbers = msgspec.defstruct(
        "Numbers",
        [
            *((name, _kind(name, dtype), None) for name, (dtype, _) in NUMBERS.items()),
            *((name, _kind(name, dtype), None) for name, dtype in OF_SOME.items()),
        ],
        omit_defaults=True,
        forbid_unknown_fields=True,
        gc=False,
    )


class Header(msgspec.Struct, array_like=True, gc=False):
    """The description of a table. strings: one per row, by name; a missing list means empty strings. columns: encoded,
    in the order of their buffers."""

    format: int
    uids: list[str]
    strings: dict[str, list[str]]
    numbers: Numbers
    columns: msgspec.Raw


_BY_TOKEN = frozenset(("tokens", *OF_RESPONSES))
_DTYPES = frozenset((BFLOAT16 if name == "bfloat16" else np.dtype(name)).str for name in DTYPES)
_decoder = msgspec.msgpack.Decoder(Header)
_columns_decoder = msgspec.msgpack.Decoder(list[Column])
_head = struct.Struct("<QI")


class Opened(msgspec.Struct, gc=False):
    """A table's description, its columns by name, and the bytes of each column. Tables may share columns."""

    header: Header
    columns: Mapping[str, Column]
    memory: dict[str, memoryview]


class _Size(NamedTuple):
    """The size of a column in bytes: per token, per response token, and in total for a declared column."""

    name: str
    of_token: int
    of_response_token: int
    declared: int


class _Columns(NamedTuple):
    """The columns of a table by name, and their sizes in the order of their buffers."""

    by_name: Mapping[str, Column]
    sizes: Sequence[_Size]


class OpenedRow(msgspec.Struct, gc=False):
    """A row of a table: the table's columns, and the row's bytes in each. strings: the table's strings. at: the row's
    index in the table."""

    columns: Mapping[str, Column]
    memory: Mapping[str, memoryview]
    strings: Mapping[str, Sequence[str]]
    at: int = 0

    def text(self, name: str) -> str:
        """Returns the row's string of this name."""
        strings = self.strings.get(name)
        return strings[self.at] if strings else ""


def encode(table: Steps) -> TableBytes:
    opened = _of_steps(table)
    header = msgspec.msgpack.encode(opened.header)
    head = -(-(_HEAD_BYTES + len(header)) // _ALIGNMENT) * _ALIGNMENT
    buffers = [memory for memory in opened.memory.values() if len(memory)]
    size = head + sum(map(len, buffers))
    first = size.to_bytes(SIZE_BYTES, "little") + len(header).to_bytes(4, "little") + header
    return TableBytes([first.ljust(head, b"\0"), *buffers], size)


def decode(data: bytes | memoryview) -> Steps:
    """Returns a table that is a view of `data`. Raises InvalidArgumentError for bytes that are not an encoded table."""
    return _table(_of_bytes(data))


def to_stored(table: Steps) -> Stored:
    """Returns the form in which to store a table on the heap. A small table is encoded, which takes less memory."""
    return encode(table).joined() if _nbytes(table) <= _COPIED_BYTES else table


def opened(stored: Stored) -> Opened:
    """Opens a table. Raises UnavailableError if its memory was released in the meantime."""
    if isinstance(stored, Steps):
        return _of_steps(stored)
    if not int.from_bytes(stored[:SIZE_BYTES], "little"):
        raise UnavailableError("rows were removed while they were being read; retry")
    return _of_bytes(stored)


def steps_of(stored: Stored) -> Steps:
    """Decodes a stored table. Raises like `opened`."""
    return stored if isinstance(stored, Steps) else _table(opened(stored))


def nbytes(table: Steps) -> int:
    """Returns about how many bytes a table takes, usually some more."""
    return _OTHER_BYTES_OF_A_ROW * len(table) + _nbytes(table)


def _nbytes(table: Steps) -> int:
    columns = [table.tokens, *table.token_columns]
    extras = [extra.values for extra in table.extras.values()]
    return sum(column.values.nbytes for column in [*columns, *extras])


def _of_steps(table: Steps) -> Opened:
    by_width = sorted(_columns(table), key=lambda one: -one[1].itemsize)
    columns = {column.name: column for column, _ in by_width}
    encoded = msgspec.Raw(msgspec.msgpack.encode([*columns.values()]))
    header = Header(FORMAT, [*table.uids], _strings(table), _numbers(table), encoded)
    return Opened(header, columns, {column.name: memoryview(bytes_of(values)) for column, values in by_width})


def _strings(table: Steps) -> dict[str, list[str]]:
    columns = ((name, getattr(table, name)) for name in ("stop_reasons", *OPTIONAL_STRINGS))
    return {name: [*values] for name, values in columns if values is not None and any(values)}


def _numbers(table: Steps) -> Numbers:
    columns: dict[str, list[Any]] = {}
    for name, (_, default) in NUMBERS.items():
        values = getattr(table, name).tolist()
        if values.count(default) < len(values):
            columns[name] = values
    for name in OF_SOME:
        if (column := getattr(table, name)) is not None:
            columns[name] = column.tolist()
    return Numbers(**columns)


def _columns(table: Steps) -> Iterator[tuple[Column, Array]]:
    yield Column("tokens", "<i4"), table.tokens.compact().values
    for name in OF_RESPONSES:
        column: Ragged | None = getattr(table, name)
        if column is None or (name == "loss_mask" and column.values.all()):
            continue
        yield Column(name, column.values.dtype.str), column.compact().values
    for name, extra in table.extras.items():
        values = extra.values.compact().values
        counts = np.where(extra.given, extra.values.lengths, -1).tolist()
        yield Column(name, values.dtype.str, [*values.shape[1:]], counts), values


def _of_bytes(data: bytes | memoryview) -> Opened:
    try:
        return _read(data)
    except (msgspec.MsgspecError, struct.error, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{len(data)} bytes are not a table of rows: {error}; restore them") from None


def _read(data: bytes | memoryview) -> Opened:
    _, length = _head.unpack_from(data)
    end = _HEAD_BYTES + length
    header = _decoder.decode(data[_HEAD_BYTES:end])
    if header.format != FORMAT:
        raise InvalidArgumentError(
            f"a table of rows has format {header.format} and this version reads {FORMAT}; use the version that wrote it"
        )
    columns, sizes = _columns_of(bytes(header.columns), len(header.uids))
    _check(header)
    numbers = header.numbers
    responses = sum(numbers.response_lengths or ())
    tokens = responses + sum(numbers.prompt_lengths or ()) - sum(numbers.prefix_lengths or ())
    view, memory, at = memoryview(data), dict[str, memoryview](), -(-end // _ALIGNMENT) * _ALIGNMENT
    for name, of_token, of_response_token, declared in sizes:
        begin, at = at, at + of_token * tokens + of_response_token * responses + declared
        memory[name] = view[begin:at]
    if at > len(data):
        raise ValueError(f"the columns end at byte {at}")
    return Opened(header, columns, memory)


def _columns_of(encoded: bytes, rows: int) -> _Columns:
    """Decodes the columns of a table with `rows` rows. Raises ValueError, or an error of msgspec, for invalid data."""
    # Most tables of a run have the same columns. Long descriptions contain counts per row, which differ by table.
    return _decoded(encoded, rows) if len(encoded) <= _SHORT else _decoded.__wrapped__(encoded, rows)


@lru_cache(maxsize=1024)
def _decoded(encoded: bytes, rows: int) -> _Columns:
    columns = _columns_decoder.decode(encoded)
    by_name = {column.name: column for column in columns}
    if len(by_name) < len(columns) or "tokens" not in by_name:
        raise ValueError("a column occurs twice, or the tokens are missing")
    for column in columns:
        if column.dtype not in _DTYPES or min(column.shape, default=1) < 1:
            raise ValueError(f"column {column.name!r} has dtype {column.dtype!r} and shape {column.shape}")
        if column.counts is None and column.name not in _BY_TOKEN:
            raise ValueError(f"{column.name!r} is not a column")
        if column.counts is not None and len(column.counts) != rows:
            raise ValueError(f"column {column.name!r} has counts for {len(column.counts)} rows, and there are {rows}")
    return _Columns(by_name, [*map(_size, columns)])


def _size(column: Column) -> _Size:
    size = column.element_bytes
    if column.counts is not None:
        return _Size(column.name, 0, 0, size * sum(max(0, count) for count in column.counts))
    return _Size(column.name, size, 0, 0) if column.name == "tokens" else _Size(column.name, 0, size, 0)


def _check(header: Header) -> None:
    """Raises ValueError for an invalid description."""
    numbers, rows = header.numbers, len(header.uids)
    for values in (*msgspec.structs.astuple(numbers), *header.strings.values()):
        if values is not None and len(values) != rows:
            raise ValueError("a column does not have one value per row")
    if numbers.prefix_lengths and any(map(gt, numbers.prefix_lengths, numbers.prompt_lengths or repeat(0))):
        raise ValueError("a prefix is longer than its prompt")


def _table(opened: Opened) -> Steps:
    header, memory = opened.header, opened.memory
    rows, encoded = len(header.uids), header.numbers
    numbers = {name: _of_rows(encoded, name, dtype, default, rows) for name, (dtype, default) in NUMBERS.items()}
    some = {
        name: np.array(values, dtype)
        for name, dtype in OF_SOME.items()
        if (values := getattr(encoded, name)) is not None
    }
    responses = numbers["response_lengths"]
    lengths: Array = numbers["prompt_lengths"] + responses
    if "prefix_lengths" in some:
        lengths = lengths - some["prefix_lengths"]
    ragged: dict[str, Ragged] = {}
    extras: dict[str, Extra] = {}
    for name, column in opened.columns.items():
        values = column.values(memory[name])
        if column.counts is None:
            ragged[name] = Ragged.from_lengths(values, lengths if name == "tokens" else responses)
        else:
            counts = np.array(column.counts, np.int64)
            extras[name] = Extra(Ragged.from_lengths(values, np.maximum(counts, 0)), counts >= 0)
    return steps_from(header.uids, header.strings, numbers | some, ragged, extras)


def steps_from(
    uids: Sequence[str],
    strings: Mapping[str, Sequence[str]],
    numbers: Mapping[str, Array],
    ragged: Mapping[str, Ragged],
    extras: Mapping[str, Extra],
) -> Steps:
    """Creates a table from columns. numbers: all of `NUMBERS`, and any of `OF_SOME`."""
    single: dict[str, Any] = {name: column for name, column in numbers.items() if name != "response_lengths"}
    texts: dict[str, Any] = {name: strings.get(name) for name in OPTIONAL_STRINGS}
    by_token: dict[str, Any] = {"logprobs": None, "token_rewards": None, **ragged}
    if "loss_mask" not in ragged:
        by_token["loss_mask"] = ones(numbers["response_lengths"])
    return Steps(
        uids=uids,
        stop_reasons=strings.get("stop_reasons") or [""] * len(uids),
        extras=extras,
        **single,
        **by_token,
        **texts,
    )


def _of_rows(numbers: Numbers, name: str, dtype: Any, default: Any, rows: int) -> Array:
    values = getattr(numbers, name)
    return few_of(rows, dtype, default) if values is None else np.array(values, dtype)
