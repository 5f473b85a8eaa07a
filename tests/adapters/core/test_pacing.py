"""Adapters derive from a trainer's configuration how far rollouts may be ahead, so that it never waits for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gristmill import InvalidArgumentError
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters.trl._async_settings import async_run_settings
from gristmill.adapters.verl._settings import run_settings
from gristmill_service.config import parse_config


def options(**settings: Any) -> Gristmill:
    return Gristmill("here:1", "run", settings=settings)


def async_grpo(groups: int, trls: int, **settings: Any) -> Any:
    """Of a trainer with steps of so many groups, and this max_staleness of its own."""
    args = SimpleNamespace(
        per_device_train_batch_size=groups,
        gradient_accumulation_steps=4,
        world_size=1,
        num_generations=4,
        max_staleness=trls,
    )
    return parse_config(async_run_settings(args, options(**settings)))


@pytest.mark.parametrize(("groups", "max_staleness", "ahead"), [(8, 4, 57), (1, 0, 4), (8, 0, 25)])
def test_async_grpo_has_two_steps_more_than_may_be_stale(groups: int, max_staleness: int, ahead: int) -> None:
    run = async_grpo(groups, max_staleness)
    assert (run.batches_ahead, run.max_buffered_batches) == (ahead, ahead + 1)


def test_async_grpo_with_a_staleness_of_the_run_is_no_further_ahead_than_that() -> None:
    run = async_grpo(8, 8, max_staleness=4, stale="mask")
    assert (run.max_staleness, run.batches_ahead) == (4, 57)
    assert async_grpo(8, 8, max_batches_ahead=30).batches_ahead == 30


def verl(save_freq: int) -> dict[str, Any]:
    actor = {
        "ppo_mini_batch_size": 2, "ppo_epochs": 1, "use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1,
        "strategy": "fsdp", "ulysses_sequence_parallel_size": 1, "loss_agg_mode": "token-mean",
    }  # fmt: skip
    return {
        "data": {"train_batch_size": 4},
        "actor_rollout_ref": {"rollout": {"n": 2}, "actor": actor},
        "critic": {"enable": False},
        "algorithm": {
            "adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False,
        },
        "trainer": {"save_freq": save_freq, "total_training_steps": 100},
    }  # fmt: skip


@pytest.mark.parametrize("stale", ["drop", "mask"])
def test_verl_refuses_to_drop_or_mask_what_is_sampled_between_two_checkpoints(stale: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"max_staleness: 4 is less than trainer.save_freq: 20.* at least 20"
    ):
        run_settings(verl(20), options(max_staleness=4, stale=stale), dp_size=1)
    assert parse_config(run_settings(verl(20), options(max_staleness=20, stale=stale), dp_size=1)).stale == stale
    assert parse_config(run_settings(verl(3), options(max_staleness=4, stale=stale), dp_size=1)).batches_ahead == 4


def test_verl_counts_staler_ones_with_any_staleness() -> None:
    assert parse_config(run_settings(verl(20), options(max_staleness=4), dp_size=1)).batches_ahead == 4
