"""Derives the settings of a run from slime's arguments. Does not import slime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.settings import (
    Configured,
    Default,
    Derived,
    Fixed,
    Refuse,
    RefuseSetting,
    Row,
    Same,
    SettingsTable,
    is_given,
    is_on,
    refuse_row_padding,
)

ADVANTAGE_FUNCTION = "gristmill.adapters.slime.advantages"
"""The value of `--custom-advantage-function-path` for advantages that differ within a row."""
TEACHER_LOGPROBS, ROUTED_EXPERTS = "teacher_log_probs", "rollout_routed_experts"
TOP_P_TOKENS = "rollout_top_p_token_ids"
"""slime's names of columns."""

_OF_ROWS = ("grpo", "rloo", "maxrl")
"""Estimators with equal advantages on all tokens of a row."""
_LOSSES = ("grpo", "gspo", "cispo")


def run_settings(config: Any, gristmill: Gristmill, *, dp_size: int, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the settings of the run to create.

    config: slime's arguments, with the parallel sizes that train actors report as `train_parallel_config`: `cp_size`,
    `vpp_size` and `microbatch_group_size_per_vp_stage`, by default 1. dp_size: the number of data-parallel ranks.
    Raises InvalidArgumentError that names all unsupported arguments and their remedies.
    """
    return _TABLE.settings(Configured(config, gristmill, dp_size, pad_token_id))


def options_of(args: Any) -> Gristmill:
    """Read the options from `gristmill` in the file of `--custom-config-path`."""
    return Gristmill.of(getattr(args, "gristmill", None), "--custom-config-path: gristmill")


def image_columns(settings: Mapping[str, Any]) -> list[str]:
    """Return the columns that become `multimodal_train_inputs`."""
    return [column["name"] for column in settings.get("columns", ()) if column.get("scope") == "items"]


def sampled_columns(settings: Mapping[str, Any]) -> list[str]:
    """Return the columns that rollouts contain."""
    return [column["name"] for column in settings.get("columns", ()) if column.get("source", "rollout") == "rollout"]


def _columns(c: Configured) -> list[dict[str, Any]]:
    """Declare the columns that slime's training reads, and that `settings` does not declare otherwise, as a run of an
    earlier version may have them."""
    declared = [column["name"] for column in c.gristmill.settings.get("columns", ())]
    columns: list[dict[str, Any]] = []
    if c.get("use_rollout_routing_replay"):
        shape = [c["num_layers"], c["moe_router_topk"]]
        dtype = "uint8" if c["num_experts"] <= 256 else "int16"
        columns.append({"name": ROUTED_EXPERTS, "dtype": dtype, "scope": "token", "shape": shape, "partial": True})
    if c.get("use_opd") and c["opd_type"] == "sglang":
        columns.append({"name": TEACHER_LOGPROBS, "dtype": "float32", "scope": "response"})
    if c["rollout_top_p"] != 1.0:
        columns.append({"name": TOP_P_TOKENS, "dtype": "int32", "scope": "response", "shape": [None]})
    return [column for column in columns if column["name"] not in declared]


def _micro_batch(c: Configured) -> dict[str, int]:
    return {"max_tokens": c["max_tokens_per_gpu"]} if c["use_dynamic_batch_size"] else {"size": c["micro_batch_size"]}


def _needs_advantages_of_tokens(value: Any, c: Configured) -> bool:
    return value not in _OF_ROWS and c["custom_advantage_function_path"] != ADVANTAGE_FUNCTION


_ROWS: tuple[Row, ...] = (
    Same("train_batch_size", "rollout_batch_size"),
    Same("n_samples_per_prompt", "n_samples_per_prompt"),
    Derived("policy_mini_batch_size", lambda c: c["global_batch_size"] // c["n_samples_per_prompt"]),
    Derived("micro_batch", _micro_batch),
    Derived("cp_size", lambda c: c.get("train_parallel_config.cp_size", 1)),
    Derived("vpp_size", lambda c: c.get("train_parallel_config.vpp_size", 1)),
    Derived("microbatch_group_size", lambda c: c.get("train_parallel_config.microbatch_group_size_per_vp_stage", 1)),
    Fixed("layout", "packed", "slime's train actors accept rows without padding"),
    Fixed("loss_reduction", "none", "slime itself divides its loss"),
    Default("step_wise", lambda c: True),
    Default("advantage_estimator", lambda c: "grpo"),
    Default("grpo_norm_by_std", lambda c: bool(c["grpo_std_normalization"])),
    Default("balance", lambda c: "tokens" if c["balance_data"] else "none"),
    # The batches between two checkpoints, the next batch, and the batch that is being sampled.
    Default("max_buffered_batches", lambda c: max(4, (c["save_interval"] or 0) + 2)),
    Refuse(
        "advantage_estimator",
        lambda value, _: value not in _LOSSES,
        "computes advantages, but the service computes them",
        f"use {', '.join(_LOSSES)}, which select the loss, and settings: {{advantage_estimator: ...}}",
    ),
    Refuse("use_critic", is_on, "trains a critic on its own batches, which is not supported", "omit it"),
    Refuse(
        "rewards_normalization",
        lambda value, _: not value,
        "uses rewards as advantages, which no estimator does",
        "omit --disable-rewards-normalization",
    ),
    Refuse("normalize_advantages", is_on, "changes the service's advantages", "use settings: {whiten: batch}"),
    *(
        Refuse(name, lambda value, _: value is not None, "replaces rewards or train data of the service", "omit it")
        for name in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
    ),
    Refuse(
        "global_batch_size",
        lambda value, c: value % c["n_samples_per_prompt"],
        "splits prompt groups, but a training step has whole groups",
        lambda c: f"use a multiple of --n-samples-per-prompt, {c['n_samples_per_prompt']}",
    ),
    Refuse("log_passrate", is_on, "needs one row per sample", "omit it, and use pass@n in the plan or the dashboard"),
    Refuse("debug_rollout_only", is_on, "trains nothing", "run slime without gristmill"),
    Refuse(
        "rollout_global_dataset",
        lambda value, c: not value and c["save_interval"] is not None,
        "does not report when a checkpoint is saved",
        "omit --disable-rollout-global-dataset, or --save-interval",
    ),
    RefuseSetting(
        "advantage_estimator",
        _needs_advantages_of_tokens,
        "computes advantages per token",
        f"add --custom-advantage-function-path {ADVANTAGE_FUNCTION}",
    ),
    RefuseSetting(
        "update_epochs_per_batch", lambda value, _: value != 1, "is not supported: slime makes one pass", "omit it"
    ),
    *refuse_row_padding("slime"),
    RefuseSetting("critic_mini_batch_size", is_given, "has no effect: slime's critic is not supported", "omit it"),
)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_TABLE = SettingsTable("slime", _ROWS, rollouts=("trainer", "workers"), columns=_columns, spell=_flag)
