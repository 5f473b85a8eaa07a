"""Where prompt groups are whose uid somebody looks for."""

from __future__ import annotations

from pydantic import Field

from gristmill_service.monitoring.health.health_models import Document
from gristmill_service.run.machine.answers import GroupState
from gristmill_service.run.run import Run

_MOST = 50


class FoundGroup(Document):
    uid: str
    round: int
    tag: str
    state: GroupState
    batch: int | None = Field(description="That it was sealed into.")
    reason: str = Field(description="Why it was dropped; empty where it was not.")


class FoundGroups(Document):
    run: str
    in_all: int
    groups: list[FoundGroup] = Field(description="The first 50; those whose uid is the text itself come first.")


def find_groups(run: Run, text: str) -> FoundGroups:
    """The groups whose uid contains this text."""
    found = [group for group in run.groups() if text in group.uid]
    found.sort(key=lambda group: (group.uid != text, group.uid, group.round))
    return FoundGroups(
        run=run.name,
        in_all=len(found),
        groups=[
            FoundGroup(
                uid=group.uid,
                round=group.round,
                tag=group.tag,
                state=group.state,
                batch=group.batch,
                reason=group.reason,
            )
            for group in found[:_MOST]
        ],
    )
