"""The settings of a run, as SkyRL's configuration means them. What has no equal there is refused, with what to do.

Reads the configuration by its names and imports nothing of SkyRL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gristmill.adapters.skyrl._options import Gristmill
from gristmill.errors import InvalidArgumentError

_ESTIMATORS = ("grpo", "rloo", "maxrl", "gae", "reinforce++")
_PER_TOKEN = ("gae", "reinforce++")
_REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
_KL_ESTIMATORS = ("k1", "k2", "k3")
_TOLERANCE = 1e-6
"""SkyRL's default, under which scores of a group count as equal; the service's are exact sums."""
_BATCHES_AHEAD = 2
"""Beside the batches since the last checkpoint: the one that is trained, and the next."""

# Not SkyRL's to say, and needed as they are: one width a batch, rows of a rank one after another, its order of prompts.
_FIXED: dict[str, Any] = {
    "layout": "left_padded",
    "pad_width": "batch",
    "on_misaligned": "pad",
    "seal_order": "admission",
}
# What would leave a batch without a group that SkyRL sampled for it: it would wait for ever.
_OF_WORKERS = ("tag_shares", "group_timeout_s", "min_samples", "max_samples_per_prompt", "surplus", "mini_batch_unit")


def run_settings(cfg: Any, gristmill: Gristmill, *, dp_size: int, pad_token_id: int) -> dict[str, Any]:
    """The settings with which a trainer of this configuration creates its run, for `RolloutClient.create_run`.

    cfg: a `SkyRLTrainConfig`. dp_size: data-parallel ranks of the policy. pad_token_id: the tokenizer's.
    Raises InvalidArgumentError for what the service cannot do as SkyRL does it, and for settings that contradict.
    """
    for is_wrong, message in _rules(cfg, gristmill):
        if is_wrong:
            raise InvalidArgumentError(message)
    derived = _derived(cfg) | _FIXED | {"dp_size": dp_size, "pad_token_id": pad_token_id}
    for name in gristmill.settings.keys() & derived.keys():
        where = "is fixed at" if name in _FIXED else "follows from SkyRL's configuration, where it is"
        raise InvalidArgumentError(f"settings: {name} {where} {derived[name]!r}; leave it out, or change it there")
    columns = [*_written_columns(cfg), *gristmill.settings.get("columns", ())]
    return _defaults(cfg) | dict(gristmill.settings) | derived | ({"columns": columns} if columns else {})


def makes_checkpoints(cfg: Any) -> bool:
    """Whether batches are kept until a checkpoint has them."""
    return bool(cfg.trainer.ckpt_interval > 0)


def _derived(cfg: Any) -> dict[str, Any]:
    trainer, algorithm, generator = cfg.trainer, cfg.trainer.algorithm, cfg.generator
    found: dict[str, Any] = {
        "train_batch_size": trainer.train_batch_size,
        "n_samples_per_prompt": generator.n_samples_per_prompt,
        "policy_mini_batch_size": trainer.policy_mini_batch_size,
        "update_epochs_per_batch": trainer.update_epochs_per_batch,
        "step_wise": generator.step_wise_trajectories,
        "advantage_estimator": algorithm.advantage_estimator,
        "loss_reduction": algorithm.loss_reduction,
        "zero_variance_filter": "mask" if algorithm.zero_variance_filter else False,
        "micro_batch": (
            {"max_tokens": trainer.max_tokens_per_microbatch}
            if trainer.max_tokens_per_microbatch > 0
            else {"size": trainer.micro_train_batch_size_per_gpu}
        ),
    }
    if algorithm.max_seq_len is not None:
        found["max_seq_len"] = algorithm.max_seq_len
    if algorithm.advantage_estimator == "grpo":
        found["grpo_norm_by_std"] = algorithm.grpo_norm_by_std
    if algorithm.advantage_estimator in _PER_TOKEN:
        # SkyRL's own estimators whiten what they return.
        found |= {"gamma": algorithm.gamma, "whiten": "batch"}
    if algorithm.advantage_estimator == "gae":
        found["lambda"] = algorithm.lambd
    if algorithm.use_kl_in_reward:
        found["kl_in_reward"] = {"coef": algorithm.kl_loss_coef, "estimator": algorithm.kl_estimator_type}
    if cfg.trainer.critic.model.path:
        found["critic_mini_batch_size"] = trainer.critic_mini_batch_size
    return found


def _defaults(cfg: Any) -> dict[str, Any]:
    """What the settings of the adapter may say otherwise."""
    found: dict[str, Any] = {"merge": "prefix" if cfg.generator.merge_stepwise_output else "none"}
    if makes_checkpoints(cfg):
        found["max_buffered_batches"] = cfg.trainer.ckpt_interval + _BATCHES_AHEAD
    if cfg.trainer.fully_async.enabled:
        # Counted, as SkyRL logs them.
        found["max_staleness"] = cfg.trainer.fully_async.max_staleness_steps
    return found


def _written_columns(cfg: Any) -> Iterator[dict[str, Any]]:
    """What advantages depend on and SkyRL's forward passes compute."""
    algorithm = cfg.trainer.algorithm
    names = ["old_logprobs", "ref_logprobs"] if algorithm.use_kl_in_reward else []
    if algorithm.advantage_estimator == "gae":
        names.append("values")
    for name in names:
        yield {"name": name, "dtype": "float32", "scope": "response", "source": "trainer"}


