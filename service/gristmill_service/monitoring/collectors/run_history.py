"""Records the times of a run's events, for display, because the run's state contains no times.

Events are recorded as they are applied. A history is only in memory, limited, and not part of the run: a process that
takes over a run starts a new history.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
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
    GroupClosed,
    GroupDropped,
    GroupKey,
    ModelResumed,
    RowsStored,
    TrajectoryAborted,
)
from gristmill_service.run.machine.groups import SURPLUS
from gristmill_service.run.machine.state import State

KEPT_BATCHES = 256
_KEPT_STEPS = 16_384
"""The maximum number of entries of a timeline, over all ranks of a model."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The times at which a batch was sealed, published, and freed or failed; None if it was not, or if unknown.
    columns: when its forward shards were published, or a column was last written. was_published: whether the batch was
    published before the history began; then `published` is the beginning of the history."""

    sealed: float | None = None
    published: float | None = None
    ended: float | None = None
    was_published: bool = False
    columns: float | None = None


class Passed(NamedTuple):
    """An acknowledgement of the shard at this position by a rank."""

    at: float
    position: Position


@dataclass(slots=True)
class RankTimes:
    """The times of a rank.

    next: the rank's position when the times were recorded. since: when it last acknowledged a shard, or its trainer
    resumed. pulled: when it last received the location of a shard; None before the first. passed: its last
    acknowledgements.
    """

    next: Position
    since: float
    passed: deque[Passed]
    pulled: float | None = None


class RunHistory:
    """A run's history. Called on the event loop, or with the state locked; `now` from any thread.

    Times are seconds since 1970, measured with a monotonic clock from the beginning of the history, so they never
    decrease.

    began: the beginning of the history. last_event: the time of the run's last event. rows_since: when a row was last
    accepted. pulling: the models of which a rank has requested a shard. aborted: the number of aborted samples per
    reason, without surplus samples, and the last group of each. retried: the number of later attempts of samples.
    dropped: the number of groups that were dropped since a batch was last sealed, by reason.
    full_since: since when the run has had no capacity; None if it has. steps: the number of recorded acknowledgements.
    longest_step: per model, a rank's longest time from when a shard was available until it acknowledged it, since the
    trainer resumed; 0 before the first.
    """

    def __init__(
        self, clock: Callable[[], float], now: Callable[[], float], wall: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._run_time, self._offset = clock, now, wall() - clock()
        self.began = self.last_event = self.rows_since = self.now()
        self.full_since: float | None = None
        self.steps = 0
        self.pulling: set[Model] = set()
        self.aborted: dict[str, tuple[int, GroupKey]] = {}
        self.retried = 0
        self.dropped: Counter[str] = Counter()
        self.ranks: dict[Model, list[RankTimes]] = {}
        self.longest_step: dict[Model, float] = {}
        self.batches: dict[int, BatchTimes] = {}

    @cached_property
    def run_offset(self) -> float:
        """The difference in seconds between the history's time and the run's time."""
        return self.now() - self._run_time()

    def now(self) -> float:
        return self._clock() + self._offset

    def of_batch(self, number: int) -> BatchTimes:
        """Returns the batch's times; all None if they are unknown."""
        return self.batches.get(number, BatchTimes())

    def applied(self, event: Event, state: State) -> None:
        now = self.last_event = self.now()
        if type(event) is RowsStored:
            # This happens thousands of times a second.
            self.rows_since = now
            self.retried += sum(row.attempt > 0 and row.step == 0 for row in event.rows)
            return
        self.follow(state)
        match event:
            case Acknowledged(model, rank, following):
                self._acknowledged(state, model, rank, following, now)
            case ModelResumed(model):
                self._begin(state, model, now)
            case TrajectoryAborted(trajectory, reason):
                self._count_aborted(reason, GroupKey(*trajectory[:2]))
            case GroupClosed(key, reason):
                samples = sum(why == reason for why in state.open[key].aborted.values()) if key in state.open else 0
                self._count_aborted(reason, key, samples)
            case GroupDropped(_, reason):
                self.dropped[reason] += 1
            case _:
                self._note_batch(event, now)

    def changed(self, state: State, room: Room) -> None:
        self.follow(state)
        self.full_since = None if room.groups else self.full_since or self.now()

    def gave_shard(self, model: Model, rank: int) -> None:
        ranks = self.ranks.get(model, [])
        if rank < len(ranks):
            ranks[rank].pulled = self.now()

    def follow(self, state: State) -> None:
        """Initializes the history from the state. Resets a model's history if its number of ranks changed."""
        now = self.now()
        if not self.ranks:
            for key, group in state.open.items():
                for reason in group.aborted.values():
                    self._count_aborted(reason, key)
                self.retried += sum(trajectory.attempt > 0 for trajectory in group.trajectories.values())
            for number, batch in state.batches.items():
                is_published = batch.is_published and not batch.awaits
                published = self.began if is_published else None
                self.batches[number] = BatchTimes(published=published, was_published=is_published)
        for model, model_state in state.models.items():
            if len(model_state.next) != len(self.ranks.get(model, ())):
                self._begin(state, model, now)

    def _count_aborted(self, reason: str, key: GroupKey, samples: int = 1) -> None:
        if reason != SURPLUS:
            before, _ = self.aborted.get(reason, (0, key))
            self.aborted[reason] = (before + samples, key)

    def _begin(self, state: State, model: Model, now: float) -> None:
        positions = state.models[model].next
        most = max(8, _KEPT_STEPS // len(positions))
        self.ranks[model] = [RankTimes(position, now, deque(maxlen=most)) for position in positions]
        self.longest_step[model] = 0.0

    def _acknowledged(self, state: State, model: Model, rank: int, following: Position, now: float) -> None:
        times = self.ranks[model][rank]
        # The batch at that position may have failed in the meantime.
        position = progress.settle(state, model, times.next)
        if position < following:
            times.passed.append(Passed(now, position))
            self.steps += 1
            published = self.of_batch(position.batch).published
            begun = max(times.since, published or times.since)
            self.longest_step[model] = max(self.longest_step[model], now - begun)
        times.next, times.since = following, now

    def _note_batch(self, event: Event, now: float) -> None:
        match event:
            case BatchSealed(batch=batch):
                self.dropped.clear()
                times = BatchTimes(sealed=now)
            case (
                BatchPublished(batch=batch, awaits=(_, *_)) | ColumnsWritten(batch=batch) | ColumnsDropped(batch=batch)
            ):
                times = replace(self.of_batch(batch), columns=now)
            case BatchPublished(batch=batch):
                times = replace(self.of_batch(batch), published=now, was_published=False)
            case BatchWithdrawn(batch=batch):
                times = replace(self.of_batch(batch), published=None, was_published=False, ended=None)
            case BatchFailed(batch=batch) | BatchGivenUp(batch=batch) | BatchFreed(batch=batch):
                times = replace(self.of_batch(batch), ended=now)
            case _:
                return
        self.batches[batch] = times
        while len(self.batches) > KEPT_BATCHES:
            del self.batches[min(self.batches)]
