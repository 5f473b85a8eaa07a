"""The prompt groups of a run and their states."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from gristmill.v1 import run_pb2


class GroupState(StrEnum):
    """The progress of a prompt group."""

    OPEN = "open"
    """The group was admitted, and samples are missing."""
    COMPLETE = "complete"
    """Every sample has its last step and its reward. The group is not part of a batch yet."""
    SEALED = "sealed"
    """The group is part of a batch."""
    DROPPED = "dropped"
    """The group was dropped; `Group.reason` says why."""
    UNKNOWN = "unknown"
    """The group was never begun."""


_STATES: dict[int, GroupState] = {
    run_pb2.GROUP_STATE_OPEN: GroupState.OPEN,
    run_pb2.GROUP_STATE_COMPLETE: GroupState.COMPLETE,
    run_pb2.GROUP_STATE_SEALED: GroupState.SEALED,
    run_pb2.GROUP_STATE_DROPPED: GroupState.DROPPED,
    run_pb2.GROUP_STATE_UNKNOWN: GroupState.UNKNOWN,
}


class Group(NamedTuple):
    """A prompt group of a run.

    batch: the number of the group's batch; None if it is not sealed. reason: why the group was dropped, or is
    not complete. tag: the group's environment or task; empty if it has none, or if the group's batch is freed.
    """

    uid: str
    round: int
    state: GroupState
    batch: int | None
    reason: str
    tag: str = ""

    @property
    def is_consumed(self) -> bool:
        """Whether the group is in a batch or was dropped, so that it need not be sampled again."""
        return self.state in (GroupState.SEALED, GroupState.DROPPED)


def groups_of(pages: Iterable[run_pb2.ListGroupsResponse]) -> list[Group]:
    return [_group(status) for page in pages for status in page.groups]


def _group(status: run_pb2.GroupStatus) -> Group:
    state = _STATES[status.state]
    batch = status.batch if state is GroupState.SEALED else None
    return Group(status.uid, status.round, state, batch, status.reason, status.tag)
