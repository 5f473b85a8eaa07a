"""Whatever a disk has of a journal when the machine dies: the first records, with all the tables that they need."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from gristmill_service.storage.journal import database
from gristmill_service.storage.journal.run_log import Fsync
from gristmill_service.storage.journal.run_store import JournalRunStore
from tests.storage.dying_disk import PARTS, Disk, compiled
from tests.storage.power_loss import moments, noted, opened, table
from tests.storage.tables import digests_of, lost_tables

IMAGES = 6


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    return compiled(tmp_path_factory.mktemp("syscalls"), compiler)


def check(directory: Path, fsync: Fsync, seed: int, answered: int, flushed: int) -> None:
    """Opens the run as it was left, and goes on with it."""
    store = JournalRunStore(directory / "journal", fsync)
    log, count, is_short = opened(store)
    promised = {"always": answered, "interval": flushed, "never": 0}[fsync]
    assert promised <= count
    assert is_short or count >= answered, "what is missing is reported"
    records, live = moments(seed)[count]
    kept = list(log.replay().records)
    assert kept == records[count - len(kept) :]

    wanted = digests_of({number: table(number) for number in live})
    assert lost_tables(log, wanted) == set(), "none was deleted before the record that allows it"
    assert log.first_number > max(live, default=-1)
    log.append(b"goes on", {log.first_number: table(0)})
    log.close()
    log, _, is_short = opened(store)
    assert list(log.replay().records)[-1] == b"goes on"
    assert not is_short
    log.close()
    store.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_a_machine_that_dies_leaves_the_first_records_and_their_tables(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, fsync: Fsync, seed: int
) -> None:
    done = noted(tmp_path / "disk", library, fsync, seed)
    assert len(done) > 1000
    monkeypatch.setattr(database, "this_boot", lambda: "a later one")
    generator, disk = random.Random(seed), Disk(tmp_path / "disk")
    looked_at = {*generator.sample(range(len(done)), IMAGES), len(done) - 1}
    answered = flushed = 0
    for number, note in enumerate(done):
        disk.apply(note)
        if note.kind == b"p":
            answered, flushed = note.promise
        for part in PARTS if number in looked_at and answered else ():
            left = tmp_path / "left"
            disk.write(left, part, generator)
            check(left, fsync, seed, answered, flushed)
            shutil.rmtree(left)
    assert answered > 50
