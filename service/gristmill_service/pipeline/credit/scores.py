"""Computes trajectories' scores, from the steps as received, so that merging cannot change them."""

from __future__ import annotations

import math

import numpy as np

from gristmill._wire.columns import Int64s, Ragged
from gristmill_service.estimators import Float64s


def trajectory_scores(
    rewards: Float64s, trajectory_bounds: Int64s, mode: str, token_rewards: Ragged | None = None
) -> Float64s:
    """Returns each trajectory's score: its last step's reward, or the exact sum over its steps (`trajectory_score`).

    rewards: float64 (steps,), trajectories one after another; trajectory_bounds: (trajectories + 1,). token_rewards:
    (steps,), of their response tokens, where steps have those: `rewards` are then their rounded sums, and the sum over
    steps is that of the tokens, so that it does not depend on how they are divided into steps.
    """
    if mode == "last_step":
        return rewards[trajectory_bounds[1:] - 1]
    if len(trajectory_bounds) == 1:
        return np.empty(0, np.float64)
    if token_rewards is not None:
        edges = np.append(0, np.cumsum(token_rewards.lengths))
        rewards, trajectory_bounds = token_rewards.compact().values.astype(np.float64), edges[trajectory_bounds]
    scores = np.add.reduceat(rewards, trajectory_bounds[:-1])
    # Two terms have one sum, whatever zeros are between them; that of three or more depends on the order of addition.
    terms = np.add.reduceat(rewards != 0, trajectory_bounds[:-1], dtype=np.int64)
    several = np.flatnonzero(terms > 2)
    if several.size:
        places = np.flatnonzero(rewards)
        numbers, bounds = rewards[places].tolist(), np.searchsorted(places, trajectory_bounds)
        spans = zip(bounds[several].tolist(), bounds[several + 1].tolist(), strict=True)
        scores[several] = [math.fsum(numbers[begin:end]) for begin, end in spans]
    return scores
