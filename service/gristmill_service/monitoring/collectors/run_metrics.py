"""The counts of a run for metrics. They start at 0 when a process becomes the run's owner.

Nothing is counted twice: neither events that a restart replays, nor a batch that is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from gristmill._wire.columns import sum_of
from gristmill._wire.steps import Steps
from gristmill_service import tracing
from gristmill_service.config import Model
from gristmill_service.monitoring.collectors.rank_metrics import ASKS_AGAIN_S, RankMetrics
from gristmill_service.pipeline.figures import Figures, most_frequent
from gristmill_service.pipeline.rows.breaks import CAUSES
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

REASONS = (
    "aborted", "batch_failed", "finished", "misaligned", "rows_lost", "stale", "superseded", "surplus",
    "timeout", "zero_variance"
)  # fmt: skip
ROW_KINDS = ("submitted", "merged", "trained", "padding")
TOKEN_KINDS = (*ROW_KINDS, "loss", "realigned", "distinct")
STAGES = ("queue", "gather", "validate", "merge", "advantage", "schedule", "layout", "plan", "publish")
_OUTCOMES = tuple(outcome.name.lower() for outcome in Outcome)
# Counters by name, without `_total`: help, labels, and initial values of a single label, so that the first count of
# each value is visible as an increase.
_COUNTERS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "gristmill_rows": ("Rows received, by outcome.", ("outcome",), _OUTCOMES),
    "gristmill_tokens": (
        "Prompt and response tokens received, by the outcome of their rows.", ("outcome",), _OUTCOMES
    ),
    "gristmill_rows_dropped": ("Accepted rows that are not trained, by reason.", ("reason",), REASONS),
    "gristmill_tokens_dropped": ("Tokens of accepted rows that are not trained, by reason.", ("reason",), REASONS),
    "gristmill_groups_shortened": ("Groups that went on with fewer samples.", ("reason",), ("timeout",)),
    "gristmill_batch_rows": ("Rows of published batches.", ("kind",), ROW_KINDS),
    "gristmill_batch_tokens": ("Tokens of published batches.", ("kind",), TOKEN_KINDS),
    "gristmill_prefix_mismatches": ("Later steps that joined none before them.", ("cause",), CAUSES),
    "gristmill_column_bytes": (
        "Bytes of declared columns, in received rows and in shards.", ("column", "kind"), ()
    ),
    "gristmill_tag_groups": ("Prompt groups of published batches, by tag.", ("tag",), ()),
    "gristmill_tag_short_batches": ("Batches sealed with fewer groups of a tag than its share.", ("tag",), ()),
}  # fmt: skip
# Gauges of the last published batch, or of the last batch with the tag.
_GAUGES = {
    "gristmill_padding_share": ("Share of the last published batch that is padding.", "level"),
    "gristmill_tag_score_mean": ("Mean score of trajectories of the last batch with the tag.", "tag"),
    "gristmill_tag_response_length_mean": ("Mean response tokens of the same trajectories.", "tag"),
    "gristmill_agent_score_mean": ("Mean score of trajectories of the last batch with the agent.", "agent"),
    "gristmill_reward_component_mean": ("Mean of a component of rewards in the last batch.", "component"),
    "gristmill_running_baseline": ("Running baseline after the last batch, by TAG/AGENT.", "baseline"),
    "gristmill_tag_padding_share": ("Share of the rows of a tag that is padding, in the last batch with it.", "tag"),
}
_MEANS = {
    "agents": "gristmill_agent_score_mean",
    "components": "gristmill_reward_component_mean",
    "baselines": "gristmill_running_baseline",
}
# The buckets range from a stage of a small batch to waiting for a trainer or a full disk.
_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_VERSIONS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_HISTOGRAMS = {
    "gristmill_seal_seconds": ("Seconds from when a batch's first group was begun until it was sealed.", _SECONDS),
    "gristmill_publish_seconds": ("Seconds from a batch's seal until it was published.", _SECONDS),
    "gristmill_staleness_versions": ("Policy versions that a trained trajectory was behind.", _VERSIONS),
}
# Events after which any rank may continue or start to wait; an acknowledgement affects only one rank.
_MOVES_RANKS = frozenset(
    [BatchPublished, BatchWithdrawn, BatchFailed, BatchGivenUp, ModelResumed, Resized, RunFinished]
)


def bounded_reason(reason: str) -> str:
    """Returns the label for a drop reason: `aborted` for a reason from a client, so that the number of labels is
    limited."""
    return reason if reason in REASONS else "aborted"


@dataclass(slots=True)
class _Build:
    """A batch that is sealed and not published. figures: set when it is built for the first time."""

    sealed_at: float
    is_started: bool = False
    figures: Figures | None = None


class _Spent(NamedTuple):
    """Seconds since this process became the run's owner. waited: the part during which workers waited for capacity, and
    during which a rank of the policy waited. stages: the seconds in each stage of building batches."""

    passed: float
    workers_waited: float
    ranks_waited: float
    stages: dict[str, float]


class RunMetrics:
    """The counts of a run. Call it on the event loop, or with the state locked; the thread that builds the run's
    batches may also call `timed`, `building` and `built`.

    clock: returns seconds, like `time.monotonic`. now: returns the run's time, in which groups are admitted.
    """

    def __init__(self, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._clock, self._now, self._began = clock, now, clock()
        self._builds: dict[int, _Build] = {}
        # The waiting time of workers until their last request, and the start of the current wait; replaced together.
        self._throttled: tuple[float, float | None] = (0.0, None)
        self._stage_sums = dict.fromkeys(STAGES, 0.0)
        self._ranks = RankMetrics(clock)
        # The seconds at the time when the last batch was built.
        self._spent = self._spent_until_now()
        # A separate registry, so that the series begin and end with the run.
        registry = self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, text, labels, registry=registry) for name, (text, labels, _) in _COUNTERS.items()
        }
        for name, (_, _, values) in _COUNTERS.items():
            for value in values:
                self._counters[name].labels(value)
        self._received = {
            outcome: tuple(self._counters[name].labels(label) for name in ("gristmill_rows", "gristmill_tokens"))
            for outcome, label in zip(Outcome, _OUTCOMES, strict=True)
        }
        self._gauges = {name: Gauge(name, text, (label,), registry=registry) for name, (text, label) in _GAUGES.items()}
        self._histograms = {
            name: Histogram(name, text, registry=registry, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        stages = Histogram(
            "gristmill_stage_seconds",
            "Seconds of each stage of building a batch.",
            ("stage",),
            registry=registry,
            buckets=_SECONDS,
        )
        self._stages = {stage: stages.labels(stage) for stage in STAGES}

    def run_time(self) -> float:
        """The run's time, in seconds."""
        return self._now()

    def collect(self, state: State) -> list[Metric]:
        """Returns all counts. state: the current state, so that it is consistent with the counts."""
        throttled = CounterMetricFamily(
            "gristmill_throttled_seconds",
            "Seconds during which workers waited for capacity.",
            self._throttled_until_now(),
        )
        return [*self._registry.collect(), throttled, *self._ranks.collect(state)]

    def received(self, outcomes: Sequence[Outcome], steps: Steps) -> None:
        """Counts a request's rows by outcome."""
        if not outcomes:
            return
        for name, extra in steps.extras.items():
            self._inc("gristmill_column_bytes", int(extra.row_bytes.sum()), name, "rows")
        first = outcomes[0]
        # Usually all rows of a request have the same outcome.
        if outcomes.count(first) == len(outcomes):
            self._count_received(first, len(outcomes), sum_of(steps.sequence_lengths))
            return
        values = np.array([outcome.value for outcome in outcomes])
        tokens = np.bincount(values, weights=steps.sequence_lengths).tolist()
        for outcome in set(outcomes):
            self._count_received(outcome, outcomes.count(outcome), int(tokens[outcome.value]))

    def refused(self, rows: int) -> None:
        self._received[Outcome.REFUSED][0].inc(rows)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Measures the `with` block as a stage of building a batch."""
        begin = self._clock()
        try:
            with tracing.span(stage):
                yield
        finally:
            self._count_stage(stage, self._clock() - begin)

    def building(self, batch: int) -> None:
        """Counts the time that the batch waited for the builder. Called when the builder starts with it."""
        build = self._builds.setdefault(batch, _Build(self._clock()))
        if not build.is_started:
            build.is_started = True
            self._count_stage("queue", self._clock() - build.sealed_at)

    def built(self, batch: int, figures: Figures, at: float) -> Figures:
        """Counts a batch that will be published for the first time. Returns its figures for the log, with the seconds
        since the previous batch. at: the current time, in seconds since 1970."""
        self._builds.setdefault(batch, _Build(self._clock())).figures = figures
        before, self._spent = self._spent, self._spent_until_now()
        return replace(
            figures,
            at=round(at, 1),
            seconds=self._spent.passed - before.passed,
            workers_waited=self._spent.workers_waited - before.workers_waited,
            # The sum may decrease when ranks are removed.
            ranks_waited=max(0.0, self._spent.ranks_waited - before.ranks_waited),
            stages={stage: round(seconds - before.stages[stage], 4) for stage, seconds in self._spent.stages.items()},
            tags=most_frequent(figures.tags),
            staleness={},
        )

    def asked_for_groups(self, found_room: bool) -> None:
        """Counts a worker's request to begin groups. Workers wait between two requests without capacity."""
        self._throttled = self._throttled_until_now(), None if found_room else self._clock()

    def asked_for_shard(self, state: State, model: Model, rank: int) -> None:
        self._ranks.asked(state, model, rank)

    def gave_shard(self, model: Model, rank: int, nbytes: int) -> None:
        self._ranks.pulled(model, rank, nbytes)

    def applied(self, event: Event, state: State, released: int, tokens: Callable[[], int]) -> None:
        """Counts an event. released, tokens: the rows that nothing refers to any more, and their tokens."""
        if type(event) is RowsStored and not released:
            # This happens thousands of times a second.
            return
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
                self._inc("gristmill_groups_shortened", 1, bounded_reason(reason))
                self._drop(bounded_reason(reason), released, tokens())
            case BatchFailed(batch):
                self._builds.pop(batch, None)
                self._drop(BATCH_FAILED, released, tokens())
            case BatchGivenUp(batch, reason):
                self._builds.pop(batch, None)
                self._drop(bounded_reason(reason), released, tokens())
            case BatchSealed(batch):
                self._builds[batch] = _Build(self._clock())
                for tag in event.short_tags:
                    self._inc("gristmill_tag_short_batches", 1, tag)
                oldest = min(group.admitted_at for group in state.batches[batch].groups)
                self._histograms["gristmill_seal_seconds"].observe(max(0.0, self._now() - oldest))
            case BatchPublished(batch):
                self._count_published(self._builds.pop(batch, None))
            case BatchWithdrawn(batch):
                self._builds[batch] = _Build(self._clock())
            case BatchFreed(batch):
                self._builds.pop(batch, None)
                if batch in state.failed:
                    self._drop(BATCH_FAILED, released, tokens())

    def _throttled_until_now(self) -> float:
        seconds, since = self._throttled
        return seconds if since is None else seconds + min(self._clock() - since, ASKS_AGAIN_S)

    def _count_received(self, outcome: Outcome, count: int, tokens: int) -> None:
        of_rows, of_tokens = self._received[outcome]
        of_rows.inc(count)
        of_tokens.inc(tokens)

    def _count_stage(self, stage: str, seconds: float) -> None:
        self._stages[stage].observe(seconds)
        self._stage_sums[stage] += seconds

    def _inc(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(*labels).inc(amount)

    def _drop(self, reason: str, rows: int, tokens: int) -> None:
        if rows:
            self._inc("gristmill_rows_dropped", rows, reason)
            self._inc("gristmill_tokens_dropped", tokens, reason)

    def _count_published(self, build: _Build | None) -> None:
        if build is None:
            return
        self._histograms["gristmill_publish_seconds"].observe(self._clock() - build.sealed_at)
        if (figures := build.figures) is not None:
            self._count_figures(figures)

    def _count_figures(self, figures: Figures) -> None:
        rows = (figures.rows, figures.merged, figures.trained, figures.padding)
        for kind, count in zip(ROW_KINDS, rows, strict=True):
            self._inc("gristmill_batch_rows", count, kind)
        tokens = (
            *(figures.submitted_tokens, figures.merged_tokens, figures.tokens, figures.padding_tokens),
            *(figures.loss_tokens, figures.realigned_tokens, figures.distinct),
        )
        for kind, count in zip(TOKEN_KINDS, tokens, strict=True):
            self._inc("gristmill_batch_tokens", count, kind)
        self._drop("stale", figures.stale_rows, figures.stale_tokens)
        self._drop("misaligned", figures.misaligned_rows, figures.misaligned_tokens)
        for cause, count in figures.mismatches.items():
            self._inc("gristmill_prefix_mismatches", count, cause)
        for name, nbytes in figures.column_bytes.items():
            self._inc("gristmill_column_bytes", nbytes, name, "shards")
        self._gauges["gristmill_padding_share"].clear()
        for level, share in figures.padding_shares.items():
            self._gauges["gristmill_padding_share"].labels(level).set(share)
        for tag, counts in figures.tags.items():
            if tag:
                self._inc("gristmill_tag_groups", counts.groups, tag)
                self._gauges["gristmill_tag_score_mean"].labels(tag).set(counts.means["score_mean"])
                lengths = counts.means["response_length_mean"]
                self._gauges["gristmill_tag_response_length_mean"].labels(tag).set(lengths)
                self._gauges["gristmill_tag_padding_share"].labels(tag).set(counts.padding_share)
        for name, mean in figures.means.items():
            kind, _, rest = name.partition("/")
            self._gauges[_MEANS[kind]].labels(rest.removesuffix("/score_mean").removesuffix("/mean")).set(mean.value)
        for behind, trajectories in figures.staleness.items():
            for _ in range(trajectories):
                self._histograms["gristmill_staleness_versions"].observe(behind)

    def _spent_until_now(self) -> _Spent:
        return _Spent(
            passed=self._clock() - self._began,
            workers_waited=self._throttled_until_now(),
            ranks_waited=self._ranks.waited("policy"),
            stages=self._stage_sums.copy(),
        )
