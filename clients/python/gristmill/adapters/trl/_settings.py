"""Derives the settings of a run from a `GRPOConfig`. Does not import TRL."""

from __future__ import annotations

from math import lcm
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
    off,
    one_of,
)

# TRL's losses that are divided by the tokens of a mini-batch, and by its rows.
TOKEN_MEANS = frozenset({"dapo", "cispo", "vespo"})
ROW_MEANS = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})

_EPSILON = 1e-4
"""TRL adds this to the standard deviation of a group's rewards."""


def run_settings(config: Any, gristmill: Gristmill, *, dp_size: int, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the settings with which a trainer of this configuration creates its run, for `create_run`.

    config: a `GRPOConfig`. dp_size: its `world_size`, the number of the trainer's processes. pad_token_id: the
    tokenizer's. Raises InvalidArgumentError that names all unsupported settings and their remedies.
    """
    return _TABLE.settings(Configured(config, gristmill, dp_size, pad_token_id))


def steps_per_batch(config: Any, dp_size: int) -> int:
    """Return the optimizer steps between two weight updates of the sampler."""
    return _steps_per_batch(Configured(config, Gristmill("", ""), dp_size, 0))


def logprob_columns(config: Any, gristmill: Gristmill) -> list[str]:
    """Return TRL's names of the columns that the loss needs in addition to the rows' fields. Rows that TRL generates
    contain them. For rows of workers, the adapter writes them back."""
    is_corrected = config.use_vllm and config.vllm_importance_sampling_correction
    if gristmill.rollouts == "workers":
        # A batch with one step is trained by the same weights that computed its log-probabilities.
        needs_old = gristmill.old_logprobs == "trainer" and not _is_one_step(config)
    else:
        # TRL's condition: generations that do not end with an optimizer step are trained by other weights.
        every = config.steps_per_generation * config.num_iterations
        needs_old = config.gradient_accumulation_steps % every != 0 or is_corrected
    needed = {
        "old_per_token_logps": needs_old,
        "importance_sampling_ratio": is_corrected,
        "ref_per_token_logps": config.beta != 0,
    }
    return [name for name, is_needed in needed.items() if is_needed]


def loss_columns(config: Any, gristmill: Gristmill) -> dict[str, str]:
    """Return the columns that the loss reads: TRL's names, mapped to names in shards."""
    columns = {name: name for name in logprob_columns(config, gristmill)}
    sampled = []
    if gristmill.rollouts == "workers" and gristmill.old_logprobs == "rollout":
        sampled.append("old_per_token_logps")
    if config.off_policy_mask_threshold is not None:
        sampled.append("sampling_per_token_logps")
    return columns | dict.fromkeys(sampled, "rollout_logprobs")


def _by_workers(c: Configured) -> bool:
    return c.gristmill.rollouts == "workers"


def _rows_per_step(c: Configured) -> int:
    rows: int = c["per_device_train_batch_size"] * c.dp_size * c["gradient_accumulation_steps"]
    return rows


def _prompts_per_step(c: Configured) -> int:
    return max(1, _rows_per_step(c) // int(c["num_generations"]))


def _prompts_per_batch(c: Configured) -> int:
    return int(c["generation_batch_size"] // c["num_generations"])


def _steps_per_batch(c: Configured) -> int:
    return _prompts_per_batch(c) // _prompts_per_step(c) * int(c["num_iterations"])


def _is_one_step(config: Any) -> bool:
    is_one: bool = config.steps_per_generation * config.num_iterations == config.gradient_accumulation_steps
    return is_one


def _max_buffered_batches(c: Configured) -> int | None:
    if _by_workers(c) or c["save_strategy"] != "steps" or c["save_steps"] < 1:
        return None
    # The run stores the batches since the last checkpoint, and one more batch that is generated.
    return int(c["save_steps"]) // max(1, _steps_per_batch(c)) + 2


def _columns(c: Configured) -> list[dict[str, Any]]:
    column = {"dtype": "float32", "scope": "response", "source": "trainer" if _by_workers(c) else "rollout"}
    return [{"name": name} | column for name in logprob_columns(c.config, c.gristmill)]


def _loss_ignores_reduction(value: Any, c: Configured) -> bool:
    has_entropy = c["entropy_coef"] or c["use_adaptive_entropy"]
    return value != "none" and (c["loss_type"] not in TOKEN_MEANS or c["beta"] != 0 or bool(has_entropy))


_ROWS: tuple[Row, ...] = (
    Derived("train_batch_size", _prompts_per_batch),
    Derived("policy_mini_batch_size", _prompts_per_step),
    Fixed("mini_batch_unit", "prompt", "TRL's optimizer steps have whole prompts"),
    Same("n_samples_per_prompt", "num_generations"),
    Same("update_epochs_per_batch", "num_iterations"),
    Derived("grpo_norm_by_std", lambda c: c["scale_rewards"] != "none"),
    Derived("grpo_std_over", lambda c: "batch" if c["scale_rewards"] == "batch" else None),
    Fixed("grpo_epsilon", _EPSILON, "TRL adds it to standard deviations"),
    Fixed("layout", "left_padded", "TRL's loss accepts padded rows"),
    Derived("pad_to_multiple_of", lambda c: c["pad_to_multiple_of"] or 1),
    Derived("overlong_filter", lambda c: ["length"] if c["mask_truncated_completions"] else None),
    # Batches contain the groups that TRL generated together, in TRL's order.
    Derived("seal_order", lambda c: None if _by_workers(c) else "admission"),
    Default("micro_batch", lambda c: {"size": c["per_device_train_batch_size"]}),
    Default("pad_width", lambda c: "micro_batch"),
    Default("max_buffered_batches", _max_buffered_batches),
    Refuse(
        "loss_type",
        lambda value, _: value not in TOKEN_MEANS | ROW_MEANS,
        "divides by the tokens of each micro-batch, so the loss depends on how the mini-batch is split",
        "use 'dapo', which divides by the tokens of the whole mini-batch",
    ),
    one_of("scale_rewards", ("group", "batch", "none"), "is not supported"),
    Refuse(
        "multi_objective_aggregation",
        lambda value, _: value != "sum_then_normalize",
        "is not supported: the adapter sends the sum of the reward functions",
        "use 'sum_then_normalize', and for GDPO let workers send reward_components (rollouts='workers', "
        "settings={'advantage_estimator': 'gdpo', 'whiten': 'trajectories'})",
    ),
    Refuse(
        "gradient_accumulation_steps",
        lambda _, c: bool(_rows_per_step(c) % c["num_generations"]),
        lambda c: (
            f"results in {_rows_per_step(c)} rows per optimizer step (times per_device_train_batch_size and ranks), "
            f"but mini-batches have whole prompts of num_generations: {c['num_generations']} rows"
        ),
        lambda c: f"set it so that a step has a multiple of {lcm(_rows_per_step(c), c['num_generations'])} rows",
    ),
    Refuse(
        "steps_per_generation",
        lambda _, c: bool(_prompts_per_batch(c) % _prompts_per_step(c)),
        "ends a generation within an optimizer step",
        lambda c: f"use a multiple of gradient_accumulation_steps: {c['gradient_accumulation_steps']}, TRL's default",
    ),
    off("use_vllm", "starts an engine for TRL's generation, but workers send the rollouts", _by_workers),
    Refuse(
        "max_steps",
        lambda value, c: value < 1 and _by_workers(c),
        "does not limit the training, and rollouts of workers have no data set",
        "set the number of optimizer steps",
    ),
    RefuseSetting(
        "loss_reduction",
        _loss_ignores_reduction,
        "scales the advantages, which KL, an entropy bonus and a loss per row do not use",
        "omit it, or use loss_type: 'dapo', beta: 0 and no entropy bonus",
    ),
    RefuseSetting(
        "columns",
        lambda value, _: any(column.get("source") == "trainer" for column in value),
        "has a column of source: trainer, but the adapter only writes log-probabilities, which it declares itself",
        "send the column with the rows",
    ),
)

_TABLE = SettingsTable("TRL", _ROWS, rollouts=("trainer", "workers"), columns=_columns)