def _rules(cfg: Any, gristmill: Gristmill) -> Iterator[tuple[bool, str]]:
    """What is refused: whether it is so, and the words."""
    trainer, algorithm, generator = cfg.trainer, cfg.trainer.algorithm, cfg.generator
    yield (
        algorithm.advantage_estimator not in _ESTIMATORS,
        f"trainer.algorithm.advantage_estimator: {algorithm.advantage_estimator!r} is SkyRL's alone; the service "
        f"computes {', '.join(_ESTIMATORS)}",
    )
    yield (
        algorithm.loss_reduction not in _REDUCTIONS,
        f"trainer.algorithm.loss_reduction: {algorithm.loss_reduction!r} depends on how a mini-batch is cut; use "
        f"{', '.join(_REDUCTIONS)}",
    )
    yield (
        algorithm.advantage_batch_normalize,
        "trainer.algorithm.advantage_batch_normalize: True takes its mean over padding too; set it to False and "
        "settings={'whiten': 'batch'}, which is over trained tokens",
    )
    yield (
        algorithm.zero_variance_filter and algorithm.zero_variance_filter_tol > _TOLERANCE,
        f"trainer.algorithm.zero_variance_filter_tol: {algorithm.zero_variance_filter_tol} has no equal: the service "
        f"masks groups of equal scores; use at most {_TOLERANCE}, and round the rewards in the environment",
    )
    yield (
        algorithm.dynamic_sampling.type is not None,
        f"trainer.algorithm.dynamic_sampling.type: {algorithm.dynamic_sampling.type!r} chooses groups that the service "
        "would choose; leave it None and set trainer.algorithm.zero_variance_filter=true, which masks them",
    )
    yield (
        algorithm.use_kl_in_reward and algorithm.kl_ctrl.type != "fixed",
        f"trainer.algorithm.kl_ctrl.type: {algorithm.kl_ctrl.type!r} changes the coefficient as it goes, and a run has "
        "one; use 'fixed'",
    )
    yield (
        algorithm.use_kl_in_reward and algorithm.kl_estimator_type not in _KL_ESTIMATORS,
        f"trainer.algorithm.kl_estimator_type: {algorithm.kl_estimator_type!r} has no equal in rewards; use "
        f"{', '.join(_KL_ESTIMATORS)}",
    )
    yield (
        algorithm.use_kl_in_reward and gristmill.settings.get("kl_from", "old_logprobs") != "old_logprobs",
        "settings: kl_from: SkyRL takes the KL of its own forward pass; leave it out",
    )
    yield (
        bool(trainer.critic.model.path) and algorithm.advantage_estimator != "gae",
        f"trainer.critic.model.path: advantages of {algorithm.advantage_estimator!r} need no values; leave it None, or "
        "use advantage_estimator 'gae'",
    )
    yield (
        generator.vision_language_generator,
        "generator.vision_language_generator: True: images are not taken to the workers yet; train text with this "
        "adapter",
    )
    yield (
        trainer.fully_async.sample_full_batch,
        "trainer.fully_async.sample_full_batch: True drops groups before they come to the service; set it to False and "
        "leave zero_variance_filter, which masks them",
    )
    yield (
        trainer.fully_async.simulate_training,
        "trainer.fully_async.simulate_training: True trains nothing, so that there is no run; use SkyRL's own trainer",
    )
    for name in _OF_WORKERS:
        yield (
            name in gristmill.settings,
            f"settings: {name} chooses among groups that come when they are ready, and SkyRL samples a batch at a "
            "time; leave it out",
        )
    yield (
        gristmill.settings.get("stale") == "drop",
        "settings: stale: drop would leave a batch without a group that SkyRL sampled for it; use count or mask",
    )
