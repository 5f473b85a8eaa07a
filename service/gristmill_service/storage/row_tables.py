"""A table of steps as bytes that can be mapped: a small description, and the buffers of its tokens as they are.

Little-endian. Buffers of wider numbers come first, so that each is aligned without a gap. What every row has the same,
such as a mask of ones, is left out. Reading makes views of the buffers, no copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gristmill._wire.column_spec import BFLOAT16, DTYPES
from gristmill._wire.columns import Array, Ragged, bytes_of
from gristmill._wire.row_codec import few_of, ones
from gristmill._wire.steps import UNKNOWN, Extra, Steps
from gristmill.errors import InvalidArgumentError, UnavailableError

Stored = Steps | bytes | memoryview
"""A table as it is held: as bytes, or opened."""

SIZE_BYTES = 8
"""A table's bytes begin with their number, these included."""

_ALIGNMENT = 8
_FORMAT = 2
_HEAD = SIZE_BYTES + 4
# A larger table is not copied to be held.
_COPIED_BYTES = 256 << 10


class TableBytes(NamedTuple):
    """The table's bytes are those of the buffers, one after another; the first describes the rest."""

    buffers: Sequence[bytes | memoryview]
    size: int

    def joined(self) -> bytes:
        return b"".join(self.buffers)


class Column(msgspec.Struct, array_like=True):
    """A ragged column. counts: of a declared column, of each row how many values, -1 where it does not have it; others
    have one a token."""

    name: str
    dtype: str
    shape: list[int] = []
    counts: list[int] | None = None

    @property
    def element_bytes(self) -> int:
        return int(self.dtype[2:]) * prod(self.shape)

    def values(self, data: bytes | memoryview) -> Array:
        """The values that these bytes are; (n, *shape)."""
        dtype = np.dtype(self.dtype)
        found = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
        return found.reshape(-1, *self.shape) if self.shape else found


class Header(msgspec.Struct, array_like=True):
    """strings, numbers: of each row one, by name; those that are not there are the default. columns: in the order of
    their buffers."""

    format: int
    uids: list[str]
    strings: dict[str, list[str]]
    numbers: dict[str, list[int | float | bool]]
    columns: list[Column]


NUMBERS: dict[str, tuple[Any, Any]] = {
    "rounds": (np.int32, 0),
    "samples": (np.int32, 0),
    "steps": (np.int32, 0),
    "attempts": (np.int32, 0),
    "is_last_steps": (np.bool_, True),
    "policy_versions": (np.int32, UNKNOWN),
    "prompt_lengths": (np.int64, 0),
    "response_lengths": (np.int64, 0),
    "rewards": (np.float64, 0.0),
    "rewards_pending": (np.bool_, False),
}
OF_SOME = {"advantages": np.float64, "prefix_lengths": np.int64}
OF_RESPONSES = ("loss_mask", "logprobs", "token_rewards", "token_advantages", "token_versions")
_LENGTHS = ("prompt_lengths", "response_lengths", "prefix_lengths")
_KNOWN_NUMBERS = NUMBERS.keys() | OF_SOME.keys()
_BY_TOKEN = frozenset(("tokens", *OF_RESPONSES))
_DTYPES = frozenset((BFLOAT16 if name == "bfloat16" else np.dtype(name)).str for name in DTYPES)
_decoder = msgspec.msgpack.Decoder(Header)


class Opened(NamedTuple):
    """A table's description, and the bytes of each of its columns."""

    header: Header
    memory: list[memoryview]


