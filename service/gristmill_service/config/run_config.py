"""A run's settings: names, types and defaults of the specification, and values derived from them."""

from __future__ import annotations

import sys
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    NonNegativeFloat,
)
from pydantic import Tag as UnionTag
from pydantic_core import PydanticCustomError

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Int64s
from gristmill._wire.row_fields import LONGEST_AGENT, LONGEST_COMPONENT, LONGEST_TAG, MOST_AGENTS, MOST_COMPONENTS
from gristmill_service.estimators import ESTIMATORS, Estimator

LossReduction = Literal[
    "none", "token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "trajectory_mean"
]
Model = Literal["policy", "critic"]
KlEstimator = Literal["k1", "k2", "k3"]


class MergeMode(NamedTuple):
    """How the steps of a trajectory become rows; `pipeline.rows.joins` contains the function of each mode.

    joins: whether a step may continue an earlier step of its trajectory. branches: whether it may continue any earlier
    step, so that rows may share steps; if False, only the previous step.
    """

    joins: bool = False
    branches: bool = False


MERGE_MODES = {"none": MergeMode(), "prefix": MergeMode(joins=True), "tree": MergeMode(joins=True, branches=True)}

if TYPE_CHECKING:
    EstimatorName = str
    MergeName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
    MergeName = Literal[tuple(MERGE_MODES)]

# Far beyond real runs, and small enough that a typing error is rejected before memory runs out.
Size = Annotated[int, Field(gt=0, le=1 << 14)]
Count = Annotated[int, Field(gt=0, le=1 << 24)]
# The default limit of settings: stores and messages use 64-bit integers.
INT64_MAX = 2**63 - 1
FLOAT64_MAX = sys.float_info.max
Tokens = Annotated[int, Field(gt=0, le=INT64_MAX)]
Bytes = Annotated[int, Field(gt=0, le=INT64_MAX)]
Versions = Annotated[int, Field(ge=0, le=INT64_MAX)]
# The limit is about thirty years, which timers can handle.
Seconds = Annotated[float, Field(gt=0, le=1e9)]

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, serialize_by_alias=True)


class MicroBatch(BaseModel):
    """The limit of micro-batches: exactly one of `size` (rows per micro-batch), `max_tokens` (tokens per micro-batch,
    times `cp_size`) and `count` (micro-batches per mini-batch and rank). `full`: whether padding rows fill a rank's
    last micro-batch to `size`."""

    model_config = _STRICT

    size: Count | None = None
    max_tokens: Tokens | None = None
    count: Size | None = None
    full: bool = False


def _number(value: object) -> object:
    """Parses a number given as text: YAML 1.1 reads `1.5e10` as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _encodable(text: str) -> str:
    """Rejects an unpaired surrogate, which neither files nor messages can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "input should be valid Unicode") from error
    return text


Tag = Annotated[str, AfterValidator(_encodable), Field(min_length=1, max_length=LONGEST_TAG)]
Agent = Annotated[str, AfterValidator(_encodable), Field(min_length=1, max_length=LONGEST_AGENT)]
StopReason = Annotated[str, AfterValidator(_encodable), Field(max_length=1000)]
StopReasons = Annotated[tuple[StopReason, ...], FailFast()]
Coefficient = Annotated[NonNegativeFloat, BeforeValidator(_number)]
Epsilon = Annotated[float, BeforeValidator(_number), Field(gt=0)]
# The limit keeps scores and advantages finite.
Factor = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1000)]
Discount = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Weight = Annotated[float, BeforeValidator(_number)]
ComponentName = Annotated[str, AfterValidator(_encodable), Field(min_length=1, max_length=LONGEST_COMPONENT)]
ColumnName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$", max_length=63)]


class Flops(BaseModel):
    """The FLOPs of a row of n tokens are `linear * n + quadratic * n**2`, plus its value of `column` if that is set:
    the cost of what tokens do not count, such as image patches.

    Only their ratio matters. For a dense transformer, use 2 * parameters and 2 * layers * hidden size: a forward pass
    costs 2 * parameters + 4 * layers * hidden size * context per token (PaLM, arXiv:2204.02311, appendix B, which
    counts three times that for forward and backward), and with causal attention the average context is n / 2.
    """

    model_config = _STRICT

    linear: Coefficient = 1.0
    quadratic: Coefficient = 0.0
    column: ColumnName | None = None


class TagShare(BaseModel):
    """The minimum share (`min`) of each batch's groups that must have a tag."""

    model_config = _STRICT

    min: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]

    def groups(self, size: int) -> int:
        """Returns the tag's minimum number of groups in a batch of `size`, in decimal arithmetic: 0.7 of 10 is 7."""
        return _share_of(self.min, size)


@lru_cache
def _share_of(share: float, size: int) -> int:
    return ceil(Fraction(repr(share)) * size)


class KlInReward(BaseModel):
    """The KL against a reference, times `coef`, that is subtracted from rewards. Exactly one source is set: `estimator`
    (computed from each trained token's log-probabilities) or `column` (a row column with the row's sum)."""

    model_config = _STRICT

    coef: Coefficient
    estimator: KlEstimator | None = None
    column: ColumnName | None = None


