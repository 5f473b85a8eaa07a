"""The service's estimators compute what verl's own functions compute, and GiGPO what verl-agent's do.

verl-agent is no package: set VERL_AGENT_SOURCE to a checkout of its source.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos

from gristmill_service.estimators import Float64s
from tests.rows import make_row
from tests.trainers.random_groups import FLOAT32, FLOAT64, LONGEST, Differences, batches, credit_of, few_values

OUTCOME: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "grpo": (core_algos.compute_grpo_outcome_advantage, {}, {"advantage_estimator": "grpo"}),
    "rloo": (core_algos.compute_rloo_outcome_advantage, {}, {"advantage_estimator": "rloo"}),
    "opo": (core_algos.compute_opo_outcome_advantage, {}, {"advantage_estimator": "opo"}),
    "grpo_passk": (
        core_algos.compute_grpo_passk_outcome_advantage,
        {"config": {"norm_adv_by_std_in_grpo": True}},
        {"advantage_estimator": "passk"},
    ),
    "grpo_passk without std": (
        core_algos.compute_grpo_passk_outcome_advantage,
        {"config": {"norm_adv_by_std_in_grpo": False}},
        {"advantage_estimator": "passk", "grpo_norm_by_std": False},
    ),
}


def column(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": "float64", "scope": "response"} | more


@pytest.mark.parametrize("name", OUTCOME)
def test_advantages_of_scores_are_verls(name: str) -> None:
    theirs, arguments, settings = OUTCOME[name]
    differences = Differences(f"verl {name}")
    for _, samples in batches():
        rewards, mask = torch.tensor(samples.at_the_end(samples.scores)), torch.tensor(samples.mask)
        expected = theirs(rewards, mask, samples.uids, **arguments)[0][:, 0]
        differences.add(credit_of(samples.rows(), **settings).advantages, expected)
    differences.check(FLOAT64)


def test_gdpo_is_verls() -> None:
    """verl's components and weights are float32."""
    names, weights = ["format", "answer", "style"], [0.5, 2.0, -1.0]
    settings: dict[str, Any] = {
        "advantage_estimator": "gdpo",
        "whiten": "batch",
        "component_weights": dict(zip(names, weights, strict=True)),
    }
    differences = Differences("verl gdpo")
    for draw, samples in batches():
        scores = few_values(draw, (len(samples.scores), len(names)))
        components = [dict(zip(names, of_sample, strict=True)) for of_sample in scores.tolist()]
        ours = credit_of(samples.rows(reward_components=components), **settings).advantages
        theirs, _ = core_algos.compute_gdpo_outcome_advantage(
            torch.zeros(samples.mask.shape),
            torch.tensor(samples.mask),
            samples.uids,
            config={"gdpo_reward_keys": names, "gdpo_reward_weights": weights},
            non_tensor_batch=dict(zip(names, scores.T, strict=True)),
            batch={
                "prompts": torch.zeros(len(scores), 1),
                "attention_mask": torch.ones(len(scores), 1 + LONGEST, dtype=torch.long),
            },
        )
        differences.add(ours, theirs[:, 0])
    differences.check(FLOAT32)


def test_the_optimal_token_baseline_is_that_of_verls_turns() -> None:
    columns = [column("old_logprobs"), column("sum_pi_squared")]
    differences = Differences("verl tir_optimal_token_baseline")
    for draw, samples in batches(least=1):
        trained = samples.mask == 1
        rewards, logprobs = token_rewards(draw, samples.mask), -draw.exponential(size=trained.shape)
        squares = np.exp(logprobs) ** 2 + draw.random(trained.shape)
        rows = samples.rows(rewards, old_logprobs=logprobs, sum_pi_squared=squares)
        credit = credit_of(rows, advantage_estimator="otb", columns=columns).of_tokens
        theirs, _ = core_algos.compute_multi_turn_optimal_token_baseline_advantage(
            *map(torch.tensor, (rewards, samples.mask)), samples.uids, *map(torch.tensor, (logprobs, squares))
        )
        assert credit is not None
        differences.add(credit.advantages, theirs.numpy()[trained])
    differences.check(FLOAT64)


