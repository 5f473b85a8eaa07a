"""The counts of a run for metrics, from when this process took it: they begin at 0 with each process.

Nothing is counted twice: neither what a restart replays, nor a batch that is built again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import structlog

from gristmill._wire.columns import sum_of
from gristmill._wire.steps import Steps
from gristmill_service import tracing
from gristmill_service.config import Model
from gristmill_service.monitoring.collectors.bucket_counts import SECONDS, VERSIONS, BucketCounts
from gristmill_service.monitoring.collectors.rank_metrics import ASKS_AGAIN_S, RankMetrics, RankStats
from gristmill_service.pipeline.batch_stats import BatchStats
from gristmill_service.pipeline.tag_metrics import Figures
from gristmill_service.run.machine.answers import Outcome
from gristmill_service.run.machine.events import (
    Acknowledged,
    BatchFailed,
    BatchFreed,
    BatchGivenUp,
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
from gristmill_service.run.machine.state import BATCH_FAILED, State

_log = structlog.get_logger(__name__)

REASONS = (
    "aborted", "batch_failed", "finished", "misaligned", "rows_lost", "stale", "superseded", "surplus",
    "timeout", "zero_variance"
)  # fmt: skip
STAGES = ("queue", "gather", "validate", "merge", "advantage", "schedule", "layout", "plan", "publish")
# Events that may let any rank go on, or make it wait; an acknowledgement moves one alone.
_MOVES_RANKS = frozenset(
    [BatchPublished, BatchWithdrawn, BatchFailed, BatchGivenUp, ModelResumed, Resized, RunFinished]
)


def bounded_reason(reason: str) -> str:
    """A client's own reason is counted as `aborted`: labels are few."""
    return reason if reason in REASONS else "aborted"


@dataclass(slots=True)
class _Build:
    """A batch on its way from its seal to its publication. stats: once it was built for the first time."""

    sealed_at: float
    is_started: bool = False
    stats: BatchStats | None = None


