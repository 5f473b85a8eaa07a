"""A run's story for people and programs, from the records that it keeps of its batches."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill_service.monitoring.views.history_models import BatchFigures, BatchHistory, FailedBatch, GroupFigures
from gristmill_service.pipeline.group_counts import GroupCounts
from gristmill_service.run.machine.batch_records import BatchRecord, total
from gristmill_service.run.machine.decisions.failures import remedy
from gristmill_service.run.run import Run

SHOWN_FAILURES = 100
_DIGITS = 6


def batch_history(run: Run, most: int) -> BatchHistory:
    """Figures of all batches of the run, `most` points at most."""
    records, failed, kept = run.read(
        lambda state, _: (
            list(state.records),
            list(state.failed.items())[-SHOWN_FAILURES:],
            frozenset(state.batches_kept),
        )
    )
    totals = total(records)
    return BatchHistory(
        run=run.name,
        totals=None if totals is None else _figures(totals),
        points=[_figures(record) for record in _thinned(records, most)],
        failed=[
            FailedBatch(batch=number, reason=reason, remedy=remedy(reason, is_kept=number in kept))
            for number, reason in failed
        ],
    )


def _thinned(records: Sequence[BatchRecord], most: int) -> list[BatchRecord]:
    """As few as asked for, by adding up equally many neighbours."""
    step = max(1, -(-len(records) // most))
    parts = (total(records[begin : begin + step]) for begin in range(0, len(records), step))
    return [part for part in parts if part is not None]


def _figures(record: BatchRecord) -> BatchFigures:
    return BatchFigures(
        **dict(_group_figures(record.groups)),
        first=record.first,
        last=record.last,
        batches=record.batches,
        at=record.at,
        rows=record.rows,
        rows_merged=record.rows - record.merged,
        padding_rows=record.padding,
        breaks=record.breaks,
        tokens=record.tokens,
        loss_tokens=record.loss_tokens,
        padding_share=_ratio(record.elements - record.distinct, record.elements),
        tokens_per_second=_ratio(record.tokens, record.seconds),
        staleness_mean=_ratio(record.stale, record.versioned),
        staleness_max=record.stalest,
        seconds=_short(record.seconds),
        ranks_waited=_short(record.ranks_waited),
        workers_waited=_short(record.workers_waited),
        stages={stage: _short(seconds) for stage, seconds in record.stages.items()},
        tags={tag: _group_figures(counts) for tag, counts in record.tags.items()},
    )


def _group_figures(counts: GroupCounts) -> GroupFigures:
    return GroupFigures(
        groups=counts.groups,
        trajectories=counts.trajectories,
        score_mean=_ratio(counts.score_sum, counts.trajectories),
        solved=_ratio(counts.solved, counts.groups),
        zero_variance=_ratio(counts.zero_variance, counts.groups),
        response_length_mean=_ratio(counts.response_tokens, counts.trajectories),
    )


def _ratio(part: float, whole: float) -> float | None:
    return _short(part / whole) if whole else None


def _short(value: float) -> float:
    """As many digits as a curve needs."""
    return float(f"{value:.{_DIGITS}g}")
