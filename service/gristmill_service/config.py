"""A run's configuration has the names of the specification and is validated as a whole.

This module owns every rule that can be decided before a rollout is seen. It reads no file but the one it is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from fractions import Fraction
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, NonNegativeFloat
from pydantic import ValidationError as PydanticValidationError
from pydantic_core import PydanticCustomError

from gristmill._wire.column_spec import ColumnSpec, specs_of
from gristmill._wire.steps import LONGEST_TAG
from gristmill.errors import InvalidArgumentError
from gristmill_service import column_rules, group_rules
from gristmill_service.foreign_settings import renamings
from gristmill_service.validation_messages import place, problems, shown

LossReduction = Literal[
    "none", "token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "trajectory_mean"
]
Model = Literal["policy", "critic"]
KlEstimator = Literal["k1", "k2", "k3"]

# Far beyond what anyone runs, and small enough that a slip of the keyboard is refused before memory is.
Size = Annotated[int, Field(gt=0, le=1 << 14)]
Count = Annotated[int, Field(gt=0, le=1 << 24)]
# Where a setting has no other limit it is that of 64 bits: nothing that stores or sends a configuration holds more.
INT64_MAX = 2**63 - 1
FLOAT64_MAX = sys.float_info.max
Tokens = Annotated[int, Field(gt=0, le=INT64_MAX)]
Bytes = Annotated[int, Field(gt=0, le=INT64_MAX)]
Versions = Annotated[int, Field(ge=0, le=INT64_MAX)]
# Thirty years: what timers take.
Seconds = Annotated[float, Field(gt=0, le=1e9)]

_MOST_PADDED_TO = 1 << 17
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, serialize_by_alias=True)


class MicroBatch(BaseModel):
    """What bounds micro-batches: exactly one of `size` (rows of each), `max_tokens` (tokens of each per rank, times
    `cp_size`) and `count` (how many a rank has of a mini-batch). `full`: whether padding rows fill a rank's last
    micro-batch up to `size`."""

    model_config = _STRICT

    size: Count | None = None
    max_tokens: Tokens | None = None
    count: Size | None = None
    full: bool = False


def _number(value: object) -> object:
    """Makes a number of text: YAML 1.1 takes `1.5e10` for text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _encodable(text: str) -> str:
    """Refuses what no file and no message can hold: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "input should be valid Unicode") from error
    return text


Tag = Annotated[str, AfterValidator(_encodable), Field(min_length=1, max_length=LONGEST_TAG)]
StopReason = Annotated[str, AfterValidator(_encodable), Field(max_length=1000)]
Coefficient = Annotated[NonNegativeFloat, BeforeValidator(_number)]
Epsilon = Annotated[float, BeforeValidator(_number), Field(gt=0)]
Discount = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
ColumnName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$", max_length=63)]


class Flops(BaseModel):
    """The FLOPs of a row of n tokens are `linear * n + quadratic * n**2`.

    Only their ratio counts. For a dense transformer 2 * parameters and 2 * layers * hidden size: a forward pass takes
    2 * parameters + 4 * layers * hidden size * context per token (PaLM, arXiv:2204.02311, appendix B, where both passes
    are three times that), and a causal row's tokens see n / 2 on average.
    """

    model_config = _STRICT

    linear: Coefficient = 1.0
    quadratic: Coefficient = 0.0


class TagShare(BaseModel):
    """The part of each batch, of its groups, that has a tag: at least `min`."""

    model_config = _STRICT

    min: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]

    def groups(self, size: int) -> int:
        """The groups that a batch of so many has at least. Decimal: 0.7 of 10 is 7."""
        return _share_of(self.min, size)


@lru_cache
def _share_of(share: float, size: int) -> int:
    return ceil(Fraction(repr(share)) * size)


class KlInReward(BaseModel):
    """What is subtracted from rewards: `coef` times the KL against a reference, exactly one of `estimator` (of each
    trained token's log-probabilities) and `column` (a row column that holds a row's sum)."""

    model_config = _STRICT

    coef: Coefficient
    estimator: KlEstimator | None = None
    column: ColumnName | None = None


_SECTIONS: dict[str, type[BaseModel]] = {"micro_batch": MicroBatch, "flops": Flops, "kl_in_reward": KlInReward}


def _filter_mode(value: object) -> object:
    """Reads YAML's `true` as `mask` and `false` as off."""
    return {True: "mask", False: None}[value] if isinstance(value, bool) else value


