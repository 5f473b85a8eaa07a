"""Encodes and decodes protobuf's varints, and finds the fields of encoded messages."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

LENGTH_BYTES = 5
"""The longest encoding of a length that every reader accepts. A writer can reserve these bytes before the length is
known."""

_VARINT, _LENGTH_DELIMITED = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}


def varint(value: int, least_bytes: int = 1) -> bytes:
    """Encodes a value in at least `least_bytes` bytes."""
    encoded = bytearray()
    while value >= 0x80 or len(encoded) + 1 < least_bytes:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Returns the value at this offset and the offset after it. Raises IndexError if the data ends first."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80 or shift > 63:
            return value, at


def fields(data: bytes | memoryview, at: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Yields the tag of each field of an encoded message, the offset where the field begins, and the offsets where its
    content begins and ends.

    Raises IndexError if the data ends within a field, and google.protobuf.message.DecodeError for a group, which no
    message of gristmill has.
    """
    end = len(data) if end is None else end
    while at < end:
        start, tag = at, data[at]
        at += 1
        if tag & 0x80:
            tag, at = read_varint(data, start)
        kind = tag & 7
        begin = at
        if kind == _LENGTH_DELIMITED:
            size = data[at]
            begin = at + 1
            if size & 0x80:
                size, begin = read_varint(data, at)
            at = begin + size
        elif kind == _VARINT:
            at = at + 1 if data[at] < 0x80 else read_varint(data, at)[1]
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            raise DecodeError(f"a field has wire type {kind}")
        if at > end:
            raise IndexError(f"a field ends at {at}, after {end} bytes")
        yield tag, start, begin, at
