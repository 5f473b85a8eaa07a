"""A run's configuration: defaults, and every combination that is refused before a rollout is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import GristmillError, InvalidArgumentError, UnsupportedError
from gristmill_service.config import (
    SETTINGS,
    Flops,
    KlInReward,
    LengthPenalty,
    MicroBatch,
    RunConfig,
    StepGroups,
    parse_config,
    read_config,
    warnings_of,
    with_dp_size,
)

GOOD: dict[str, Any] = {
    "train_batch_size": 8,
    "n_samples_per_prompt": 4,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 2},
}

GIGPO: dict[str, Any] = {
    "advantage_estimator": "gigpo",
    "trajectory_score": "sum",
    "step_groups": {"key": "index"},
}


def kl_of_column(**more: Any) -> dict[str, Any]:
    """A KL in rewards that a column of row sums gives."""
    column = {"name": "kl", "scope": "row", "dtype": "float32", **more}
    return {"kl_in_reward": {"coef": 0.1, "column": "kl"}, "columns": [column]}


def lambda_of_column(source: str, **more: Any) -> dict[str, Any]:
    """A λ that a column has for each step."""
    values = {"name": "values", "scope": "response", "dtype": "float32"}
    column = {"name": "trust", "scope": "row", "dtype": "float32", "source": source, **more}
    return {"advantage_estimator": "gae", "lambda": {"column": "trust"}, "columns": [values, column]}


def bootstrap_of(reasons: list[str], **column: Any) -> dict[str, Any]:
    """A value after truncated trajectories; column: what its declaration has."""
    columns = [{"name": "values", "scope": "response", "dtype": "float32"}]
    columns += [{"name": "after", "dtype": "float32"} | column] if column else []
    rule = {"column": "after", "stop_reasons": reasons}
    return {"advantage_estimator": "gae", "bootstrap": rule, "columns": columns}


def test_defaults_are_those_of_the_specification() -> None:
    config = parse_config(GOOD)
    assert config == RunConfig(
        **GOOD,
        mini_batch_unit="prompt",
        update_epochs_per_batch=1,
        step_wise=False,
        merge="none",
        retokenized_tail=0,
        trajectory_score="last_step",
        advantage_estimator="grpo",
        grpo_norm_by_std=True,
        grpo_epsilon=1e-6,
        grpo_std_over="group",
        gamma=1.0,
        critic_lambda=None,
        whiten="none",
        length_penalty=None,
        step_groups=None,
        kl_in_reward=None,
        kl_from="old_logprobs",
        loss_reduction="none",
        dp_size=1,
        cp_size=1,
        vpp_size=1,
        microbatch_group_size=1,
        pad_to_multiple_of=1,
        pad_rows_to_multiple_of=1,
        pad_packed_to=(),
        cp_shards="none",
        on_misaligned="pad",
        balance="none",
        stale="count",
        layout="left_padded",
        pad_width="shard",
        pad_token_id=0,
        seal_by="count",
        token_step=False,
        observation_weight=0.0,
    )
    assert (config.zero_variance_filter, config.overlong_filter, config.max_staleness) == (None, (), None)
    assert (config.max_seq_len, config.critic_mini_batch_size, config.lambda_) == (None, None, 1.0)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_required_setting_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} is required"):
        parse_config({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_batchsize": 8},
            r"train_batchsize \(did you mean train_batch_size\?\); expected one of train_batch_size",
        ),
        (
            {"micro_batch": {"size": 2, "tokens": 3}},
            "unknown setting micro_batch.tokens; expected one of size, max_tokens",
        ),
        ({"micro_batch": {}}, "exactly one limit, got none; set one of size"),
        ({"micro_batch": {"size": 1, "max_tokens": 5}}, "exactly one limit, got size and max_tokens"),
        ({"micro_batch": {"size": 1, "count": 5}}, "exactly one limit, got size and count; set one of size"),
        (
            {"micro_batch": {"count": 3}, "vpp_size": 2, "microbatch_group_size": 2},
            "micro_batch.count: 3 is not a multiple of microbatch_group_size: 2, which vpp_size: 2 requires; change",
        ),
        (
            {"micro_batch": {"count": 3}, "on_misaligned": "error"},
            "micro_batch.count: 3 is always reached .* on_misaligned: error has no effect; use .* pad",
        ),
        ({"micro_batch": {"count": 16384}, "dp_size": 512}, "gives 8388608 micro-batches .* lower the count"),
        (
            {"micro_batch": {"count": 3}, "mini_batch_unit": "sequence"},
            "mini_batch_unit: sequence requires micro_batch: {size: ...}",
        ),
        (
            {"micro_batch": {"count": 3, "full": True}},
            "micro_batch.full: true .* set micro_batch.size, or leave full out",
        ),
        ({"micro_batch": {"size": 3, "full": 1}}, "micro_batch.full: input should be a valid boolean, got 1"),
        (
            {"micro_batch": {"size": 3, "full": True}, "mini_batch_unit": "sequence", "dp_size": 2},
            "each rank has 1 rows per policy mini-batch .* not a multiple of 3; change policy_mini_batch_size or",
        ),
        ({"micro_batch": {"count": 10**9}}, "micro_batch.count: input should be less than or equal to 16384"),
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
        ({"merge": "tree"}, "merge: tree joins the steps .* set step_wise: true or merge: none"),
        (
            {"retokenized_tail": 4, "step_wise": True},
            "retokenized_tail: 4 .* merge: none, .* set merge: prefix or tree",
        ),
        ({"retokenized_tail": -1, "step_wise": True, "merge": "tree"}, "retokenized_tail: .* got -1"),
        ({"loss_reduction": "seq_mean_token_sum_norm"}, "set max_seq_len"),
        ({"min_samples": 5}, "min_samples: 5 exceeds n_samples_per_prompt: 4"),
        ({"max_samples_per_prompt": 3}, "max_samples_per_prompt: 3 is less than n_samples_per_prompt: 4"),
        ({"overlong_filter": "length"}, "overlong_filter: input should be a list, got 'length'"),
        ({"surplus": -1}, "surplus: input should be greater than or equal to 0, got -1"),
        ({"tag_timeout_s": 5.0}, "tag_timeout_s: 5 limits how long a batch waits for tag_shares, which is not set"),
        ({"tag_shares": {"a": {"min": 0.6}, "b": {"min": 0.5}}}, "shares of 'a', 'b' add up to 1.1, more than 1"),
        ({"tag_shares": {"a": {"min": 0.51}, "b": {"min": 0.49}}}, "5 of 'a' [+] 4 of 'b' whole groups are more than"),
        ({"tag_shares": {"a": {"max": 0.5}}}, "unknown setting tag_shares.'a'.max; expected one of min"),
        ({"tag_shares": {"a": {"min": 0}}}, "tag_shares.a.min: input should be greater than 0, got 0"),
        ({"tag_shares": {"a": {"min": 1.5}}}, "tag_shares.a.min: input should be less than or equal to 1"),
        ({"tag_shares": {"a": 0.5}}, "tag_shares.a"),
        ({"tag_shares": {"": {"min": 0.5}}}, "tag_shares"),
        ({"tag_shares": {f"t{n}": {"min": 0.01} for n in range(65)}}, "tag_shares: 65 tags exceed the limit of 64"),
        ({"stale": "drop"}, "stale: drop needs max_staleness, .* set max_staleness"),
        ({"stale": "mask"}, "stale: mask needs max_staleness, .* set max_staleness"),
        ({"group_timeout_s": 0.0}, "group_timeout_s"),
        ({"group_timeout_s": float("inf")}, "group_timeout_s"),
        (
            {"dp_size": 16384, "vpp_size": 2, "microbatch_group_size": 64},
            "be padded to at least 1048576 rows, and the limit is 131072",
        ),
        ({"dp_size": 16, "micro_batch": {"count": 16384}}, "padded to at least 262144 rows"),
        ({"dp_size": 2, "micro_batch": {"size": 1 << 20, "full": True}}, "padded to at least 2097152 rows"),
        (
            {"on_misaligned": "drop_trailing", "critic_mini_batch_size": 2},
            "drop_trailing does not work with a critic",
        ),
        (
            {"on_misaligned": "error", "dp_size": 16},
            r"can never align .* = 8 rows, and at least 16 are needed",
        ),
        (
            {"on_misaligned": "drop_trailing", "dp_size": 4, "vpp_size": 2, "microbatch_group_size": 4},
            "at least 16 are needed",
        ),
        ({"mini_batch_unit": "sequence", "dp_size": 3}, "policy_mini_batch_size: 2 rows is not a multiple of dp_size"),
        (
            {"mini_batch_unit": "sequence", "critic_mini_batch_size": 3, "dp_size": 2},
            "critic_mini_batch_size: 3 rows is not a multiple of dp_size",
        ),
        ({"mini_batch_unit": "sequence", "micro_batch": {"max_tokens": 9}}, "mini_batch_unit: sequence requires"),
        ({"mini_batch_unit": "sequence", "on_misaligned": "error"}, "mini_batch_unit: sequence requires"),
        (
            {"balance": "flops"},
            r"balance: flops needs flops: .* linear = 2 × parameters, quadratic = 2 × layers × hidden size",
        ),
        ({"balance": "rows"}, "balance: input should be 'none', 'tokens' or 'flops', got 'rows'"),
        ({"flops": {"linear": 0.0, "quadratic": 0.0}}, "flops: linear and quadratic are both 0"),
        (
            {"flops": {"column": "patches"}, "columns": [{"name": "patches", "dtype": "bool", "scope": "row"}]},
            "columns: flops reads the cost of each row from patches; declare it with scope: row, a dtype of numbers",
        ),
        ({"flops": {"linear": 0.0, "column": "patches"}}, "columns: flops reads the cost of each row from patches"),
        ({"flops": {"linear": -1.0}}, "flops.linear: input should be greater than or equal to 0, got -1.0"),
        ({"flops": {"quadratic": float("inf")}}, "flops.quadratic: input should be a finite number, got inf"),
        ({"flops": {"linear": "much"}}, "flops.linear: input should be a valid number, got 'much'"),
        ({"flops": {"cubic": 1.0}}, "unknown setting flops.cubic; expected one of linear, quadratic, column"),
        ({"gamma": 1.5}, "gamma: input should be less than or equal to 1, got 1.5"),
        ({"gamma": -0.1}, "gamma: input should be greater than or equal to 0, got -0.1"),
        ({"lambda": 2}, "lambda: input should be less than or equal to 1, got 2"),
        (
            {"lambda_": 1},
            "unknown setting lambda_; rename lambda_ to lambda; expected one of .* gamma, lambda, critic_lambda",
        ),
        ({"ppo_mini_batch_size": 8}, "rename ppo_mini_batch_size to policy_mini_batch_size; expected one of"),
        ({"whiten": "group"}, "whiten: input should be 'batch', 'mini_batch', 'trajectories' or 'none', got 'group'"),
        (
            {"whiten": "trajectories", "advantage_estimator": "reinforce++"},
            r"whiten: trajectories needs one advantage per trajectory, and advantage_estimator: reinforce\+\+ computes",
        ),
        ({"grpo_epsilon": 0}, "grpo_epsilon: input should be greater than 0, got 0"),
        ({"grpo_std_over": "prompt"}, "grpo_std_over: input should be 'group' or 'batch', got 'prompt'"),
        (
            {"advantage_estimator": "pass@k"},
            "advantage_estimator: input should be 'grpo', .*'gigpo', 'rae', 'passk'",
        ),
        ({"kl_from": "logprobs"}, "kl_from: input should be 'old_logprobs' or 'rollout_logprobs', got 'logprobs'"),
        ({"lambda": {"length_adaptive": 0}}, "lambda.length_adaptive: input should be greater than 0, got 0"),
        ({"lambda": {"alpha": 0.05}}, "unknown setting lambda.alpha; expected one of length_adaptive, column"),
        ({"lambda": {}}, "lambda: needs exactly one rule; set {length_adaptive: ...}, {column: ...}, or a number"),
        ({"lambda": {"length_adaptive": 0.1, "column": "trust"}}, "lambda: needs exactly one rule"),
        (
            lambda_of_column("trainer"),
            "columns: trust has source: trainer, so it has one value per row, .*; leave source out",
        ),
        (lambda_of_column("rollout", scope="response"), "columns: trust has scope: response, .* set scope: row"),
        (bootstrap_of(["length"]), "columns: after is missing, and bootstrap reads the value after a truncated"),
        (bootstrap_of(["length"], scope="response"), "columns: after has scope: response, .* set scope: row"),
        (bootstrap_of([], scope="row"), "bootstrap.stop_reasons: .* at least 1 item"),
        ({"bootstrap": {"column": "after"}}, "bootstrap.stop_reasons is required; set it"),
        ({"bootstrap": {"colum": "after"}}, r"unknown setting bootstrap.colum \(did you mean column\?\)"),
        ({"step_groups": {"trajectory_weight": -1}}, "step_groups.trajectory_weight: input should be greater than"),
        ({"critic_lambda": 1.5}, "critic_lambda: input should be less than or equal to 1, got 1.5"),
        ({"kl_in_reward": {"estimator": "k1"}}, "kl_in_reward.coef is required"),
        (
            {"kl_in_reward": {"coef": 0.1, "estimator": "k1"}, "advantage_estimator": "gdpo"},
            "kl_in_reward changes rewards, and advantage_estimator: gdpo is computed from reward_components; leave",
        ),
        (
            {"length_penalty": {"turns": 0.1}, "advantage_estimator": "gdpo"},
            "length_penalty changes scores, and advantage_estimator: gdpo is not computed from scores; leave",
        ),
        ({"length_penalty": {"turns": 0.1}, "advantage_estimator": "none"}, "leave length_penalty out, or use another"),
        (
            {"columns": [{"name": "loss_weight", "dtype": "float64", "scope": "response"}]},
            "columns: loss_weight has the weight .* settings dtype: float32 and scope: response; omit",
        ),
        (
            {"columns": [{"name": "loss_weight", "dtype": "float32", "scope": "response", "source": "trainer"}]},
            "columns: loss_weight .* omit the others",
        ),
        ({"seal_by": "call", "tag_shares": {"a": {"min": 0.5}}}, "tag_shares decides when .* or use seal_by: count"),
        ({"observation_weight": -0.5}, "observation_weight: .* greater than or equal to 0, got -0.5"),
        ({"length_penalty": {"turns": -1}}, "length_penalty.turns: .* greater than or equal to 0, got -1"),
        ({"length_penalty": {"steps": 1}}, "unknown setting length_penalty.steps; expected one of output_tokens"),
        (
            {"pad_rows_to_multiple_of": 8},
            "pad_rows_to_multiple_of: has no effect with layout: left_padded; use layout: packed or prefix_tree",
        ),
        ({"pad_packed_to": [64]}, "pad_packed_to: has no effect with layout: left_padded"),
        (
            {"layout": "packed", "pad_rows_to_multiple_of": 8, "pad_packed_to": [64, 100]},
            "pad_packed_to: 100 is not a multiple of pad_rows_to_multiple_of: 8",
        ),
        (
            {"layout": "packed", "pad_packed_to": [64]},
            "pad_packed_to: micro-batches have no limit of tokens, and the largest size is 64; set micro_batch.max",
        ),
        (
            {"layout": "packed", "pad_packed_to": [64], "micro_batch": {"max_tokens": 40}, "cp_size": 2},
            r"pad_packed_to: micro-batches have up to 80 tokens \(max_tokens × cp_size\), and the largest size is 64",
        ),
        ({"cp_shards": "zigzag", "cp_size": 2}, "cp_shards: zigzag cuts layout: packed, and the layout is left_padded"),
        (
            {"cp_shards": "blocks", "cp_size": 2, "layout": "packed"},
            "cp_shards: blocks cuts layout: prefix_tree, and the layout is packed; use layout: prefix_tree",
        ),
        ({"cp_shards": "contiguous", "layout": "packed"}, "cp_shards: contiguous has no effect with cp_size: 1"),
        (
            {"cp_shards": "zigzag", "cp_size": 2, "layout": "packed", "pad_rows_to_multiple_of": 6},
            "zigzag cuts each row into 4 pieces, and pad_rows_to_multiple_of: 6 .*; set pad_rows_to_multiple_of: 4",
        ),
        (
            {
                "cp_shards": "blocks",
                "cp_size": 2,
                "layout": "prefix_tree",
                "columns": [{"name": "labels", "dtype": "int32", "scope": "token"}],
            },
            "columns: labels is a tensor of shards with cp_shards: blocks; give the column another name",
        ),
        (GIGPO | {"trajectory_score": "last_step"}, "trajectory_score: last_step is not what .* set trajectory_score"),
        (
            GIGPO | {"kl_in_reward": {"coef": 0.1, "estimator": "k1"}},
            "kl_in_reward changes rewards, and advantage_estimator: gigpo compares steps by the rewards that were sent",
        ),
        (GIGPO | {"whiten": "trajectories"}, "gigpo computes one per step; use whiten: batch or mini_batch"),
        # In self-play each agent has one trajectory in a group: all groups were replaced, and no batch was ever sealed.
        (
            {"advantage_estimator": "rae", "zero_variance_filter": "replace"},
            "zero_variance_filter: replace .* compares scores with running baselines, .* leave zero_variance_filter",
        ),
        ({"step_groups": {"key": "uid"}}, "step_groups.key: input should be 'step_key' or 'index', got 'uid'"),
        ({"component_weights": {"a": "x"}}, "component_weights.a: input should be a valid number, got 'x'"),
        ({"component_weights": {"": 1}}, "component_weights"),
        ({"kl_in_reward": {"coef": -1, "estimator": "k1"}}, "kl_in_reward.coef: .* greater than or equal to 0"),
        ({"kl_in_reward": {"coef": 0.1, "estimator": "k4"}}, "kl_in_reward.estimator: .* got 'k4'"),
        ({"kl_in_reward": {"coef": 0.1, "column": "KL"}}, "kl_in_reward.column: .* got 'KL'"),
        (
            {"kl_in_reward": {"coef": 0.1, "kind": "k1"}},
            "unknown setting kl_in_reward.kind; expected one of coef, estimator",
        ),
        (
            {"advantage_estimator": "gae"},
            "columns: values is missing, and advantage_estimator: gae is computed from it",
        ),
        ({"advantage_estimator": "otb"}, "columns: old_logprobs is missing, and advantage_estimator: otb is computed"),
        ({"kl_in_reward": {"coef": 0.1}}, "kl_in_reward: needs exactly one source; set estimator"),
        ({"kl_in_reward": {"coef": 0.1, "estimator": "k1", "column": "kl"}}, "kl_in_reward: needs exactly one source"),
        (
            {"kl_in_reward": {"coef": 0.1, "estimator": "k1"}, "advantage_estimator": "none"},
            "kl_in_reward changes rewards.* leave kl_in_reward out",
        ),
        (
            {"kl_in_reward": {"coef": 0.1, "column": "kl"}, "advantage_estimator": "reinforce++"},
            r"kl_in_reward: column has a sum per row, and advantage_estimator: reinforce\+\+ needs the KL of each",
        ),
        ({"kl_in_reward": {"coef": 0.1, "column": "kl"}}, "columns: kl is missing, .* declare it with scope: row"),
        (
            kl_of_column(scope="response"),
            "columns: kl has scope: response, .* set scope: row, dtype: float32 or float64, no shape",
        ),
        (kl_of_column(dtype="bfloat16"), "columns: kl has scope: row, dtype: bfloat16, "),
        (kl_of_column(shape=[2]), r"columns: kl has scope: row, dtype: float32, shape: \[2\], "),
        (
            kl_of_column(required=False),
            "columns: kl has .* required: false, .* no shape, required: true, partial: false",
        ),
        (
            {**kl_of_column(), "merge": "prefix", "step_wise": True},
            "columns: kl has merge: last, so with merge: prefix .* set merge: sum in the column",
        ),
        (
            {"kl_in_reward": {"coef": 0.1, "estimator": "k3"}},
            "columns: ref_logprobs is missing, and kl_in_reward: k3 is computed from it; declare it",
        ),
        (
            {
                "kl_in_reward": {"coef": 0.1, "estimator": "k3"},
                "columns": [{"name": "ref_logprobs", "scope": "response", "dtype": "float32"}],
            },
            "columns: old_logprobs is missing",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_naming_the_setting_and_the_remedy(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as refusal:
        parse_config(GOOD | change)
    assert not isinstance(refusal.value, UnsupportedError)


def has(annotation: Any, kind: type) -> bool:
    """Whether a value of that type may be given."""
    return annotation is kind or any(has(part, kind) for part in get_args(annotation))


NUMBERS = {
    kind: [
        *(
            name + ".any" * (get_origin(field.annotation) is dict)
            for name, field in SETTINGS.items()
            if has(field.annotation, kind) and name != "pad_packed_to"
        ),
        *(f"micro_batch.{name}" for name, field in MicroBatch.model_fields.items() if has(field.annotation, kind)),
        *(f"flops.{name}" for name, field in Flops.model_fields.items() if has(field.annotation, kind)),
        *(f"kl_in_reward.{name}" for name, field in KlInReward.model_fields.items() if has(field.annotation, kind)),
        *(f"step_groups.{name}" for name, field in StepGroups.model_fields.items() if has(field.annotation, kind)),
        *(f"length_penalty.{name}" for name, one in LengthPenalty.model_fields.items() if has(one.annotation, kind)),
    ]
    for kind in (int, float)
}


def with_setting(name: str, value: object) -> dict[str, Any]:
    section, _, inner = name.rpartition(".")
    return GOOD | ({section: {inner: value}} if section else {name: value})


@pytest.mark.parametrize("value", [2**63, 2**64, 10**400, 10**5000], ids=["2**63", "2**64", "10**400", "10**5000"])
@pytest.mark.parametrize("name", NUMBERS[int])
def test_an_integer_beyond_64_bits_is_refused_with_setting_value_and_limit(name: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{name}: input should be less than .*\d, got ") as refusal:
        parse_config(with_setting(name, value))
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("value", [10**400, 10**5000], ids=["10**400", "10**5000"])
@pytest.mark.parametrize("name", NUMBERS[float])
def test_a_number_beyond_64_bits_is_refused_with_setting_value_and_limit(name: str, value: int) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"{name}: input should be less than or equal to .*, got "
    ) as refusal:
        parse_config(with_setting(name, value))
    assert len(str(refusal.value)) < 300


def test_a_timeout_longer_than_timers_take_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="group_timeout_s: input should be less than or equal to 1000000000"):
        parse_config(GOOD | {"group_timeout_s": 1e308})


def test_text_that_no_file_holds_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"overlong_filter.1: input should be valid unicode, got '\\ud800'"):
        parse_config(GOOD | {"overlong_filter": ["length", "\ud800"]})


@pytest.mark.parametrize(
    "change",
    [
        {f"setting_{number}": number for number in range(100_000)},
        {"micro_batch": {f"setting_{number}": number for number in range(100_000)}},
        {"overlong_filter": list(range(100_000))},
        {"overlong_filter": ["length"] * 100_000},
        {"columns": list(range(100_000))},
        {"merge": "x" * 100_000},
        {"\ud800" * 100_000: 1},
    ],
    ids=["unknown", "unknown_within", "no_reasons", "reasons", "columns", "text", "name"],
)
def test_however_much_is_wrong_the_message_is_short(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        parse_config(GOOD | change)
    assert len(str(refusal.value).encode()) < 2500


TEXTS = st.text(st.characters(codec=None, categories=["Cs", "L", "N", "P", "Cc", "So"]), max_size=3)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.integers(-2, 4)
    | st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64])
    | st.floats()
    | TEXTS
)


def values_of(name: str, annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a setting, most of them fit for it."""
    choices = [
        value for part in (annotation, *get_args(annotation)) for value in get_args(part) if get_origin(part) is Literal
    ]
    fit = {
        int: st.integers(1, 4) | st.integers(1, 2**63 - 1),
        float: st.floats(0, 1e9),
        str: TEXTS,
        bool: st.booleans(),
        NoneType: st.none(),
    }
    if name in ("overlong_filter", "pad_packed_to"):
        return st.lists(TEXTS if name == "overlong_filter" else st.integers(1, 4), max_size=3) | SCALARS
    fitting = [strategy for kind, strategy in fit.items() if has(annotation, kind)]
    return st.one_of(*fitting, *([st.sampled_from(choices)] if choices else []), SCALARS)