class RunConfig(BaseModel):
    """The settings of a run. Field names, defaults and rules are those of the specification."""

    model_config = _STRICT

    train_batch_size: Count
    n_samples_per_prompt: Size
    policy_mini_batch_size: Count
    critic_mini_batch_size: Count | None = None
    mini_batch_unit: Literal["prompt", "sequence"] = "prompt"
    update_epochs_per_batch: Count = 1
    step_wise: bool = False
    merge: Literal["none", "prefix", "tree"] = "none"
    retokenised_tail: Annotated[int, Field(ge=0, le=INT64_MAX)] = 0
    trajectory_score: Literal["last_step", "sum"] = "last_step"
    advantage_estimator: Literal["grpo", "rloo", "maxrl", "none", "gae", "reinforce++"] = "grpo"
    grpo_norm_by_std: bool = True
    grpo_epsilon: Epsilon = 1e-6
    gamma: Discount = 1.0
    lambda_: Discount = Field(default=1.0, alias="lambda")
    whiten: Literal["batch", "mini_batch", "none"] = "none"
    kl_in_reward: KlInReward | None = None
    kl_from: Literal["old_logprobs", "rollout_logprobs"] = "old_logprobs"
    loss_reduction: LossReduction = "none"
    zero_variance_filter: Annotated[Literal["mask", "replace"] | None, BeforeValidator(_filter_mode)] = None
    overlong_filter: Annotated[tuple[StopReason, ...], FailFast()] = Field(default=(), strict=False, max_length=1000)
    max_staleness: Versions | None = None
    stale: Literal["drop", "count", "mask"] = "count"
    dp_size: Size = 1
    cp_size: Size = 1
    vpp_size: Size = 1
    microbatch_group_size: Size = 1
    micro_batch: MicroBatch
    on_misaligned: Literal["pad", "drop_trailing", "error"] = "pad"
    balance: Literal["none", "tokens", "flops"] = "none"
    flops: Flops | None = None
    seal_order: Literal["completion", "admission"] = "completion"
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
    pad_token_id: Annotated[int, Field(ge=0, lt=2**31)] = 0
    max_seq_len: Tokens | None = None
    columns: tuple[ColumnSpec, ...] = ()

    @property
    def align_to(self) -> int:
        """The number of which a mini-batch's micro-batch count is a multiple (all ranks together)."""
        return self.dp_size * (self.microbatch_group_size if self.vpp_size > 1 else 1)

    @property
    def token_cap(self) -> int | None:
        """The tokens (prompt and response) that a micro-batch may hold; None without `micro_batch.max_tokens`."""
        tokens = self.micro_batch.max_tokens
        return None if tokens is None else min(tokens * self.cp_size, INT64_MAX)

    @property
    def padding_row_tokens(self) -> int:
        """The length of a padding row: one prompt and one response token, or what `pad_to_multiple_of` asks for."""
        return max(2, self.pad_to_multiple_of)

    @property
    def has_token_axis(self) -> bool:
        """Whether the rows of a micro-batch stand on one token axis."""
        return self.layout != "left_padded"

    @property
    def shared_columns(self) -> frozenset[str]:
        """The names of the columns whose values a row may lack where the step before has them."""
        return frozenset(column.name for column in self.columns if column.is_shared)

    @property
    def written_columns(self) -> tuple[ColumnSpec, ...]:
        """The columns that trainers write back: a batch waits for them."""
        return tuple(column for column in self.columns if column.source == "trainer")

    @property
    def models(self) -> tuple[Model, ...]:
        return ("policy",) if self.critic_mini_batch_size is None else ("policy", "critic")

    @property
    def most_samples(self) -> int:
        """The samples that a prompt group may be made of."""
        return self.max_samples_per_prompt or self.n_samples_per_prompt

    def tag_groups(self, size: int) -> dict[str, int]:
        """The groups of each tag that a batch of so many groups has at least."""
        return {tag: share.groups(size) for tag, share in self.tag_shares.items()}

    def mini_batch_size(self, model: Model) -> int:
        """Returns the prompt groups, or rows with `mini_batch_unit: sequence`, of one optimizer step of `model`."""
        if model == "policy" or self.critic_mini_batch_size is None:
            return self.policy_mini_batch_size
        return self.critic_mini_batch_size

    def with_dp_size(self, dp_size: int) -> RunConfig:
        """The same for so many ranks. Raises InvalidArgumentError where the other settings do not allow it."""
        if dp_size == self.dp_size:
            return self
        return parse_config(json.loads(self.model_dump_json(exclude_defaults=True)) | {"dp_size": dp_size})

    def warnings(self) -> list[str]:
        """Returns a sentence for each thing that is allowed but probably not meant. A run's creator is told once."""
        found = []
        if self.merge != "none" and self.loss_reduction in ("sequence_mean", "seq_mean_token_sum_norm"):
            found.append(
                f"loss_reduction: {self.loss_reduction} counts rows, and merge: {self.merge} makes fewer of them, so "
                "the scale of the loss depends on how many steps merge; trajectory_mean, prompt_mean and token_mean "
                "do not"
            )
        if self.on_misaligned == "drop_trailing" and self.seal_order == "completion":
            found.append(
                "on_misaligned: drop_trailing with seal_order: completion drops the groups that finished last, which "
                "are the slowest and longest; use seal_order: admission or on_misaligned: pad to keep them"
            )
        size = self.micro_batch.size
        if self.layout == "prefix_tree" and size is not None and size < self.n_samples_per_prompt:
            found.append(
                f"layout: prefix_tree with micro_batch: {{size: {size}}} cuts every group of "
                f"{self.n_samples_per_prompt} samples, so that its prompt stands in several micro-batches; use "
                "micro_batch: {max_tokens: ...}, which counts distinct tokens, or a larger size"
            )
        found += _without_effect(self)
        found += group_rules.warnings(self)
        return found


