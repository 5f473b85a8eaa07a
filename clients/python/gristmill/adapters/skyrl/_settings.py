"""Derives the settings of a run from SkyRL's configuration. Does not import SkyRL."""

from __future__ import annotations

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
    one_of,
    written_column,
)

WRITTEN = {"old_logprobs": "action_log_probs", "ref_logprobs": "base_action_log_probs", "values": "values"}
"""SkyRL's names of the columns that the trainer writes back."""

_ALGORITHM = "trainer.algorithm"
_ESTIMATORS = ("grpo", "rloo", "maxrl", "gae", "reinforce++")
_PER_TOKEN = ("gae", "reinforce++")
_REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
_KL_ESTIMATORS = ("k1", "k2", "k3")
_TOLERANCE = 1e-6
"""SkyRL's default. Scores of a group that differ by less count as equal. The service compares exact sums."""
_BATCHES_AHEAD = 2
"""The batches that a run stores in addition to those since the last checkpoint: the batch in training, and the next."""


def run_settings(config: Any, gristmill: Gristmill, *, dp_size: int, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the settings with which a trainer of this configuration creates its run, for `create_run`.

    config: a `SkyRLTrainConfig`. dp_size: the number of data-parallel ranks of the policy. pad_token_id: the
    tokenizer's. Raises InvalidArgumentError that names all unsupported settings and their remedies.
    """
    return _TABLE.settings(Configured(config, gristmill, dp_size, pad_token_id))


def makes_checkpoints(config: Any) -> bool:
    """Return whether batches are stored until a checkpoint includes them."""
    return bool(config.trainer.ckpt_interval > 0)


def _estimator(c: Configured) -> str:
    return str(c["trainer.algorithm.advantage_estimator"])


def _has_kl(c: Configured) -> bool:
    return bool(c["trainer.algorithm.use_kl_in_reward"])


def _micro_batch(c: Configured) -> dict[str, int]:
    if c["trainer.max_tokens_per_microbatch"] > 0:
        return {"max_tokens": c["trainer.max_tokens_per_microbatch"]}
    return {"size": c["trainer.micro_train_batch_size_per_gpu"]}


def _kl_in_reward(c: Configured) -> dict[str, Any] | None:
    if not _has_kl(c):
        return None
    return {"coef": c["trainer.algorithm.kl_loss_coef"], "estimator": c["trainer.algorithm.kl_estimator_type"]}


def _written_columns(c: Configured) -> list[dict[str, Any]]:
    """Declare the columns that SkyRL's forward passes compute and advantages depend on."""
    names = ["old_logprobs", "ref_logprobs"] if _has_kl(c) else []
    return [written_column(name) for name in (*names, *(["values"] if _estimator(c) == "gae" else []))]


_ROWS: tuple[Row, ...] = (
    Same("train_batch_size", "trainer.train_batch_size"),
    Same("n_samples_per_prompt", "generator.n_samples_per_prompt"),
    Same("policy_mini_batch_size", "trainer.policy_mini_batch_size"),
    Same("critic_mini_batch_size", "trainer.critic_mini_batch_size", when=lambda c: c["trainer.critic.model.path"]),
    Same("update_epochs_per_batch", "trainer.update_epochs_per_batch"),
    Same("step_wise", "generator.step_wise_trajectories"),
    Same("advantage_estimator", f"{_ALGORITHM}.advantage_estimator"),
    Same("grpo_norm_by_std", f"{_ALGORITHM}.grpo_norm_by_std", when=lambda c: _estimator(c) == "grpo"),
    Same("gamma", f"{_ALGORITHM}.gamma", when=lambda c: _estimator(c) in _PER_TOKEN),
    Same("lambda", f"{_ALGORITHM}.lambd", when=lambda c: _estimator(c) == "gae"),
    # SkyRL's estimators also whiten advantages.
    Derived("whiten", lambda c: "batch" if _estimator(c) in _PER_TOKEN else None),
    Same("loss_reduction", f"{_ALGORITHM}.loss_reduction"),
    Same("max_seq_len", f"{_ALGORITHM}.max_seq_len"),
    Derived("zero_variance_filter", lambda c: "mask" if c[f"{_ALGORITHM}.zero_variance_filter"] else False),
    Derived("micro_batch", _micro_batch),
    Derived("kl_in_reward", _kl_in_reward),
    Fixed("layout", "left_padded", "SkyRL's workers accept padded rows"),
    Fixed("pad_width", "batch", "SkyRL uses one width per batch"),
    Fixed("on_misaligned", "pad", "SkyRL sends every rank the same number of rows"),
    Fixed("seal_order", "admission", "a batch has the groups that SkyRL sampled for it"),
    Default("merge", lambda c: "prefix" if c["generator.merge_stepwise_output"] else "none"),
    Default(
        "max_buffered_batches",
        lambda c: c["trainer.ckpt_interval"] + _BATCHES_AHEAD if makes_checkpoints(c.config) else None,
    ),
    # The run counts stale groups, because SkyRL logs them.
    Default(
        "max_staleness",
        lambda c: c["trainer.fully_async.max_staleness_steps"] if c["trainer.fully_async.enabled"] else None,
    ),
    one_of(f"{_ALGORITHM}.advantage_estimator", _ESTIMATORS, "is not an estimator of the service"),
    one_of(f"{_ALGORITHM}.loss_reduction", _REDUCTIONS, "depends on how a mini-batch is split into micro-batches"),
    Refuse(
        f"{_ALGORITHM}.advantage_batch_normalize",
        is_on,
        "includes padding in its mean",
        "set it to False and settings={'whiten': 'batch'}, which uses only trained tokens",
    ),
    Refuse(
        f"{_ALGORITHM}.zero_variance_filter_tol",
        lambda value, c: c[f"{_ALGORITHM}.zero_variance_filter"] and value > _TOLERANCE,
        "is not supported: the service masks groups of equal scores",
        f"use at most {_TOLERANCE}, and round the rewards in the environment",
    ),
    Refuse(
        f"{_ALGORITHM}.dynamic_sampling.type",
        is_on,
        "selects groups, but the service selects them",
        "set it to None and trainer.algorithm.zero_variance_filter=true, which masks groups",
    ),
    one_of(f"{_ALGORITHM}.kl_ctrl.type", ("fixed",), "changes the coefficient, but a run has a fixed one", _has_kl),
    one_of(f"{_ALGORITHM}.kl_estimator_type", _KL_ESTIMATORS, "is not supported in rewards", _has_kl),
    Refuse(
        "trainer.critic.model.path",
        lambda value, c: value and _estimator(c) != "gae",
        "computes values that this advantage_estimator does not use",
        "set it to None, or use advantage_estimator 'gae'",
    ),
    Refuse(
        "generator.vision_language_generator",
        is_on,
        "generates images, which the adapter does not pass to SkyRL's workers",
        "train on text only",
    ),
    Refuse(
        "trainer.fully_async.sample_full_batch",
        is_on,
        "drops groups before the service gets them",
        "set it to False and use zero_variance_filter, which masks groups",
    ),
    Refuse("trainer.fully_async.simulate_training", is_on, "trains nothing", "use SkyRL's own trainer"),
    RefuseSetting(
        "columns",
        lambda value, _: any(None in (column.get("shape") or ()) for column in value),
        "has a column with any number of values per token (shape: [null]), which SkyRL's workers do not support",
        "declare a shape, for example the shape of rollout_sample_support, and a fill",
    ),
    RefuseSetting("mini_batch_unit", is_given, "is not supported: SkyRL counts prompts", "omit it"),
    RefuseSetting(
        "kl_from",
        lambda value, c: _has_kl(c) and value != "old_logprobs",
        "is not supported: SkyRL uses the KL of its forward pass",
        "omit it",
    ),
)


_TABLE = SettingsTable("SkyRL", _ROWS, rollouts=("trainer",), columns=_written_columns)
