"""Memory that batches are gathered in, one after another.

The kernel takes longer to give new pages than it takes to fill them, and the allocator does not keep freed ones for
long: after every 10,000 blocks that protobuf frees, in some thousand calls, it has the allocator give all of them back.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np

from gristmill._wire.columns import Array
from gristmill._wire.idle_blocks import IdleBlocks

LEAST_BYTES = 256 << 10
"""Less is left to the allocator."""

# A column of more is rare, and would hold much; so much at most is held in all.
_MOST_BYTES, _MOST_IDLE = 32 << 20, 4


class Block(NamedTuple):
    """memory: to write to from its beginning. view: what is written, to read."""

    memory: mmap.mmap
    view: memoryview


class GatheredMemory:
    """Thread-safe, without a lock: memory is let go wherever garbage is collected."""

    def __init__(self) -> None:
        self._idle = IdleBlocks(_mapped, _MOST_IDLE)

    def take(self, nbytes: int) -> Block:
        """So many bytes, at least one. Their memory is used again when no array views it any more."""
        if nbytes > _MOST_BYTES:
            return new(nbytes)
        memory = self._idle.take(nbytes)
        memory.seek(0)
        # All views of it refer to this one, however they are made.
        view = _view(memory, nbytes)
        self._idle.take_back_with(view, memory)
        return Block(memory, view.data)


def new(nbytes: int) -> Block:
    """So many bytes, at least one. Pages come as they are written to, and go with the last array that views them."""
    memory = _mapped(nbytes)
    return Block(memory, _view(memory, nbytes).data)


def _mapped(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _view(memory: mmap.mmap, nbytes: int) -> Array:
    view: Array = np.frombuffer(memory, np.uint8, nbytes)
    view.flags.writeable = False
    return view


GATHERED = GatheredMemory()
"""That of this process."""
