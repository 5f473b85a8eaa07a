"""Compresses shards as zstd frames (RFC 8878) with size and checksum, for transfer and for Redis."""

from __future__ import annotations

from functools import cache
from typing import Any

from gristmill.errors import InvalidArgumentError

FRAME_BYTES = 2 << 20
"""The uncompressed bytes of a frame. An incompressible frame of this size still fits into a message of 4 MiB."""

# About half of a shard is padding, which even the fastest level removes.
_LEVEL = 1


class DamagedFrameError(InvalidArgumentError):
    """The bytes are not a complete frame, or their content has changed since it was compressed."""


@cache
def is_available() -> bool:
    """Returns whether zstandard is installed."""
    try:
        zstandard()
    except InvalidArgumentError:
        return False
    return True


def zstandard() -> Any:
    """Returns the module. Raises InvalidArgumentError if it is not installed."""
    try:
        import zstandard as module
    except ImportError as missing:
        raise InvalidArgumentError(f"zstd needs zstandard ({missing}); pip install zstandard") from None
    return module


def compressed(data: bytes | memoryview) -> bytes:
    """Compresses the bytes to one frame."""
    frame: bytes = zstandard().ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)
    return frame


def decompressed(frame: bytes | memoryview, most_bytes: int) -> bytes:
    """Decompresses one frame. Allocates at most `most_bytes`.

    Raises DamagedFrameError for a frame with more content, without size or checksum, or with a wrong checksum.
    """
    module = zstandard()
    try:
        parameters = module.get_frame_parameters(frame)
        if not parameters.has_checksum or parameters.content_size > most_bytes:
            raise DamagedFrameError(
                f"a frame of {len(frame)} bytes has no checksum, or has more than the expected {most_bytes} bytes of "
                "content; read it again"
            )
        content: bytes = module.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        return content
    except module.ZstdError as error:
        raise DamagedFrameError(f"a frame of {len(frame)} bytes is damaged: {error}; read it again") from None
