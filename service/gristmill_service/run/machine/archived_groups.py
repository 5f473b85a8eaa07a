"""The archived groups of a run: the closed groups whose batch is freed, each in 20 bytes. A run may have millions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill_service.run.machine.events import GroupKey

# Segments of at most this many groups are merged at once, in about a millisecond.
_SMALL = 1 << 16
# A segment is merged with one of at most this many times its size: 30 million groups are in about five segments.
_RATIO = 16
_KINDS = ("<u8", "<u8", "<i4")

Digests = tuple[NDArray[np.uint64], NDArray[np.uint64]]
"""The high and low halves of digests."""


def digests_of(run_id: str, keys: Iterable[GroupKey]) -> Digests:
    """Returns the digests of groups' rounds and uids, which differ from run to run. Two groups of a run have the same
    digest with a probability of 2^-128."""
    start = hashlib.blake2b(digest_size=16, key=run_id.encode()[: hashlib.blake2b.MAX_KEY_SIZE])
    digests = []
    for round_, uid in keys:
        digest = start.copy()
        digest.update(f"{round_} {uid}".encode("utf-8", "surrogatepass"))
        digests.append(digest.digest())
    halves = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).T.copy()
    return halves[0], halves[1]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Some archived groups, ordered by the high halves of their digests. Never changes, so that threads can read it."""

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    outcomes: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.high)

    @property
    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.high, self.low, self.outcomes

    @classmethod
    def of(cls, digests: Digests, outcomes: Sequence[int]) -> Segment:
        order = digests[0].argsort()
        return cls(digests[0][order], digests[1][order], np.array(outcomes, np.int32)[order])

    @classmethod
    def read(cls, size: int, pieces: Iterator[bytes]) -> Segment:
        """Reads a segment of this size from the pieces of it. Raises EOFError if they are not all of it."""
        return cls(*(_read(size, pieces, np.dtype(kind)) for kind in _KINDS))

    def pieces(self, most: int) -> Iterator[bytes]:
        """Yields the bytes of the segment, in pieces of at most this many."""
        for column, kind in zip(self._columns, _KINDS, strict=True):
            view = column.astype(kind, copy=False).data.cast("B")
            yield from (bytes(view[at : at + most]) for at in range(0, len(view), most))

    def merged(self, other: Segment) -> Segment:
        """Returns the groups of both segments. Releases the interpreter's lock, except for milliseconds."""
        places = self.high.searchsorted(other.high)
        return Segment(*(np.insert(one, places, two) for one, two in zip(self._columns, other._columns, strict=True)))

    def find(self, digests: Digests) -> NDArray[np.int64]:
        """Returns the index of each digest; -1 for those that the segment does not have."""
        high, low = digests
        places, asked = self.high.searchsorted(high), np.arange(len(high))
        found = np.full(len(high), -1)
        while True:
            asked = asked[places[asked] < len(self)]
            asked = asked[self.high[places[asked]] == high[asked]]
            if not len(asked):
                return found
            is_same = self.low[places[asked]] == low[asked]
            found[asked[is_same]] = places[asked[is_same]]
            # Other digests may have the same high half.
            asked = asked[~is_same]
            places[asked] += 1


def _read(size: int, pieces: Iterator[bytes], kind: np.dtype[Any]) -> NDArray[Any]:
    column, nbytes = bytearray(), size * kind.itemsize
    while len(column) < nbytes and (piece := next(pieces, b"")):
        column += piece
    if len(column) != nbytes:
        raise EOFError(f"archived groups have {len(column)} bytes instead of {nbytes}")
    return np.frombuffer(column, kind)


class ArchivedGroups:
    """Remembers outcomes by digest. An outcome is an integer of 32 bits.

    segments: from the largest to the smallest. Every group is in one of them.
    """

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        self.segments = tuple(segments)

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArchivedGroups) and self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def add(self, digests: Digests, outcomes: Sequence[int]) -> None:
        """Adds groups. Takes milliseconds: `large_pair` is for a thread."""
        if outcomes:
            self.replace((), Segment.of(digests, outcomes))
        while (pair := self._similar(lambda larger, _: len(larger) <= _SMALL)) is not None:
            self.replace(pair, pair[0].merged(pair[1]))

    def large_pair(self) -> tuple[Segment, Segment] | None:
        """Returns two large segments that a thread should merge; None if there are none. `add` does not touch them."""
        return self._similar(lambda _, smaller: len(smaller) > _SMALL)

    def replace(self, segments: Sequence[Segment], merged: Segment) -> None:
        kept = (segment for segment in self.segments if segment not in segments)
        self.segments = tuple(sorted([*kept, merged], key=len, reverse=True))

    def find(self, digests: Digests) -> dict[int, int]:
        """Returns the outcome of each archived group among these, by the index of its digest."""
        # Neighboring groups are in the processor's caches.
        order = digests[0].argsort()
        ordered = digests[0][order], digests[1][order]
        outcomes: dict[int, int] = {}
        for segment in self.segments:
            places = segment.find(ordered)
            found = np.flatnonzero(places >= 0)
            outcomes |= zip(order[found].tolist(), segment.outcomes[places[found]].tolist(), strict=True)
        return outcomes

    def _similar(self, suits: Callable[[Segment, Segment], bool]) -> tuple[Segment, Segment] | None:
        pairs = (pair for pair in pairwise(self.segments) if len(pair[0]) <= _RATIO * len(pair[1]))
        return next((pair for pair in pairs if suits(*pair)), None)

    def _content(self) -> list[Any]:
        whole = reduce(Segment.merged, self.segments, Segment.of(digests_of("", ()), ()))
        order = np.lexsort((whole.low, whole.high))
        return [column[order].tolist() for column in whole._columns]
