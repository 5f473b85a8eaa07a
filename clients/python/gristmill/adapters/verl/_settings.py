"""Derives the settings of a run from verl's configuration. Does not import verl."""

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
    off,
    one_of,
    refuse_row_padding,
    written_column,
)

OPTIONS = "trainer.v1.gristmill"
"""The path of the adapter's options in verl's configuration."""

WRITTEN = {
    "old_logprobs": "old_log_probs",
    "ref_logprobs": "ref_log_prob",
    "values": "values",
    "sum_pi_squared": "sum_pi_squared",
}
"""verl's names of the columns that the trainer writes back."""

_ACTOR = "actor_rollout_ref.actor"
_ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "gae": "gae",
    "reinforce_plus_plus": "reinforce++",
    "opo": "opo",
    "grpo_passk": "passk",
    "gdpo": "gdpo",
    "tir_optimal_token_baseline": "otb",
}
_INSTEAD = {"optimal_token_baseline": "tir_optimal_token_baseline, which has no baseline where one rollout is left"}
_WITH_STD = ("grpo", "passk")
"""The estimators for which verl reads `norm_adv_by_std_in_grpo`; its gdpo always divides."""
_PER_TOKEN = ("gae", "reinforce++")
_WHITENED = (*_PER_TOKEN, "gdpo")
# verl.trainer.ppo.core_algos.kl_penalty
_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_STRATEGIES = ("fsdp", "fsdp2", "megatron")
_BATCHES_AHEAD = 2
"""The number of batches that a run stores in addition to the batches since the last checkpoint."""


