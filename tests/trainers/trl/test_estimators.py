"""The service's estimators compute what TRL's own code computes, in which n / (n - 1) of a deviation is float32."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trl.trainer import grpo_trainer

from gristmill_service.estimators import Float64s
from tests.trainers.random_groups import FLOAT32, Differences, batches, credit_of

EPSILON = 1e-4
"""TRL's."""


@cache
def statement() -> CodeType:
    """Return the statement of TRL's trainer that computes advantages, which is in a long method."""
    (advantages,) = (
        node
        for node in ast.walk(ast.parse(inspect.getsource(grpo_trainer)))
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("self.multi_objective_aggregation == 'sum")
    )
    return compile(ast.Module([advantages], []), inspect.getfile(grpo_trainer), "exec")


def trl_s(rewards: Float64s, samples: int, **config: Any) -> SimpleNamespace:
    """Return `rewards` and `advantages` as TRL computes them, by its own statement.

    rewards: (rows, reward functions). samples: of each group.
    """
    of_functions = torch.tensor(rewards)
    weights = torch.tensor(config.pop("weights", [1.0] * rewards.shape[1]), dtype=torch.float64)
    names = vars(grpo_trainer) | {
        "self": SimpleNamespace(reward_weights=weights, reward_funcs=[None] * len(weights), **config),
        "rewards_per_func": of_functions,
        "unscorable_mask": of_functions.isnan().all(1),
        "num_generations": samples,
        "device": "cpu",
    }
    exec(statement(), names)
    return SimpleNamespace(rewards=names["rewards"].numpy(), advantages=names["advantages"].numpy())


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_scaled_as_by_trl(scale: str) -> None:
    settings: dict[str, Any] = {"grpo_epsilon": EPSILON, "grpo_norm_by_std": scale != "none"}
    settings |= {"grpo_std_over": "batch"} if scale == "batch" else {}
    differences = Differences(f"TRL scale_rewards: {scale}")
    for _, samples in batches(same_size=True):
        theirs = trl_s(
            samples.scores[:, None], max(samples.numbers) + 1,
            multi_objective_aggregation="sum_then_normalize", scale_rewards=scale,
        )  # fmt: skip
        differences.add(credit_of(samples.rows(), **settings).advantages, theirs.advantages)
    differences.check(FLOAT32)


def test_gdpo_is_trls_but_for_the_epsilon_of_the_last_deviation() -> None:
    names, weights = ["format", "answer"], [0.3, -2.0]
    settings: dict[str, Any] = {
        "advantage_estimator": "gdpo",
        "grpo_epsilon": EPSILON,
        "component_weights": dict(zip(names, weights, strict=True)),
    }
    sums, whitened = Differences("TRL normalize_then_sum"), Differences("TRL normalize_then_sum, whitened")
    for draw, samples in batches(same_size=True):
        scores = np.stack([samples.scores, draw.choice([0.0, 1.0, 0.7], len(samples.scores))], 1)
        rows = samples.rows(reward_components=[dict(zip(names, of_row, strict=True)) for of_row in scores.tolist()])
        theirs = trl_s(
            scores, max(samples.numbers) + 1, weights=weights, multi_objective_aggregation="normalize_then_sum"
        )
        sums.add(credit_of(rows, **settings).advantages, theirs.rewards)
        std = theirs.rewards.std(ddof=1)
        with_our_epsilon = theirs.advantages * (std + EPSILON) / np.sqrt(std**2 + 1e-8)
        whitened.add(credit_of(rows, whiten="trajectories", **settings).advantages, with_our_epsilon)
    sums.check(FLOAT32)
    whitened.check(FLOAT32)
