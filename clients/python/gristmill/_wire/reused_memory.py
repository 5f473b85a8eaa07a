"""Memory of large arrays that are made and let go one after another. The kernel takes longer to give new pages than it
takes to fill them, and a process that keeps no freed pages gets new ones each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Array, Ragged, lengths_of
from gristmill._wire.idle_blocks import IdleBlocks
from gristmill._wire.shared_files import SHARED

# The allocator keeps smaller ones by itself. Larger ones are rare, and would hold much.
_LEAST_BYTES, _MOST_BYTES = 256 << 10, 8 << 20
_MOST_IDLE = 12


class ReusedMemory:
    """Thread-safe, without a lock: arrays are let go wherever garbage is collected."""

    def __init__(self) -> None:
        self._idle = IdleBlocks(_new, _MOST_IDLE)

    def joined(self, arrays: Sequence[Array], dtype: Any) -> Array:
        """A copy of the arrays, one after another. Its memory is used again when no array views it any more."""
        if not arrays:
            return np.empty(0, dtype)
        shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
        return np.concatenate(arrays, out=self._empty(shape, np.dtype(dtype)), casting="same_kind")

    def ragged(self, arrays: Sequence[Array], dtype: Any) -> Ragged:
        """As `Ragged.from_arrays`, in such memory."""
        return Ragged.from_lengths(self.joined(arrays, dtype), lengths_of(arrays))

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        if not _LEAST_BYTES <= nbytes <= _MOST_BYTES:
            return np.empty(shape, dtype)
        block = SHARED.take(nbytes)
        return (self._taken(nbytes) if block is None else block).view(dtype).reshape(shape)

    def _taken(self, nbytes: int) -> NDArray[np.uint8]:
        block = self._idle.take(nbytes)
        # All views of it refer to this one, however they are made.
        whole = np.frombuffer(block.data, np.uint8, nbytes)
        self._idle.take_back_with(whole, block)
        return whole


def _new(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


REUSED = ReusedMemory()
"""That of this process."""
