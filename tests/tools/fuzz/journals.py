"""What is stored, in files and in Redis: databases of runs, events and snapshots themselves, and tables of rows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps
from gristmill_service.run.machine.codec import decode_events, decode_state, snapshot_of
from gristmill_service.run.rows.checked_tables import CheckedTables
from gristmill_service.storage import row_tables
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.rows import make_row
from tests.run.harness import Bench, group_rows
from tests.tools.fuzz.mutate import changed_bytes, changed_document
from tests.tools.fuzz.targets import Target

# The first byte of an input: that of a record, or the index of a piece of the snapshot.
_RECORD = b"r"


@cache
def _bench() -> Bench:
    """A run that something of everything happened to."""
    bench = Bench(train_batch_size=1, critic_mini_batch_size=1)
    for uid in "abc":
        bench.submit(*group_rows(uid))
        bench.make_batches()
    bench.begin("d", "e")
    bench.run.abort_groups(0, ["d"], "why")
    bench.run.announce(3)
    return bench


def _events() -> list[bytes]:
    bench = _bench()
    pieces = [bytes([index]) + piece for index, piece in enumerate(snapshot_of(bench.state))]
    return [*(_RECORD + record for record in bench.log.records), *pieces]


def _change_event(random: Random, data: bytes) -> bytes:
    if random.random() < 0.2:
        return data[:1] + changed_bytes(random, data[1:])
    document = changed_document(random, msgspec.msgpack.decode(data[1:], strict=False))
    try:
        return data[:1] + msgspec.msgpack.encode(document)
    except (OverflowError, UnicodeEncodeError, TypeError):
        return data[:1] + changed_bytes(random, data[1:])


def _read_event(data: bytes) -> None:
    if data[:1] == _RECORD:
        decode_events(data[1:])
    else:
        pieces = [*snapshot_of(_bench().state)]
        pieces[data[0]] = data[1:]
        list(snapshot_of(decode_state(pieces)))


@contextmanager
def _journal() -> Iterator[tuple[JournalRunStore, Path]]:
    """A journal, and the place of a run's database in it."""
    # In memory: each input is a file, which is synced.
    directory = Path(tempfile.mkdtemp(prefix="gristmill-fuzz-", dir="/dev/shm"))
    store = JournalRunStore(directory)
    try:
        yield store, directory / "run-run" / "journal.sqlite"
    finally:
        store.close()
        shutil.rmtree(directory)


def _databases() -> list[bytes]:
    with _journal() as (store, path):
        log = store.create("run", b"{}")
        log.replay()
        for number, record in enumerate(_events()[:6]):
            log.append(record[1:], {number: _steps()})
        log.close()
        return [path.read_bytes()]


def _read_database(data: bytes) -> None:
    with _journal() as (store, path):
        path.parent.mkdir()
        path.write_bytes(data)
        assert store.names() == ["run"]
        log = store.open("run")
        try:
            for record in log.replay().records:
                decode_events(record)
            checked = CheckedTables(log, {number: {0: b""} for number in range(6)})
            checked.lost([*{*range(6)} - log.retain(range(6))])
            log.append(b"goes on", {})
        finally:
            log.close()


def _steps() -> Steps:
    rows = [make_row(uid=uid, response=[3], rollout_logprobs=[-1.0]) for uid in "ab"]
    return from_rows(rows, step_wise=False)


def _tables() -> list[bytes]:
    whole = _steps()
    return [row_tables.encode(table).joined() for table in (whole, whole.take(np.array([1])))]


def _read_table(data: bytes) -> None:
    row_tables.decode(data)


DATABASES = Target("journal_databases", _databases, changed_bytes, _read_database)
EVENTS = Target("events", _events, _change_event, _read_event)
TABLES = Target("redis_rows", _tables, changed_bytes, _read_table)
