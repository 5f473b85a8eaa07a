"""Each run's metrics, out of its readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, Sample

from gristmill_service.monitoring.bucket_counts import BucketCounts
from gristmill_service.monitoring.metrics.exposition import labels_of
from gristmill_service.monitoring.run_metrics import REASONS, STAGES, bounded_reason
from gristmill_service.monitoring.run_stats import RunStats
from gristmill_service.pipeline.batch_stats import CAUSES, LEVELS, ROW_KINDS, TOKEN_KINDS
from gristmill_service.run.machine.answers import Outcome

# A trajectory's rows are superseded, and a plan's misaligned, never a whole group here.
_GROUP_REASONS = tuple(reason for reason in REASONS if reason not in ("misaligned", "superseded"))

_Values = Iterable[tuple[tuple[str, ...], float]]


class _Told(NamedTuple):
    """A gauge, or a counter where its name ends in `_total`. labels: after `run`. values: by those labels."""

    name: str
    help: str
    labels: Sequence[str]
    values: Callable[[RunStats], _Values]


class _Spread(NamedTuple):
    """A histogram."""

    name: str
    help: str
    labels: Sequence[str]
    tallies: Callable[[RunStats], Iterable[tuple[tuple[str, ...], BucketCounts]]]


def _one(value: Callable[[RunStats], float]) -> Callable[[RunStats], _Values]:
    return lambda found: [((), value(found))]


def _by(keys: Sequence[str], counts: Callable[[RunStats], Mapping[str, float]]) -> Callable[[RunStats], _Values]:
    """Each key from the start on, so that its first count is an increase."""

    def values(found: RunStats) -> _Values:
        counted = counts(found)
        return [((key,), counted.get(key, 0)) for key in keys]

    return values


def _groups(found: RunStats) -> _Values:
    status = found.status
    counts = {"open": status.groups_open, "complete": status.groups_complete, "room": status.groups_room}
    return [((state,), count) for state, count in counts.items()]


def _groups_dropped(found: RunStats) -> _Values:
    counts = dict.fromkeys(_GROUP_REASONS, 0)
    for reason, count in found.status.groups_dropped.items():
        label = bounded_reason(reason)
        counts[label] = counts.get(label, 0) + count
    return [((reason,), count) for reason, count in counts.items()]


def _batches(found: RunStats) -> _Values:
    status = found.status
    yield ("sealed",), status.batches_sealed
    yield ("published",), status.batches_published
    yield ("failed",), len(status.failed_batches)
    yield ("freed",), status.batches_freed


def _outcomes(counts: Callable[[RunStats], Mapping[Outcome, int]]) -> Callable[[RunStats], _Values]:
    def values(found: RunStats) -> _Values:
        counted = counts(found)
        return [((outcome.name.lower(),), counted.get(outcome, 0)) for outcome in Outcome]

    return values


def _ranks(value: str) -> Callable[[RunStats], _Values]:
    return lambda found: [((rank.model, str(rank.rank)), getattr(rank, value)) for rank in found.ranks]


_RANK = ("model", "rank")

_TOLD: Sequence[_Told] = (
    _Told("gristmill_rows_total", "Rows received, by what became of them.", ("outcome",),
          _outcomes(lambda found: found.meters.rows)),
    _Told("gristmill_tokens_total", "Prompt and response tokens received, by what became of their rows.", ("outcome",),
          _outcomes(lambda found: found.meters.tokens)),
    _Told("gristmill_rows_dropped_total", "Accepted rows that are not trained, by reason.", ("reason",),
          _by(REASONS, lambda found: found.meters.dropped_rows)),
    _Told("gristmill_tokens_dropped_total", "Tokens of accepted rows that are not trained, by reason.", ("reason",),
          _by(REASONS, lambda found: found.meters.dropped_tokens)),
    _Told("gristmill_batch_rows_total", "Rows of published batches.", ("kind",),
          _by(ROW_KINDS, lambda found: found.meters.batch_rows)),
    _Told("gristmill_batch_tokens_total", "Tokens of published batches.", ("kind",),
          _by(TOKEN_KINDS, lambda found: found.meters.batch_tokens)),
    _Told("gristmill_padding_share", "Share of the last published batch that is padding.", ("level",),
          lambda found: [((level,), found.meters.padding[level]) for level in LEVELS if level in found.meters.padding]),
    _Told("gristmill_prefix_mismatches_total", "Steps that did not extend the one before.", ("cause",),
          _by(CAUSES, lambda found: found.meters.mismatches)),
    _Told("gristmill_groups", "Prompt groups: open, complete, room.", ("state",), _groups),
    _Told("gristmill_groups_dropped_total", "Groups dropped, by reason.", ("reason",), _groups_dropped),
    _Told("gristmill_groups_shortened_total", "Groups that went on with fewer samples.", ("reason",),
          _by(("timeout",), lambda found: found.meters.closed)),
    _Told("gristmill_oldest_open_group_seconds", "Age of the oldest group that is not complete.", (),
          _one(lambda found: found.oldest_open)),
    _Told("gristmill_batches_total", "Batches, by how far they came.", ("stage",), _batches),
    _Told("gristmill_batches_buffered", "Batches that are sealed and not freed.", (),
          _one(lambda found: found.batches_buffered)),
    _Told("gristmill_batches_buffered_limit", "As many may be: max_buffered_batches.", (),
          _one(lambda found: found.max_buffered_batches)),
    _Told("gristmill_held_bytes", "Bytes held of rows and of shards.", ("kind",),
          lambda found: [(("rows",), found.status.row_bytes), (("shards",), found.status.shard_bytes)]),
    _Told("gristmill_held_limit_bytes", "As many may be held: max_buffered_bytes.", (),
          _one(lambda found: found.max_buffered_bytes)),
    _Told("gristmill_throttled_seconds_total", "Seconds during which workers waited for room.", (),
          _one(lambda found: found.throttled)),
    _Told("gristmill_rank_pulls_total", "Shards that the rank was given.", _RANK, _ranks("pulls")),
    _Told("gristmill_rank_pulled_bytes_total", "Bytes of the shards that the rank was given.", _RANK, _ranks("nbytes")),
    _Told("gristmill_rank_acknowledged_total", "Shards that the rank acknowledged.", _RANK, _ranks("acknowledged")),
    _Told("gristmill_rank_wait_seconds_total", "Seconds during which the rank had nothing to train on.", _RANK,
          _ranks("waited")),
    _Told("gristmill_rank_lag_shards", "Shards that the rank is behind the one that is furthest.", _RANK,
          _ranks("lag")),
    _Told("gristmill_policy_version", "The version that rollouts sample from.", (),
          _one(lambda found: found.status.policy_version)),
    _Told("gristmill_committed_batch", "The batch that the model's training is committed up to.", ("model",),
          lambda found: [((model.model,), model.committed.batch) for model in found.status.models]),
    _Told("gristmill_journal_bytes", "Bytes of the run's log of events.", (), _one(lambda found: found.journal_bytes)),
    _Told("gristmill_lease_seconds", "Seconds for which this process decides unless it renews that.", (),
          lambda found: [] if found.lease is None else [((), found.lease)]),
)  # fmt: skip

_SPREADS: Sequence[_Spread] = (
    _Spread("gristmill_stage_seconds", "Seconds of each stage of making a batch.", ("stage",),
            lambda found: [((stage,), found.meters.stages[stage]) for stage in STAGES]),
    _Spread("gristmill_seal_seconds", "Seconds from when a batch's first group was begun until it was sealed.", (),
            lambda found: [((), found.meters.seal)]),
    _Spread("gristmill_publish_seconds", "Seconds from a batch's seal until it was published.", (),
            lambda found: [((), found.meters.publish)]),
    _Spread("gristmill_staleness_versions", "Policy versions that a trained trajectory was behind.", (),
            lambda found: [((), found.meters.staleness)]),
)  # fmt: skip


def run_metrics(readings: Sequence[RunStats]) -> Iterator[Metric]:
    for told in _TOLD:
        family = CounterMetricFamily if told.name.endswith("_total") else GaugeMetricFamily
        names = ("run", *told.labels)
        metric = family(told.name, told.help, labels=names)
        # As `add_metric` does, but for making the labels anew.
        metric.samples = [
            Sample(told.name, labels_of(names, (found.status.run, *labels)), value)
            for found in readings
            for labels, value in told.values(found)
        ]
        yield metric
    for spread in _SPREADS:
        histogram = HistogramMetricFamily(spread.name, spread.help, labels=("run", *spread.labels))
        histogram.samples = [
            sample
            for found in readings
            for labels, tally in spread.tallies(found)
            for sample in _samples(spread, (found.status.run, *labels), tally)
        ]
        yield histogram


def _samples(spread: _Spread, values: tuple[str, ...], tally: BucketCounts) -> Iterator[Sample]:
    names = ("run", *spread.labels)
    for bound, count in tally.up_to():
        yield Sample(f"{spread.name}_bucket", labels_of((*names, "le"), (*values, bound)), count)
    labels = labels_of(names, values)
    yield Sample(f"{spread.name}_count", labels, count)
    yield Sample(f"{spread.name}_sum", labels, tally.sum)
