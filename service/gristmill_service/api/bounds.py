"""Bounds what a request may make the service build, in bytes, entries and nesting, before anything is built of it.

One message or document is parsed while nothing else runs, because parsers hold the GIL, also in threads. These checks
build nothing: they read the tags of a message, and count the marks of a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from gristmill._wire.codecs.varints import fields
from gristmill.errors import InvalidArgumentError, TooLargeError

MOST_ENTRIES = 1 << 10
"""How many rows, groups, trajectories, rewards or names a request lists. Deciding on each takes some 40 µs on the event
loop, and a request is decided on as a whole."""
MOST_RANKS = 1 << 13
"""How many ranks a message lists, in one message because they begin together. Each takes some 4 µs."""

_SMALL_BYTES, _LISTS_BYTES = 1 << 20, 4 << 20
_UNBOUNDED = frozenset(["submit_rows", "write_columns"])
_LISTS = frozenset(["begin_groups", "list_groups", "abort_trajectories", "abort_groups", "set_rewards"])
_MOST_FIELDS = 1 << 15


def most_bytes(call: str) -> int | None:
    """Returns the size of the largest message of a call; None: `max_message_bytes`."""
    return None if call in _UNBOUNDED else _LISTS_BYTES if call in _LISTS else _SMALL_BYTES


# --- Messages

_WIDTHS = {
    **dict.fromkeys((FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_FLOAT), 4),
    **dict.fromkeys((FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64, FieldDescriptor.TYPE_DOUBLE), 8),
}


class _Field(NamedTuple):
    """A known field. width: of its packed values, in bytes; 0: varints; None: it has no packed values. known: the
    fields of its message; None: it is no message. is_text: whether it is decoded as UTF-8."""

    name: str
    width: int | None
    known: Mapping[int, _Field] | None
    is_text: bool


def check_message(data: bytes | memoryview, descriptor: Descriptor) -> None:
    """Raises TooLargeError if an encoded message, or a message in it, has a list of more than `MOST_ENTRIES`, too many
    fields, or a text of more than 1 MiB. Bytes that are no message pass: protobuf refuses them where this function
    stops."""
    if len(data) > MOST_ENTRIES:
        with suppress(IndexError, DecodeError):
            _count(data, 0, len(data), _known(descriptor), 0)


def _count(data: bytes | memoryview, begin: int, end: int, known: Mapping[int, _Field], total: int) -> int:
    """Returns `total` plus the number of fields between these offsets."""
    counts: dict[str, int] = {}
    for tag, _, at, after in fields(data, begin, end):
        name, width, nested, is_text = known.get(tag >> 3, _UNKNOWN)
        is_packed = width is not None and tag & 7 == 2
        count = counts[name] = counts.get(name, 0) + (_packed(data[at:after], width) if is_packed else 1)
        check_count(name, count)
        if is_text and after - at > _SMALL_BYTES:
            raise TooLargeError(f"{name} is a text of {after - at} bytes, and the limit is {_SMALL_BYTES}; send less")
        if nested is not None:
            total = _count(data, at, after, nested, total)
        if (total := total + 1) > _MOST_FIELDS:
            raise TooLargeError(f"the request has more than {_MOST_FIELDS} fields; send several requests")
    return total


def check_count(name: str, count: int) -> None:
    """Raises TooLargeError if a list has too many entries."""
    most = MOST_RANKS if name == "ranks" else MOST_ENTRIES
    if count > most:
        raise TooLargeError(
            f"{name} has {count} entries or more, and the limit is {most} per request; send several requests"
        )


def _packed(data: bytes | memoryview, width: int | None) -> int:
    """Returns the number of packed values. The last byte of a varint has no high bit."""
    return len(data) // width if width else int(np.count_nonzero(np.frombuffer(data, np.int8) >= 0))


@cache
def _known(descriptor: Descriptor) -> dict[int, _Field]:
    return {field.number: _field(field) for field in descriptor.fields}


def _field(field: FieldDescriptor) -> _Field:
    if field.message_type is not None:
        return _Field(field.name, None, _known(field.message_type), is_text=False)
    is_packed = field.cpp_type != FieldDescriptor.CPPTYPE_STRING
    is_text = field.type == FieldDescriptor.TYPE_STRING
    return _Field(field.name, _WIDTHS.get(field.type, 0) if is_packed else None, None, is_text)


_UNKNOWN = _Field("unknown fields", None, None, is_text=False)

# --- JSON


class Json(NamedTuple):
    """Limits of a document: bytes; values and names; lists and objects, and how deep they are nested."""

    nbytes: int
    entries: int
    lists: int
    nesting: int = 32


DOCUMENT = Json(_SMALL_BYTES, 1 << 13, 1 << 12)
_REWARDS = Json(_SMALL_BYTES, 1 << 16, 1 << 12)
_ROWS = Json(8 << 20, 1 << 20, 1 << 15)
_ROW_BYTES, _ROW_ENTRIES = 4 << 20, 1 << 19

_PIECE_BYTES = 1 << 20
_ESCAPES = (b"\\\\", b'\\"')
_MARKS = b'[]{},:"'
_NO_MARKS = bytes(set(range(256)).difference(_MARKS))


def of_path(path: str) -> Json:
    """Returns the limits of a document for this path."""
    return _ROWS if path.endswith("/rows") else _REWARDS if path.endswith("/rewards") else DOCUMENT


def check_json(document: bytes | memoryview, most: Json, what: str = "the body") -> None:
    """Raises InvalidArgumentError for a document that would take too long to parse."""
    if len(document) > most.nbytes:
        raise InvalidArgumentError(
            f"{what} exceeds {most.nbytes} bytes, the limit for JSON in this call; send less per request, or send it "
            "over gRPC, or rows as application/x-protobuf"
        )
    document = bytes(document)
    if b"\0" in document:
        raise InvalidArgumentError(f"{what} is not JSON in UTF-8, or nested too deeply; send JSON")
    if sum(map(document.count, (b",", b":", b"[", b"{"))) <= most.nesting:
        return
    marks = np.frombuffer(b"".join(map(_marks, _pieces(document))), np.uint8)
    outside = marks[np.cumsum(marks == ord('"'), dtype=np.uint8) & 1 == 0]
    opened = (outside == ord("[")) | (outside == ord("{"))
    lists, commas = int(opened.sum()), int(((outside == ord(",")) | (outside == ord(":"))).sum())
    for count, limit, name in ((lists, most.lists, "lists and objects"), (lists + commas, most.entries, "values")):
        if count > limit:
            raise InvalidArgumentError(
                f"{what} has {count} {name}, and the limit for JSON in this call is {limit}; send less per request, or "
                "send it over gRPC"
            )
    closed = (outside == ord("]")) | (outside == ord("}"))
    if np.cumsum(opened.astype(np.int8) - closed, dtype=np.int32).max(initial=0) > most.nesting:
        raise InvalidArgumentError(
            f"{what} is not JSON in UTF-8, or nested too deeply; send JSON with at most {most.nesting} levels"
        )


def _pieces(document: bytes) -> Iterator[bytes]:
    """Splits a document, because other threads run only between pieces. No piece ends within an escape."""
    at = 0
    while piece := document[at : at + _PIECE_BYTES]:
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = document[at : at + _PIECE_BYTES + 1]
        at += len(piece)
        yield piece


def _marks(piece: bytes) -> bytes:
    for escape in _ESCAPES:
        piece = piece.replace(escape, b"")
    return piece.translate(None, _NO_MARKS)


def check_row(row: memoryview, number: int) -> None:
    """Raises InvalidArgumentError for a row of a document that takes too long to parse. The document is checked."""
    if len(row) > _ROW_BYTES or (len(row) > _ROW_ENTRIES and bytes(row).count(b",") > _ROW_ENTRIES):
        raise InvalidArgumentError(
            f"row {number} has {len(row)} bytes, and the limits for JSON are {_ROW_BYTES} bytes and {_ROW_ENTRIES} "
            "values; send it as application/x-protobuf, or over gRPC"
        )


# --- URLs

PROTOBUF = "application/x-protobuf"


def is_json(method: str, path: str, kind: str) -> bool:
    """Returns whether a body is read as JSON, whatever its content type says. Only rows and written columns have
    another form."""
    return not (kind == PROTOBUF and path.endswith("/rows")) and not (method == "PUT" and "/batches/" in path)


def check_query(query: bytes) -> None:
    """Raises InvalidArgumentError for a URL with too many parameters."""
    if query.count(b"&") >= MOST_ENTRIES:
        raise InvalidArgumentError(f"the URL has more than {MOST_ENTRIES} parameters; send fewer")
