"""Excludes steps and groups from training. Filters use the steps as received, so that merging cannot widen a filter.

A masked step remains in the batch with loss_mask 0, and counts in scores and baselines. A stale group is dropped.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.row_fields import UNKNOWN
from gristmill._wire.steps import Steps, versions_of_tokens
from gristmill_service.config import RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.rows.validate import Received, receive


def trained_steps(received: Received, scores: Float64s, config: RunConfig) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """Returns which steps are not masked, bool (steps,), and how many steps or groups each filter masked.

    `overlong_filter`: the end of a trajectory masks all of its steps (DAPO, Yu et al. 2025, arXiv:2503.14476, section
    3.4; TRL's `mask_truncated_completions`), and an earlier step only itself.
    """
    trained = np.ones(len(received.steps), np.bool_)
    counts: dict[str, int] = {}
    if config.overlong_filter:
        reasons = frozenset(config.overlong_filter)
        overlong = np.fromiter((reason in reasons for reason in received.steps.stop_reasons), np.bool_, len(trained))
        overlong |= overlong[received.trajectory_bounds[1:] - 1][received.trajectory_of_step]
        trained &= ~overlong
        counts["overlong_steps"] = int(overlong.sum())
    if config.zero_variance_filter == "mask":
        constant = ~received.compared.differ(scores) & (np.diff(received.compared.bounds) > 1)
        trained &= ~constant[received.compared.numbers][received.trajectory_of_step]
        counts["zero_variance_groups"] = int(constant.sum())
    return trained, counts


def newest_version(steps: Steps) -> int:
    """Returns the largest policy version of the batch, which counts as the current one offline."""
    columns = [steps.policy_versions]
    if steps.token_versions is not None:
        columns.append(steps.token_versions.compact().values)
    return max((int(column.max()) for column in columns if len(column)), default=UNKNOWN)


def drop_stale_groups(
    received: Received, config: RunConfig, current: int
) -> tuple[Received, list[tuple[int, str]], dict[str, int]]:
    """Drops groups with a trajectory more than `max_staleness` versions behind, if `stale: drop`. Returns the remaining
    batch, the dropped groups, and the number of stale groups. Unknown versions are not stale."""
    if config.max_staleness is None:
        return received, [], {}
    is_stale = np.zeros(len(received.groups), np.bool_)
    behind = _are_stale(received.steps.policy_versions, config.max_staleness, current)
    is_stale[received.trajectory_groups[received.trajectory_of_step[behind]]] = True
    counts = {"stale_groups": int(is_stale.sum())}
    if config.stale != "drop" or not is_stale.any():
        return received, [], counts
    fresh = np.flatnonzero(~is_stale[received.trajectory_groups][received.trajectory_of_step])
    dropped = [received.groups[group] for group in np.flatnonzero(is_stale).tolist()]
    return receive(received.steps.take(fresh), config), dropped, counts


def mask_stale_tokens(received: Received, config: RunConfig, current: int) -> tuple[Received, dict[str, int]]:
    """Returns a batch with loss_mask 0 on tokens more than `max_staleness` versions behind, if `stale: mask`, and the
    number of trained tokens among them. Does not modify its argument."""
    steps = received.steps
    if config.stale != "mask" or not len(steps):
        return received, {}
    fresh = fresh_loss_mask(steps, config, current)
    before = steps.loss_mask.compact().values.sum(dtype=np.int64)
    counts = {"stale_tokens": int(before - fresh.values.sum(dtype=np.int64))}
    return replace(received, steps=replace(steps, loss_mask=fresh)), counts


def fresh_loss_mask(steps: Steps, config: RunConfig, current: int) -> Ragged:
    """Returns the rows' loss_mask, with 0 on stale tokens if `stale: mask`."""
    if config.stale != "mask" or config.max_staleness is None:
        return steps.loss_mask
    versions, mask = versions_of_tokens(steps).compact(), steps.loss_mask.compact()
    stale = _are_stale(versions.values, config.max_staleness, current)
    return Ragged(mask.values * ~stale, mask.starts, mask.lengths)


def _are_stale(versions: NDArray[np.int32], max_staleness: int, current: int) -> NDArray[np.bool_]:
    stale: NDArray[np.bool_] = (versions != UNKNOWN) & (current - versions.astype(np.int64) > max_staleness)
    return stale


def versions_behind(received: Received, current: int) -> Int64s:
    """Returns how many versions the oldest step of each trajectory is behind the current one; -1 if its version is
    unknown, or if it is newer than that one; int64 (trajectories,)."""
    versions = received.steps.policy_versions.astype(np.int64)
    if not len(versions):
        return versions
    behind = np.where(versions == UNKNOWN, UNKNOWN, current - versions)
    oldest = np.maximum.reduceat(behind, received.trajectory_bounds[:-1])
    return np.maximum(oldest, UNKNOWN)
