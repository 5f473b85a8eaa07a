"""A row that is alone in its table, as most are that come turn by turn: read without what tables of many rows need."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from gristmill_service.storage.row_tables import FORMAT, HEAD, Column, Length, OpenedRow, columns_of, edges_of

_One = tuple[Length]


class _Lengths(msgspec.Struct, gc=False):
    """The numbers of a table that say where its columns end."""

    prompt_lengths: _One = (0,)
    response_lengths: _One = (0,)
    prefix_lengths: _One = (0,)


class _Strings(msgspec.Struct, gc=False):
    stop_reasons: tuple[str] = ("",)


class _Header(msgspec.Struct, array_like=True, gc=False):
    """As `row_tables.Header`, of one row."""

    format: int
    uids: tuple[str]
    strings: _Strings
    numbers: _Lengths
    columns: msgspec.Raw


class _Size(NamedTuple):
    """A column's bytes: so many for each token that the table has, for each of the response, and in any case."""

    name: str
    of_token: int
    of_response_token: int
    fixed: int


_decoder = msgspec.msgpack.Decoder(_Header)
# What reading other bytes may raise.
_ERRORS = (msgspec.MsgspecError, struct.error, ValueError, TypeError, OverflowError)


def single_row(data: bytes | memoryview) -> OpenedRow | None:
    """The row of a table that has no other; None for what is not one as it was written, which `row_tables.opened`
    reads, or refuses."""
    try:
        size, end, at = edges_of(data)
        header = _decoder.decode(data[HEAD:end])
    except _ERRORS:
        return None
    numbers = header.numbers
    (prompt,), (response,), (prefix,) = numbers.prompt_lengths, numbers.response_lengths, numbers.prefix_lengths
    if not size or header.format != FORMAT or prefix > prompt:
        return None
    found = _sizes(bytes(header.columns))
    if found is None:
        return None
    columns, sizes = found
    view, own = memoryview(data), prompt + response - prefix
    memory: dict[str, memoryview] = {}
    for name, of_token, of_response_token, fixed in sizes:
        start, at = at, at + of_token * own + of_response_token * response + fixed
        memory[name] = view[start:at]
    if at > len(data):
        return None
    return OpenedRow(columns, memory, header.strings.stop_reasons[0])


@lru_cache(maxsize=1024)
def _sizes(encoded: bytes) -> tuple[Mapping[str, Column], list[_Size]] | None:
    """The sizes of columns as they are described; None where they are not those of one row."""
    try:
        columns, found = columns_of(encoded), list[_Size]()
    except _ERRORS:
        return None
    for name, column in columns.items():
        size, counts = column.element_bytes, column.counts
        if counts is None:
            found.append(_Size(name, size, 0, 0) if name == "tokens" else _Size(name, 0, size, 0))
        elif len(counts) == 1:
            found.append(_Size(name, 0, 0, max(0, counts[0]) * size))
        else:
            return None
    return columns, found
