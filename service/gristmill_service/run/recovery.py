"""Recover a run from its log: compute its state, and the consequences of lost rows and shards as events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig
from gristmill_service.run.machine.codec import decode_events, decode_state
from gristmill_service.run.machine.described_rows import row_digests
from gristmill_service.run.machine.events import (
    COLUMNS,
    BatchFailed,
    BatchWithdrawn,
    ColumnsDropped,
    Event,
    GenerationBegan,
    GroupDropped,
    StoredRow,
)
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import State, apply
from gristmill_service.run.rows.row_buffer import RowBuffer
from gristmill_service.storage.run_store import RunLog

ROWS_LOST = "rows_lost"


def replayed(log: RunLog, config: RunConfig) -> tuple[State, GenerationBegan | None]:
    """Computes the state from the log. Also returns the event to record if the log has, or may have, lost events that
    were already confirmed. Raises InvalidArgumentError for a log that this version cannot read.
    """
    snapshot, records, is_short, generation = log.replay()
    state = State.initial(config) if snapshot is None else decode_state(snapshot)
    for record in records:
        for event in decode_events(record):
            apply(state, event)
    return state, _rollback(state, generation) if is_short() else None


def recovered(
    state: State, rows: RowBuffer, log: RunLog, is_stored: Callable[[int], bool], shared: Collection[str] = ()
) -> list[Event]:
    """Adds the rows that the state needs to the buffer. Returns the events that lost rows and lost shards cause.
    shared: as in `row_digests`."""
    needed = Needed(state, shared)
    lost = log.retain(needed.tables, needed.is_whole)
    for number, needed_rows in needed.tables.items():
        rows.add(number, None, max(needed_rows) + 1, needed_rows)
    # Forward shards cannot be reused: only the process that built them knows their form.
    published = [
        number
        for number, batch in state.batches.items()
        if batch.is_published and not batch.awaits and is_stored(number)
    ]
    lossy = losses(state, lost)
    failed = [event.batch for event in lossy if isinstance(event, BatchFailed)]
    return [*lossy, *withdrawn(state, [*published, *failed])]


def _rollback(state: State, generation: int) -> GenerationBegan:
    """Returns the event that records a rollback: the log has lost confirmed events. generation: the run's confirmed
    generation; 0 if unknown. The new generation must differ from all earlier ones, whose events may be lost.
    """
    reached = {model: max(progress.furthest, progress.committed) for model, progress in state.models.items()}
    return GenerationBegan(max(state.generation, generation) + 1, reached)


class Needed:
    """The rows that a state refers to, by table."""

    def __init__(self, state: State, shared: Collection[str]) -> None:
        self._shared = shared
        self.tables: dict[int, dict[int, bytes]] = {}
        for row in _rows(state):
            self.tables.setdefault(row.ref.table, {})[row.ref.row] = row.check or row.digest
        for batch in state.batches.values():
            self.tables |= {column.table: {COLUMNS: column.check} for column in batch.written.values()}

    def is_whole(self, number: int, steps: Steps) -> bool:
        """Returns whether the table contains the rows that were accepted, unchanged."""
        rows = self.tables[number]
        if len(steps) <= max(rows):
            return False
        digests = row_digests(steps, self._shared)
        return all(digests[row] == digest for row, digest in rows.items())


def losses(state: State, lost: Collection[int]) -> list[Event]:
    """Returns the events that lost tables cause: groups are dropped and batches fail, with a recorded reason."""
    if not lost:
        return []
    dropped: list[Event] = [GroupDropped(key, ROWS_LOST) for key, group in state.open.items() if _touches(group, lost)]
    failed = [
        BatchFailed(number, "rows of it are lost, though the log refers to them: the journal's disk or Redis lost them")
        for number, batch in state.batches.items()
        if any(_touches(group, lost) for group in batch.groups)
    ]
    unwritten: list[Event] = [
        ColumnsDropped(number)
        for number, batch in state.batches.items()
        if any(column.table in lost for column in batch.written.values())
    ]
    return dropped + unwritten + failed


def withdrawn(state: State, kept: Collection[int]) -> list[Event]:
    """Returns the events that withdraw published batches whose shards were lost with the process that published them.
    kept: the batches whose shards still exist."""
    return [
        BatchWithdrawn(number) for number, batch in state.batches.items() if batch.is_published and number not in kept
    ]


def _touches(group: Group, lost: Collection[int]) -> bool:
    return any(ref.table in lost for ref in group.refs())


def _rows(state: State) -> Iterator[StoredRow]:
    for group in state.open.values():
        yield from group.stored_rows()
    for batch in state.batches.values():
        for group in batch.groups:
            yield from group.stored_rows()
