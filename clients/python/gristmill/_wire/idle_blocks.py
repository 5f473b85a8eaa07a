"""Blocks of memory that were let go and are used again: the kernel takes longer to give new pages than it takes to fill
them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sized
from typing import Generic, TypeVar

from gristmill._wire.columns import Array

Block = TypeVar("Block", bound=Sized)

# Few sizes, so that one block fits the next use. What is not written to takes no memory.
_ROUNDED_TO = 1 << 20


class IdleBlocks(Generic[Block]):
    """Thread-safe, without a lock: blocks are let go wherever garbage is collected."""

    def __init__(self, make: Callable[[int], Block], most: int) -> None:
        """make: gives a new block of so many bytes. most: how many wait to be used again; the oldest goes first."""
        self._make = make
        self._blocks: deque[Block] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, nbytes: int) -> Block:
        """One of at least so many bytes."""
        size = -(-nbytes // _ROUNDED_TO) * _ROUNDED_TO
        for _ in range(len(self._blocks)):
            try:
                block = self._blocks.popleft()
            except IndexError:
                break
            if size <= len(block) <= 2 * size:
                return block
            self._blocks.append(block)
        return self._make(size)

    def take_back_with(self, view: Array, block: Block) -> None:
        """Has the block used again when the array is no more, to which all views of the block refer."""
        weakref.finalize(view, self._blocks.append, block).atexit = False
