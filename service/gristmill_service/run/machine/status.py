"""The status of a run and of its groups, as the APIs report them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from gristmill_service.config import RunConfig
from gristmill_service.run.machine.answers import GroupAnswer, ModelProgress, RunStatus, TagGroups
from gristmill_service.run.machine.closed_groups import ClosedOutcome
from gristmill_service.run.machine.decisions import progress
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.machine.state import GIVEN_UP, State

_KEPT = "its rows are kept; resume with a dp_size that aligns it, or sample its groups again in another round"
# Reading the state of this many groups takes about a millisecond.
_GROUPS_AT_ONCE = 256
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
        groups_archived=len(state.closed.archive),
        next_round=state.next_round,
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
                own.resumes,
            )
            for model, own in state.models.items()
        ],
        failed_batches=dict(state.failed),
    )


def stored_counts(state: State) -> dict[str, int]:
    """Returns the numbers of batches, open groups and rows that are stored now."""
    groups = chain(state.open.values(), *(batch.groups for batch in state.batches.values()))
    rows = sum(len(group.refs()) for group in groups)
    return {"batches": len(state.batches), "groups_open": len(state.open), "rows": rows}


def group_keys(state: State, named: Sequence[GroupKey] | None = None) -> list[Sequence[GroupKey]]:
    """Returns the keys of all groups that are not archived, or the named ones, in parts: there may be hundreds of
    thousands."""
    keys = [*state.closed.listed, *state.open] if named is None else named
    return [keys[first : first + _GROUPS_AT_ONCE] for first in range(0, len(keys), _GROUPS_AT_ONCE)]


def group_answers(keys: Sequence[GroupKey], state: State) -> list[GroupAnswer]:
    outcomes = state.outcomes(keys)
    return [_group_answer(state, key, outcomes.get(key)) for key in keys]


def _group_answer(state: State, key: GroupKey, outcome: ClosedOutcome | None) -> GroupAnswer:
    group = state.open.get(key)
    if group is not None:
        if key in state.complete:
            return GroupAnswer(*key, "complete", tag=group.tag)
        return GroupAnswer(*key, "open", reason=str(group.lacking()), tag=group.tag)
    if outcome is None:
        return GroupAnswer(*key, "unknown")
    tag = state.closed.listed[key].tag if key in state.closed.listed else ""
    if isinstance(outcome, str):
        return GroupAnswer(*key, "dropped", reason=outcome, tag=tag)
    # A failed batch whose rows are kept may still be built.
    if state.is_dropped(outcome):
        return GroupAnswer(*key, "dropped", outcome, "batch_failed", tag)
    return GroupAnswer(*key, "sealed", outcome, tag=tag)


def explained(reason: str, *, is_kept: bool) -> tuple[str, str]:
    """Splits the reason of a failed batch into the cause and the remedy; a batch that was given up has no remedy.
    is_kept: whether the batch's rows are kept."""
    if reason.startswith(GIVEN_UP):
        return reason, ""
    why, _, correction = reason.partition("; ")
    return why, "; ".join(filter(None, [correction, _KEPT if is_kept else _DROPPED]))
