"""SkyRL 0.4 can write checkpoints in the background: batches would be freed before their weights are safe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gristmill import InvalidArgumentError
from gristmill.adapters.skyrl import Gristmill, run_settings


def configuration(**megatron: bool) -> Any:
    """The part of SkyRL 0.4's configuration that the adapter reads. megatron: by model, its asynchronous saving."""
    algorithm = SimpleNamespace(
        advantage_estimator="grpo",
        grpo_norm_by_std=True,
        loss_reduction="token_mean",
        max_seq_len=None,
        use_kl_in_reward=False,
        zero_variance_filter=False,
    )
    models = {
        model: SimpleNamespace(
            model=SimpleNamespace(path=None), megatron_config=SimpleNamespace(async_dist_ckpt_save=is_async)
        )
        for model, is_async in ({"policy": False, "critic": False} | megatron).items()
    }
    trainer = SimpleNamespace(
        algorithm=algorithm,
        train_batch_size=4,
        policy_mini_batch_size=2,
        update_epochs_per_batch=1,
        max_tokens_per_microbatch=0,
        micro_train_batch_size_per_gpu=1,
        ckpt_interval=10,
        fully_async=SimpleNamespace(enabled=False),
        **models,
    )
    generator = SimpleNamespace(n_samples_per_prompt=2, step_wise_trajectories=True, merge_stepwise_output=True)
    return SimpleNamespace(trainer=trainer, generator=generator)


def settings(**megatron: bool) -> dict[str, Any]:
    return run_settings(configuration(**megatron), Gristmill("here:1", "my-run"), dp_size=2)


def test_a_checkpoint_that_is_written_at_once_is_accepted() -> None:
    assert settings()["max_buffered_batches"] == 12


@pytest.mark.parametrize("model", ["policy", "critic"])
def test_one_that_is_written_in_the_background_is_refused(model: str) -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=rf"trainer.{model}.megatron_config.async_dist_ckpt_save: True writes checkpoints in the background, and "
        "batches are freed when a checkpoint is written: .*; set it to False",
    ):
        settings(**{model: True})
