"""A run's state as it is shown to people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gristmill_service.config import RunConfig
from gristmill_service.run.machine.answers import GroupAnswer, ModelProgress, RunStatus, TagGroups
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.machine.state import State


def status(state: State, run: str, run_id: str, *, config: RunConfig, room: int, duplicates: int) -> RunStatus:
    """duplicates: rows that came again, which is no event of the run."""
    return RunStatus(
        run=run,
        run_id=run_id,
        generation=state.generation,
        config_json=config.model_dump_json(exclude_defaults=True),
        resolved_config_json=config.model_dump_json(),
        policy_version=state.policy_version,
        finished=state.finished,
        groups_open=len(state.open) - len(state.complete),
        groups_complete=len(state.complete),
        groups_room=0 if state.finished else room,
        batches_sealed=state.batches_sealed,
        batches_published=state.batches_made,
        batches_freed=state.freed,
        row_bytes=state.row_bytes,
        shard_bytes=state.shard_bytes,
        rows_accepted=state.rows_accepted,
        rows_duplicate=duplicates,
        groups_dropped=dict(state.groups_dropped),
        tags={
            tag: TagGroups(found.open - found.complete, found.complete, found.sealed, found.dropped)
            for tag, found in sorted(state.tags.items())
        },
        models=[
            ModelProgress(
                model,
                own.committed,
                own.incarnation,
                [progress.settle(state, model, position) for position in own.next],
            )
            for model, own in state.models.items()
        ],
        failed_batches=dict(state.failed),
    )


class AllGroups(NamedTuple):
    """The groups that were ever admitted, copied while the state was read: the rest is for a thread.

    closed, tags: what became of each that is decided, and its tag, as the state has them. failed: why batches are lost.
    """

    closed: Mapping[GroupKey, int | str]
    tags: Mapping[GroupKey, str]
    failed: Mapping[int, str]
    waiting: list[GroupAnswer]

    def answers(self) -> list[GroupAnswer]:
        return [self._decided(key, found) for key, found in self.closed.items()] + self.waiting

    def _decided(self, key: GroupKey, found: int | str) -> GroupAnswer:
        tag = self.tags.get(key, "")
        if isinstance(found, str):
            return GroupAnswer(*key, "dropped", reason=found, tag=tag)
        if found in self.failed:
            return GroupAnswer(*key, "dropped", found, "batch_failed", tag)
        return GroupAnswer(*key, "sealed", found, tag=tag)


def all_groups(state: State) -> AllGroups:
    return AllGroups(
        dict(state.closed),
        dict(state.closed_tags),
        # One that is kept may be built yet.
        {number: reason for number, reason in state.failed.items() if state.is_dropped(number)},
        [
            GroupAnswer(*key, "complete" if key in state.complete else "open", tag=group.tag)
            for key, group in state.open.items()
        ],
    )
