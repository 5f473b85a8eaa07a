"""Runs' configurations."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from gristmill_service.config import parse_config, warnings_of
from tests.rows import make_config
from tests.tools.fuzz.mutate import changed_document
from tests.tools.fuzz.targets import Target

_BASE = make_config(train_batch_size=4, n_samples_per_prompt=2, policy_mini_batch_size=2, dp_size=2, step_wise=False)
_TRAINERS = {"name": "old_logprobs", "dtype": "float32", "scope": "response", "source": "trainer"}
_MORE: list[dict[str, Any]] = [
    {},
    {"critic_mini_batch_size": 4, "advantage_estimator": "reinforce++", "gamma": 0.9, "whiten": "batch"},
    {
        "advantage_estimator": "gigpo",
        "trajectory_score": "sum",
        "step_wise": True,
        "step_groups": {"key": "step_key", "omega": 0.5},
    },
    {
        "advantage_estimator": "gae",
        "bootstrap": {"column": "next_value", "stop_reasons": ["length"]},
        "columns": [_TRAINERS | {"name": "values"}, _TRAINERS | {"name": "next_value", "scope": "row"}],
        "loss_reduction_over": "trained",
    },
    {"advantage_estimator": "rloo", "rloo_norm_by_std": True},
    {"advantage_estimator": "rae", "rae": {"decay": 0.5}, "episode_agents": ["solver"]},
    {"length_penalty": {"output_tokens": 0.1, "turns": 0.5}},
    {"advantage_estimator": "gdpo", "component_weights": {"format": 0.5}, "whiten": "trajectories"},
    {
        "advantage_estimator": "passk",
        "grpo_std_over": "batch",
        "lambda": {"length_adaptive": 0.05},
        "critic_lambda": 1.0,
    },
    {"balance": "flops", "flops": {"linear": 1.0, "quadratic": 0.5}, "micro_batch": {"max_tokens": 100}},
    {"tag_shares": {"math": {"min": 0.5}, "code": {"min": 0.25}}, "tag_timeout_s": 5.0, "max_staleness": 2},
    {"kl_in_reward": {"coef": 0.1, "estimator": "k3"}, "columns": [_TRAINERS, _TRAINERS | {"name": "ref_logprobs"}]},
    {"columns": [{"name": "extra", "dtype": "float32", "scope": "token"}], "overlong_filter": ["length"]},
    {"columns": [{"name": "loss_weight", "dtype": "float32", "scope": "response"}], "observation_weight": 0.1},
    {"layout": "packed", "pad_to_multiple_of": 8, "vpp_size": 2, "microbatch_group_size": 2, "surplus": 1},
    {
        "step_wise": True,
        "merge": "prefix",
        "retokenized_tail": 2,
        "token_step": True,
        "group_timeout_s": 1.5,
        "seal_by": "call",
        "min_samples": 1,
    },
    {
        "layout": "packed",
        "pad_rows_to_multiple_of": 4,
        "pad_packed_to": [64, 128],
        "cp_size": 2,
        "cp_shards": "zigzag",
        "micro_batch": {"max_tokens": 64},
    },
]


def _seeds() -> list[bytes]:
    return [json.dumps(_BASE | more).encode() for more in _MORE]


def _change(random: Random, data: bytes) -> bytes:
    return json.dumps(changed_document(random, json.loads(data))).encode()


def _read(data: bytes) -> None:
    config = parse_config(json.loads(data))
    warnings_of(config)
    text = config.model_dump_json()
    assert len(text) < 100_000 + 10 * len(data)
    assert parse_config(json.loads(text)) == config, "what is stored is what was given"


CONFIGURATIONS = Target("configurations", _seeds, _change, _read)
