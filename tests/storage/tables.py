"""Tables of rows for tests of what stores them."""

from __future__ import annotations

from collections.abc import Mapping

from gristmill._wire.rows import to_rows
from gristmill._wire.steps import Steps
from gristmill_service.run.machine.described_rows import row_digests
from gristmill_service.run.rows.checked_tables import CheckedTables, Digests
from gristmill_service.storage.row_tables import Stored, steps_of
from gristmill_service.storage.run_store import Replay, RunLog
from tests.run.harness import row, table


def any_table(number: int = 0, rows: int = 3, tokens: int = 20) -> Steps:
    """Rows with their table's number in them."""
    made: Steps = table(*(row(f"u{number}-{index}", response=range(number, number + tokens)) for index in range(rows)))
    return made


def same(one: Stored, other: Steps) -> bool:
    return list(to_rows(steps_of(one))) == list(to_rows(other))


def compact(log: RunLog, snapshot: bytes) -> None:
    """Replaces all records by a snapshot, in pieces."""
    log.compact(log.end, [snapshot[at : at + (1 << 20)] for at in range(0, len(snapshot), 1 << 20)])


def snapshot_in(replay: Replay) -> bytes | None:
    return None if replay.snapshot is None else b"".join(replay.snapshot)


def lost_tables(log: RunLog, digests: Mapping[int, Digests]) -> set[int]:
    """Opens a log's tables as a run does. Returns those that are missing, or do not have these rows."""
    missing = log.retain(digests.keys())
    return missing | CheckedTables(log, digests).lost([*digests.keys() - missing])


def digests_of(tables: Mapping[int, Steps]) -> dict[int, Digests]:
    return {number: dict(enumerate(row_digests(table))) for number, table in tables.items()}
