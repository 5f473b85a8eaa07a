"""Recover a run from its log: compute its state, and the consequences of lost rows and shards as events."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import structlog

from gristmill_service.config import RunConfig
from gristmill_service.run.machine.codec import decode_events, decode_state
from gristmill_service.run.machine.events import (
    BatchFailed,
    BatchWithdrawn,
    ColumnsDropped,
    Event,
    GenerationBegan,
    GroupDropped,
)
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import State, apply
from gristmill_service.run.rows.checked_tables import CheckedTables, needed_rows
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.storage.run_store import RunLog
from gristmill_service.storage.shard_store import ShardStore, is_published

_log = structlog.get_logger(__name__)

ROWS_LOST = "rows_lost"


class Recovered(NamedTuple):
    """A run as recovered from its log. tables: the tables of rows, of which damaged ones are found when they are read.
    events: the consequences of missing rows and lost shards, and of a rollback."""

    state: State
    rows: RowBuffer
    tables: CheckedTables
    events: list[Event]


def recover(name: str, config: RunConfig, log: RunLog, store: ShardStore) -> Recovered:
    """Recovers a run from its log. Blocks; called before anything else uses the log.

    Raises InvalidArgumentError for a log that this version cannot read.
    """
    snapshot, records, is_short, generation = log.replay()
    state = State.initial(config, log.run_id) if snapshot is None else decode_state(snapshot)
    for record in records:
        for event in decode_events(record):
            apply(state, event)
    rollback = _rollback(state, generation) if is_short() else None
    tables, rows = needed_rows(state), RowBuffer()
    lost = log.retain(tables.keys())
    for number, digests in tables.items():
        rows.add(number, None, max(digests) + 1, digests)
    # Forward shards cannot be reused: only the process that built them knows their form.
    stored = [number for number in _trainable(state) if is_published(store, name, number)]
    lossy = losses(state, lost, stored)
    failed = [event.batch for event in lossy if isinstance(event, BatchFailed)]
    events = [*lossy, *withdrawn(state, [*stored, *failed])]
    if rollback is not None:
        events.append(rollback)
        _log.error("run rolled back: its log is shorter than confirmed", run=name, run_id=log.run_id)
    unread = {number: tables[number] for number in tables.keys() - lost}
    return Recovered(state, rows, CheckedTables(log, unread, config.repeated_columns), events)


def _rollback(state: State, generation: int) -> GenerationBegan:
    """Returns the event that records a rollback: the log has lost confirmed events. generation: the run's confirmed
    generation; 0 if unknown. The new generation must differ from all earlier ones, whose events may be lost.
    """
    reached = {model: max(progress.furthest, progress.committed) for model, progress in state.models.items()}
    return GenerationBegan(max(state.generation, generation) + 1, reached)


def losses(state: State, lost: Collection[int], stored: Collection[int] | None = None) -> list[Event]:
    """Returns the events that lost tables cause: groups are dropped and batches fail, with a recorded reason. A batch
    whose train shards are stored needs its rows only when it is built again.

    stored: the batches whose train shards are in the store; None for all that are published.
    """
    if not lost:
        return []
    stored = _trainable(state) if stored is None else stored
    dropped: list[Event] = [GroupDropped(key, ROWS_LOST) for key, group in state.open.items() if _touches(group, lost)]
    unstored = {number: batch for number, batch in state.batches.items() if number not in stored}
    failed = {
        number: "rows of it are lost, though the log refers to them: the journal's disk or Redis lost them"
        for number, batch in unstored.items()
        if any(_touches(group, lost) for group in batch.groups)
    }
    unwritten = [
        number
        for number, batch in state.batches.items()
        if any(column.table in lost for column in batch.written.values())
    ]
    # Nobody writes the columns of a batch again that the policy has trained.
    trained = state.models["policy"].committed.batch
    failed |= {
        number: "columns of it are lost, though the log refers to them, and the policy's trainer has passed it"
        for number in unwritten
        if number in unstored and number < trained
    }
    return [
        *dropped,
        *(ColumnsDropped(number) for number in unwritten),
        *(BatchFailed(number, reason) for number, reason in failed.items()),
    ]


def _trainable(state: State) -> list[int]:
    """Returns the batches whose train shards are published."""
    return [number for number, batch in state.batches.items() if batch.is_published and not batch.awaits]


def withdrawn(state: State, kept: Collection[int]) -> list[Event]:
    """Returns the events that withdraw published batches whose shards were lost with the process that published them.
    kept: the batches whose shards still exist."""
    return [
        BatchWithdrawn(number) for number, batch in state.batches.items() if batch.is_published and number not in kept
    ]


def _touches(group: Group, lost: Collection[int]) -> bool:
    return any(ref.table in lost for ref in group.refs())
