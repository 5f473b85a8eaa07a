"""Running baselines of scores, which a run keeps over its batches: the estimator `rae`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from gristmill_service.config import Rae, RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.rows.validate import Received


class BaselineKey(NamedTuple):
    """Whose scores a baseline follows: trajectories of this tag and this agent, "" for those without."""

    tag: str
    agent: str


Baselines = Mapping[BaselineKey, float]
NO_BASELINES: Baselines = MappingProxyType({})
"""The baselines before a run's first batch, and of other estimators."""


def running_advantages(
    received: Received, scores: Float64s, before: Baselines, config: RunConfig
) -> tuple[Float64s, Baselines]:
    """Returns each trajectory's score less the running baseline of its tag and agent before it, and the baselines after
    the batch, including those that the batch does not change.

    Each score then changes its baseline: b = decay · b + (1 - decay) · s, in the order of the batch, from 0 in a run's
    first batch. Role-conditioned advantage estimation: SPIRAL, Liu et al. 2025, arXiv:2506.24119, and prime-rl.
    """
    decay, after = (config.rae or Rae()).decay, dict(before)
    agents = received.agents or [""] * len(scores)
    tags = received.tags or [""] * len(received.groups)
    advantages = np.empty(len(scores))
    for place, (score, group, agent) in enumerate(
        zip(scores.tolist(), received.trajectory_groups.tolist(), agents, strict=True)
    ):
        key = BaselineKey(tags[group], agent)
        baseline = after.get(key, 0.0)
        advantages[place] = score - baseline
        after[key] = decay * baseline + (1 - decay) * score
    return advantages, after