# By the names that a configuration has: `lambda` is a word of Python's.
SETTINGS = {field.alias or name: field for name, field in RunConfig.model_fields.items()}


def parse_config(mapping: object, source: str = "configuration") -> RunConfig:
    """Returns a checked configuration from what JSON or YAML gave.

    Raises InvalidArgumentError naming the setting, its value, the reason and the remedy.
    """
    if not isinstance(mapping, dict):
        raise InvalidArgumentError(f"{source}: expected a mapping of settings, got {type(mapping).__name__}")
    try:
        _refuse_unknown(mapping, SETTINGS)
        for section, model in _SECTIONS.items():
            if isinstance(given := mapping.get(section), dict):
                _refuse_unknown(given, model.model_fields, f"{section}.")
        if isinstance(shares := mapping.get("tag_shares"), dict):
            for tag, share in shares.items():
                if isinstance(share, dict):
                    _refuse_unknown(share, TagShare.model_fields, f"tag_shares.{shown(tag)}.")
        if "columns" in mapping:
            mapping = mapping | {"columns": _columns(mapping["columns"])}
        config = RunConfig.model_validate(mapping)
        column_rules.check_kl(config)
        column_rules.check_written(config)
        column_rules.check_tree(config)
        _refuse_wrong_combinations(config)
    except PydanticValidationError as error:
        raise InvalidArgumentError(f"{source}: {problems(_explain(error))}") from None
    except InvalidArgumentError as error:
        raise type(error)(f"{source}: {error}") from None
    return config


