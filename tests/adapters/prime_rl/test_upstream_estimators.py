"""`rae`, comparison groups and length penalties are those of prime-rl's own algorithms. Needs a checkout of its source:

PRIME_RL_SOURCE=path/to/prime-rl python -m pytest tests/adapters/prime_rl/test_upstream_estimators.py
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gristmill_service.pipeline.credit.baselines import NO_BASELINES
from tests.adapters.prime_rl.upstream import algorithms
from tests.rows import make_row
from tests.trainers.random_groups import FLOAT32, FLOAT64, Differences, Samples, batches, credit_of

pytestmark = pytest.mark.skipif("PRIME_RL_SOURCE" not in os.environ, reason="PRIME_RL_SOURCE names no checkout")

RAW: dict[str, Any] = {"advantage_estimator": "grpo", "grpo_norm_by_std": False}


@pytest.fixture
def modules() -> Iterator[SimpleNamespace]:
    with algorithms(Path(os.environ["PRIME_RL_SOURCE"])) as loaded:
        yield loaded


def trace(agent: str, reward: float, **more: Any) -> SimpleNamespace:
    """One of prime-rl's, with one sampled token."""
    node = SimpleNamespace(mask=[True], token_ids=[7], advantages=None)
    return SimpleNamespace(
        agent=SimpleNamespace(name=agent, trainable=True), reward=reward, has_error=False, nodes=[node], **more
    )


def scored(algorithm: Any, samples: Samples, traces: list[Any], episodes: list[str]) -> list[float]:
    """The advantages that the algorithm assigns, group after group."""
    for uid in dict.fromkeys(samples.uids):
        of_group: dict[str, list[Any]] = {}
        for own, episode, one in zip(samples.uids, episodes, traces, strict=True):
            if own == uid:
                of_group.setdefault(episode, []).append(one)
        group = [SimpleNamespace(id=name, traces=members) for name, members in of_group.items()]
        asyncio.run(algorithm.score_group(group))
    return [one.nodes[0].advantages[0] for one in traces]


@pytest.mark.parametrize("decay", [0.95, 0.5])
def test_running_baselines_of_agents_are_prime_rls(modules: SimpleNamespace, decay: float) -> None:
    algorithm, baselines = modules.RAEAlgorithm(SimpleNamespace(decay=decay), None), NO_BASELINES
    differences = Differences(f"prime-rl rae, decay: {decay}")
    for draw, samples in batches(least=1):
        agents = draw.choice(["player0", "player1", "referee"], len(samples.numbers)).tolist()
        settings = {"advantage_estimator": "rae", "rae": {"decay": decay}}
        credit = credit_of(samples.rows(agent=agents), baselines, **settings)
        traces = [trace(agent, score) for agent, score in zip(agents, samples.scores.tolist(), strict=True)]
        differences.add(credit.advantages, scored(algorithm, samples, traces, [""] * len(traces)))
        baselines = credit.baselines
    assert {key.agent: value for key, value in baselines.items()} == pytest.approx(dict(algorithm.baselines), abs=1e-12)
    differences.check(FLOAT64)


@pytest.mark.parametrize("episode_agents", [["solver"], ["solver", "proposer"]])
def test_agents_are_compared_with_those_of_prime_rls_hierarchical_grpo(
    modules: SimpleNamespace, episode_agents: list[str]
) -> None:
    algorithm = modules.HierarchicalGRPOAlgorithm(SimpleNamespace(episode_agents=episode_agents), None)
    differences = Differences(f"prime-rl hierarchical_grpo, episode_agents: {episode_agents}")
    for draw, samples in batches():
        agents = draw.choice(["proposer", "solver", "solver"], len(samples.numbers)).tolist()
        episodes = draw.choice(["x", "y"], len(agents)).tolist()
        rows = samples.rows(agent=agents, episode=episodes)
        traces = [trace(agent, score) for agent, score in zip(agents, samples.scores.tolist(), strict=True)]
        ours = credit_of(rows, episode_agents=episode_agents, **RAW).advantages
        differences.add(ours, scored(algorithm, samples, traces, episodes))
    differences.check(FLOAT64)


def test_the_length_penalty_is_prime_rls(modules: SimpleNamespace) -> None:
    """prime-rl computes it in float32."""
    weights = {"num_output_tokens_weight": 0.5, "num_input_tokens_weight": 0.25, "num_turns_weight": 1.0}
    algorithm = modules.GRPOAlgorithm(SimpleNamespace(length_penalty=SimpleNamespace(**weights)), None)
    settings = RAW | {"length_penalty": {"output_tokens": 0.5, "input_tokens": 0.25, "turns": 1.0}}
    differences = Differences("prime-rl grpo with a length penalty")
    for draw, samples in batches():
        rows, traces = [], []
        for uid, number, score in zip(samples.uids, samples.numbers, samples.scores.tolist(), strict=True):
            prompts, responses = draw.integers(1, 9, (2, draw.integers(1, 5))).tolist()
            for step, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
                # No token of a step's prompt is that of another step.
                tokens = [100 * step + 10 + at for at in range(prompt)]
                last = step == len(prompts) - 1
                rows.append(
                    make_row(uid, number, step, last=last, prompt=tokens, response=[7] * response, reward=score)
                )
            lengths = {"num_output_tokens": sum(responses), "num_total_tokens": sum(prompts) + sum(responses)}
            traces.append(trace("", score, num_turns=len(prompts), **lengths))
        ours = credit_of(rows, **settings).advantages
        differences.add(ours, np.array(scored(algorithm, samples, traces, [str(n) for n in samples.numbers])))
    differences.check(FLOAT32)
