"""The history of a run: the figures of all its batches, including freed ones. They are stored in the run's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from gristmill_service.monitoring import Document
from gristmill_service.pipeline.figures import Figures, GroupCounts
from gristmill_service.run.machine.batch_records import total
from gristmill_service.run.machine.status import explained
from gristmill_service.run.run import Run

SHOWN_FAILURES = 100
_DIGITS = 6


class GroupFigures(Document):
    """Figures of groups. Means and shares are null if there are no groups."""

    groups: int
    trajectories: int
    score_mean: float | None = Field(description="Of all trajectories.")
    solved: float | None = Field(description="Share of groups of which a trajectory scored above 0.")
    zero_variance: float | None = Field(description="Share of groups of several trajectories that all score the same.")
    response_length_mean: float | None = Field(description="Response tokens of a trajectory.")


class BatchFigures(GroupFigures):
    """Figures of batches `first` to `last`, of which `batches` were published. Counts and seconds are summed."""

    first: int
    last: int
    batches: int
    at: float = Field(description="When the last of them was published, seconds since 1970.")
    rows: int = Field(description="Rows as received.")
    rows_merged: int = Field(description="Rows after merging.")
    padding_rows: int
    breaks: int = Field(description="Steps that could not be merged into those before them.")
    tokens: int = Field(description="Of rows that are trained.")
    loss_tokens: int = Field(description="Of these, those with loss_mask 1.")
    padding_share: float | None = Field(description="Share of padding in what is laid out.")
    tokens_per_second: float | None = Field(description="Trained tokens by `seconds`.")
    staleness_mean: float | None = Field(description="Policy versions that a trajectory was behind.")
    staleness_max: int
    seconds: float = Field(description="From the publication before, or since this process took the run.")
    ranks_waited: float = Field(description="Seconds of these in which a rank of the policy waited for its next shard.")
    workers_waited: float = Field(description="Seconds of these in which workers waited for capacity.")
    stages: dict[str, float] = Field(description="Seconds in each stage of building.")
    tags: dict[str, GroupFigures] = Field(
        description="By tag, for the 8 tags with the most groups; empty without tags."
    )
    means: dict[str, float] = Field(
        description="Mean scores by agent (agents/AGENT/score_mean), means of the components of rewards "
        "(components/NAME/mean), and running baselines (baselines/TAG/AGENT)."
    )


class FailedBatch(Document):
    batch: int
    reason: str
    remedy: str = Field(description="What to do; empty where the batch was given up.")


class BatchHistory(Document):
    run: str
    totals: BatchFigures | None = Field(description="Of all batches; null before the first.")
    points: list[BatchFigures] = Field(
        description="Oldest first; each of the same number of batches, the last of fewer."
    )
    failed: list[FailedBatch] = Field(description="The last 100 batches that could not be built.")


def batch_history(run: Run, most: int) -> BatchHistory:
    """Returns figures of all batches of the run, in at most `most` points."""
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
        totals=None if totals is None else _batch_figures(totals),
        points=[_batch_figures(record) for record in _thinned(records, most)],
        failed=[
            FailedBatch(batch=number, reason=why, remedy=remedy)
            for number, reason in failed
            for why, remedy in [explained(reason, is_kept=number in kept)]
        ],
    )


def _thinned(records: Sequence[Figures], most: int) -> list[Figures]:
    """Returns at most `most` records, by merging equal numbers of neighbors."""
    step = max(1, -(-len(records) // most))
    parts = (total(records[begin : begin + step]) for begin in range(0, len(records), step))
    return [part for part in parts if part is not None]


def _batch_figures(record: Figures) -> BatchFigures:
    same = ("first", "last", "batches", "at", "rows", "breaks", "tokens", "loss_tokens")
    return BatchFigures(
        **_group_figures(record.groups),
        **{name: getattr(record, name) for name in same},
        rows_merged=record.rows - record.merged,
        padding_rows=record.padding,
        padding_share=_ratio(record.padding_tokens, record.elements),
        tokens_per_second=_ratio(record.tokens, record.seconds),
        staleness_mean=_ratio(record.stale, record.versioned),
        staleness_max=record.stalest,
        seconds=_short(record.seconds),
        ranks_waited=_short(record.ranks_waited),
        workers_waited=_short(record.workers_waited),
        stages={stage: _short(seconds) for stage, seconds in record.stages.items()},
        tags={tag: GroupFigures(**_group_figures(counts)) for tag, counts in record.tags.items()},
        means={name: _short(mean.value) for name, mean in record.means.items()},
    )


def _group_figures(counts: GroupCounts) -> dict[str, Any]:
    return {
        "groups": counts.groups,
        "trajectories": counts.trajectories,
        "score_mean": _ratio(counts.score_sum, counts.trajectories),
        "solved": _ratio(counts.solved, counts.groups),
        "zero_variance": _ratio(counts.zero_variance, counts.groups),
        "response_length_mean": _ratio(counts.response_tokens, counts.trajectories),
    }


def _ratio(part: float, whole: float) -> float | None:
    return _short(part / whole) if whole else None


def _short(value: float) -> float:
    """Rounds a value to the digits that a curve needs."""
    return float(f"{value:.{_DIGITS}g}")
