"""What the page's calls answer, for the API page: they are told as plain values, which tests hold against these."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gristmill_service.api.http.models import Place
from gristmill_service.config import Model

SHOWN_RUNS = 1_000


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RunSummary(_Told):
    """The run's name alone where another process decides for it: ask for its health, which any process gives."""

    run: str
    state: Literal["well", "slow", "stuck", "finished"] | None = None
    findings: int | None = Field(None, description="How many things hold it up, or did for long.")
    newest_batch: int | None = Field(None, description="The newest that is published and not freed.")
    rows_since: float | None = Field(None, description="When a row was last accepted, seconds since 1970.")
    groups_open: int | None = None
    groups_complete: int | None = None
    batches_sealed: int | None = None
    batches_published: int | None = None
    batches_freed: int | None = None
    policy_version: int | None = None
    finished: bool | None = None


class Overview(_Told):
    now: float = Field(description="The service's clock, seconds since 1970.")
    trouble: str = Field(description="Why the service is not ready; empty when it is.")
    runs: list[RunSummary]


class Finding(_Told):
    level: Literal["stuck", "slow", "note"]
    text: str
    since: float | None = Field(description="Seconds since 1970; null: not known.")


class OpenGroup(_Told):
    uid: str
    round: int
    since: float
    complete: int = Field(description="Samples that are complete.")
    aborted: int
    samples: int
    rows: int


class HeldBatch(_Told):
    batch: int
    state: Literal["published", "being made"]
    prompts: int
    since: float | None


class Rank(_Told):
    rank: int
    next: Place = Field(description="What it has to acknowledge next.")
    since: float = Field(description="When it moved on to that, or, where that is longer ago, when watching began.")
    has_shard: bool = Field(description="Whether that is published.")
    available: float = Field(description="Since when it could have begun with it.")
    pulled: float | None = Field(description="When it last asked for a shard that was there.")
    has_pulled: bool | None = Field(description="Whether it did so since that batch was published; null: not known.")


class ModelHealth(_Told):
    model: Model
    committed: Place
    incarnation: int
    ranks_in_all: int
    ranks: list[Rank] = Field(description="Those that are least far, at most 128.")


class Health(_Told):
    now: float
    run: str
    state: Literal["well", "slow", "stuck", "finished"]
    findings: list[Finding] = Field(description="What holds the run up, worst first.")
    watched_since: float = Field(description="Nothing is known of when things happened before.")
    steps_seen: int = Field(description="Grows with every entry of the time line.")
    policy_version: int
    finished: bool
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
    rows_since: float
    train_batch_size: int
    max_buffered_batches: int
    open_groups: list[OpenGroup] = Field(description="The oldest that are not complete, at most 20.")
    batches: list[HeldBatch] = Field(description="Those that are held, oldest first, at most 32.")
    models: list[ModelHealth]


class RankLine(_Told):
    next: Place
    since: float
    passed: list[tuple[float, int, int, int]] = Field(
        description="When it acknowledged which batch, epoch, mini-batch."
    )


class PublishedBatch(_Told):
    batch: int
    published: float


class Timeline(_Told):
    run: str
    model: Model
    begin: float
    end: float
    ranks_in_all: int
    ranks: list[RankLine]
    batches: list[PublishedBatch]


class PictureShard(_Told):
    """Tokens a bar, in the shard's order. row, group, sample, first, last: which row each bar is and the steps that it
    covers, -1 for padding rows; only where a bar is one row."""

    rows: int
    prompt: list[int]
    observation: list[int] = Field(description="Response tokens with loss_mask 0.")
    trained: list[int]
    padding: list[int]
    load: list[int] = Field(description="One a micro-step.")
    row: list[int] | None = None
    group: list[int] | None = None
    sample: list[int] | None = None
    first: list[int] | None = None
    last: list[int] | None = None


class PictureMiniBatch(_Told):
    index: int
    rows: int
    padding_rows: int
    loss_tokens: int
    shards: list[PictureShard] = Field(description="One a rank.")


class BatchView(_Told):
    run: str
    batch: int
    model: Model
    models: list[Model]
    layout: str
    pad_width: str
    merge: str
    prompts: int
    rows_received: int
    rows: int
    dropped_uids: int
    metrics: dict[str, float] = Field(description="As in the plan.")
    counts: dict[str, int] = Field(description="As in the plan.")
    mini_batches_in_all: int
    rows_per_bar: int = Field(description="Rows that are added up in each bar; 4,000 bars at most are given.")
    micro_steps_per_cell: int = Field(description="Micro-steps that are added up in each load.")
    load_unit: str
    mini_batches: list[PictureMiniBatch] = Field(description="As many as have 1,024 shards; ask for others one by one.")
    groups: list[str] = Field(description="Their uids, shortened; the first 4,000.")


class TokenPair(_Told):
    was: int = Field(description="The token in the step before; -1: it had ended.")
    now: int = Field(description="The token in the prompt; -1: it had ended.")
    count: int


class Break(_Told):
    uid: str
    round: int
    sample: int
    step: int
    index: int = Field(description="Of the first token of the step's prompt that differs, or the prompt's length.")
    before: list[int] = Field(description="Tokens before it, which are the same.")
    was: list[int] = Field(description="From there on in the step before.")
    now: list[int] = Field(description="From there on in this step's prompt.")


class Breaks(_Told):
    run: str
    batch: int
    merge: str
    in_all: int = Field(description="Steps that did not join the one before.")
    rows_received: int
    rows: int
    pairs: list[TokenPair] = Field(description="The most frequent, at most 10.")
    breaks: list[Break] = Field(description="The first 200.")


class GroupScores(_Told):
    uid: str
    round: int
    samples: list[int]
    scores: list[float]
    advantages: list[float] | None = Field(description="null where clients gave one per token.")


class Scores(_Told):
    run: str
    batch: int
    estimator: str
    groups_in_all: int
    start: int
    groups: list[GroupScores]