def section(model: Any) -> st.SearchStrategy[Any]:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    return st.fixed_dictionaries(
        {}, optional={name: values_of(name, field.annotation) for name, field in fields.items()}
    )


CHANGES = section(RunConfig).flatmap(
    lambda change: st.fixed_dictionaries(
        {
            name: st.just(value)
            for name, value in list(change.items())[:3]
            if name not in ("micro_batch", "flops", "columns", "kl_in_reward", "length_penalty", "step_groups")
        },
        optional={
            "micro_batch": section(MicroBatch),
            "flops": section(Flops) | SCALARS,
            "kl_in_reward": section(KlInReward),
            "length_penalty": section(LengthPenalty),
            "step_groups": section(StepGroups),
        },
    )
)


@given(CHANGES)
def test_an_accepted_configuration_survives_whatever_stores_and_sends_it(change: dict[str, Any]) -> None:
    try:
        config = parse_config(GOOD | change)
    except GristmillError as refusal:
        str(refusal).encode()
        return
    for exclude_defaults in (False, True):
        text = config.model_dump_json(exclude_defaults=exclude_defaults)
        assert parse_config(json.loads(text)) == parse_config(orjson.loads(text)) == config
        packed = msgspec.msgpack.encode(config.model_dump(mode="json", exclude_defaults=exclude_defaults))
        assert parse_config(msgspec.msgpack.decode(packed)) == config


