"""Each run's metrics, made of its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric, Sample

from gristmill_service.monitoring.collectors.bucket_counts import BucketCounts
from gristmill_service.monitoring.collectors.run_metrics import REASONS, STAGES, bounded_reason
from gristmill_service.monitoring.health.health_models import STATES
from gristmill_service.monitoring.metrics.exposition import labels_of
from gristmill_service.monitoring.metrics.run_stats import RunStats
from gristmill_service.pipeline.batch_stats import CAUSES, LEVELS, ROW_KINDS, TOKEN_KINDS
from gristmill_service.run.machine.answers import Outcome

# A trajectory's rows are superseded or surplus, and a plan's misaligned, never a whole group here.
_GROUP_REASONS = tuple(reason for reason in REASONS if reason not in ("misaligned", "superseded", "surplus"))

_Values = Iterable[tuple[tuple[str, ...], float]]


class _Series(NamedTuple):
    """A gauge, or a counter where its name ends in `_total`. labels: after `run`. values: by those labels."""

    name: str
    help: str
    labels: Sequence[str]
    values: Callable[[RunStats], _Values]


class _Histogram(NamedTuple):
    """A histogram."""

    name: str
    help: str
    labels: Sequence[str]
    counts: Callable[[RunStats], Iterable[tuple[tuple[str, ...], BucketCounts]]]


def _one(value: Callable[[RunStats], float]) -> Callable[[RunStats], _Values]:
    return lambda found: [((), value(found))]


def _by(keys: Sequence[str], counts: Callable[[RunStats], Mapping[str, float]]) -> Callable[[RunStats], _Values]:
    """Each key from the start on, so that its first count is an increase."""

    def values(found: RunStats) -> _Values:
        counted = counts(found)
        return [((key,), counted.get(key, 0)) for key in keys]

    return values


def _groups(found: RunStats) -> _Values:
    counts = found.counts
    yield ("open",), counts.groups_open
    yield ("complete",), counts.groups_complete
    yield ("room",), counts.groups_room


def _groups_dropped(found: RunStats) -> _Values:
    counts = dict.fromkeys(_GROUP_REASONS, 0)
    for reason, count in found.groups_dropped.items():
        label = bounded_reason(reason)
        counts[label] = counts.get(label, 0) + count
    return [((reason,), count) for reason, count in counts.items()]


def _batches(found: RunStats) -> _Values:
    counts = found.counts
    yield ("sealed",), counts.batches_sealed
    yield ("published",), counts.batches_published
    yield ("failed",), counts.batches_failed
    yield ("freed",), counts.batches_freed


def _outcomes(counts: Callable[[RunStats], Mapping[Outcome, int]]) -> Callable[[RunStats], _Values]:
    def values(found: RunStats) -> _Values:
        counted = counts(found)
        return [((outcome.name.lower(),), counted.get(outcome, 0)) for outcome in Outcome]

    return values


def _ranks(value: str) -> Callable[[RunStats], _Values]:
    return lambda found: [((rank.model, str(rank.rank)), getattr(rank, value)) for rank in found.counted.ranks]


def _by_tag(figure: str) -> Callable[[RunStats], _Values]:
    """Samples by tag, each of the last published batch that had the tag."""
    return lambda found: [((tag,), own[figure]) for tag, own in found.counted.tags.items() if tag and figure in own]


def _tag_counts(counts: Callable[[RunStats], Mapping[str, int]]) -> Callable[[RunStats], _Values]:
    return lambda found: [((tag,), count) for tag, count in counts(found).items() if tag]


_RANK = ("model", "rank")

_SERIES: Sequence[_Series] = (
    _Series("gristmill_run_state", "1 for the state that the run is in, 0 for the others.", ("state",),
            lambda found: [((state,), int(state == found.health)) for state in STATES]),
    _Series("gristmill_rows_total", "Rows received, by what became of them.", ("outcome",),
            _outcomes(lambda found: found.counted.rows)),
    _Series("gristmill_tokens_total", "Prompt and response tokens received, by what became of their rows.",
            ("outcome",),
            _outcomes(lambda found: found.counted.tokens)),
    _Series("gristmill_rows_dropped_total", "Accepted rows that are not trained, by reason.", ("reason",),
            _by(REASONS, lambda found: found.counted.dropped_rows)),
    _Series("gristmill_tokens_dropped_total", "Tokens of accepted rows that are not trained, by reason.", ("reason",),
            _by(REASONS, lambda found: found.counted.dropped_tokens)),
    _Series("gristmill_batch_rows_total", "Rows of published batches.", ("kind",),
            _by(ROW_KINDS, lambda found: found.counted.batch_rows)),
    _Series("gristmill_batch_tokens_total", "Tokens of published batches.", ("kind",),
            _by(TOKEN_KINDS, lambda found: found.counted.batch_tokens)),
    _Series("gristmill_padding_share", "Share of the last published batch that is padding.", ("level",),
            lambda found: [((level,), share) for level, share in found.counted.padding.items() if level in LEVELS]),
    _Series("gristmill_prefix_mismatches_total", "Later steps that joined none before them.", ("cause",),
            _by(CAUSES, lambda found: found.counted.mismatches)),
    _Series("gristmill_column_bytes_total", "Bytes of declared columns: as rows brought them, as shards have them.",
            ("column", "kind"), lambda found: list(found.counted.column_bytes.items())),
    _Series("gristmill_tag_groups_total", "Prompt groups of published batches, by tag.", ("tag",),
            _tag_counts(lambda found: found.counted.tag_groups)),
    _Series("gristmill_tag_short_batches_total", "Batches sealed with fewer groups of a tag than its share.", ("tag",),
            _tag_counts(lambda found: found.counted.tags_short)),
    _Series("gristmill_tag_score_mean", "Mean score of trajectories of the last batch with the tag.", ("tag",),
            _by_tag("score_mean")),
    _Series("gristmill_tag_response_length_mean", "Mean response tokens of the same trajectories.",
            ("tag",), _by_tag("response_length_mean")),
    _Series("gristmill_tag_padding_share", "Share of the rows of a tag that is padding, in the last batch with it.",
            ("tag",), _by_tag("padding_share")),
    _Series("gristmill_groups", "Prompt groups: open, complete, room.", ("state",), _groups),
    _Series("gristmill_groups_dropped_total", "Groups dropped, by reason.", ("reason",), _groups_dropped),
    _Series("gristmill_groups_shortened_total", "Groups that went on with fewer samples.", ("reason",),
            _by(("timeout",), lambda found: found.counted.closed)),
    _Series("gristmill_oldest_open_group_seconds", "Age of the oldest group that is not complete.", (),
            _one(lambda found: found.oldest_open)),
    _Series("gristmill_batches_total", "Batches, by how far they came.", ("stage",), _batches),
    _Series("gristmill_batches_buffered", "Batches that are sealed and not freed.", (),
            _one(lambda found: found.batches_buffered)),
    _Series("gristmill_batches_buffered_limit", "As many may be: max_buffered_batches.", (),
            _one(lambda found: found.max_buffered_batches)),
    _Series("gristmill_held_bytes", "Bytes held of rows and of shards.", ("kind",),
            lambda found: [(("rows",), found.counts.row_bytes), (("shards",), found.counts.shard_bytes)]),
    _Series("gristmill_held_limit_bytes", "As many may be held: max_buffered_bytes.", (),
            _one(lambda found: found.max_buffered_bytes)),
    _Series("gristmill_throttled_seconds_total", "Seconds during which workers waited for room.", (),
            _one(lambda found: found.counted.throttled)),
    _Series("gristmill_rank_pulls_total", "Shards that the rank was given.", _RANK, _ranks("pulls")),
    _Series("gristmill_rank_pulled_bytes_total", "Bytes of the files of the shards that the rank was given.", _RANK,
            _ranks("nbytes")),
    _Series("gristmill_rank_acknowledged_total", "Shards that the rank acknowledged.", _RANK, _ranks("acknowledged")),
    _Series("gristmill_rank_wait_seconds_total", "Seconds during which the rank had nothing to train on.", _RANK,
            _ranks("waited")),
    _Series("gristmill_rank_lag_shards", "Shards that the rank is behind the one that is furthest.", _RANK,
            _ranks("lag")),
    _Series("gristmill_run_generation", "How often the run's log was found shorter than promised, plus 1.", (),
            _one(lambda found: found.counts.generation)),
    _Series("gristmill_policy_version", "The version that rollouts sample from.", (),
            _one(lambda found: found.counts.policy_version)),
    _Series("gristmill_committed_batch", "The batch that the model's training is committed up to.", ("model",),
            lambda found: [((model,), batch) for model, batch in found.committed.items()]),
    _Series("gristmill_journal_bytes", "Bytes of the run's log of events.", (),
            _one(lambda found: found.journal_bytes)),
    _Series("gristmill_lease_seconds", "Seconds for which this process decides unless it renews that.", (),
            lambda found: [] if found.lease is None else [((), found.lease)]),
)  # fmt: skip

_HISTOGRAMS: Sequence[_Histogram] = (
    _Histogram("gristmill_stage_seconds", "Seconds of each stage of building a batch.", ("stage",),
            lambda found: [((stage,), found.counted.stages[stage]) for stage in STAGES]),
    _Histogram("gristmill_seal_seconds", "Seconds from when a batch's first group was begun until it was sealed.", (),
            lambda found: [((), found.counted.seal)]),
    _Histogram("gristmill_publish_seconds", "Seconds from a batch's seal until it was published.", (),
            lambda found: [((), found.counted.publish)]),
    _Histogram("gristmill_staleness_versions", "Policy versions that a trained trajectory was behind.", (),
            lambda found: [((), found.counted.staleness)]),
)  # fmt: skip


def run_metrics(stats: Sequence[RunStats]) -> Iterator[Metric]:
    for spec in _SERIES:
        family = CounterMetricFamily if spec.name.endswith("_total") else GaugeMetricFamily
        names = ("run", *spec.labels)
        metric = family(spec.name, spec.help, labels=names)
        # As `add_metric` does, but for making the labels anew.
        metric.samples = [
            Sample(spec.name, labels_of(names, (found.run, *labels)), value)
            for found in stats
            for labels, value in spec.values(found)
        ]
        yield metric
    for shape in _HISTOGRAMS:
        histogram = HistogramMetricFamily(shape.name, shape.help, labels=("run", *shape.labels))
        histogram.samples = [
            sample
            for found in stats
            for labels, counts in shape.counts(found)
            for sample in _samples(shape, (found.run, *labels), counts)
        ]
        yield histogram


def _samples(spec: _Histogram, values: tuple[str, ...], counts: BucketCounts) -> Iterator[Sample]:
    names = ("run", *spec.labels)
    for bound, count in counts.up_to():
        yield Sample(f"{spec.name}_bucket", labels_of((*names, "le"), (*values, bound)), count)
    labels = labels_of(names, values)
    yield Sample(f"{spec.name}_count", labels, count)
    yield Sample(f"{spec.name}_sum", labels, counts.sum)
