"""Journals of format 1 are converted once: nothing of them is lost, and nothing is tried twice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.errors import InvalidArgumentError
from gristmill_service.run.machine.codec import decode_events
from gristmill_service.run.machine.events import RowsStored, StoredRow
from gristmill_service.storage.journal import database
from gristmill_service.storage.journal.run_store import JournalRunStore
from gristmill_service.storage.row_tables import steps_of
from tests.formats import kept
from tests.storage.tables import lost_tables

FIXTURE = json.loads((Path(__file__).parents[1] / "formats" / "fixtures" / "journal-1.1.2.2.json").read_text())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    kept.put_files(FIXTURE["kept"], tmp_path / "journal")
    return tmp_path / "journal"


@pytest.fixture
def store(directory: Path) -> Iterator[JournalRunStore]:
    store = JournalRunStore(directory)
    yield store
    store.close()


def rows_of(records: list[bytes]) -> dict[int, dict[int, bytes]]:
    """The digests of all rows that were accepted, by table and row."""
    rows: dict[int, dict[int, bytes]] = {}
    for record in records:
        for event in decode_events(record):
            stored: list[StoredRow] = [*event.rows] if isinstance(event, RowsStored) else []
            for row in stored:
                rows.setdefault(row.ref.table, {})[row.ref.row] = row.digest
    return rows


def test_records_and_rows_of_an_old_journal_are_there_again(store: JournalRunStore, directory: Path) -> None:
    assert store.names() == ["kept"]
    log = store.open("kept")
    replay = log.replay()
    records = list(replay.records)
    assert (replay.snapshot, len(records), replay.is_short()) == (None, 17, False)
    rows = rows_of(records)
    assert len(rows) > 3

    assert lost_tables(log, rows) == set()
    assert [path.name for path in directory.rglob("*") if path.suffix in (".json", ".log", ".seg")] == []
    assert log.first_number > max(rows)
    log.append(b"goes on", {log.first_number: steps_of(log.get(min(rows)))})
    log.close()

    log = store.open("kept")
    assert log.replay().records == [*records, b"goes on"]
    assert lost_tables(log, rows) == set()
    log.close()


def test_a_machine_that_died_with_an_old_journal_open_may_have_lost_its_end(
    store: JournalRunStore, directory: Path
) -> None:
    (directory / "run-kept" / "boot-id").write_text("another boot\n")
    log = store.open("kept")
    assert log.replay().is_short()
    log.close()


def test_a_process_that_was_killed_with_an_old_journal_open_lost_nothing(
    store: JournalRunStore, directory: Path
) -> None:
    (directory / "run-kept" / "boot-id").write_text(f"{database.this_boot()}\n")
    log = store.open("kept")
    assert not log.replay().is_short()
    log.append(b"goes on", {})
    log.close()


@pytest.mark.parametrize("until", range(1, 4))
def test_a_conversion_that_is_cut_short_is_finished(
    store: JournalRunStore, directory: Path, monkeypatch: pytest.MonkeyPatch, until: int
) -> None:
    calls = 0
    real_rename, real_unlink = os.rename, os.unlink

    def killed(function: object, *args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == until:
            raise KeyboardInterrupt
        function(*args)  # type: ignore[operator]

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", lambda *args: killed(real_rename, *args))
        patched.setattr(Path, "unlink", lambda path, **_: killed(real_unlink, path))
        with pytest.raises(KeyboardInterrupt):
            store.open("kept")
    assert store.names() == ["kept"]
    log = store.open("kept")
    records = log.replay().records
    assert len(list(records)) == 17
    assert log.retain(rows_of(list(records))) == set()
    log.close()
    assert [path.name for path in (directory / "run-kept").iterdir()] == ["journal.sqlite"]


def test_rows_that_are_moved_when_the_process_dies_are_moved_again(
    store: JournalRunStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = store.open("kept")
    rows = rows_of(list(log.replay().records))
    segment = directory / "run-kept" / "rows-000000.seg"
    copy = shutil.copy(segment, directory.parent)
    assert log.retain(rows) == set()
    log.close()
    shutil.copy(copy, segment)
    log = store.open("kept")
    log.replay()
    assert log.retain(rows) == set()
    assert not segment.exists()
    log.close()


def test_rows_that_are_damaged_are_lost(store: JournalRunStore, directory: Path) -> None:
    log = store.open("kept")
    rows = rows_of(list(log.replay().records))
    segment = directory / "run-kept" / "rows-000000.seg"
    first, second = sorted(rows)[:2]
    with segment.open("r+b") as file:
        file.seek(first & ((1 << 40) - 1))
        file.write(bytes(4))
        file.seek((second & ((1 << 40) - 1)) + 30)
        file.write(bytes(20))
    assert {first, second} <= lost_tables(log, rows | {5 << 40: {0: b""}})
    log.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda run: (run / "run.json").write_text("{"), r"run.json is damaged"),
        (lambda run: (run / "run.json").write_text('{"format":9,"run":"kept"}'), r"run.json is damaged: format 9"),
        (lambda run: (run / "run.json").write_text('{"format":1}'), r"run.json is damaged: 'run'"),
        (lambda run: (run / "events-000000.log").unlink(), r"has no event log"),
        (lambda run: (run / "events-000000.log").write_bytes(b""), r"header of the log is invalid"),
        (
            lambda run: (run / "events-000000.log").write_bytes(b"gristmill log\0\1\0"),
            r"there is no complete record at byte 16",
        ),
        (
            lambda run: os.truncate(run / "events-000000.log", 700),
            r"there is no complete record at byte \d+; try the version that",
        ),
    ],
)
def test_a_damaged_old_journal_is_refused_as_it_is(
    store: JournalRunStore, directory: Path, damage: object, reason: str
) -> None:
    damage(directory / "run-kept")  # type: ignore[operator]
    before = {path: path.read_bytes() for path in (directory / "run-kept").iterdir()}
    with pytest.raises(InvalidArgumentError, match=rf"{reason}.*; restore it, or delete the run"):
        store.open("kept")
    assert {path: path.read_bytes() for path in (directory / "run-kept").iterdir()} == before
    assert store.names() == ["kept"]
    store.delete("kept")
    assert store.names() == []


def test_an_old_journal_of_another_name_is_no_other_run(store: JournalRunStore, directory: Path) -> None:
    (directory / "run-kept").rename(directory / "run-other")
    with pytest.raises(InvalidArgumentError, match="is of run 'kept', not of 'other'; move it back, or delete"):
        store.open("other")


def test_an_old_run_of_a_long_name_is_listed(store: JournalRunStore, directory: Path) -> None:
    name = "日本語" * 40
    description = directory / "run-kept" / "run.json"
    document = json.loads(description.read_text())
    description.write_text(json.dumps({**document, "run": name}))
    store.create(name, b"{}").close()
    [long] = directory.glob("hash-*")
    shutil.rmtree(long)
    (directory / "run-kept").rename(long)
    assert store.names() == [name]
    log = store.open(name)
    assert len(list(log.replay().records)) == 17
    log.close()
    assert store.names() == [name]
