"""The status of a run and of its groups, as the APIs report them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gristmill_service.config import RunConfig
from gristmill_service.run.machine.answers import GroupAnswer, ModelProgress, RunStatus, TagGroups
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.machine.state import GIVEN_UP, State

_KEPT = "its rows are kept; resume with a dp_size that aligns it, or sample its groups again in another round"
_DROPPED = "its groups are dropped (batch_failed); fix the cause, and sample them again in another round"


def status(state: State, run: str, run_id: str, *, config: RunConfig, room: int, duplicates: int) -> RunStatus:
    """Returns the run's status. duplicates: the number of repeated rows, which the log does not record."""
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
            tag: TagGroups(counts.open - counts.complete, counts.complete, counts.sealed, counts.dropped)
            for tag, counts in sorted(state.tags.items())
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
    """A copy of all groups that were ever admitted, so that a thread can encode them while the state changes.

    closed, tags: the outcome and the tag of each closed group, as in `State`. failed: the reasons of failed batches.
    """

    closed: Mapping[GroupKey, int | str]
    tags: Mapping[GroupKey, str]
    failed: Mapping[int, str]
    waiting: list[GroupAnswer]

    def answers(self) -> list[GroupAnswer]:
        return [self._decided(key, outcome) for key, outcome in self.closed.items()] + self.waiting

    def _decided(self, key: GroupKey, outcome: int | str) -> GroupAnswer:
        tag = self.tags.get(key, "")
        if isinstance(outcome, str):
            return GroupAnswer(*key, "dropped", reason=outcome, tag=tag)
        if outcome in self.failed:
            return GroupAnswer(*key, "dropped", outcome, "batch_failed", tag)
        return GroupAnswer(*key, "sealed", outcome, tag=tag)


def all_groups(state: State) -> AllGroups:
    return AllGroups(
        dict(state.closed),
        dict(state.closed_tags),
        # A failed batch whose rows are kept may still be built.
        {number: reason for number, reason in state.failed.items() if state.is_dropped(number)},
        [
            GroupAnswer(*key, "complete" if key in state.complete else "open", tag=group.tag)
            for key, group in state.open.items()
        ],
    )


def explained(reason: str, *, is_kept: bool) -> tuple[str, str]:
    """Splits the reason of a failed batch into the cause and the remedy; a batch that was given up has no remedy.
    is_kept: whether the batch's rows are kept."""
    if reason.startswith(GIVEN_UP):
        return reason, ""
    why, _, correction = reason.partition("; ")
    return why, "; ".join(filter(None, [correction, _KEPT if is_kept else _DROPPED]))
