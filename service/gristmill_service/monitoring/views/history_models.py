"""The API's answer about a run's story: figures of its batches, those that are freed, too."""

from __future__ import annotations

from pydantic import Field

from gristmill_service.monitoring.health.health_models import Document


class GroupFigures(Document):
    """What groups scored. Means and shares are null where there is nothing to take them of."""

    groups: int
    trajectories: int
    score_mean: float | None = Field(description="Of all trajectories.")
    solved: float | None = Field(description="Share of groups of which a trajectory scored above 0.")
    zero_variance: float | None = Field(description="Share of groups of several trajectories that all score the same.")
    response_length_mean: float | None = Field(description="Response tokens of a trajectory.")


class BatchFigures(GroupFigures):
    """Batches `first` to `last`, of which `batches` were published. Counts and seconds are of all of them together."""

    first: int
    last: int
    batches: int
    at: float = Field(description="When the last of them was published, seconds since 1970.")
    rows: int = Field(description="As they came.")
    rows_merged: int = Field(description="What they are after merging.")
    padding_rows: int
    breaks: int = Field(description="Steps that could not be merged into those before them.")
    tokens: int = Field(description="Of rows that are trained.")
    loss_tokens: int = Field(description="Of these, those with loss_mask 1.")
    padding_share: float | None = Field(description="Share of padding in what is laid out.")
    tokens_per_second: float | None = Field(description="Trained tokens by `seconds`.")
    staleness_mean: float | None = Field(description="Policy versions that a trajectory was behind.")
    staleness_max: int
    seconds: float = Field(description="From the publication before, or since this process took the run.")
    ranks_waited: float = Field(description="Of these, those in which a rank of the policy waited for its next shard.")
    workers_waited: float = Field(description="Of these, those in which workers waited for room.")
    stages: dict[str, float] = Field(description="Seconds in each stage of building.")
    tags: dict[str, GroupFigures] = Field(description="By tag, of the 8 that have most groups; none without tags.")


class FailedBatch(Document):
    batch: int
    reason: str
    remedy: str = Field(description="What to do; empty where somebody gave the batch up.")


class BatchHistory(Document):
    run: str
    totals: BatchFigures | None = Field(description="Of all batches; null before the first.")
    points: list[BatchFigures] = Field(description="Oldest first; each of equally many batches, the last of fewer.")
    failed: list[FailedBatch] = Field(description="Batches that could not be built, the last 100.")
