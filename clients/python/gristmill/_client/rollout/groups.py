"""The prompt groups of a run and their states."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from gristmill.v1 import run_pb2


class GroupState(StrEnum):
    """How far a prompt group is."""

    OPEN = "open"
    """Admitted, and samples are missing."""
    COMPLETE = "complete"
    """Every sample has its last step and its reward; the group is not part of a batch yet."""
    SEALED = "sealed"
    """Part of a batch."""
    DROPPED = "dropped"
    """Given up; `Group.reason` says why."""


_STATES: dict[int, GroupState] = {
    run_pb2.GROUP_STATE_OPEN: GroupState.OPEN,
    run_pb2.GROUP_STATE_COMPLETE: GroupState.COMPLETE,
    run_pb2.GROUP_STATE_SEALED: GroupState.SEALED,
    run_pb2.GROUP_STATE_DROPPED: GroupState.DROPPED,
}


class Group(NamedTuple):
    """One prompt group that was admitted to a run.

    batch: which it was sealed into, None where it was not. reason: why it was dropped, empty where it was not. tag: its
    environment or task, empty where it has none.
    """

    uid: str
    round: int
    state: GroupState
    batch: int | None
    reason: str
    tag: str = ""

    @property
    def is_consumed(self) -> bool:
        """Whether it need not be sampled again: it is in a batch, or dropped."""
        return self.state in (GroupState.SEALED, GroupState.DROPPED)


def groups_of(pages: Iterable[run_pb2.ListGroupsResponse]) -> list[Group]:
    return [_group(found) for page in pages for found in page.groups]


def _group(found: run_pb2.GroupStatus) -> Group:
    state = _STATES[found.state]
    batch = found.batch if state is GroupState.SEALED else None
    return Group(found.uid, found.round, state, batch, found.reason, found.tag)