@pytest.mark.parametrize("alpha", [None, 0.05, 0.5])
@pytest.mark.parametrize("critic", [None, 0.9])
def test_gae_is_verls_with_a_lambda_for_each_length_and_another_for_returns(
    monkeypatch: pytest.MonkeyPatch, alpha: float | None, critic: float | None
) -> None:
    """verl has neither setting; its function computes both if it is called with those values. It also whitens the
    advantages, with 1e-8 more tokens than there are, which is 1e-11 of them."""
    monkeypatch.setattr(core_algos.verl_F, "masked_whiten", lambda advantages, mask: advantages)
    settings: dict[str, Any] = {"advantage_estimator": "gae", "gamma": 0.95, "critic_lambda": critic}
    settings |= {"lambda": 0.8 if alpha is None else {"length_adaptive": alpha}, "columns": [column("values")]}
    differences = Differences(f"verl gae, length_adaptive: {alpha}, critic_lambda: {critic}")
    for draw, samples in batches():
        trained, values = samples.mask == 1, draw.normal(size=samples.mask.shape)
        rewards = token_rewards(draw, samples.mask)
        lengths = samples.mask.sum(1)
        lam = np.full(len(lengths), 0.8) if alpha is None else np.maximum(0, 1 - 1 / (alpha * lengths))
        arguments = [torch.tensor(numbers) for numbers in (rewards, values, samples.mask)]
        theirs, returns = core_algos.compute_gae_advantage_return(*arguments, gamma=0.95, lam=torch.tensor(lam))
        if critic is not None:
            _, returns = core_algos.compute_gae_advantage_return(*arguments, gamma=0.95, lam=critic)
        credit = credit_of(samples.rows(rewards, values=values), **settings).of_tokens
        assert credit is not None
        assert credit.returns is not None
        differences.add(credit.advantages, theirs.numpy()[trained])
        # Returns are stored as float32.
        stored = returns.numpy()[trained].astype(np.float32)
        np.testing.assert_allclose(credit.tokens.take(credit.returns), stored, rtol=1e-6, atol=1e-6)
    differences.check(FLOAT64)


def token_rewards(draw: np.random.Generator, mask: Float64s) -> Float64s:
    """Rows have rewards of tokens in float32."""
    rewards: Float64s = draw.normal(size=mask.shape).astype(np.float32) * mask
    return rewards


@pytest.fixture
def gigpo() -> ModuleType:
    if "VERL_AGENT_SOURCE" not in os.environ:
        pytest.skip("VERL_AGENT_SOURCE names no checkout")
    spec = importlib.util.spec_from_file_location(
        "core_gigpo", Path(os.environ["VERL_AGENT_SOURCE"]) / "gigpo/core_gigpo.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("normed", [True, False])
def test_gigpo_is_verl_agents(gigpo: ModuleType, normed: bool) -> None:
    """Its rows are steps, and its returns and means float32. By default it counts a trajectory once for each step where
    it compares trajectories; the paper and the service count it once."""
    omega, gamma = 0.5, 0.5
    settings: dict[str, Any] = {"advantage_estimator": "gigpo", "trajectory_score": "sum", "grpo_norm_by_std": normed}
    settings |= {"step_groups": {"omega": omega, "gamma": gamma}}
    differences = Differences(f"verl-agent gigpo, {'mean_std_norm' if normed else 'mean_norm'}")
    for draw, samples in batches():
        turns = [int(count) for count in draw.integers(1, 5, len(samples.numbers))]
        uids = np.repeat(samples.uids, turns)
        names = np.repeat([f"{uid} {number}" for uid, number in zip(samples.uids, samples.numbers, strict=True)], turns)
        rewards, keys = few_values(draw, len(uids)), draw.choice(["a", "b", "c"], len(uids)).astype(object)
        places = [
            (number, step, count) for number, count in zip(samples.numbers, turns, strict=True) for step in range(count)
        ]
        rows = [
            make_row(uid, number, step, last=step == count - 1, reward=float(reward), step_key=key)
            for uid, (number, step, count), reward, key in zip(uids, places, rewards, keys, strict=True)
        ]
        credit = credit_of(rows, **settings).of_tokens
        assert credit is not None
        sums = np.add.reduceat(rewards, np.cumsum([0, *turns[:-1]]))
        mask = torch.ones(len(rows), 1, dtype=torch.float64)
        batch = SimpleNamespace(
            batch={"input_ids": mask},
            non_tensor_batch={"rewards": rewards, "traj_uid": names, "active_masks": np.ones(len(rows))},
        )
        returns = gigpo.compute_step_discounted_returns(batch, gamma).double()
        of_trajectories = gigpo.episode_norm_reward(
            torch.tensor(np.repeat(sums, turns))[:, None], mask, uids, names,
            remove_std=not normed, compute_mean_std_cross_steps=False,
        )  # fmt: skip
        of_steps = gigpo.step_norm_reward(returns, mask, gigpo.build_step_group(keys, uids), remove_std=not normed)
        differences.add(credit.advantages, (of_trajectories + omega * of_steps)[:, 0])
    differences.check(FLOAT32)