def run_settings(config: Any, gristmill: Gristmill, *, dp_size: int, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the settings with which a trainer of this configuration creates its run, for `create_run`.

    config: verl's configuration, as Hydra composes `ppo_trainer`. gristmill: for example
    `Gristmill.of(config.trainer.v1.gristmill, ...)`. dp_size: the number of data-parallel ranks of the actor.
    pad_token_id: the tokenizer's. Raises InvalidArgumentError that names all unsupported settings and their remedies.
    """
    return _TABLE.settings(Configured(config, gristmill, dp_size, pad_token_id))


def needs_critic(config: Any) -> bool:
    """Return whether verl trains a critic, by verl's own rule."""
    enabled = config["critic"]["enable"]
    return config["algorithm"]["adv_estimator"] == "gae" if enabled is None else bool(enabled)


def bypasses_old_logprobs(config: Any) -> bool:
    """Return whether the sampler's log-probabilities replace the policy's log-probabilities before the update."""
    correction = config["algorithm"].get("rollout_correction") or {}
    return bool(correction.get("bypass_mode", False))


def _estimator(c: Configured) -> str | None:
    return _ESTIMATORS.get(c["algorithm.adv_estimator"])


def _component_weights(c: Configured) -> dict[str, float] | None:
    keys = c.get("algorithm.gdpo_reward_keys") if _estimator(c) == "gdpo" else None
    weights = c.get("algorithm.gdpo_reward_weights") or [1.0] * len(keys or ())
    return {str(key): float(weight) for key, weight in zip(keys, weights, strict=False)} if keys else None


def _has_kl(c: Configured) -> bool:
    return bool(c["algorithm.use_kl_in_reward"])


def _micro_batch(c: Configured) -> dict[str, Any]:
    if c[f"{_ACTOR}.use_dynamic_bsz"]:
        return {"max_tokens": c[f"{_ACTOR}.ppo_max_token_len_per_gpu"]}
    return {"size": c[f"{_ACTOR}.ppo_micro_batch_size_per_gpu"], "full": True}


def _cp_size(c: Configured) -> int:
    is_megatron = c[f"{_ACTOR}.strategy"] == "megatron"
    size = c[f"{_ACTOR}.megatron.context_parallel_size" if is_megatron else f"{_ACTOR}.ulysses_sequence_parallel_size"]
    return int(size)


def _kl_in_reward(c: Configured) -> dict[str, Any] | None:
    if not _has_kl(c):
        return None
    return {"coef": c["algorithm.kl_ctrl.kl_coef"], "estimator": _KL_ESTIMATORS.get(c["algorithm.kl_penalty"])}


def _kl_from(c: Configured) -> str | None:
    if not _has_kl(c):
        return None
    return "rollout_logprobs" if bypasses_old_logprobs(c.config) else "old_logprobs"


def _max_buffered_batches(c: Configured) -> int | None:
    save_freq: int = c["trainer.save_freq"]
    return save_freq + _BATCHES_AHEAD if save_freq > _BATCHES_AHEAD else None


def _written_columns(c: Configured) -> list[dict[str, Any]]:
    """Declare the columns that verl's workers compute and advantages depend on."""
    names = []
    if _has_kl(c):
        names += ["ref_logprobs"] if bypasses_old_logprobs(c.config) else ["old_logprobs", "ref_logprobs"]
    if c["algorithm.adv_estimator"] == "gae":
        names.append("values")
    if _estimator(c) == "otb":
        names += ["sum_pi_squared"] if "old_logprobs" in names else ["old_logprobs", "sum_pi_squared"]
    return [written_column(name) for name in names]


def _corrects_before_advantages(value: Any, _: Configured) -> bool:
    correction = value or {}
    corrects = correction.get("rollout_is") is not None or correction.get("rollout_rs") is not None
    return corrects and not correction.get("bypass_mode")


def _is_smaller_than_the_actors(size: str) -> Refuse:
    """Refuse a critic with smaller micro-batches than the actor, because it trains the actor's micro-batches."""

    def is_smaller(value: Any, c: Configured) -> bool:
        is_used = needs_critic(c.config) and (size == "ppo_max_token_len_per_gpu") == bool(
            c[f"{_ACTOR}.use_dynamic_bsz"]
        )
        return is_used and value is not None and value < c[f"{_ACTOR}.{size}"]

    return Refuse(
        f"critic.{size}", is_smaller, "is less than the actor's value, but the critic trains the actor's micro-batches",
        f"lower {_ACTOR}.{size} to it",
    )  # fmt: skip


_ROWS: tuple[Row, ...] = (
    Same("train_batch_size", "data.train_batch_size"),
    Same("n_samples_per_prompt", "actor_rollout_ref.rollout.n"),
    Same("policy_mini_batch_size", f"{_ACTOR}.ppo_mini_batch_size"),
    Same("critic_mini_batch_size", "critic.ppo_mini_batch_size", when=lambda c: needs_critic(c.config)),
    Same("update_epochs_per_batch", f"{_ACTOR}.ppo_epochs"),
    Derived("advantage_estimator", _estimator),
    Derived("micro_batch", _micro_batch),
    Derived("cp_size", _cp_size),
    Same("grpo_norm_by_std", "algorithm.norm_adv_by_std_in_grpo", when=lambda c: _estimator(c) in _WITH_STD),
    Derived("component_weights", _component_weights),
    Same("gamma", "algorithm.gamma", when=lambda c: _estimator(c) in _PER_TOKEN),
    Derived("whiten", lambda c: "batch" if _estimator(c) in _WHITENED else None),
    Same("lambda", "algorithm.lam", when=lambda c: _estimator(c) == "gae"),
    Derived("kl_in_reward", _kl_in_reward),
    Derived("kl_from", _kl_from),
    Fixed("layout", "packed", "verl's workers accept rows without padding"),
    Default("step_wise", lambda c: True),
    Default("max_buffered_batches", _max_buffered_batches),
    *refuse_row_padding("verl"),
    RefuseSetting(
        "max_staleness",
        lambda value, c: c.gristmill.settings.get("stale", "count") != "count" and value < c["trainer.save_freq"],
        lambda c: (
            f"is less than trainer.save_freq: {c['trainer.save_freq']}, the steps by which the version grows with each "
            "checkpoint, so that every rollout before it would be stale"
        ),
        lambda c: f"set it to at least {c['trainer.save_freq']}, use stale: count, or save more often",
    ),
    RefuseSetting("columns", is_given, "is not supported: verl's workers get no other columns", "omit it"),
    RefuseSetting(
        "loss_reduction",
        is_given,
        "is not supported: verl reduces losses itself",
        f"omit it, and set {_ACTOR}.loss_agg_mode",
    ),
    Refuse(
        "algorithm.adv_estimator",
        lambda value, _: value not in _ESTIMATORS,
        "is not an estimator of the service",
        lambda c: f"use {_INSTEAD.get(c['algorithm.adv_estimator'], ', '.join(_ESTIMATORS))}",
    ),
    Refuse(
        f"{_ACTOR}.calculate_sum_pi_squared",
        lambda value, c: not value and _estimator(c) == "otb",
        "leaves out what the optimal token baseline is computed from",
        "set it to True",
    ),
    Refuse(
        "algorithm.rollout_correction.bypass_mode",
        lambda value, c: bool(value) and _estimator(c) == "otb",
        "computes no old_log_probs, which the optimal token baseline is computed from",
        "set it to False",
    ),
    Refuse(
        "algorithm.adv_estimator",
        lambda value, c: value == "gdpo" and not c.get("algorithm.gdpo_reward_keys"),
        "compares the components of rewards, and algorithm.gdpo_reward_keys names none",
        "set it to the names of the rows' reward_components",
    ),
    one_of("algorithm.kl_penalty", _KL_ESTIMATORS, "is not supported in rewards", _has_kl),
    one_of("algorithm.kl_ctrl.type", ("fixed",), "changes the coefficient, but a run has a fixed one", _has_kl),
    Refuse(
        "algorithm.filter_groups.enable",
        is_on,
        "selects groups, but the service selects them",
        f"set it to False and {OPTIONS}.settings.zero_variance_filter=replace",
    ),
    Refuse(
        "algorithm.rollout_correction",
        _corrects_before_advantages,
        "weighs and rejects tokens before advantages are computed",
        "set rollout_is and rollout_rs to null, or set bypass_mode=True, which corrects in the loss",
    ),
    off("algorithm.use_pf_ppo", "samples rows, but a run trains each row once per epoch"),
    one_of(f"{_ACTOR}.strategy", _STRATEGIES, "is a strategy that the adapter does not support"),
    off(f"{_ACTOR}.shuffle", "moves rows, but the service plans mini-batches"),
    Refuse(
        f"{_ACTOR}.loss_agg_mode",
        lambda value, c: value == "seq-mean-token-sum-norm" and c.get(f"{_ACTOR}.loss_scale_factor") is None,
        "divides by the width of each micro-batch",
        f"set {_ACTOR}.loss_scale_factor",
    ),
    off(
        f"{_ACTOR}.checkpoint.async_save",
        "writes checkpoints in the background, but the adapter frees batches when verl returns from saving",
    ),
    off(f"{_ACTOR}.use_prefix_grouper", "needs a group's rows on one rank, but the service may use several ranks"),
    Refuse(
        "critic.enable",
        lambda value, c: value and c["algorithm.adv_estimator"] != "gae",
        "computes values that only gae uses",
        "set it to null, or set algorithm.adv_estimator=gae",
    ),
    Refuse(
        "critic.ppo_epochs",
        lambda value, c: needs_critic(c.config) and value != c[f"{_ACTOR}.ppo_epochs"],
        "differs from the actor's, but both must train a batch equally often",
        lambda c: f"set it to {c[f'{_ACTOR}.ppo_epochs']}",
    ),
    off("critic.shuffle", "moves rows, but the service plans mini-batches", lambda c: needs_critic(c.config)),
    _is_smaller_than_the_actors("ppo_max_token_len_per_gpu"),
    _is_smaller_than_the_actors("ppo_micro_batch_size_per_gpu"),
    Refuse(
        "trainer.total_training_steps",
        lambda value, _: value is None,
        "does not limit the training, and there is no data set",
        "set the number of batches",
    ),
    *(
        Refuse(f"trainer.{name}", when, "needs an inference engine, which verl does not start", f"set it to {off}")
        for name, when, off in (
            ("val_before_train", is_on, False),
            ("val_only", is_on, False),
            ("test_freq", lambda value, _: value > 0, -1),
        )
    ),
    Refuse(
        "trainer.rollout_data_dir",
        is_on,
        "would stay empty, because workers send the rollouts",
        "set it to null, and write rollouts with gristmill export",
    ),
    off("reward.reward_model.enable", "would score rollouts that already have rewards"),
    off("distillation.enabled", "needs rollouts that verl samples"),
)

_TABLE = SettingsTable("verl", _ROWS, rollouts=("workers",), columns=_written_columns)
