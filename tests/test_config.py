"""A run's configuration: defaults, and every combination that is refused before a rollout is accepted."""

import json

import pytest

from gristmill.errors import InvalidArgumentError, UnsupportedError
from gristmill_service.config import RunConfig, parse_config, read_config

GOOD = {
    "train_batch_size": 8,
    "n_samples_per_prompt": 4,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 2},
}


def test_defaults_are_those_of_the_specification():
    config = parse_config(GOOD)
    assert config == RunConfig(
        **GOOD,
        mini_batch_unit="prompt",
        update_epochs_per_batch=1,
        step_wise=False,
        merge="none",
        trajectory_score="last_step",
        advantage_estimator="grpo",
        grpo_norm_by_std=True,
        loss_reduction="none",
        dp_size=1,
        cp_size=1,
        vpp_size=1,
        microbatch_group_size=1,
        pad_to_multiple_of=1,
        on_misaligned="pad",
        balance="none",
        stale="count",
        layout="left_padded",
        pad_width="shard",
        pad_token_id=0,
    )
    assert (config.zero_variance_filter, config.overlong_filter, config.max_staleness) == (None, (), None)
    assert (config.max_seq_len, config.critic_mini_batch_size) == (None, None)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_required_setting_that_is_missing_is_named(name):
    with pytest.raises(InvalidArgumentError, match=f"{name} is required"):
        parse_config({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_batchsize": 8}, "unknown setting train_batchsize; known are train_batch_size"),
        ({"micro_batch": {"size": 2, "tokens": 3}}, "unknown setting micro_batch.tokens; known are size, max_tokens"),
        ({"micro_batch": {}}, "give exactly one of size"),
        ({"micro_batch": {"size": 1, "max_tokens": 5}}, "give exactly one of size"),
        ({"micro_batch": {"size": 0}}, "micro_batch.size: input should be greater than 0, got 0"),
        ({"train_batch_size": 7}, "train_batch_size: 7 is not a multiple of policy_mini_batch_size: 2"),
        ({"critic_mini_batch_size": 3}, "train_batch_size: 8 is not a multiple of critic_mini_batch_size: 3"),
        ({"policy_mini_batch_size": "2"}, "policy_mini_batch_size: .* got '2'"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": 10**9}, "dp_size: input should be less than or equal to 16384, got 1000000000"),
        ({"n_samples_per_prompt": 10**12}, "n_samples_per_prompt: input should be less than or equal to 16384"),
        ({"train_batch_size": 10**15}, "train_batch_size: input should be less than or equal to"),
        ({"pad_to_multiple_of": 10**9}, "pad_to_multiple_of"),
        ({"dp_size": True}, "dp_size"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"merge": "suffix"}, "merge"),
        ({"merge": "prefix"}, "merge: prefix joins the steps .* set step_wise: true or merge: none"),
        ({"loss_reduction": "seq_mean_token_sum_norm"}, "set max_seq_len"),
        ({"min_samples": 5}, "min_samples: 5 exceeds n_samples_per_prompt: 4"),
        ({"stale": "drop"}, "stale: drop needs a bound; set max_staleness"),
        ({"group_timeout_s": 0.0}, "group_timeout_s"),
        ({"group_timeout_s": float("inf")}, "group_timeout_s"),
        (
            {"on_misaligned": "drop_trailing", "critic_mini_batch_size": 2},
            "drop_trailing is refused with a critic",
        ),
        (
            {"on_misaligned": "error", "dp_size": 16},
            r"can never align: .* = 8 rows, and micro-batches come in multiples of 16",
        ),
        (
            {"on_misaligned": "drop_trailing", "dp_size": 4, "vpp_size": 2, "microbatch_group_size": 4},
            "multiples of 16",
        ),
        ({"mini_batch_unit": "sequence", "dp_size": 3}, "policy_mini_batch_size: 2 rows is not a multiple of dp_size"),
        (
            {"mini_batch_unit": "sequence", "critic_mini_batch_size": 3, "dp_size": 2},
            "critic_mini_batch_size: 3 rows is not a multiple of dp_size",
        ),
        ({"mini_batch_unit": "sequence", "micro_batch": {"max_tokens": 9}}, "mini_batch_unit: sequence works with"),
        ({"mini_batch_unit": "sequence", "on_misaligned": "error"}, "mini_batch_unit: sequence works with"),
        (
            {"balance": "flops"},
            r"balance: flops needs flops: .* linear is 2 × parameters and quadratic 2 × layers × hidden size",
        ),
        ({"balance": "rows"}, "balance: input should be 'none', 'tokens' or 'flops', got 'rows'"),
        ({"flops": {"linear": 0.0, "quadratic": 0.0}}, "flops: linear and quadratic are both 0"),
        ({"flops": {"linear": -1.0}}, "flops.linear: input should be greater than or equal to 0, got -1.0"),
        ({"flops": {"quadratic": float("inf")}}, "flops.quadratic: input should be a finite number, got inf"),
        ({"flops": {"linear": "much"}}, "flops.linear: input should be a valid number, got 'much'"),
        ({"flops": {"cubic": 1.0}}, "unknown setting flops.cubic; known are linear, quadratic"),
    ],
)
def test_a_wrong_configuration_is_refused_naming_the_setting_and_the_remedy(change, message):
    with pytest.raises(InvalidArgumentError, match=message) as refusal:
        parse_config(GOOD | change)
    assert not isinstance(refusal.value, UnsupportedError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merge": "tree", "step_wise": True}, "merge: tree is not built yet"),
        ({"columns": [{"name": "routes"}]}, "extra columns are not built yet"),
        ({"advantage_estimator": "gae"}, "gae is refused: it needs per-token credit"),
        ({"advantage_estimator": "gae", "step_wise": True}, "cannot be broadcast over the steps"),
        ({"advantage_estimator": "reinforce++", "step_wise": True}, "cannot be broadcast over the steps"),
    ],
)
def test_what_is_not_built_is_refused_as_such(change, message):
    with pytest.raises(UnsupportedError, match=message):
        parse_config(GOOD | change)


