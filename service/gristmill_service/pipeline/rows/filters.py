"""Filters leave steps and groups out of training. They see the steps as received, so that merging cannot widen it.

A masked step stays in the batch with loss_mask 0; a stale group leaves it. Scores, baselines and counts still include
what is masked.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.steps import UNKNOWN, Steps, versions_of_tokens
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s, flat
from gristmill_service.pipeline.credit.advantage import by_size
from gristmill_service.pipeline.rows.validate import Received


def trained_steps(received: Received, scores: Float64s, config: RunConfig) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Returns which steps keep their loss_mask, bool (steps,), and how much each filter masked."""
    trained = np.ones(len(received.steps), np.bool_)
    counts: dict[str, int] = {}
    if config.overlong_filter:
        reasons = frozenset(config.overlong_filter)
        overlong = np.fromiter((reason in reasons for reason in received.steps.stop_reasons), np.bool_, len(trained))
        trained &= ~overlong
        counts["overlong_steps"] = int(overlong.sum())
    if config.zero_variance_filter == "mask":
        constant = zero_variance_groups(received, scores)
        trained &= ~constant[received.trajectory_groups][received.trajectory_of_step]
        counts["zero_variance_groups"] = int(constant.sum())
    return trained, counts


def zero_variance_groups(received: Received, scores: Float64s) -> NDArray[np.bool_]:
    """Finds groups of two or more trajectories with equal scores; bool (groups,)."""
    found = np.zeros(len(received.groups), np.bool_)
    for groups, trajectories in by_size(received.group_bounds):
        found[groups] = flat(scores[trajectories])
    return found


def current_version(received: Received, policy_version: int | None) -> int:
    """Returns the given version; None (offline) takes the largest in the batch."""
    if policy_version is not None:
        return policy_version
    columns = [received.steps.policy_versions]
    if received.steps.token_versions is not None:
        columns.append(received.steps.token_versions.values)
    return max((int(column.max()) for column in columns if len(column)), default=UNKNOWN)


def stale_groups(received: Received, config: RunConfig, policy_version: int | None) -> NDArray[np.bool_]:
    """Finds groups with a trajectory more than `max_staleness` versions behind; bool (groups,).

    policy_version: the current one; None (offline) takes the largest in the batch. Unknown versions are not stale.
    """
    versions = received.steps.policy_versions
    stale = np.zeros(len(received.groups), np.bool_)
    if config.max_staleness is None or not len(versions):
        return stale
    current = current_version(received, policy_version)
    behind = (versions != UNKNOWN) & (current - versions.astype(np.int64) > config.max_staleness)
    stale[received.trajectory_groups[received.trajectory_of_step[behind]]] = True
    return stale


def mask_stale_tokens(
    received: Received, config: RunConfig, policy_version: int | None
) -> tuple[Received, dict[str, int]]:
    """Returns the batch with loss_mask 0 on tokens more than `max_staleness` versions behind, under `stale: mask`, and
    how many trained tokens those were. policy_version: as `stale_groups` has it. Nothing is modified."""
    steps = received.steps
    if config.stale != "mask" or not len(steps):
        return received, {}
    fresh = fresh_loss_mask(steps, config, current_version(received, policy_version))
    before = steps.loss_mask.compact().values.sum(dtype=np.int64)
    counts = {"stale_tokens": int(before - fresh.values.sum(dtype=np.int64))}
    return replace(received, steps=replace(steps, loss_mask=fresh)), counts


def fresh_loss_mask(steps: Steps, config: RunConfig, current: int) -> Ragged:
    """Returns the rows' loss_mask, with 0 on tokens that are too far behind under `stale: mask`."""
    if config.stale != "mask" or config.max_staleness is None:
        return steps.loss_mask
    versions, mask = versions_of_tokens(steps).compact(), steps.loss_mask.compact()
    behind = (versions.values != UNKNOWN) & (current - versions.values.astype(np.int64) > config.max_staleness)
    return Ragged(mask.values * ~behind, mask.starts, mask.lengths)


def staleness(received: Received, policy_version: int | None) -> Int64s:
    """Returns how many versions each trajectory's oldest step is behind the current one, where its version is known."""
    versions = received.steps.policy_versions.astype(np.int64)
    if not len(versions):
        return versions
    current = current_version(received, policy_version)
    behind = np.where(versions == UNKNOWN, UNKNOWN, current - versions)
    oldest = np.maximum.reduceat(behind, received.trajectory_bounds[:-1])
    return oldest[oldest > UNKNOWN]
