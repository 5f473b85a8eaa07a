"""Numbers as protobuf writes them, for messages that are written and read by hand."""

from __future__ import annotations

LENGTH_BYTES = 5
"""A length may be written longer than it needs to be, so that it is known where a field begins before it is known how
long it is. So many bytes are the most that every reader takes."""


def varint(value: int, least_bytes: int = 1) -> bytes:
    found = bytearray()
    while value >= 0x80 or len(found) + 1 < least_bytes:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The value, and where it ends. Raises IndexError where the data ends first."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80 or shift > 63:
            return value, at
