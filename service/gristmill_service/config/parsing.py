"""Parses and checks a run's configuration."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic import ValidationError as PydanticValidationError

from gristmill._wire.column_spec import ColumnSpec, specs_of
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import rules
from gristmill_service.config.run_config import (
    FLOAT64_MAX,
    SETTINGS,
    Bootstrap,
    Flops,
    KlInReward,
    LambdaRule,
    LengthPenalty,
    MicroBatch,
    RunConfig,
    StepGroups,
    TagShare,
)
from gristmill_service.validation_messages import place, problems, shown

_OURS = {
    "train_batch_size": "rollout_batch_size",
    "n_samples_per_prompt": "num_generations num_samples_per_prompt rollouts_per_example rollout_n",
    "policy_mini_batch_size": "ppo_mini_batch_size mini_batch_size",
    "update_epochs_per_batch": "ppo_epochs num_iterations",
    "advantage_estimator": "adv_estimator",
    "grpo_norm_by_std": "norm_adv_by_std_in_grpo scale_rewards grpo_std_normalization",
    "lambda": "lam lambda_ gae_lambda",
    "kl_in_reward": "use_kl_in_reward",
    "loss_reduction": "loss_agg_mode",
    "overlong_filter": "mask_truncated_completions",
    "max_staleness": "max_staleness_steps max_off_policy_steps",
    "micro_batch": "micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu max_tokens_per_gpu",
}
_NAMES = {foreign: ours for ours, names in _OURS.items() for foreign in names.split()}


def renamings(unknown: Iterable[Any], known: Collection[str]) -> str:
    """Returns a remedy for each name that another framework uses for one of our settings, each after a semicolon."""
    return "".join(f"; rename {name} to {_NAMES[name]}" for name in unknown if _NAMES.get(name) in known)


_SECTIONS: dict[str, type[BaseModel]] = {
    "micro_batch": MicroBatch,
    "bootstrap": Bootstrap,
    "flops": Flops,
    "kl_in_reward": KlInReward,
    "lambda": LambdaRule,
    "length_penalty": LengthPenalty,
    "step_groups": StepGroups,
}


def parse_config(mapping: object, source: str = "configuration") -> RunConfig:
    """Returns a checked configuration from parsed JSON or YAML.

    Raises InvalidArgumentError naming the setting, its value, the reason and the remedy.
    """
    if not isinstance(mapping, dict):
        raise InvalidArgumentError(
            f"{source}: expected a mapping of settings, got {type(mapping).__name__}; write NAME: VALUE per setting"
        )
    try:
        _refuse_unknown(mapping, SETTINGS)
        for section, model in _SECTIONS.items():
            if isinstance(settings := mapping.get(section), dict):
                _refuse_unknown(settings, model.model_fields, f"{section}.")
        if isinstance(shares := mapping.get("tag_shares"), dict):
            for tag, share in shares.items():
                if isinstance(share, dict):
                    _refuse_unknown(share, TagShare.model_fields, f"tag_shares.{shown(tag)}.")
        if "columns" in mapping:
            mapping = mapping | {"columns": _columns(mapping["columns"])}
        config = RunConfig.model_validate(mapping)
        rules.check(config)
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
        raise InvalidArgumentError(f"{path}: cannot read the configuration: {error}; pass a UTF-8 file") from None
    try:
        mapping = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidArgumentError(f"{path}: not valid YAML or JSON: {error}; correct the file") from None
    return parse_config(mapping, str(path))


def stored_config(config: bytes) -> RunConfig:
    """Parses the configuration stored in a run's log."""
    return parse_config(json.loads(config))


def with_dp_size(config: RunConfig, dp_size: int) -> RunConfig:
    """Returns the configuration with another `dp_size`. Raises InvalidArgumentError for a conflict."""
    if dp_size == config.dp_size:
        return config
    return parse_config(json.loads(config.model_dump_json(exclude_defaults=True)) | {"dp_size": dp_size})


def _columns(columns: object) -> tuple[ColumnSpec, ...]:
    if not isinstance(columns, list | tuple):
        raise InvalidArgumentError(f"columns: expected a list of columns, got {type(columns).__name__}; send a list")
    return specs_of(columns)


def difference(one: RunConfig, other: RunConfig) -> str:
    """Returns the settings that differ, with both values."""
    before, after = json.loads(one.model_dump_json()), json.loads(other.model_dump_json())
    changed = [
        f"{name} was {before[name]!r} and is now {after[name]!r}" for name in before if before[name] != after[name]
    ]
    return ", ".join(changed)


def _refuse_unknown(mapping: dict[Any, Any], known: Collection[str], section: str = "") -> None:
    """Rejects all unknown settings in one message, where pydantic would report an error for each."""
    unknown = [name for name in mapping if name not in known]
    if unknown:
        names = (
            f"unknown setting {section}{name if str(name).isprintable() else shown(name)}{_suggestion(name, known)}"
            for name in unknown
        )
        raise InvalidArgumentError(f"{problems(names)}{renamings(unknown, known)}; expected one of {', '.join(known)}")


def _suggestion(name: Any, known: Collection[str]) -> str:
    """Returns a clause that suggests the most similar known name; empty if there is none, or `renamings` has one."""
    close = [] if _NAMES.get(name) in known else get_close_matches(str(name)[:64], known, 1, 0.8)
    return f" (did you mean {close[0]}?)" if close else ""


def _explain(error: PydanticValidationError) -> Iterator[str]:
    for item in error.errors(include_url=False, include_context=False):
        name, value = place(item), item["input"]
        if item["type"] == "missing":
            yield f"{name} is required; set it"
        elif item["type"] == "float_type" and isinstance(value, int) and not isinstance(value, bool):
            yield f"{name}: input should be less than or equal to {FLOAT64_MAX}, got {shown(value)}"
        elif item["type"] == "tuple_type":
            yield f"{name}: input should be a list, got {shown(value)}"
        else:
            yield f"{name}: {item['msg'].lower()}, got {shown(value)}"