def test_with_steps_a_mini_batch_that_looks_too_small_may_still_align_and_is_let_through():
    parse_config(GOOD | {"step_wise": True, "on_misaligned": "error", "dp_size": 16})


@pytest.mark.parametrize("balance", ["none", "tokens", "flops"])
def test_flops_may_be_given_with_every_balance_and_in_whole_numbers(balance):
    config = parse_config(GOOD | {"balance": balance, "flops": {"linear": 14_000_000_000, "quadratic": 262_144}})
    assert (config.flops.linear, config.flops.quadratic) == (14e9, 262_144.0)


def test_flops_are_read_from_yaml_with_an_exponent(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(GOOD)[:-1] + ", balance: flops, flops: {linear: 1.5e10, quadratic: 2e5}}")
    flops = read_config(path).flops
    assert (flops.linear, flops.quadratic) == (1.5e10, 2e5)


def test_warnings_name_settings_that_do_not_go_together():
    merged = GOOD | {"step_wise": True, "merge": "prefix", "loss_reduction": "sequence_mean"}
    assert "scale of the loss depends on how many steps merge" in parse_config(merged).warnings()[0]
    dropping = GOOD | {"on_misaligned": "drop_trailing"}
    assert "drops the groups that finished last" in parse_config(dropping).warnings()[0]
    assert parse_config(GOOD).warnings() == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.yaml",
            "train_batch_size: 8\nn_samples_per_prompt: 4\npolicy_mini_batch_size: 2\nmicro_batch: {size: 2}\n",
        ),
        (
            "run.json",
            json.dumps(GOOD),
        ),
    ],
)
def test_configurations_are_read_from_yaml_and_json(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert read_config(path) == parse_config(GOOD)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "", "\x00"])
def test_a_file_that_is_no_configuration_is_refused_with_its_name(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"run\.yaml"):
        read_config(path)


def test_a_missing_file_is_refused_with_its_name(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"absent\.yaml: cannot read"):
        read_config(tmp_path / "absent.yaml")
