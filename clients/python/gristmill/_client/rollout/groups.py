"""The prompt groups of a run and their states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from gristmill.v1 import run_pb2

GroupState = Literal["open", "complete", "sealed", "dropped"]

_STATES: dict[int, GroupState] = {
    run_pb2.GROUP_STATE_OPEN: "open",
    run_pb2.GROUP_STATE_COMPLETE: "complete",
    run_pb2.GROUP_STATE_SEALED: "sealed",
    run_pb2.GROUP_STATE_DROPPED: "dropped",
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
        return self.state in ("sealed", "dropped")


def groups_of(pages: Iterable[run_pb2.ListGroupsResponse]) -> list[Group]:
    return [_group(found) for page in pages for found in page.groups]


def _group(found: run_pb2.GroupStatus) -> Group:
    state = _STATES[found.state]
    return Group(found.uid, found.round, state, found.batch if state == "sealed" else None, found.reason, found.tag)
