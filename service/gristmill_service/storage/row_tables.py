"""A table of steps as bytes that can be mapped: a small description, and the columns' buffers as they are.

Little-endian, each buffer at a multiple of 8 bytes. Reading makes views, no copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gristmill._wire.columns import Array, Ragged, bytes_of
from gristmill._wire.steps import Extra, Steps
from gristmill.errors import InvalidArgumentError

_ALIGNMENT = 8
_FORMAT = 1


class TableBytes(NamedTuple):
    """The table's bytes are those of the buffers, one after another; the first describes the rest."""

    buffers: Sequence[bytes | memoryview]
    size: int


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    offset: int
    shape: list[int]


class _Header(msgspec.Struct, array_like=True):
    """Offsets count from the end of the header, padded to the alignment."""

    format: int
    strings: dict[str, list[str]]
    arrays: dict[str, _Array]


_PARTS = ("values", "starts", "lengths")
# Before the name of a declared column, so that it is never that of a field.
_EXTRA = "extras."
_decoder = msgspec.msgpack.Decoder(_Header)


def encode(table: Steps) -> TableBytes:
    strings: dict[str, list[str]] = {}
    arrays: dict[str, _Array] = {}
    buffers: list[bytes | memoryview] = []
    offset = 0
    for name, values in _columns(table):
        if not isinstance(values, np.ndarray):
            strings[name] = list(values)
            continue
        arrays[name] = _Array(values.dtype.str, offset, list(values.shape))
        fill = -values.nbytes % _ALIGNMENT
        buffers += [bytes_of(values), bytes(fill)]
        offset += values.nbytes + fill
    header = msgspec.msgpack.encode(_Header(_FORMAT, strings, arrays))
    head = len(header).to_bytes(4, "little") + header
    head += bytes(-len(head) % _ALIGNMENT)
    return TableBytes([head, *(buffer for buffer in buffers if len(buffer))], len(head) + offset)


def decode(data: memoryview) -> Steps:
    """A table that views `data`. Raises InvalidArgumentError for what this version's `encode` cannot have written."""
    try:
        end = 4 + int.from_bytes(data[:4], "little")
        header = _decoder.decode(data[4:end])
        if header.format > _FORMAT:
            raise InvalidArgumentError(
                f"a table of rows has format {header.format} and this version reads up to {_FORMAT}; use a newer "
                "gristmill"
            )
        return _table(header, data[end + -end % _ALIGNMENT :])
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, SyntaxError) as error:
        # NumPy reads some names of types as Python's own parser would.
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{len(data)} bytes are no table of rows: {error}") from None


def _columns(table: Steps) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for field in fields(table):
        column = getattr(table, field.name)
        if isinstance(column, Ragged):
            found += _ragged_parts(field.name, column)
        elif isinstance(column, dict):
            for name, extra in column.items():
                found += [*_ragged_parts(_EXTRA + name, extra.values), (f"{_EXTRA}{name}.given", extra.given)]
        elif column is not None:
            found.append((field.name, column))
    return found


def _ragged_parts(name: str, column: Ragged) -> list[tuple[str, Array]]:
    # Rows may share values (a mask that is all ones); values of no row are left out.
    column = column if len(column.values) <= column.total else column.compact()
    return [(f"{name}.{part}", getattr(column, part)) for part in _PARTS]


def _table(header: _Header, data: memoryview) -> Steps:
    def array(name: str) -> Array:
        part = header.arrays[name]
        count = prod(part.shape)
        if not count:
            return np.empty(part.shape, part.dtype)
        return np.frombuffer(data, part.dtype, count, part.offset).reshape(part.shape)

    def ragged(name: str) -> Ragged:
        return Ragged(*(array(f"{name}.{part}") for part in _PARTS))

    def column(name: str) -> Any:
        if name in header.strings:
            return header.strings[name]
        if name in header.arrays:
            return array(name)
        if f"{name}.values" in header.arrays:
            return ragged(name)
        return None

    extras = [name[: -len(".given")] for name in header.arrays if name.startswith(_EXTRA) and name.endswith(".given")]
    found = {name[len(_EXTRA) :]: Extra(ragged(name), array(f"{name}.given")) for name in extras}
    named = {field.name: column(field.name) for field in fields(Steps) if field.name != "extras"}
    return Steps(**named, extras=found)
