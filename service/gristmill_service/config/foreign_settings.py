"""What other frameworks call the settings of a run, so that who moves over is told the name here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

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
    """Which settings to give in the place of these, with a semicolon before each; "" where none is known."""
    return "".join(f"; give {name} as {_NAMES[name]}" for name in unknown if _NAMES.get(name) in known)
