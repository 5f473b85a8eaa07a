"""The settings of a run, as SkyRL's configuration means them. What has no equal there is refused, with what to do.

Reads the configuration by its names and imports nothing of SkyRL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gristmill.adapters.skyrl._options import Gristmill
from gristmill.adapters.skyrl._refusals import refusals
from gristmill.errors import InvalidArgumentError

_PER_TOKEN = ("gae", "reinforce++")
_BATCHES_AHEAD = 2
"""Beside the batches since the last checkpoint: the one that is trained, and the next."""

# Not SkyRL's to say, and needed as they are: one width a batch, rows of a rank one after another, its order of prompts.
_FIXED: dict[str, Any] = {
    "layout": "left_padded",
    "pad_width": "batch",
    "on_misaligned": "pad",
    "seal_order": "admission",
}


def run_settings(cfg: Any, gristmill: Gristmill, *, dp_size: int, pad_token_id: int) -> dict[str, Any]:
    """The settings with which a trainer of this configuration creates its run, for `RolloutClient.create_run`.

    cfg: a `SkyRLTrainConfig`. dp_size: data-parallel ranks of the policy. pad_token_id: the tokenizer's.
    Raises InvalidArgumentError for all that the service cannot do as SkyRL does it, and for settings that contradict.
    """
    if problems := list(refusals(cfg, gristmill.settings)):
        raise InvalidArgumentError("; ".join(problems))
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