class LengthPenalty(BaseModel):
    """The coefficients by which a trajectory's length lowers its score: of its response tokens, of its other tokens and
    of its steps, each relative to the longest of the group."""

    model_config = _STRICT

    output_tokens: Factor = 0.0
    input_tokens: Factor = 0.0
    turns: Factor = 0.0


class Rae(BaseModel):
    """The running baselines of `rae`: each score changes that of its tag and agent by `1 - decay` of the difference."""

    model_config = _STRICT

    decay: Discount = 0.95


class StepGroups(BaseModel):
    """The advantages of steps that `gigpo` adds to those of trajectories: `trajectory_weight` times that of the
    trajectory plus `omega` times that of the step. Steps of a prompt group are compared if they have the same
    `step_key`, or the same number (`key: index`), by their returns with the discount `gamma`."""

    model_config = _STRICT

    key: Literal["step_key", "index"] = "step_key"
    omega: Factor = 1.0
    gamma: Discount = 1.0
    trajectory_weight: Factor = 1.0


class LambdaRule(BaseModel):
    """The λ of `gae`, by exactly one rule: `length_adaptive` (α: max(0, 1 - 1/(α·n)) for a trajectory of n trained
    tokens) or `column` (a row column with the λ of each step)."""

    model_config = _STRICT

    length_adaptive: Epsilon | None = None
    column: ColumnName | None = None


class Bootstrap(BaseModel):
    """The value after a truncated trajectory: that of its last step in a row column, if its stop reason is one of
    `stop_reasons`."""

    model_config = _STRICT

    column: ColumnName
    stop_reasons: StopReasons = Field(strict=False, min_length=1, max_length=1000)


# The tags of this union are blank, so that messages do not show them.
Lambda = Annotated[
    Annotated[Discount, UnionTag("")] | Annotated[LambdaRule, UnionTag(" ")],
    Discriminator(lambda value: " " if isinstance(value, dict | LambdaRule) else ""),
]


def _filter_mode(value: object) -> object:
    """Reads YAML's `true` as `mask` and `false` as off."""
    return {True: "mask", False: None}[value] if isinstance(value, bool) else value


