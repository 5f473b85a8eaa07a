"""slime's arguments become the settings of a run, and what has no equal is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill import InvalidArgumentError
from gristmill.adapters.slime import Gristmill, run_settings
from gristmill.adapters.slime._settings import options_of
from gristmill_service.config import parse_config
from tests.adapters.slime.samples import PARALLEL, arguments

OPTIONS = Gristmill("here", "run")


def settings(options: Gristmill = OPTIONS, **changes: Any) -> dict[str, Any]:
    return run_settings(arguments(**changes), options, dp_size=PARALLEL["dp_size"])


def test_the_run_is_scheduled_as_slime_would() -> None:
    config = parse_config(settings())
    assert (config.train_batch_size, config.n_samples_per_prompt, config.policy_mini_batch_size) == (4, 2, 2)
    assert (config.layout, config.loss_reduction, config.advantage_estimator) == ("packed", "none", "grpo")
    assert (config.dp_size, config.micro_batch.max_tokens) == (2, 24)
    assert not config.grpo_norm_by_std


def test_parallel_sizes_are_those_of_the_train_actors() -> None:
    parallel = {"cp_size": 2, "vpp_size": 2, "microbatch_group_size_per_vp_stage": 3}
    made = run_settings(arguments(train_parallel_config=parallel), OPTIONS, dp_size=4)
    assert (made["dp_size"], made["cp_size"], made["vpp_size"], made["microbatch_group_size"]) == (4, 2, 2, 3)


def test_micro_batches_of_a_size_are_taken_too() -> None:
    assert settings(use_dynamic_batch_size=False, micro_batch_size=3)["micro_batch"] == {"size": 3}


def test_batches_between_two_checkpoints_find_room() -> None:
    assert settings()["max_buffered_batches"] == 4
    assert settings(save_interval=20)["max_buffered_batches"] == 22


def test_the_user_s_settings_go_before_what_is_only_a_default() -> None:
    made = settings(Gristmill("here", "run", settings={"merge": "prefix", "balance": "flops", "step_wise": True}))
    assert (made["merge"], made["balance"]) == ("prefix", "flops")


def test_columns_are_declared_that_slime_s_training_reads() -> None:
    difficulty = {"name": "difficulty", "dtype": "float32", "scope": "row"}
    made = settings(
        Gristmill("here", "run", settings={"columns": [difficulty]}),
        use_rollout_routing_replay=True,
        num_layers=48,
        num_experts=256,
        moe_router_topk=8,
        use_opd=True,
        opd_type="sglang",
    )
    assert [column["name"] for column in made["columns"]] == [
        "rollout_routed_experts",
        "teacher_log_probs",
        "difficulty",
    ]
    assert made["columns"][0] == {
        "name": "rollout_routed_experts",
        "dtype": "uint8",
        "scope": "token",
        "shape": [48, 8],
        "partial": True,
    }


@pytest.mark.parametrize("declared", [[], [{"name": "rollout_routed_experts", "dtype": "int32", "fill": -1}]])
def test_more_experts_need_more_bytes_and_a_run_that_declares_its_own_goes_on(declared: list[Any]) -> None:
    gristmill = Gristmill("here", "run", settings={"columns": declared} if declared else {})
    replay = {"use_rollout_routing_replay": True, "num_layers": 48, "num_experts": 257, "moe_router_topk": 8}
    (column,) = settings(gristmill, **replay)["columns"]
    assert column["dtype"] == ("int32" if declared else "int16")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"advantage_estimator": "ppo"}, "--advantage-estimator: 'ppo' computes advantages"),
        ({"use_critic": True}, "--use-critic"),
        ({"rewards_normalization": False}, "omit --disable-rewards-normalization"),
        ({"normalize_advantages": True}, "--normalize-advantages: True .*whiten: batch"),
        ({"custom_reward_post_process_path": "a.b"}, "--custom-reward-post-process-path"),
        ({"custom_convert_samples_to_train_data_path": "a.b"}, "--custom-convert-samples-to-train-data-path"),
        ({"global_batch_size": 3}, "--global-batch-size: 3 .* a multiple of --n-samples-per-prompt, 2"),
        ({"log_passrate": True}, "--log-passrate"),
        ({"debug_rollout_only": True}, "--debug-rollout-only"),
        ({"save_interval": 5, "rollout_global_dataset": False}, "omit --disable-rollout-global-dataset"),
    ],
)
def test_arguments_without_an_equal_are_refused_naming_the_remedy(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        settings(**changes)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dp_size": 8}, "dp_size follows from slime's configuration, where it is 2"),
        ({"loss_reduction": "token_mean"}, "loss_reduction is fixed at 'none', because slime itself divides its loss"),
        ({"advantage_estimator": "gae"}, "--custom-advantage-function-path gristmill.adapters.slime.advantages"),
        ({"update_epochs_per_batch": 2}, "slime makes one pass"),
        ({"critic_mini_batch_size": 2}, "slime's critic is not supported"),
        ({"surplus": 1}, "rollouts='workers'"),
        ({"zero_variance_filter": "replace"}, "use mask"),
    ],
)
def test_settings_that_contradict_slime_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        settings(Gristmill("here", "run", settings=given))


def test_workers_of_one_s_own_may_sample_more() -> None:
    changes = {"surplus": 1, "zero_variance_filter": "replace"}
    assert settings(Gristmill("here", "run", rollouts="workers", settings=changes))["surplus"] == 1


def test_the_options_are_in_the_custom_configuration() -> None:
    assert options_of(arguments(gristmill={"address": "here", "run": "r"})) == Gristmill("here", "r")
    with pytest.raises(InvalidArgumentError, match="--custom-config-path: gristmill is missing"):
        options_of(arguments())


@pytest.mark.parametrize("setting", [{"pad_rows_to_multiple_of": 8}, {"pad_packed_to": [64]}, {"cp_shards": "zigzag"}])
def test_padding_and_parts_of_rows_are_left_to_slime(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(setting))}.* slime pads rows and cuts them .*omit it"):
        settings(Gristmill("here", "run", settings=setting))
