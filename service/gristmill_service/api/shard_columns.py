"""Removes the columns that a trainer does not request from a shard, so that their bytes are not sent.

The result is a safetensors file without the tensors of these columns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any, NamedTuple

import orjson

from gristmill._wire.codecs import zstd_frames
from gristmill._wire.column_spec import BUILT_IN, of_column
from gristmill.errors import InvalidArgumentError, UnavailableError


async def file_with(columns: Collection[str], pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes | memoryview]:
    """Yields a safetensors file with only these declared columns. pieces: the whole file, split anywhere.

    Raises InvalidArgumentError for a column that the shard does not have.
    """
    stream = _Stream(pieces)
    header = await _header(stream, columns)
    yield header.text
    for begin, end in header.kept:
        async for piece in stream.span(begin, end):
            yield piece


async def compressed(pieces: AsyncIterator[bytes | memoryview]) -> AsyncIterator[bytes]:
    """Yields zstd frames of the pieces, which may be split anywhere."""
    buffer, size = bytearray(), zstd_frames.FRAME_BYTES
    async for piece in pieces:
        buffer += piece
        while len(buffer) >= size:
            yield await asyncio.to_thread(zstd_frames.compressed, bytes(buffer[:size]))
            del buffer[:size]
    if buffer:
        yield await asyncio.to_thread(zstd_frames.compressed, bytes(buffer))


class _Header(NamedTuple):
    """The header of the new file.

    text: its bytes. was: the size in bytes of the old header. kept: the byte ranges of the old file to send.
    """

    text: bytes
    was: int
    kept: list[tuple[int, int]]


async def _header(stream: _Stream, columns: Collection[str]) -> _Header:
    size = int.from_bytes(await stream.take(8), "little")
    entries: dict[str, Any] = orjson.loads(await stream.take(size))
    declared = {name.rpartition("/")[2] for name in entries.keys() - {"__metadata__"}} - BUILT_IN
    known = declared.difference(*map(of_column, declared))
    if unknown := sorted(set(columns) - known):
        raise InvalidArgumentError(
            f"columns: the shard has no column {unknown[0]!r}; request one of its columns: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    tensors = declared.difference(columns, *(of_column(name) for name in columns))
    left: dict[str, Any] = {}
    kept: list[tuple[int, int]] = []
    offset, was = 0, 8 + size
    for name, entry in entries.items():
        if name == "__metadata__":
            left[name] = entry
        elif name.rpartition("/")[2] not in tensors:
            begin, end = entry["data_offsets"]
            left[name] = entry | {"data_offsets": [offset, offset + end - begin]}
            offset += end - begin
            if begin < end:
                kept.append((was + begin, was + end))
    text = orjson.dumps(left)
    text += b" " * (-len(text) % 8)
    return _Header(len(text).to_bytes(8, "little") + text, was, kept)


class _Stream:
    """Reads bytes in order from pieces."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")
        self._at = 0

    async def take(self, count: int) -> bytes:
        """Returns the next `count` bytes. Raises UnavailableError if the stream ends before."""
        return b"".join([piece async for piece in self.span(self._at, self._at + count)])

    async def span(self, begin: int, end: int) -> AsyncIterator[memoryview]:
        """Yields the bytes `begin:end` of the stream, and skips the bytes before `begin`."""
        while self._at < end:
            if not len(self._piece):
                self._piece = memoryview(await anext(self._pieces, b""))
                if not len(self._piece):
                    raise UnavailableError(f"the shard's data ended early, after {self._at} bytes; read it again")
            taken = self._piece[: (begin if self._at < begin else end) - self._at]
            if self._at >= begin:
                yield taken
            self._at += len(taken)
            self._piece = self._piece[len(taken) :]
