"""Bytes as frames of zstd (RFC 8878) with their size and checksum: shards, as they travel and as Redis stores them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from gristmill.errors import InvalidArgumentError

FRAME_BYTES = 2 << 20
"""The content of a shard's frame: small enough that one that does not compress fits a message of 4 MiB."""

# Half of a shard is padding, which the fastest level removes.
_LEVEL = 1


class DamagedFrameError(InvalidArgumentError):
    """The bytes are no whole frame, or their content is not what was compressed."""


@cache
def is_available() -> bool:
    """Whether zstandard is installed."""
    try:
        zstandard()
    except InvalidArgumentError:
        return False
    return True


def zstandard() -> Any:
    """The module. Raises InvalidArgumentError where it is missing."""
    try:
        import zstandard as module
    except ImportError as missing:
        raise InvalidArgumentError(f"zstd needs zstandard ({missing}): pip install gristmill[zstd]") from None
    return module


def compressed(data: bytes | memoryview) -> bytes:
    """One frame of these bytes, with their size and checksum."""
    frame: bytes = zstandard().ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)
    return frame


def compressed_stream(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Frames of the pieces' bytes, which are cut anywhere."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= FRAME_BYTES:
            yield compressed(bytes(buffer[:FRAME_BYTES]))
            del buffer[:FRAME_BYTES]
    if buffer:
        yield compressed(bytes(buffer))


def decompressed(frame: bytes | memoryview, most_bytes: int) -> bytes:
    """The content of one frame. Takes no more memory than `most_bytes`.

    Raises DamagedFrameError where it has more, says no size or carries no checksum, or where the checksum does not fit.
    """
    module = zstandard()
    try:
        parameters = module.get_frame_parameters(frame)
        if not parameters.has_checksum or parameters.content_size > most_bytes:
            raise DamagedFrameError(
                f"a frame of {len(frame)} bytes has no checksum, or more content than the {most_bytes} bytes that are "
                "expected; read it again"
            )
        content: bytes = module.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        return content
    except module.ZstdError as error:
        raise DamagedFrameError(f"a frame of {len(frame)} bytes is damaged: {error}; read it again") from None