class RunConfig(BaseModel):
    """The settings of a run. Field names, defaults and rules follow the specification."""

    model_config = _STRICT

    train_batch_size: Count
    n_samples_per_prompt: Size
    policy_mini_batch_size: Count
    critic_mini_batch_size: Count | None = None
    mini_batch_unit: Literal["prompt", "sequence"] = "prompt"
    update_epochs_per_batch: Count = 1
    step_wise: bool = False
    merge: MergeName = "none"
    retokenized_tail: Annotated[int, Field(ge=0, le=INT64_MAX)] = 0
    trajectory_score: Literal["last_step", "sum"] = "last_step"
    advantage_estimator: EstimatorName = "grpo"
    episode_agents: Annotated[tuple[Agent, ...], FailFast()] = Field(default=(), strict=False, max_length=MOST_AGENTS)
    grpo_norm_by_std: bool = True
    grpo_epsilon: Epsilon = 1e-6
    grpo_std_over: Literal["group", "batch"] = "group"
    rloo_norm_by_std: bool = False
    component_weights: dict[ComponentName, Weight] = Field(default={}, max_length=MOST_COMPONENTS)
    length_penalty: LengthPenalty | None = None
    step_groups: StepGroups | None = None
    rae: Rae | None = None
    gamma: Discount = 1.0
    lambda_: Lambda = Field(default=1.0, alias="lambda")
    critic_lambda: Discount | None = None
    bootstrap: Bootstrap | None = None
    whiten: Literal["batch", "mini_batch", "trajectories", "none"] = "none"
    kl_in_reward: KlInReward | None = None
    kl_from: Literal["old_logprobs", "rollout_logprobs"] = "old_logprobs"
    loss_reduction: LossReduction = "none"
    loss_reduction_over: Literal["all", "trained"] = "all"
    zero_variance_filter: Annotated[Literal["mask", "replace"] | None, BeforeValidator(_filter_mode)] = None
    overlong_filter: StopReasons = Field(default=(), strict=False, max_length=1000)
    max_staleness: Versions | None = None
    max_batches_ahead: Versions | None = None
    stale: Literal["drop", "count", "mask"] = "count"
    dp_size: Size = 1
    cp_size: Size = 1
    cp_shards: Literal["none", "zigzag", "contiguous", "blocks"] = "none"
    vpp_size: Size = 1
    microbatch_group_size: Size = 1
    micro_batch: MicroBatch
    on_misaligned: Literal["pad", "drop_trailing", "error"] = "pad"
    balance: Literal["none", "tokens", "flops"] = "none"
    flops: Flops | None = None
    seal_order: Literal["completion", "admission"] = "completion"
    seal_by: Literal["count", "call"] = "count"
    group_timeout_s: Seconds | None = None
    min_samples: Size = 1
    max_samples_per_prompt: Size | None = None
    surplus: Annotated[int, Field(ge=0, le=1 << 14)] = 0
    max_buffered_batches: Count = 4
    max_buffered_bytes: Bytes = 4 << 30
    tag_shares: dict[Tag, TagShare] = Field(default={})
    tag_timeout_s: Seconds | None = None
    layout: Literal["left_padded", "packed", "prefix_tree"] = "left_padded"
    pad_width: Literal["batch", "mini_batch", "shard", "micro_batch"] = "shard"
    pad_to_multiple_of: Size = 1
    pad_rows_to_multiple_of: Size = 1
    pad_packed_to: Annotated[tuple[Count, ...], FailFast()] = Field(default=(), strict=False, max_length=1000)
    pad_token_id: Annotated[int, Field(ge=0, lt=2**31)] = 0
    max_seq_len: Tokens | None = None
    token_step: bool = False
    observation_weight: Factor = 0.0
    columns: tuple[ColumnSpec, ...] = ()

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS[self.advantage_estimator]

    @property
    def lambda_column(self) -> str | None:
        """The row column from which the estimator reads each step's λ."""
        reads = "lambda" in self.estimator.settings
        return self.lambda_.column if reads and isinstance(self.lambda_, LambdaRule) else None

    @property
    def bootstrap_column(self) -> str | None:
        """The row column from which the estimator reads the value after a truncated trajectory."""
        reads = self.bootstrap is not None and "bootstrap" in self.estimator.settings
        return self.bootstrap.column if reads and self.bootstrap is not None else None

    @property
    def merging(self) -> MergeMode:
        return MERGE_MODES[self.merge]

    @property
    def align_to(self) -> int:
        """The divisor of the number of micro-batches in a mini-batch, over all ranks."""
        return self.dp_size * (self.microbatch_group_size if self.vpp_size > 1 else 1)

    @property
    def least_rows(self) -> int:
        """The number of rows to which every mini-batch is padded at least."""
        each = self.micro_batch
        most = max(self.align_to, self.dp_size * (each.count or 1))
        return most * (each.size if each.full and each.size else 1)

    @property
    def token_cap(self) -> int | None:
        """The maximum tokens (prompt and response) of a micro-batch; None without `micro_batch.max_tokens`."""
        tokens = self.micro_batch.max_tokens
        return None if tokens is None else min(tokens * self.cp_size, INT64_MAX)

    @property
    def padding_row_tokens(self) -> int:
        """The length of a padding row: one prompt and one response token, or `pad_to_multiple_of` if that is more."""
        return max(2, self.pad_to_multiple_of)

    @property
    def pads_rows(self) -> bool:
        """Whether padding may follow rows on a token axis."""
        return self.pad_rows_to_multiple_of > 1 or bool(self.pad_packed_to)

    @property
    def most_padding(self) -> int:
        """The maximum number of padding tokens before and after a row, beyond those that make it as wide as another."""
        return self.pad_to_multiple_of + self.pad_rows_to_multiple_of + max(self.pad_packed_to, default=0)

    def padded(self, tokens: Int64s) -> Int64s:
        """Returns the tokens of rows with the padding after each row, as caps and loads count them; int64 (rows,)."""
        multiple = self.pad_rows_to_multiple_of
        return tokens if multiple == 1 else -(-tokens // multiple) * multiple

    @property
    def has_token_axis(self) -> bool:
        """Whether the rows of a micro-batch are concatenated on one token axis."""
        return self.layout != "left_padded"

    @property
    def repeated_columns(self) -> dict[str, bool]:
        """The names of the columns whose values a row may omit if the previous step contains them, and whether each is
        partial: values of the others are omitted only together with their tokens."""
        return {column.name: column.partial for column in self.columns if column.takes_first and not column.is_ragged}

    @property
    def written_columns(self) -> tuple[ColumnSpec, ...]:
        """The columns that trainers write back. A batch waits for them."""
        return tuple(column for column in self.columns if column.source == "trainer")

    @property
    def models(self) -> tuple[Model, ...]:
        return ("policy",) if self.critic_mini_batch_size is None else ("policy", "critic")

    @property
    def batches_ahead(self) -> int | None:
        """How many batches rollouts may be ahead of training; None for any number."""
        return self.max_staleness if self.max_batches_ahead is None else self.max_batches_ahead

    @property
    def most_samples(self) -> int:
        """The maximum number of samples of a prompt group."""
        return self.max_samples_per_prompt or self.n_samples_per_prompt

    def tag_groups(self, size: int) -> dict[str, int]:
        """Returns the minimum number of groups of each tag in a batch of `size` groups."""
        return {tag: share.groups(size) for tag, share in self.tag_shares.items()}

    def mini_batch_size(self, model: Model) -> int:
        """Returns the prompt groups (with `mini_batch_unit: sequence`: rows) per optimizer step of `model`."""
        if model == "policy" or self.critic_mini_batch_size is None:
            return self.policy_mini_batch_size
        return self.critic_mini_batch_size


# Keyed by the names used in a configuration: `lambda` is a keyword in Python, so its field is `lambda_`.
SETTINGS = {field.alias or name: field for name, field in RunConfig.model_fields.items()}