def test_with_steps_a_mini_batch_that_looks_too_small_may_still_align_and_is_let_through() -> None:
    parse_config(GOOD | {"step_wise": True, "on_misaligned": "error", "dp_size": 16})


@pytest.mark.parametrize("balance", ["none", "tokens", "flops"])
def test_flops_may_be_given_with_every_balance_and_in_whole_numbers(balance: str) -> None:
    config = parse_config(GOOD | {"balance": balance, "flops": {"linear": 14_000_000_000, "quadratic": 262_144}})
    assert config.flops is not None
    assert (config.flops.linear, config.flops.quadratic) == (14e9, 262_144.0)


def test_flops_are_read_from_yaml_with_an_exponent(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(GOOD)[:-1] + ", balance: flops, flops: {linear: 1.5e10, quadratic: 2e5}}")
    flops = read_config(path).flops
    assert flops is not None
    assert (flops.linear, flops.quadratic) == (1.5e10, 2e5)


def test_warnings_name_settings_that_do_not_go_together() -> None:
    merged = GOOD | {"step_wise": True, "merge": "prefix", "loss_reduction": "sequence_mean"}
    assert "scale of the loss depends on how many steps merge" in warnings_of(parse_config(merged))[0]
    assert "merge: tree reduces their number" in warnings_of(parse_config(merged | {"merge": "tree"}))[0]
    dropping = GOOD | {"on_misaligned": "drop_trailing"}
    assert "drops the groups that finish last" in warnings_of(parse_config(dropping))[0]
    crowded = GOOD | {"micro_batch": {"count": 3}, "dp_size": 3}
    assert "gives 9 micro-batches, but a mini-batch has at most 8 rows" in warnings_of(parse_config(crowded))[0]
    assert warnings_of(parse_config(crowded | {"dp_size": 2})) == []
    lone = GOOD | {"n_samples_per_prompt": 1, "max_samples_per_prompt": 2}
    (warning,) = warnings_of(parse_config(lone))
    assert "max_samples_per_prompt: 2 with n_samples_per_prompt: 1: a group of one" in warning
    cut = GOOD | {"layout": "prefix_tree", "n_samples_per_prompt": 4, "micro_batch": {"size": 3}}
    assert "splits every group of 4 samples" in warnings_of(parse_config(cut))[0]
    assert warnings_of(parse_config(cut | {"micro_batch": {"size": 4}})) == []
    waits = GOOD | {"tag_shares": {"math": {"min": 0.5}}}
    assert "if no more groups of a tag arrive, no batch is sealed" in warnings_of(parse_config(waits))[0]
    assert warnings_of(parse_config(waits | {"tag_timeout_s": 60.0})) == []
    assert warnings_of(parse_config(lone | {"advantage_estimator": "none"})) == []
    assert warnings_of(parse_config(GOOD)) == []


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
def test_configurations_are_read_from_yaml_and_json(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert read_config(path) == parse_config(GOOD)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "", "\x00"])
def test_a_file_that_is_no_configuration_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"run\.yaml"):
        read_config(path)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"absent\.yaml: cannot read"):
        read_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("change", "beginnings"),
    [
        ({}, []),
        ({"grpo_epsilon": 1e-4}, []),
        ({"loss_reduction_over": "trained"}, ["loss_reduction_over: trained has no effect: it is read with"]),
        ({"loss_reduction_over": "trained", "loss_reduction": "prompt_mean"}, []),
        ({"gamma": 0.9}, ["gamma: 0.9 has no effect: it is read with advantage_estimator: gae or reinforce++ alone"]),
        ({"lambda": 0.9}, ["lambda: 0.9 has no effect: it is read with advantage_estimator: gae alone"]),
        ({"lambda": {"length_adaptive": 0.1}}, ["lambda: {'length_adaptive': 0.1} has no effect: it is read with"]),
        ({"critic_lambda": 1.0}, ["critic_lambda: 1.0 has no effect: it is read with advantage_estimator: gae alone"]),
        ({"whiten": "batch"}, []),
        ({"grpo_epsilon": 1e-4, "advantage_estimator": "rloo"}, ["grpo_epsilon: 0.0001 has no effect"]),
        ({"grpo_epsilon": 1e-4, "advantage_estimator": "rloo", "rloo_norm_by_std": True}, []),
        (
            {"rloo_norm_by_std": True},
            ["rloo_norm_by_std: true has no effect: it is read with advantage_estimator: rloo"],
        ),
        # Also what is the default: who gives it expects it.
        ({"grpo_norm_by_std": True, "advantage_estimator": "rloo"}, ["grpo_norm_by_std: true has no effect: it is"]),
        ({"grpo_norm_by_std": False, "advantage_estimator": "maxrl"}, ["grpo_norm_by_std: false has no effect: it is"]),
        ({"grpo_norm_by_std": True}, []),
        ({"critic_lambda": None}, []),
        (
            {"bootstrap": {"column": "v", "stop_reasons": ["length"]}},
            ["bootstrap: {'column': 'v', 'stop_reasons': ['length']} has no effect: it is read with"],
        ),
        ({"grpo_epsilon": 1e-4, "advantage_estimator": "passk"}, []),
        ({"grpo_std_over": "batch"}, []),
        ({"grpo_std_over": "batch", "advantage_estimator": "gdpo", "component_weights": {"a": 2.0}}, []),
        ({"component_weights": {"a": 2.0}}, ["component_weights: {'a': 2.0} has no effect: it is read with"]),
        (
            {"grpo_std_over": "batch", "advantage_estimator": "opo"},
            ["grpo_std_over: batch has no effect: it is read with advantage_estimator: grpo or gdpo or gigpo alone"],
        ),
        (
            {"grpo_std_over": "batch", "grpo_norm_by_std": False},
            ["grpo_std_over: batch has no effect: it is read with grpo_norm_by_std: true alone"],
        ),
        (
            {"kl_from": "rollout_logprobs"},
            ["kl_from: rollout_logprobs has no effect: it is read only with kl_in_reward"],
        ),
    ],
)
def test_a_setting_that_the_estimator_does_not_read_is_reported(change: dict[str, Any], beginnings: list[str]) -> None:
    warnings = warnings_of(parse_config(GOOD | change))
    assert len(warnings) == len(beginnings)
    assert all(warning.startswith(expected) for warning, expected in zip(warnings, beginnings, strict=True))