def encode(table: Steps) -> TableBytes:
    opened = _of_steps(table)
    header = msgspec.msgpack.encode(opened.header)
    head = -(-(_HEAD + len(header)) // _ALIGNMENT) * _ALIGNMENT
    buffers = [memory for memory in opened.memory if len(memory)]
    size = head + sum(map(len, buffers))
    first = size.to_bytes(SIZE_BYTES, "little") + len(header).to_bytes(4, "little") + header
    return TableBytes([first.ljust(head, b"\0"), *buffers], size)


def decode(data: bytes | memoryview) -> Steps:
    """A table that views `data`. Raises InvalidArgumentError for what this version's `encode` cannot have written."""
    return _table(*_of_bytes(data))


def held(table: Steps) -> Stored:
    """The table as it is held on the heap: what is small, or views more than it has, as bytes of its own."""
    is_view = len(table.tokens.values) > table.tokens.total
    if is_view or _nbytes(table) <= _COPIED_BYTES:
        return encode(table).joined()
    return table


def opened(stored: Stored) -> Opened:
    """Raises UnavailableError where its memory was given back meanwhile."""
    if isinstance(stored, Steps):
        return _of_steps(stored)
    if not int.from_bytes(stored[:SIZE_BYTES], "little"):
        raise UnavailableError("rows were removed while they were read; ask again")
    return _of_bytes(stored)


def steps_of(stored: Stored) -> Steps:
    """The table. Raises as `opened`."""
    return stored if isinstance(stored, Steps) else _table(*opened(stored))


def _nbytes(table: Steps) -> int:
    columns = [table.tokens, *(column for name in OF_RESPONSES if (column := getattr(table, name)) is not None)]
    extras = [extra.values for extra in table.extras.values()]
    return sum(column.values.nbytes for column in [*columns, *extras])


def _of_steps(table: Steps) -> Opened:
    found = sorted(_columns(table), key=lambda one: -one[1].itemsize)
    header = Header(_FORMAT, [*table.uids], _strings(table), _numbers(table), [column for column, _ in found])
    return Opened(header, [memoryview(bytes_of(values)) for _, values in found])


def _strings(table: Steps) -> dict[str, list[str]]:
    found = {"stop_reasons": table.stop_reasons, "tags": table.tags}
    return {name: [*values] for name, values in found.items() if values is not None and any(values)}


def _numbers(table: Steps) -> dict[str, list[int | float | bool]]:
    found: dict[str, list[int | float | bool]] = {}
    for name, (_, default) in NUMBERS.items():
        values = getattr(table, name).tolist()
        if values.count(default) < len(values):
            found[name] = values
    for name in OF_SOME:
        if (column := getattr(table, name)) is not None:
            found[name] = column.tolist()
    return found


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
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{len(data)} bytes are no table of rows: {error}") from None


def _read(data: bytes | memoryview) -> Opened:
    end = _HEAD + int.from_bytes(data[SIZE_BYTES:_HEAD], "little")
    header = _decoder.decode(data[_HEAD:end])
    if header.format != _FORMAT:
        raise InvalidArgumentError(
            f"a table of rows has format {header.format} and this version reads {_FORMAT}; use the gristmill that "
            "wrote it"
        )
    _check(header)
    view, at = memoryview(data), -(-end // _ALIGNMENT) * _ALIGNMENT
    responses = sum(header.numbers.get("response_lengths", ()))
    tokens = responses + sum(header.numbers.get("prompt_lengths", ())) - sum(header.numbers.get("prefix_lengths", ()))
    memory = []
    for column in header.columns:
        if column.counts is None:
            count = int(tokens if column.name == "tokens" else responses)
        else:
            count = sum(max(0, one) for one in column.counts)
        size = count * column.element_bytes
        memory.append(view[at : at + size])
        at += size
    if at > len(data):
        raise ValueError(f"its columns end at {at}")
    return Opened(header, memory)


def _check(header: Header) -> None:
    """Raises ValueError for a description that no table has."""
    rows, numbers = len(header.uids), header.numbers
    per_row: list[Sized] = [
        *numbers.values(),
        *header.strings.values(),
        *(one.counts for one in header.columns if one.counts),
    ]
    if any(len(values) != rows for values in per_row) or not numbers.keys() <= _KNOWN_NUMBERS:
        raise ValueError("a column has not one value a row")
    lengths = [numbers[name] for name in _LENGTHS if name in numbers]
    if any(type(value) is not int or value < 0 for values in lengths for value in values):
        raise ValueError("a length is negative, or no whole number")
    prompts, prefixes = numbers.get("prompt_lengths", [0] * rows), numbers.get("prefix_lengths", [0] * rows)
    if any(prefix > prompt for prefix, prompt in zip(prefixes, prompts, strict=True)):
        raise ValueError("a prefix is longer than its prompt")
    for column in header.columns:
        if column.dtype not in _DTYPES or min(column.shape, default=1) < 1:
            raise ValueError(f"column {column.name!r} has dtype {column.dtype!r} and shape {column.shape}")
        if column.counts is None and column.name not in _BY_TOKEN:
            raise ValueError(f"{column.name!r} is no column")


def _table(header: Header, memory: Sequence[memoryview]) -> Steps:
    rows = len(header.uids)
    numbers = {name: _of_rows(header, name, dtype, default, rows) for name, (dtype, default) in NUMBERS.items()}
    some = {name: np.array(header.numbers[name], OF_SOME[name]) for name in OF_SOME if name in header.numbers}
    responses = numbers["response_lengths"]
    lengths: Array = numbers["prompt_lengths"] + responses
    if "prefix_lengths" in some:
        lengths = lengths - some["prefix_lengths"]
    ragged: dict[str, Ragged] = {}
    extras: dict[str, Extra] = {}
    for column, data in zip(header.columns, memory, strict=True):
        values = column.values(data)
        if column.counts is None:
            ragged[column.name] = Ragged.from_lengths(values, lengths if column.name == "tokens" else responses)
        else:
            counts = np.array(column.counts, np.int64)
            extras[column.name] = Extra(Ragged.from_lengths(values, np.maximum(counts, 0)), counts >= 0)
    return steps_from(header.uids, header.strings, numbers | some, ragged, extras)


def steps_from(
    uids: Sequence[str],
    strings: Mapping[str, Sequence[str]],
    numbers: Mapping[str, Array],
    ragged: Mapping[str, Ragged],
    extras: Mapping[str, Extra],
) -> Steps:
    """A table of these columns. numbers: `NUMBERS`, and those that there are of `OF_SOME`."""
    single: dict[str, Any] = {name: column for name, column in numbers.items() if name != "response_lengths"}
    by_token: dict[str, Any] = {"logprobs": None, "token_rewards": None, **ragged}
    if "loss_mask" not in ragged:
        by_token["loss_mask"] = ones(numbers["response_lengths"])
    return Steps(
        uids=uids,
        stop_reasons=strings.get("stop_reasons") or [""] * len(uids),
        tags=strings.get("tags"),
        extras=extras,
        **single,
        **by_token,
    )


def _of_rows(header: Header, name: str, dtype: Any, default: Any, rows: int) -> Array:
    values = header.numbers.get(name)
    return few_of(rows, dtype, default) if values is None else np.array(values, dtype)
