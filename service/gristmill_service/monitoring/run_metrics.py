"""What a run counts of itself for metrics, since this process has it: it goes with the run, wherever that goes.

Nothing of it is kept: what a restart replays is not counted again, nor is a batch that is made again. What is counted
of events is guarded by the run's lock, the rest by one of its own.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import structlog

from gristmill._wire.steps import Steps
from gristmill_service import tracing
from gristmill_service.monitoring.bucket_counts import SECONDS, VERSIONS, BucketCounts
from gristmill_service.monitoring.rank_metrics import RankMetrics
from gristmill_service.pipeline.batch_stats import BatchStats
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.events import (
    Acknowledged,
    BatchFailed,
    BatchFreed,
    BatchPublished,
    BatchSealed,
    BatchWithdrawn,
    Event,
    GroupClosed,
    GroupDropped,
    ModelResumed,
    Resized,
    RowsStored,
    RunFinished,
    TrajectoryAborted,
)
from gristmill_service.run.machine.state import State

_log = structlog.get_logger(__name__)

REASONS = (
    "aborted", "batch_failed", "finished", "misaligned", "rows_lost", "stale", "superseded", "timeout", "zero_variance"
)  # fmt: skip
STAGES = ("queue", "gather", "validate", "merge", "advantage", "schedule", "layout", "plan", "publish")
# Who was told that there is no room asks again within this, or has gone away.
_ASKS_AGAIN_S = 35.0
# All that may let ranks go on, or make them wait; an acknowledgement moves one alone.
_MOVES_RANKS = frozenset([BatchPublished, BatchWithdrawn, BatchFailed, ModelResumed, Resized, RunFinished])


def bounded_reason(reason: str) -> str:
    """What clients call their reasons is `aborted`: labels are ours, so that they are few."""
    return reason if reason in REASONS else "aborted"


@dataclass(slots=True)
class _Making:
    sealed_at: float
    is_started: bool = False
    census: BatchStats | None = None


class RunMetrics:
    """clock: seconds, as `time.monotonic`. now: the run's own time, in which groups were admitted."""

    def __init__(self, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._clock, self._now = clock, now
        self.now = now
        self._lock = threading.Lock()
        self._making: dict[int, _Making] = {}
        self._throttled = 0.0
        self._full_at: float | None = None
        self.rows: Counter[Outcome] = Counter()
        self.tokens: Counter[Outcome] = Counter()
        self.dropped_rows: Counter[str] = Counter()
        self.dropped_tokens: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        """Groups that went on with fewer samples."""
        self.batch_rows: Counter[str] = Counter()
        self.batch_tokens: Counter[str] = Counter()
        self.mismatches: Counter[str] = Counter()
        self.padding: dict[str, float] = {}
        """Of the batch that was published last."""
        self.staleness = BucketCounts(VERSIONS)
        self.stages: defaultdict[str, BucketCounts] = defaultdict(lambda: BucketCounts(SECONDS))
        self.seal, self.publish = BucketCounts(SECONDS), BucketCounts(SECONDS)
        self.ranks = RankMetrics(clock)

    # --- From outside the run's lock

    def received(self, outcomes: Sequence[Outcome], steps: Steps) -> None:
        """A request's rows, by what became of them."""
        if not outcomes:
            return
        first = outcomes[0]
        # As good as always.
        if outcomes.count(first) == len(outcomes):
            with self._lock:
                self.rows[first] += len(outcomes)
                self.tokens[first] += steps.tokens.total
            return
        values = np.array([outcome.value for outcome in outcomes])
        tokens = np.bincount(values, weights=steps.tokens.lengths).tolist()
        with self._lock:
            self.rows.update(outcomes)
            self.tokens.update({outcome: int(tokens[outcome.value]) for outcome in set(outcomes)})

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Measures what it is around as a stage of making a batch."""
        begin = self._clock()
        try:
            with tracing.span(stage):
                yield
        finally:
            self.stages[stage].add(self._clock() - begin)

    def started(self, batch: int) -> None:
        """The batch's turn has come."""
        made = self._making.setdefault(batch, _Making(self._clock()))
        if not made.is_started:
            made.is_started = True
            self.stages["queue"].add(self._clock() - made.sealed_at)

    def made(self, batch: int, census: Callable[[], BatchStats]) -> None:
        """The batch will be published for the first time, with this."""
        try:
            self._making.setdefault(batch, _Making(self._clock())).census = census()
        except Exception:  # noqa: BLE001 - a batch does not fail for what counts it
            _log.exception("batch not counted", batch=batch)

    # --- With the run's lock held

    def asked_for_groups(self, found_room: bool) -> None:
        """A worker asked to begin groups. Between two who found no room, workers waited."""
        self._throttled, self._full_at = self.throttled, None if found_room else self._clock()

    @property
    def throttled(self) -> float:
        """Seconds during which workers waited for room."""
        waits = 0.0 if self._full_at is None else min(self._clock() - self._full_at, _ASKS_AGAIN_S)
        return self._throttled + waits

    def note(self, event: Event, state: State, released: int, tokens: Callable[[], int]) -> None:
        """What happened, after the state took it. released, tokens: of rows that nothing refers to any more."""
        if type(event) is RowsStored and not released:
            # What happens thousands of times a second.
            return
        try:
            self._note(event, state, released, tokens)
        except Exception:  # noqa: BLE001 - it has happened, whether it can be counted or not
            _log.exception("event not counted", event=type(event).__name__)

    def _note(self, event: Event, state: State, released: int, tokens: Callable[[], int]) -> None:
        match event:
            case RowsStored():
                self._dropped("superseded", released, tokens())
            case Acknowledged(model, rank, _):
                self.ranks.moved(state, model, rank)
            case GroupDropped(_, reason) | TrajectoryAborted(_, reason):
                self._dropped(bounded_reason(reason), released, tokens())
            case GroupClosed(_, reason):
                self.closed[bounded_reason(reason)] += 1
                self._dropped(bounded_reason(reason), released, tokens())
            case BatchFailed(batch, _):
                self._making.pop(batch, None)
                self._dropped("batch_failed", released, tokens())
            case BatchSealed(batch):
                self._making[batch] = _Making(self._clock())
                oldest = min(group.admitted_at for group in state.batches[batch].groups)
                self.seal.add(max(0.0, self._now() - oldest))
            case BatchPublished(batch):
                self._published(self._making.pop(batch, None))
            case BatchWithdrawn(batch):
                self._making[batch] = _Making(self._clock())
            case BatchFreed(batch):
                self._making.pop(batch, None)
        if type(event) in _MOVES_RANKS:
            self.ranks.look(state)

    def _dropped(self, reason: str, rows: int, tokens: int) -> None:
        if rows:
            self.dropped_rows[reason] += rows
            self.dropped_tokens[reason] += tokens

    def _published(self, made: _Making | None) -> None:
        if made is None:
            return
        self.publish.add(self._clock() - made.sealed_at)
        if (census := made.census) is None:
            return
        self.batch_rows.update(census.rows)
        self.batch_tokens.update(census.tokens)
        self.dropped_rows.update(census.dropped_rows)
        self.dropped_tokens.update(census.dropped_tokens)
        self.mismatches.update(census.mismatches)
        self.padding = census.padding
        self.staleness.add_all(census.staleness.tolist())