def test_lambda_has_its_own_name_wherever_a_configuration_is_stored_or_sent() -> None:
    config = parse_config(GOOD | {"lambda": 0.95})
    assert config.lambda_ == config.model_dump()["lambda"] == json.loads(config.model_dump_json())["lambda"] == 0.95
    assert with_dp_size(config, 2).lambda_ == 0.95


def test_a_rule_for_lambda_is_kept_where_a_configuration_is_stored_or_sent() -> None:
    config = parse_config(GOOD | lambda_of_column("rollout"))
    assert with_dp_size(with_dp_size(config, 2), 1) == config
    assert config.lambda_column == "trust"
    assert parse_config(GOOD | {"lambda": {"column": "trust"}}).lambda_column is None


@pytest.mark.parametrize("source", ["rollout", "trainer"])
def test_the_value_after_a_truncated_trajectory_may_be_of_rollouts_or_of_trainers(source: str) -> None:
    config = parse_config(GOOD | bootstrap_of(["length", "timeout"], scope="row", source=source))
    assert with_dp_size(with_dp_size(config, 2), 1) == config
    assert config.bootstrap_column == "after"


def test_numbers_that_yaml_takes_for_text_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(GOOD)[:-1] + ", grpo_epsilon: 1e-4, lambda: 95e-2}")
    config = read_config(path)
    assert (config.grpo_epsilon, config.lambda_) == (1e-4, 0.95)


def test_shares_of_groups_are_counted_in_decimals() -> None:
    shares = {"a": {"min": 0.7}, "b": {"min": 0.2}, "c": {"min": 0.1}}
    config = parse_config(GOOD | {"train_batch_size": 10, "tag_shares": shares})
    assert config.tag_groups(10) == {"a": 7, "b": 2, "c": 1}
