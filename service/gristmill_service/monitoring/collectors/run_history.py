"""The times at which things happened in a run, for people: the run's state has no clock.

Notes the run's events as they are applied. A history is in memory only, bounded, and not part of the run: a process
that takes over a run begins its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gristmill_service.config import Model
from gristmill_service.run.machine.answers import Position
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.decisions.admission import Room
from gristmill_service.run.machine.events import (
    Acknowledged,
    BatchFailed,
    BatchFreed,
    BatchGivenUp,
    BatchPublished,
    BatchSealed,
    BatchWithdrawn,
    ColumnsDropped,
    ColumnsWritten,
    Event,
    ModelResumed,
    RowsStored,
)
from gristmill_service.run.machine.state import State

KEPT_BATCHES = 256
_KEPT_STEPS = 16_384
"""Entries of a timeline, of all ranks of a model together."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The times of a rank.

    since: when it last acknowledged a shard, or its trainer resumed. pulled: when it last got the location of a shard,
    None before the first.
    """

    since: float
    pulled: float | None = None


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The times at which a batch was sealed, published, and freed or failed; None where it is not, or not known.
    columns: when its forward shards were published, or a column was last written for it. was_published: it was
    published before the history began, which is `published` then."""

    sealed: float | None = None
    published: float | None = None
    ended: float | None = None
    was_published: bool = False
    columns: float | None = None


class Passed(NamedTuple):
    """A rank acknowledged the shard at this position."""

    at: float
    position: Position


@dataclass(slots=True)
class _Rank:
    next: Position
    times: RankTimes
    passed: deque[Passed]


@dataclass(frozen=True, slots=True)
class HistorySnapshot:
    """A run's history at one moment, in seconds since 1970.

    now: that moment. began: when the history began. last_event: the time of the run's last event. rows_since: when a
    row was last accepted. full_since: since when there has been no capacity, None where there is. run_offset: seconds
    between the run's own time and this one. steps: how many acknowledgements were noted. longest_step: for each model,
    the longest that a rank took from when it could begin with a shard until it acknowledged it, since the trainer
    resumed; 0 before the first.
    """

    now: float
    began: float
    last_event: float
    rows_since: float
    full_since: float | None
    run_offset: float
    steps: int
    ranks: dict[Model, list[RankTimes]]
    batches: dict[int, BatchTimes]
    longest_step: dict[Model, float]


class RunHistory:
    """Called on the event loop, or with the state locked; `now` from any thread.

    Times are seconds since 1970 as the process's clock counts them from the history's beginning on: they never go back.
    """

    def __init__(
        self, clock: Callable[[], float], now: Callable[[], float], wall: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._run_time, self._offset = clock, now, wall() - clock()
        self.began = self.now()
        self._last_event = self._rows_since = self.began
        self._full_since: float | None = None
        self._run_offset: float | None = None
        self._steps = 0
        self._ranks: dict[Model, list[_Rank]] = {}
        self._longest_step: dict[Model, float] = {}
        self._batches: dict[int, BatchTimes] = {}

    def now(self) -> float:
        return self._clock() + self._offset

    def applied(self, event: Event, state: State) -> None:
        now = self._last_event = self.now()
        if type(event) is RowsStored:
            # This happens thousands of times a second.
            self._rows_since = now
            return
        self._follow(state)
        match event:
            case Acknowledged(model, rank, following):
                self._acknowledged(state, model, rank, following, now)
            case ModelResumed(model):
                self._begin(state, model, now)
            case (
                BatchSealed()
                | BatchPublished()
                | BatchWithdrawn()
                | BatchFailed()
                | BatchGivenUp()
                | BatchFreed()
                | ColumnsWritten()
                | ColumnsDropped()
            ):
                self._note_batch(event, now)

    def changed(self, state: State, room: Room) -> None:
        self._follow(state)
        self._full_since = None if room.groups else self._full_since or self.now()

    def gave_shard(self, model: Model, rank: int) -> None:
        ranks = self._ranks.get(model, [])
        if rank < len(ranks):
            ranks[rank].times = replace(ranks[rank].times, pulled=self.now())

    def snapshot(self, state: State) -> HistorySnapshot:
        """Returns the history until now. state: as it is now, and locked."""
        self._follow(state)
        now = self.now()
        if self._run_offset is None:
            self._run_offset = now - self._run_time()
        return HistorySnapshot(
            now=now,
            began=self.began,
            last_event=self._last_event,
            rows_since=self._rows_since,
            full_since=self._full_since,
            run_offset=self._run_offset,
            steps=self._steps,
            ranks={model: [rank.times for rank in ranks] for model, ranks in self._ranks.items()},
            batches=dict(self._batches),
            longest_step=dict(self._longest_step),
        )

    def passed(self, model: Model, ranks: int, begin: float, most: int) -> Sequence[Sequence[Passed]]:
        """Returns the last acknowledgements of each of the first ranks, from `begin` on, at most `most` of each."""
        return [
            [entry for entry in rank.passed if entry.at >= begin][-most:] for rank in self._ranks.get(model, [])[:ranks]
        ]

    def _follow(self, state: State) -> None:
        """Seeds the history from the state; resets a model's where its number of ranks changed."""
        now = self.now()
        if not self._ranks:
            for number, batch in state.batches.items():
                is_published = batch.is_published and not batch.awaits
                published = self.began if is_published else None
                self._batches[number] = BatchTimes(published=published, was_published=is_published)
        for model, own in state.models.items():
            if len(own.next) != len(self._ranks.get(model, ())):
                self._begin(state, model, now)

    def _begin(self, state: State, model: Model, now: float) -> None:
        positions = state.models[model].next
        most = max(8, _KEPT_STEPS // len(positions))
        self._ranks[model] = [_Rank(position, RankTimes(now), deque(maxlen=most)) for position in positions]
        self._longest_step[model] = 0.0

    def _acknowledged(self, state: State, model: Model, rank: int, following: Position, now: float) -> None:
        own = self._ranks[model][rank]
        # The batch at that position may have failed meanwhile.
        position = progress.settle(state, model, own.next)
        if position < following:
            own.passed.append(Passed(now, position))
            self._steps += 1
            published = self._batches.get(position.batch, BatchTimes()).published
            begun = max(own.times.since, published or own.times.since)
            self._longest_step[model] = max(self._longest_step[model], now - begun)
        own.next, own.times = following, replace(own.times, since=now)

    def _note_batch(
        self,
        event: BatchSealed
        | BatchPublished
        | BatchWithdrawn
        | BatchFailed
        | BatchGivenUp
        | BatchFreed
        | ColumnsWritten
        | ColumnsDropped,
        now: float,
    ) -> None:
        before = self._batches.get(event.batch, BatchTimes())
        match event:
            case BatchSealed():
                after = BatchTimes(sealed=now)
            case BatchPublished(awaits=(_, *_)) | ColumnsWritten() | ColumnsDropped():
                after = replace(before, columns=now)
            case BatchPublished():
                after = replace(before, published=now, was_published=False)
            case BatchWithdrawn():
                after = replace(before, published=None, was_published=False, ended=None)
            case BatchFailed() | BatchGivenUp() | BatchFreed():
                after = replace(before, ended=now)
        self._batches[event.batch] = after
        while len(self._batches) > KEPT_BATCHES:
            del self._batches[min(self._batches)]
