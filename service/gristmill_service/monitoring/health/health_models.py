"""The API's answers about a run's health, its time line and all runs together."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from gristmill_service.config import Model
from gristmill_service.run.machine.answers import Position

HealthState = Literal["failed", "stuck", "training", "collecting", "idle", "finished"]
"""docs/page.md defines them."""
STATES: tuple[HealthState, ...] = get_args(HealthState)

Level = Literal["failed", "stuck", "slow", "note"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Worst first."""


Stage = Literal["published", "waiting for columns", "being built", "failed"]
"""Of a batch that is held. failed: its rows are kept, for another dp_size."""


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainingPlace(Document):
    """A place in a model's training order."""

    batch: int
    epoch: int
    mini_batch: int

    @classmethod
    def of(cls, position: Position) -> TrainingPlace:
        return cls(batch=position.batch, epoch=position.epoch, mini_batch=position.mini_batch)


class Finding(Document):
    """failed: a batch that cannot be built. stuck: it will not go on by itself. slow: it takes longer than it should,
    and may go on. note: who waits for whom."""

    level: Level
    text: str
    since: float | None = Field(description="Seconds since 1970; null: not known.")
    batch: int | None = Field(default=None, description="That it is about.")
    mini_batch: int | None = Field(default=None, description="Of that batch, which the ranks are to acknowledge.")
    model: Model | None = None
    ranks: list[int] = Field(default=[], description="That it is about, at most 8.")
    uid: str | None = Field(default=None, description="Of an open group that it is about, its first 80 characters.")
    round: int | None = Field(default=None, description="Of that group.")


class OpenGroup(Document):
    uid: str
    round: int
    since: float
    complete: int = Field(description="Samples that are complete.")
    aborted: int
    samples: int
    rows: int
    tag: str = Field(default="", description="Its environment or task.")


class HeldBatch(Document):
    batch: int
    state: Stage
    prompts: int
    since: float | None = Field(description="Since when it is in this state; null: not known.")


class RankHealth(Document):
    rank: int
    next: TrainingPlace = Field(description="The shard that it has to acknowledge next.")
    since: float = Field(
        description="When it acknowledged the one before, or, where that is longer ago, watched_since."
    )
    has_shard: bool = Field(description="Whether its next shard is published.")
    available: float = Field(description="Since when it could have begun with its next shard.")
    pulled: float | None = Field(description="When it last asked for a shard that was published.")
    has_pulled: bool | None = Field(description="Whether it did so since that batch was published; null: not known.")


class ModelHealth(Document):
    model: Model
    committed: TrainingPlace
    incarnation: int
    ranks_in_all: int
    ranks: list[RankHealth] = Field(description="The ranks that are least far, at most 128.")


class RunCounts(Document):
    generation: int = Field(description="How often the run's log was found shorter than promised, plus 1.")
    policy_version: int
    finished: bool = Field(description="Whether no more rollouts come.")
    groups_open: int
    groups_complete: int
    groups_room: int
    groups_sealed: int
    groups_dropped: dict[str, int]
    batches_sealed: int
    batches_published: int
    batches_freed: int
    batches_failed: int
    row_bytes: int
    shard_bytes: int
    rows_accepted: int


class RunHealth(RunCounts):
    now: float = Field(description="The service's clock, seconds since 1970.")
    run: str
    state: HealthState
    summary: str = Field(description="The state's reason, in one sentence.")
    findings: list[Finding] = Field(description="What holds the run up, worst first.")
    watched_since: float = Field(description="Nothing is known of when things happened before.")
    last_event: float = Field(description="When anything last happened in the run.")
    steps_seen: int = Field(description="Grows with every entry of the time line.")
    rows_since: float = Field(description="When a row was last accepted.")
    train_batch_size: int
    max_buffered_batches: int
    open_groups: list[OpenGroup] = Field(description="The oldest that are not complete, at most 20.")
    batches: list[HeldBatch] = Field(description="The batches that are held, oldest first, at most 32.")
    models: list[ModelHealth]


class RunSummary(Document):
    """The run's name alone where another process decides for it: any process gives that run's health."""

    run: str
    state: HealthState | None = None
    summary: str | None = Field(default=None, description="The state's reason, in one sentence.")
    findings: int | None = Field(default=None, description="How many findings are worse than a note.")
    newest_batch: int | None = Field(default=None, description="The newest that is published and not freed.")
    rows_since: float | None = Field(default=None, description="When a row was last accepted, seconds since 1970.")
    groups_open: int | None = None
    groups_complete: int | None = None
    batches_sealed: int | None = None
    batches_published: int | None = None
    batches_freed: int | None = None
    policy_version: int | None = None
    finished: bool | None = None


class Overview(Document):
    now: float = Field(description="The service's clock, seconds since 1970.")
    not_ready: str = Field(description="Why the service is not ready; empty when it is.")
    grpc_address: str = Field(description="Where this process takes gRPC calls.")
    runs: list[RunSummary] = Field(description="The first 1,000 by name.")


class RankLine(Document):
    next: TrainingPlace
    since: float
    passed: list[tuple[float, int, int, int]] = Field(
        description="When it acknowledged which batch, epoch, mini-batch."
    )


class PublishedBatch(Document):
    batch: int
    published: float


class Timeline(Document):
    run: str
    model: Model
    begin: float
    end: float
    ranks_in_all: int
    ranks: list[RankLine]
    batches: list[PublishedBatch]
