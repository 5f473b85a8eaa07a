"""Abort trajectories and groups, and close stragglers. Reads the state, returns events.

A request is checked completely before any event is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from gristmill._wire.steps import TrajectoryKey
from gristmill._wire.texts import check_length, check_text
from gristmill.errors import NotFoundError
from gristmill_service.config import RunConfig
from gristmill_service.run.machine.decisions.admission import View, check_sample
from gristmill_service.run.machine.decisions.sealing import tag_timeout
from gristmill_service.run.machine.events import Event, GroupClosed, GroupDropped, GroupKey, TrajectoryAborted
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import Decision, State

_UNNAMED_REASON = "aborted"
_LONGEST_REASON, MOST_REASONS = 200, 100
_OTHER_REASON = "other"


def abort_trajectories(
    state: State,
    config: RunConfig,
    trajectories: Sequence[TrajectoryKey],
    reason: str,
    attempt: int | None = None,
) -> Decision[int]:
    """Aborts trajectories, and drops groups that have no trajectory left. The answer is the number of trajectories that
    this call aborted.

    attempt: skips trajectories that have rows of a higher attempt; None: aborts any attempt.
    """
    aborted: dict[TrajectoryKey, None] = {}
    touched: dict[GroupKey, Group] = {}
    keys = [GroupKey(trajectory.round, trajectory.uid) for trajectory in trajectories]
    _check_begun(state, keys)
    for key, trajectory in zip(keys, trajectories, strict=True):
        group = state.open.get(key)
        check_sample(trajectory, trajectory.sample, group, config)
        if group is None or trajectory.sample in group.aborted:
            continue
        stored = group.trajectories.get(trajectory.sample)
        if attempt is None or stored is None or stored.attempt <= attempt:
            aborted[trajectory] = None
            touched[key] = group
    left = {key: group.sampled - len(group.aborted) for key, group in touched.items()}
    for trajectory in aborted:
        left[GroupKey(trajectory.round, trajectory.uid)] -= 1
    reason = counted_reason(state, reason)
    events = [TrajectoryAborted(trajectory, reason, max(0, attempt or 0)) for trajectory in aborted]
    dropped = [GroupDropped(key, reason) for key, samples in left.items() if not samples]
    return [*events, *dropped], lambda _: len(aborted)


def abort_groups(state: State, keys: Sequence[GroupKey], reason: str) -> Decision[int]:
    """Drops these groups. The answer is the number of groups that were still open."""
    _check_begun(state, keys)
    opened = [key for key in dict.fromkeys(keys) if key in state.open]
    reason = counted_reason(state, reason)
    return [GroupDropped(key, reason) for key in opened], lambda _: len(opened)


def close_stragglers(view: View) -> Decision[None]:
    """Closes or drops groups that exceeded `group_timeout_s`. If there are none, updates the wait for `tag_shares`."""
    events = _timeouts(view.state, view.config, view.now())
    return events or tag_timeout(view.state, view.config, view.room(), view.now()), lambda _: None


def _timeouts(state: State, config: RunConfig, now: float) -> list[Event]:
    """Returns the events for incomplete groups that were admitted longer than `group_timeout_s` ago."""
    if config.group_timeout_s is None:
        return []
    limit = now - config.group_timeout_s
    late = takewhile(lambda group: group.admitted_at <= limit, state.open.values())
    return [
        GroupClosed(group.key, "timeout") if group.done >= config.min_samples else GroupDropped(group.key, "timeout")
        for group in late
        if not group.is_complete
    ]


def counted_reason(state: State, reason: str) -> str:
    """Returns the reason under which groups are counted: `other` for a new one after the run's first 100, because every
    status lists the reasons. Raises InvalidArgumentError if it is too long."""
    remedy = "send a short name of the problem, because groups are counted by it"
    check_length(reason, _LONGEST_REASON, "reason", remedy)
    check_text(reason, "reason")
    reason = reason or _UNNAMED_REASON
    return reason if reason in state.reasons or len(state.reasons) < MOST_REASONS else _OTHER_REASON


def _check_begun(state: State, keys: Sequence[GroupKey]) -> None:
    """Raises NotFoundError if one of these groups is neither open nor closed. Aborting closed ones changes nothing."""
    others = [key for key in keys if key not in state.open]
    outcomes = state.outcomes(others)
    for key in others:
        if key not in outcomes:
            raise NotFoundError(
                f"{key}: the group was never begun, so it cannot be aborted; check the uid and the round"
            )
