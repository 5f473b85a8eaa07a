"""What SkyRL's configuration says is what the run does; what a run cannot do is refused with what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from skyrl.train.trainer import RayPPOTrainer

from gristmill import InvalidArgumentError
from gristmill.adapters.skyrl import Gristmill, GristmillPPOTrainer, run_settings
from gristmill_service.config import parse_config
from tests.trainers.skyrl.play import Engine, Prompts, Recorded, Tracker, config, save_model, tokenizer

ADDRESS = "127.0.0.1:1"


def settings_of(own: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    gristmill = Gristmill(ADDRESS, "my-run", settings=own or {})
    return run_settings(config(Path("/unused"), **overrides), gristmill, dp_size=2, pad_token_id=7)


def test_the_run_is_what_the_configuration_says() -> None:
    settings = settings_of(generator__merge_stepwise_output=True, trainer__ckpt_interval=10)
    assert settings == {
        "train_batch_size": 4,
        "n_samples_per_prompt": 4,
        "policy_mini_batch_size": 2,
        "update_epochs_per_batch": 1,
        "step_wise": True,
        "merge": "prefix",
        "advantage_estimator": "grpo",
        "grpo_norm_by_std": True,
        "loss_reduction": "token_mean",
        "zero_variance_filter": False,
        "micro_batch": {"size": 3},
        "dp_size": 2,
        "pad_token_id": 7,
        "layout": "left_padded",
        "pad_width": "batch",
        "on_misaligned": "pad",
        "seal_order": "admission",
        "max_buffered_batches": 12,
    }


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"trainer__max_tokens_per_microbatch": 4096, "trainer__algorithm__zero_variance_filter": True},
        {"trainer__algorithm__loss_reduction": "seq_mean_token_sum_norm", "trainer__algorithm__max_seq_len": 64},
        {"trainer__algorithm__use_kl_in_reward": True, "trainer__algorithm__advantage_estimator": "rloo"},
        {"trainer__critic__model__path": "model", "trainer__algorithm__advantage_estimator": "gae"},
        {"trainer__algorithm__advantage_estimator": "reinforce++", "generator__step_wise_trajectories": False},
        {"trainer__fully_async__enabled": True},
    ],
    ids=str,
)
def test_the_service_takes_them(overrides: dict[str, Any]) -> None:
    parse_config(settings_of(**overrides))


def test_what_skyrl_has_no_name_for_is_set_in_addition() -> None:
    column = {"name": "teacher", "dtype": "float32", "scope": "response"}
    settings = settings_of({"merge": "tree", "balance": "tokens", "columns": [column]}, trainer__ckpt_interval=10)
    assert (settings["merge"], settings["balance"], settings["columns"]) == ("tree", "tokens", [column])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"trainer__algorithm__advantage_estimator": "mine"},
            "advantage_estimator: 'mine' is not an estimator of the service",
        ),
        ({"trainer__algorithm__loss_reduction": "token_mean_legacy"}, "use token_mean, sequence_mean"),
        ({"trainer__algorithm__advantage_batch_normalize": True}, "settings={'whiten': 'batch'}"),
        ({"trainer__algorithm__dynamic_sampling__type": "filter"}, "zero_variance_filter=true"),
        (
            {"trainer__algorithm__zero_variance_filter": True, "trainer__algorithm__zero_variance_filter_tol": 0.1},
            "use at most 1e-06",
        ),
        (
            {"trainer__algorithm__use_kl_in_reward": True, "trainer__algorithm__kl_ctrl__type": "adaptive"},
            "kl_ctrl.type: 'adaptive' .* use fixed",
        ),
        (
            {"trainer__algorithm__use_kl_in_reward": True, "trainer__algorithm__kl_estimator_type": "abs"},
            "kl_estimator_type: 'abs' .* use k1, k2, k3",
        ),
        ({"trainer__critic__model__path": "model"}, "use advantage_estimator 'gae'"),
        ({"generator__vision_language_generator": True}, "vision_language_generator"),
        ({"trainer__fully_async__sample_full_batch": True}, "set it to False"),
        ({"trainer__fully_async__simulate_training": True}, "SkyRL's own trainer"),
    ],
)
def test_what_a_run_cannot_do_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        settings_of(**overrides)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"train_batch_size": 8}, "train_batch_size follows from SkyRL's configuration, where it is 4"),
        ({"layout": "packed"}, "layout is fixed at 'left_padded', because SkyRL's workers accept padded rows"),
        ({"surplus": 1}, "surplus: 1 selects among groups"),
        ({"stale": "drop"}, "use count or mask"),
        (
            {"columns": [{"name": "kept", "shape": [None]}]},
            "any number of values per token .* SkyRL's workers do not support",
        ),
    ],
)
def test_settings_that_contradict_are_refused(own: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        settings_of(own)


def test_they_are_refused_before_models_are_loaded(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    cfg = config(tmp_path, trainer__algorithm__loss_reduction="token_mean_legacy")
    arguments = {
        "cfg": cfg,
        "tracker": Tracker(),
        "tokenizer": tokenizer(cfg),
        "train_dataset": Prompts(4),
        "inference_engine_client": Engine(),
        "generator": Recorded(cfg),
    }
    assert RayPPOTrainer(**arguments).cfg is cfg
    with pytest.raises(InvalidArgumentError, match="token_mean_legacy"):
        GristmillPPOTrainer(**arguments, gristmill=Gristmill(ADDRESS, "my-run"))
