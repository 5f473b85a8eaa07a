"""When groups leave the run: into a batch, or dropped for a reason. Reads the state, returns events."""

from __future__ import annotations

from itertools import islice, takewhile

import numpy as np

from gristmill.errors import FailedPreconditionError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.advantage import all_equal, trajectory_scores
from gristmill_service.run.events import BatchSealed, Event, GroupClosed, GroupDropped, GroupKey, StoredRow
from gristmill_service.run.groups import Group
from gristmill_service.run.state import State


def due(state: State, config: RunConfig) -> list[Event]:
    """What follows from the state as it is; empty when nothing does. Apply it and ask again."""
    dropped = _drops(state, config)
    if dropped:
        return dropped
    if len(state.batches) >= config.max_buffered_batches:
        return []
    keys = _next_groups(state, config)
    if len(keys) == config.train_batch_size or (state.finished and keys):
        return [_seal(state, keys)]
    return []


def seal_now(state: State, config: RunConfig) -> BatchSealed:
    """A batch of what is complete, also fewer groups than train_batch_size."""
    keys = list(islice(state.complete, config.train_batch_size))
    if not keys:
        raise FailedPreconditionError(
            f"no prompt group is complete ({len(state.open)} are open), so there is nothing to seal; submit the "
            "missing steps and rewards, or abort what will not come"
        )
    return _seal(state, keys)


def timeouts(state: State, config: RunConfig, now: float) -> list[Event]:
    """Stragglers: groups admitted longer than `group_timeout_s` ago that are not complete."""
    if config.group_timeout_s is None:
        return []
    limit = now - config.group_timeout_s
    late = takewhile(lambda group: group.admitted_at <= limit, state.open.values())
    return [
        GroupClosed(group.key, "timeout") if group.done >= config.min_samples else GroupDropped(group.key, "timeout")
        for group in late
        if not group.is_complete
    ]


def remaining_batches(state: State, config: RunConfig) -> int:
    """How many batches a finished run still makes of what is complete."""
    return -(-len(state.complete) // config.train_batch_size)


def _seal(state: State, keys: list[GroupKey]) -> BatchSealed:
    return BatchSealed(state.batches_sealed, tuple(keys), state.policy_version)


def _next_groups(state: State, config: RunConfig) -> list[GroupKey]:
    """The complete groups that the next batch takes, at most a batch of them."""
    if config.seal_order == "completion" or state.finished:
        return list(islice(state.complete, config.train_batch_size))
    first = islice(state.open.values(), config.train_batch_size)
    return [group.key for group in takewhile(lambda group: group.is_complete, first)]


def _drops(state: State, config: RunConfig) -> list[Event]:
    found: list[Event] = []
    if config.stale == "drop" and config.max_staleness is not None:
        oldest_allowed = state.policy_version - config.max_staleness
        for key in state.complete:
            version = state.open[key].oldest_version()
            if version is not None and version < oldest_allowed:
                found.append(GroupDropped(key, "stale"))
    if config.zero_variance_filter == "replace" and not found:
        found += [
            GroupDropped(key, "zero_variance") for key in state.complete if _is_zero_variance(state.open[key], config)
        ]
    return found


def _is_zero_variance(group: Group, config: RunConfig) -> bool:
    rows: list[StoredRow] = list(group.ordered_rows())
    rewards = np.array([row.reward for row in rows], np.float64)
    starts = [index for index, row in enumerate(rows) if row.step == 0]
    return all_equal(trajectory_scores(rewards, np.array([*starts, len(rows)]), config.trajectory_score))
