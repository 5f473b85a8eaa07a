"""Encodes and decodes protobuf's varints."""

from __future__ import annotations

LENGTH_BYTES = 5
"""The longest encoding of a length that every reader accepts. A writer can reserve these bytes before the length is
known."""


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