class SpentSeconds(NamedTuple):
    """Seconds since the process took the run. waited: of these, those in which workers waited for room, and in which a
    rank of the policy waited. stages: those in each stage of building batches."""

    passed: float
    workers_waited: float
    ranks_waited: float
    stages: dict[str, float]


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Everything that was counted of a run, at one moment.

    closed: groups that went on with fewer samples, by reason. column_bytes: of declared columns, by name and
    kind (rows, shards). padding: the last published batch's shares. tags: figures of each tag, of the last published
    batch that had it. tag_groups: groups of published batches. tags_short: batches sealed with fewer groups of the tag
    than its share. throttled: seconds during which workers waited for room.
    """

    rows: Counter[Outcome]
    tokens: Counter[Outcome]
    dropped_rows: Counter[str]
    dropped_tokens: Counter[str]
    closed: Counter[str]
    batch_rows: Counter[str]
    batch_tokens: Counter[str]
    mismatches: Counter[str]
    column_bytes: Counter[tuple[str, str]]
    padding: dict[str, float]
    tags: dict[str, Figures]
    tag_groups: Counter[str]
    tags_short: Counter[str]
    staleness: BucketCounts
    stages: dict[str, BucketCounts]
    seal: BucketCounts
    publish: BucketCounts
    throttled: float
    ranks: list[RankStats]


class RunMetrics:
    """Thread-safe. `_lock` guards every attribute that changes; whoever holds the state takes it after the state's.

    clock: seconds, as `time.monotonic`. now: the run's own time, in which groups are admitted.
    """

    def __init__(self, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._clock, self._now, self._began = clock, now, clock()
        self._lock = threading.Lock()
        self._builds: dict[int, _Build] = {}
        self._throttled = 0.0
        self._full_at: float | None = None
        self._rows: Counter[Outcome] = Counter()
        self._tokens: Counter[Outcome] = Counter()
        self._dropped_rows: Counter[str] = Counter()
        self._dropped_tokens: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._batch_rows: Counter[str] = Counter()
        self._batch_tokens: Counter[str] = Counter()
        self._mismatches: Counter[str] = Counter()
        self._column_bytes: Counter[tuple[str, str]] = Counter()
        self._padding: dict[str, float] = {}
        self._tags: dict[str, Figures] = {}
        self._tag_groups: Counter[str] = Counter()
        self._tags_short: Counter[str] = Counter()
        self._staleness = BucketCounts(VERSIONS)
        self._stages = {stage: BucketCounts(SECONDS) for stage in STAGES}
        self._seal, self._publish = BucketCounts(SECONDS), BucketCounts(SECONDS)
        self._ranks = RankMetrics(clock)

    def run_time(self) -> float:
        """The run's own time, in seconds."""
        return self._now()

    def snapshot(self, state: State) -> MetricsSnapshot:
        """state: as it is now, and locked, so that it and the counts agree."""
        with self._lock:
            return MetricsSnapshot(
                rows=self._rows.copy(),
                tokens=self._tokens.copy(),
                dropped_rows=self._dropped_rows.copy(),
                dropped_tokens=self._dropped_tokens.copy(),
                closed=self._closed.copy(),
                batch_rows=self._batch_rows.copy(),
                batch_tokens=self._batch_tokens.copy(),
                mismatches=self._mismatches.copy(),
                column_bytes=self._column_bytes.copy(),
                padding=self._padding,
                tags=dict(self._tags),
                tag_groups=self._tag_groups.copy(),
                tags_short=self._tags_short.copy(),
                staleness=self._staleness.copy(),
                stages={stage: counts.copy() for stage, counts in self._stages.items()},
                seal=self._seal.copy(),
                publish=self._publish.copy(),
                throttled=self._throttled_until_now(),
                ranks=list(self._ranks.stats(state)),
            )

    def spent(self) -> SpentSeconds:
        """What time was spent on until now."""
        with self._lock:
            return SpentSeconds(
                passed=self._clock() - self._began,
                workers_waited=self._throttled_until_now(),
                ranks_waited=self._ranks.waited("policy"),
                stages={stage: counts.sum for stage, counts in self._stages.items()},
            )

    def received(self, outcomes: Sequence[Outcome], steps: Steps) -> None:
        """Counts a request's rows, by what became of them."""
        if not outcomes:
            return
        if steps.extras:
            with self._lock:
                for name, extra in steps.extras.items():
                    self._column_bytes[name, "rows"] += int(extra.row_bytes.sum())
        first = outcomes[0]
        # Nearly always all rows of a request have one outcome.
        if outcomes.count(first) == len(outcomes):
            with self._lock:
                self._rows[first] += len(outcomes)
                self._tokens[first] += sum_of(steps.sequence_lengths)
            return
        values = np.array([outcome.value for outcome in outcomes])
        tokens = np.bincount(values, weights=steps.sequence_lengths).tolist()
        with self._lock:
            self._rows.update(outcomes)
            self._tokens.update({outcome: int(tokens[outcome.value]) for outcome in set(outcomes)})

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Measures its body as a stage of building a batch."""
        begin = self._clock()
        try:
            with tracing.span(stage):
                yield
        finally:
            seconds = self._clock() - begin
            with self._lock:
                self._stages.setdefault(stage, BucketCounts(SECONDS)).add(seconds)

    def building(self, batch: int) -> None:
        """The batch's turn has come."""
        with self._lock:
            build = self._builds.setdefault(batch, _Build(self._clock()))
            if not build.is_started:
                build.is_started = True
                self._stages["queue"].add(self._clock() - build.sealed_at)

    def built(self, batch: int, stats: BatchStats) -> None:
        """The batch will be published for the first time, with these rows and tokens."""
        with self._lock:
            self._builds.setdefault(batch, _Build(self._clock())).stats = stats

    def asked_for_groups(self, found_room: bool) -> None:
        """A worker asked to begin groups. Between two that found no room, workers waited."""
        with self._lock:
            self._throttled = self._throttled_until_now()
            self._full_at = None if found_room else self._clock()

    def asked_for_shard(self, state: State, model: Model, rank: int) -> None:
        with self._lock:
            self._ranks.asked(state, model, rank)

    def gave_shard(self, model: Model, rank: int, nbytes: int) -> None:
        with self._lock:
            self._ranks.pulled(model, rank, nbytes)

    def applied(self, event: Event, state: State, released: int, tokens: Callable[[], int]) -> None:
        """released, tokens: of the rows that nothing refers to any more."""
        if type(event) is RowsStored and not released:
            # This happens thousands of times a second.
            return
        with self._lock:
            self._count(event, state, released, tokens)
            if type(event) in _MOVES_RANKS:
                self._ranks.update_all(state)

    def _count(self, event: Event, state: State, released: int, tokens: Callable[[], int]) -> None:
        match event:
            case RowsStored():
                self._drop("superseded", released, tokens())
            case Acknowledged(model, rank, _):
                self._ranks.acknowledged(state, model, rank)
            case GroupDropped(_, reason) | TrajectoryAborted(_, reason):
                self._drop(bounded_reason(reason), released, tokens())
            case GroupClosed(_, reason):
                self._closed[bounded_reason(reason)] += 1
                self._drop(bounded_reason(reason), released, tokens())
            case BatchFailed(batch):
                self._builds.pop(batch, None)
                self._drop(BATCH_FAILED, released, tokens())
            case BatchGivenUp(batch, reason):
                self._builds.pop(batch, None)
                self._drop(bounded_reason(reason), released, tokens())
            case BatchSealed(batch):
                self._builds[batch] = _Build(self._clock())
                self._tags_short.update(event.short_tags)
                oldest = min(group.admitted_at for group in state.batches[batch].groups)
                self._seal.add(max(0.0, self._now() - oldest))
            case BatchPublished(batch):
                self._count_published(self._builds.pop(batch, None))
            case BatchWithdrawn(batch):
                self._builds[batch] = _Build(self._clock())
            case BatchFreed(batch):
                self._builds.pop(batch, None)
                if batch in state.failed:
                    self._drop(BATCH_FAILED, released, tokens())

    def _throttled_until_now(self) -> float:
        waits = 0.0 if self._full_at is None else min(self._clock() - self._full_at, ASKS_AGAIN_S)
        return self._throttled + waits

    def _drop(self, reason: str, rows: int, tokens: int) -> None:
        if rows:
            self._dropped_rows[reason] += rows
            self._dropped_tokens[reason] += tokens

    def _count_published(self, build: _Build | None) -> None:
        if build is None:
            return
        self._publish.add(self._clock() - build.sealed_at)
        if (stats := build.stats) is None:
            return
        self._batch_rows.update(stats.rows)
        self._batch_tokens.update(stats.tokens)
        self._dropped_rows.update(stats.dropped_rows)
        self._dropped_tokens.update(stats.dropped_tokens)
        self._mismatches.update(stats.mismatches)
        self._column_bytes.update({(name, "shards"): nbytes for name, nbytes in stats.column_bytes.items()})
        self._padding = stats.padding
        self._tags |= stats.tags
        self._tag_groups.update({tag: int(figures["prompts"]) for tag, figures in stats.tags.items()})
        self._staleness.add_all(stats.staleness.tolist())