def read_config(path: Path) -> RunConfig:
    """Returns a checked configuration from a YAML or JSON file. Raises InvalidArgumentError naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path}: cannot read the configuration: {error}") from None
    try:
        mapping = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"{path}: neither valid YAML nor JSON: {error}") from None
    return parse_config(mapping, str(path))


def _columns(given: object) -> tuple[ColumnSpec, ...]:
    if not isinstance(given, list | tuple):
        raise InvalidArgumentError(f"columns: expected a list of columns, got {type(given).__name__}")
    return specs_of(given)


def _refuse_unknown(mapping: dict[Any, Any], known: Collection[str], section: str = "") -> None:
    """Refuses settings that there are not, before pydantic makes an error of each."""
    unknown = [name for name in mapping if name not in known]
    if unknown:
        names = (f"unknown setting {section}{name if str(name).isprintable() else shown(name)}" for name in unknown)
        raise InvalidArgumentError(f"{problems(names)}{renamings(unknown, known)}; known are {', '.join(known)}")


def _explain(error: PydanticValidationError) -> Iterator[str]:
    for item in error.errors(include_url=False, include_context=False):
        name, value = place(item), item["input"]
        if item["type"] == "missing":
            yield f"{name} is required"
        elif item["type"] == "float_type" and isinstance(value, int) and not isinstance(value, bool):
            yield f"{name}: input should be less than or equal to {FLOAT64_MAX}, got {shown(value)}"
        else:
            yield f"{name}: {item['msg'].lower()}, got {shown(value)}"


def _refuse_wrong_combinations(config: RunConfig) -> None:
    _check_micro_batch(config)
    _check_mini_batches(config)
    _check_padding(config)
    _check_alignment(config)
    _check_balance(config)
    group_rules.check_sizes(config)
    group_rules.check_tags(config)
    if config.merge != "none" and not config.step_wise:
        raise InvalidArgumentError(
            f"merge: {config.merge} joins the steps of a trajectory, but step_wise is false (one step each); "
            "set step_wise: true or merge: none"
        )
    if config.retokenised_tail and config.merge == "none":
        raise InvalidArgumentError(
            f"retokenised_tail: {config.retokenised_tail} says which steps merge, and merge is none; set merge: prefix "
            "or tree, or leave it out"
        )
    if config.loss_reduction == "seq_mean_token_sum_norm" and config.max_seq_len is None:
        raise InvalidArgumentError("loss_reduction: seq_mean_token_sum_norm divides by max_seq_len; set max_seq_len")
    if config.min_samples > config.n_samples_per_prompt:
        raise InvalidArgumentError(
            f"min_samples: {config.min_samples} exceeds n_samples_per_prompt: {config.n_samples_per_prompt}; lower it"
        )
    if config.stale != "count" and config.max_staleness is None:
        raise InvalidArgumentError(f"stale: {config.stale} needs a bound; set max_staleness")


def _check_micro_batch(config: RunConfig) -> None:
    given = config.micro_batch.model_dump(exclude_none=True, exclude={"full"})
    if len(given) != 1:
        raise InvalidArgumentError(
            f"micro_batch: give exactly one of size (rows), max_tokens and count (of each rank), got "
            f"{' and '.join(given) or 'none'}"
        )
    if config.micro_batch.count is not None:
        group_rules.check_micro_batch_count(config, config.micro_batch.count)
    if config.micro_batch.full:
        group_rules.check_full_micro_batches(config, config.micro_batch.size)


def _check_mini_batches(config: RunConfig) -> None:
    for model in config.models:
        size, name = config.mini_batch_size(model), f"{model}_mini_batch_size"
        if config.mini_batch_unit == "sequence":
            if size % config.dp_size:
                raise InvalidArgumentError(
                    f"{name}: {size} rows is not a multiple of dp_size: {config.dp_size}, so not every rank could have "
                    "as many; change one of them"
                )
        elif config.train_batch_size % size:
            raise InvalidArgumentError(
                f"train_batch_size: {config.train_batch_size} is not a multiple of {name}: {size}; change one of them"
            )
    if config.mini_batch_unit == "sequence" and (config.micro_batch.size is None or config.on_misaligned != "pad"):
        raise InvalidArgumentError(
            "mini_batch_unit: sequence works with micro_batch: {size: ...} and on_misaligned: pad only; "
            "change those, or use mini_batch_unit: prompt"
        )


def _check_padding(config: RunConfig) -> None:
    """A row that is padding costs as much work as one that is not."""
    each = config.micro_batch
    least = max(config.align_to, config.dp_size * (each.count or 1)) * (each.size if each.full and each.size else 1)
    if least > _MOST_PADDED_TO:
        raise InvalidArgumentError(
            f"every mini-batch would be padded to {least} rows at least, and {_MOST_PADDED_TO} are the most: dp_size × "
            "microbatch_group_size (under VPP) or micro_batch.count, × micro_batch.size where it is full; lower one"
        )


def _check_alignment(config: RunConfig) -> None:
    if config.on_misaligned == "drop_trailing" and config.critic_mini_batch_size is not None:
        raise InvalidArgumentError(
            "on_misaligned: drop_trailing is refused with a critic: policy and critic mini-batches would drop "
            "different groups; use pad, or leave critic_mini_batch_size out"
        )
    rows = config.policy_mini_batch_size * config.most_samples
    samples = "n_samples_per_prompt" if config.max_samples_per_prompt is None else "max_samples_per_prompt"
    if not config.step_wise and config.on_misaligned != "pad" and rows < config.align_to:
        raise InvalidArgumentError(
            f"on_misaligned: {config.on_misaligned} can never align: a mini-batch has policy_mini_batch_size × "
            f"{samples} = {rows} rows, and micro-batches come in multiples of {config.align_to} "
            "(dp_size × microbatch_group_size under VPP); use on_misaligned: pad or larger mini-batches"
        )


def _check_balance(config: RunConfig) -> None:
    if config.balance == "flops" and config.flops is None:
        raise InvalidArgumentError(
            "balance: flops needs flops: {linear: ..., quadratic: ...}, as a row of n tokens costs linear·n + "
            "quadratic·n²; for a dense transformer linear is 2 × parameters and quadratic 2 × layers × hidden size "
            "(PaLM, arXiv:2204.02311, appendix B); set flops, or balance: tokens"
        )
    if config.flops is not None and config.flops.linear == 0 and config.flops.quadratic == 0:
        raise InvalidArgumentError("flops: linear and quadratic are both 0, so every row would cost nothing; set one")


def _without_effect(config: RunConfig) -> Iterator[str]:
    """Yields a sentence for each setting of estimators that the run's own does not read."""
    estimator, kl = config.advantage_estimator, config.kl_in_reward
    per_token = estimator in ("gae", "reinforce++")
    checks = (
        ("gamma", config.gamma, per_token, "advantage_estimator: gae or reinforce++"),
        ("lambda", config.lambda_, estimator == "gae", "advantage_estimator: gae"),
        ("whiten", config.whiten, per_token, "advantage_estimator: gae or reinforce++"),
        ("grpo_epsilon", config.grpo_epsilon, estimator == "grpo", "advantage_estimator: grpo"),
        ("kl_from", config.kl_from, kl is not None and kl.estimator is not None, "kl_in_reward: {estimator: ...}"),
    )
    for name, value, is_read, by in checks:
        if value != SETTINGS[name].default and not is_read:
            yield f"{name}: {value} has no effect: it is read with {by} alone"
