"""What a GRPOConfig says becomes the run's settings, or is refused with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill import InvalidArgumentError
from gristmill.adapters.trl import Gristmill, GristmillGRPOTrainer, run_settings
from gristmill_service.config import parse_config
from tests.trainers.trl.play import config, policy, prompts_of, replayed, rollouts, tokenizer

OWN = Gristmill("127.0.0.1:1", "run")
WORKERS = Gristmill("127.0.0.1:1", "run", rollouts="workers")


def test_a_configuration_of_trl_is_a_run_of_the_service(tmp_path: Path) -> None:
    args = config(tmp_path, num_iterations=2, steps_per_generation=8, pad_to_multiple_of=8, scale_rewards="none")
    settings = run_settings(args, OWN, dp_size=1, pad_token_id=3)
    assert settings == {
        "train_batch_size": 8,
        "policy_mini_batch_size": 4,
        "mini_batch_unit": "prompt",
        "n_samples_per_prompt": 4,
        "update_epochs_per_batch": 2,
        "grpo_norm_by_std": False,
        "grpo_epsilon": 1e-4,
        "dp_size": 1,
        "layout": "left_padded",
        "pad_token_id": 3,
        "pad_to_multiple_of": 8,
        "seal_order": "admission",
        "micro_batch": {"size": 4},
        "pad_width": "micro_batch",
        "columns": [{"name": "old_per_token_logps", "dtype": "float32", "scope": "response", "source": "rollout"}],
    }
    parse_config(settings)


@pytest.mark.parametrize(
    ("scale_rewards", "normed"),
    [("group", (True, "group")), ("batch", (True, "batch")), ("none", (False, "group")), (False, (False, "group"))],
)
def test_rewards_are_scaled_over_what_trl_scales_them_over(
    tmp_path: Path, scale_rewards: Any, normed: tuple[bool, str]
) -> None:
    run = parse_config(run_settings(config(tmp_path, scale_rewards=scale_rewards), OWN, dp_size=1))
    assert (run.grpo_norm_by_std, run.grpo_std_over) == normed


def test_the_remedy_for_several_objectives_is_a_run(tmp_path: Path) -> None:
    gdpo = {"advantage_estimator": "gdpo", "whiten": "trajectories"}
    gristmill = Gristmill("127.0.0.1:1", "run", rollouts="workers", settings=gdpo)
    run = parse_config(run_settings(config(tmp_path), gristmill, dp_size=1))
    assert (run.advantage_estimator, run.whiten, run.grpo_epsilon) == ("gdpo", "trajectories", 1e-4)


def test_completions_that_were_cut_off_are_masked_by_the_run(tmp_path: Path) -> None:
    settings = run_settings(config(tmp_path, mask_truncated_completions=True), OWN, dp_size=1, pad_token_id=0)
    assert settings["overlong_filter"] == ["length"]


def test_a_run_holds_what_is_trained_between_two_checkpoints(tmp_path: Path) -> None:
    args = config(tmp_path, save_strategy="steps", save_steps=6, steps_per_generation=8)
    assert run_settings(args, OWN, dp_size=1, pad_token_id=0)["max_buffered_batches"] == 5


@pytest.mark.parametrize(
    ("more", "gristmill", "columns"),
    [
        ({}, OWN, []),
        ({"beta": 0.1}, OWN, [("ref_per_token_logps", "rollout")]),
        ({"beta": 0.1}, WORKERS, [("ref_per_token_logps", "trainer")]),
        ({"steps_per_generation": 8}, WORKERS, []),
        (
            {"steps_per_generation": 8},
            Gristmill("127.0.0.1:1", "run", rollouts="workers", old_logprobs="trainer"),
            [("old_per_token_logps", "trainer")],
        ),
    ],
)
def test_log_probabilities_that_the_loss_needs_are_columns(
    tmp_path: Path, more: dict[str, Any], gristmill: Gristmill, columns: list[tuple[str, str]]
) -> None:
    declared = run_settings(config(tmp_path, **more), gristmill, dp_size=1, pad_token_id=0).get("columns", [])
    assert [(column["name"], column["source"]) for column in declared] == columns


def test_columns_that_workers_bring_are_declared_with_those_of_the_loss(tmp_path: Path) -> None:
    verdicts = {"name": "verdict", "dtype": "int32", "scope": "row"}
    gristmill = Gristmill("127.0.0.1:1", "run", rollouts="workers", settings={"columns": [verdicts]})
    settings = run_settings(config(tmp_path, beta=0.1), gristmill, dp_size=1, pad_token_id=0)
    assert [column["name"] for column in settings["columns"]] == ["ref_per_token_logps", "verdict"]
    parse_config(settings)


@pytest.mark.parametrize(
    ("more", "gristmill", "message"),
    [
        ({"loss_type": "bnpo"}, OWN, "loss_type: 'bnpo' divides by the tokens of each micro-batch.* use 'dapo'"),
        ({"scale_rewards": "mean"}, OWN, "scale_rewards: 'mean' is not supported; use group, batch, none"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            OWN,
            "multi_objective_aggregation: 'normalize_then_sum' is not supported.* let workers send reward_components",
        ),
        ({"gradient_accumulation_steps": 1, "num_generations": 2, "per_device_train_batch_size": 3,
          "steps_per_generation": 2}, OWN, "results in 3 rows per optimizer step.* a multiple of 6 rows"),
        ({"steps_per_generation": 2}, OWN, "steps_per_generation: 2 ends .* gradient_accumulation_steps: 4"),
        ({"max_steps": -1}, WORKERS, "max_steps: -1 does not limit the training"),
        ({}, Gristmill("a:1", "run", settings={"dp_size": 2}), "dp_size follows from TRL's .* where it is 1"),
        ({}, Gristmill("a:1", "run", settings={"tag_shares": {"math": {"min": 0.5}}}), "let workers sample"),
        ({}, Gristmill("a:1", "run", settings={"zero_variance_filter": "replace"}), "use mask, or let workers"),
        (
            {},
            Gristmill("a", "run", rollouts="workers", settings={"columns": [{"name": "v", "source": "trainer"}]}),
            "has a column of source: trainer, but the adapter only writes log-probabilities",
        ),
        (
            {"beta": 0.1},
            Gristmill("a:1", "run", settings={"loss_reduction": "trajectory_mean"}),
            "loss_reduction: 'trajectory_mean' scales the advantages",
        ),
    ],
)  # fmt: skip
def test_what_the_service_has_no_equal_for_is_refused_with_what_to_do(
    tmp_path: Path, more: dict[str, Any], gristmill: Gristmill, message: str
) -> None:
    args = config(tmp_path, **more)
    with pytest.raises(InvalidArgumentError, match=message):
        run_settings(args, gristmill, dp_size=1, pad_token_id=0)


def test_a_trainer_refuses_before_it_loads_a_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="use 'dapo'"):
        GristmillGRPOTrainer("no/such-model", replayed, config(tmp_path, loss_type="bnpo"), gristmill=OWN)


def test_a_data_set_that_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    stream = prompts_of(rollouts(prompts=4)).to_iterable_dataset()
    with pytest.raises(InvalidArgumentError, match="train_dataset is a IterableDataset"):
        GristmillGRPOTrainer(policy(), replayed, config(tmp_path), stream, processing_class=tokenizer(), gristmill=OWN)
