"""The API's answers about a published batch: its shards row by row, where merging broke, its scores."""

from __future__ import annotations

from pydantic import Field

from gristmill_service.config import Model
from gristmill_service.monitoring.health.health_models import Document


class ShardPicture(Document):
    """Tokens a bar, in the shard's order. row, group, sample, first, last, steps: which row each bar is, the first and
    the last step that it is made of, and how many they are; -1 for padding rows, null where a bar is several rows."""

    rows: int
    shared: list[int] = Field(
        description="With layout prefix_tree the tokens that stand with the row before, else 0; in none of the others."
    )
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
    steps: list[int] | None = None


class MiniBatchPicture(Document):
    index: int
    rows: int
    padding_rows: int
    loss_tokens: int
    shards: list[ShardPicture] = Field(description="One a rank.")


class BatchPicture(Document):
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
    mini_batches: list[MiniBatchPicture] = Field(description="As many as have 1,024 shards; ask for others one by one.")
    columns: list[str] = Field(description="The declared columns: name, type and shape, and what there is a value for.")
    groups: list[str] = Field(description="Their uids, shortened; the first 4,000.")


class TokenPair(Document):
    was: int = Field(description="The token in the step that it is held against; -1: it had ended.")
    now: int = Field(description="The token in the prompt; -1: it had ended.")
    count: int


class PrefixBreak(Document):
    uid: str
    round: int
    sample: int
    step: int
    against: int = Field(description="The step that it is held against: the one before, or the most alike of a tree.")
    index: int = Field(description="Of the first token of the step's prompt that differs, or the prompt's length.")
    before: list[int] = Field(description="Tokens before it, which are the same.")
    was: list[int] = Field(description="From there on in the step that it is held against.")
    now: list[int] = Field(description="From there on in this step's prompt.")
    column: str = Field(description="The declared column in which the two differ, where no token does; else empty.")


class BatchBreaks(Document):
    run: str
    batch: int
    merge: str
    in_all: int = Field(description="Steps that joined none, but for each trajectory's first.")
    rows_received: int
    rows: int
    pairs: list[TokenPair] = Field(description="The most frequent, at most 10.")
    breaks: list[PrefixBreak] = Field(description="The first 200.")
    texts: dict[int, str] = Field(
        default={}, description="What each of these tokens says, where the service has a tokenizer."
    )


class GroupScores(Document):
    uid: str
    round: int
    tag: str = Field(default="", description="Its environment or task.")
    samples: list[int]
    scores: list[float]
    advantages: list[float] | None = Field(description="null where clients gave one per token.")


class BatchScores(Document):
    run: str
    batch: int
    estimator: str
    groups_in_all: int
    start: int
    groups: list[GroupScores]
