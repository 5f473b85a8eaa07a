"""The times at which things happened in a run, for people: the run's state has no clock.

Notes the run's events as they are applied. A history is in memory only, bounded, and not part of the run: a process
that takes over a run begins its own.
"""

from __future__ import annotations

import time
from collections import deque
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
    GroupKey,
    ModelResumed,
    RowsStored,
    TrajectoryAborted,
)
from gristmill_service.run.machine.groups import SURPLUS
from gristmill_service.run.machine.state import State

KEPT_BATCHES = 256
_KEPT_STEPS = 16_384
"""Entries of a timeline, of all ranks of a model together."""


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
class RankTimes:
    """The times of a rank.

    next: its position when they were noted. since: when it last acknowledged a shard, or its trainer resumed. pulled:
    when it last got the location of a shard, None before the first. passed: its last acknowledgements.
    """

    next: Position
    since: float
    passed: deque[Passed]
    pulled: float | None = None


class RunHistory:
    """A run's history. Called on the event loop, or with the state locked; `now` from any thread.

    Times are seconds since 1970 as the process's clock counts them from the history's beginning on: they never go back.

    began: when the history began. last_event: the time of the run's last event. rows_since: when a row was last
    accepted. pulling: the models of which a rank has asked for a shard. aborted: how many samples were aborted for each
    reason, and the last group of them, without surplus ones. retried: how often a later attempt of a sample began.
    full_since: since when there has been no capacity, None where there is. steps: how many acknowledgements were noted.
    longest_step: for each model, the longest that a rank took from when it could begin with a shard until it
    acknowledged it, since the trainer resumed; 0 before the first.
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
        self.ranks: dict[Model, list[RankTimes]] = {}
        self.longest_step: dict[Model, float] = {}
        self.batches: dict[int, BatchTimes] = {}

    @cached_property
    def run_offset(self) -> float:
        """Seconds between the run's own time and this one."""
        return self.now() - self._run_time()

    def now(self) -> float:
        return self._clock() + self._offset

    def of_batch(self, number: int) -> BatchTimes:
        """Returns the batch's times, all None where nothing is known."""
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
        """Seeds the history from the state; resets a model's where its number of ranks changed."""
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
        # The batch at that position may have failed meanwhile.
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
