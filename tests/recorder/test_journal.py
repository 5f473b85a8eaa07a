"""The journal gives back what it took, belongs to one recorder, and changes nothing where the disk refuses."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill import FailedPreconditionError, InvalidArgumentError, UnavailableError
from gristmill.completions import Sampled
from gristmill_recorder.journal import Entry, Journal
from gristmill_recorder.journal_files import JournalFiles
from gristmill_recorder.names import TrajectoryName
from gristmill_recorder.rows import Row

NAME = TrajectoryName("run", "uid", 0, 0, 0)
LONG = Sampled([7] * 10_000, [3], None, "stop")
EXPERTS = np.arange(6, dtype=np.int16).reshape(1, 3, 2)


def row(step: int, *, logprobs: bool = True) -> Row:
    choice = Sampled([1, 2, step], [3, 4], [-0.5, -1.0], "stop", [8, 9] if step == 2 else None)
    columns = {"experts": EXPERTS, "experts_start": np.array(2)} if step == 2 else {}
    return Row.of(choice, step, 7, columns, has_logprobs=logprobs, is_masked=step == 2)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite3")
    yield journal
    journal.close()


def test_steps_come_back_as_they_were_but_those_that_were_delivered(journal: Journal) -> None:
    begun = Entry(NAME)
    journal.append(begun, [row(0), row(1, logprobs=False)], None)
    journal.append(begun, [row(2)], row(1))
    begun.delivered = 1
    journal.deliver(begun)
    (entry,) = journal.open()
    assert (entry.name, entry.next_step, entry.delivered, entry.is_ended) == (NAME, 3, 1, False)
    assert [each.step for each in entry.rows] == [1, 2]
    assert entry.rows[0].logprobs is None
    for stored, wanted in zip(entry.rows, (row(1, logprobs=False), row(2)), strict=True):
        assert np.array_equal(stored.prompt, wanted.prompt)
        assert np.array_equal(stored.response, wanted.response)
        assert (stored.stop_reason, stored.policy_version, stored.nbytes) == ("stop", 7, wanted.nbytes)
    assert "policy_versions" not in entry.rows[0].fields(NAME)
    assert entry.rows[1].fields(NAME)["policy_versions"].tolist() == [8, 9]
    assert [each.fields(NAME)["loss_mask"].tolist() for each in entry.rows] == [[1, 1], [0, 0]]
    assert "experts" not in entry.rows[0].fields(NAME)
    fields = entry.rows[1].fields(NAME)
    assert (fields["experts"].dtype, fields["experts_start"]) == (EXPERTS.dtype, 2)
    assert np.array_equal(fields["experts"], EXPERTS)


def test_any_step_of_an_open_trajectory_is_found_by_its_conversation(journal: Journal) -> None:
    begun, first, second = Entry(NAME), row(0), row(1)
    first.said, second.said, second.is_cut = b"one", b"two", True
    journal.append(begun, [first], None)
    journal.append(begun, [second, row(2)], first)
    begun.delivered = 2
    journal.deliver(begun)
    (entry,) = journal.open()
    assert entry.ends == {b"one": 0, b"two": 1}
    stored = journal.row(entry.id, entry.ends[b"two"])
    assert stored is not None
    assert (stored.prompt.tolist(), stored.response.tolist(), stored.is_cut) == ([1, 2, 1], [3, 4], True)
    assert journal.row(entry.id, 3) is None


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.data(), st.lists(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3), max_size=4))
def test_a_prompt_comes_back_whatever_it_shares_with_an_earlier_step(
    data: st.DataObject, calls: list[list[tuple[Any, Any]]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        journal, entry = Journal(Path(directory) / "journal"), Entry(NAME)
        rows: list[Row] = []
        for call in calls:
            made = [
                Row.of(
                    Sampled(prompt, response, None, ""), len(rows) + number, -1, {}, has_logprobs=False, is_masked=False
                )
                for number, (prompt, response) in enumerate(call)
            ]
            journal.append(entry, made, data.draw(st.sampled_from(rows)) if rows else None)
            rows += made
        stored = [each for opened in journal.open() for each in opened.rows]
        alone = [journal.row(entry.id, step) for step in range(len(rows))]
        journal.close()
    for back in (stored, alone):
        assert [(each and each.prompt.tolist(), each and each.response.tolist()) for each in back] == [
            one for call in calls for one in call
        ]


def test_conversations_that_take_turns_are_written_once(journal: Journal, tmp_path: Path) -> None:
    """Each turn begins with all turns of its conversation before it: written whole, they would be 1 MB."""
    entry, last = Entry(NAME), list[Row | None]([None, None])
    tokens = [[*range(1000)], [*range(1000, 2000)]]
    for step in range(100):
        turn = Row.of(
            Sampled(tokens[step % 2], [step] * 50, None, ""), step, -1, {}, has_logprobs=False, is_masked=False
        )
        journal.append(entry, [turn], last[step % 2])
        last[step % 2], tokens[step % 2] = turn, [*tokens[step % 2], *[step] * 50, 7, 7]
    journal.sync()
    assert (tmp_path / "journal.sqlite3").stat().st_size < 200_000


def test_what_is_closed_is_remembered_until_it_is_forgotten(journal: Journal) -> None:
    begun = Entry(NAME)
    journal.append(begun, [row(0)], None)
    journal.end(begun.id, 0.5)
    journal.close_trajectory(begun.id, "accepted", keeps_rows=False)
    stored = journal.find(NAME)
    assert stored is not None
    assert (stored.next_step, stored.is_ended, stored.reward, stored.outcome) == (1, True, 0.5, "accepted")
    assert list(journal.open()) == []
    journal.forget(60)
    assert journal.find(NAME) is not None
    journal.forget(-1)
    assert journal.find(NAME) is None


@pytest.mark.parametrize("jump_s", [-366 * 86_400, 366 * 86_400])
def test_what_is_closed_is_remembered_though_the_clock_jumps_by_a_year(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """While a recorder runs, and while none does."""
    path, names, time_before = tmp_path / "journal", [NAME._replace(sample=number) for number in range(3)], time.time
    for name in names:
        with closing(Journal(path)) as journal:
            entry = Entry(name)
            journal.append(entry, [row(0)], None)
            journal.close_trajectory(entry.id, "accepted", keeps_rows=False)
            monkeypatch.setattr(time, "time", lambda since=time.time: since() + jump_s)
            journal.forget(60)
    monkeypatch.setattr(time, "time", time_before)
    with closing(Journal(path)) as journal:
        assert all(journal.find(name) for name in names)
        time.sleep(0.01)
        journal.forget(0.001)
        assert not any(journal.find(name) for name in names)


def test_its_log_stays_small_while_writes_never_pause(journal: Journal, tmp_path: Path) -> None:
    """A checkpoint during which something was written does not let the log begin again."""
    entry, log = Entry(NAME), tmp_path / "journal.sqlite3-wal"

    def write() -> None:
        journal.append(entry, [Row.of(LONG, entry.next_step, 7, {}, has_logprobs=False, is_masked=False)], None)

    for _ in range(8):
        for _ in range(500):
            write()
        syncing = threading.Thread(target=journal.sync)
        syncing.start()
        while syncing.is_alive():
            write()
            time.sleep(0.001)
    assert log.stat().st_size < 150 << 20


def test_only_its_owner_reads_it(journal: Journal, tmp_path: Path) -> None:
    """It has prompts and responses."""
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
    assert modes
    assert set(modes.values()) == {"0o600"}


def test_it_belongs_to_one_recorder(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"another recorder uses .* set another --journal"):
        Journal(tmp_path / "journal.sqlite3")


def test_a_change_that_the_disk_refuses_changes_nothing(journal: Journal, tmp_path: Path) -> None:
    begun = Entry(NAME)
    journal.append(begun, [row(0)], None)
    with pytest.raises(FailedPreconditionError, match="so the call is not answered"):
        # A step number that is there is refused as a full disk would be.
        journal.append(begun, [row(1), row(0)], row(0))
    (entry,) = journal.open()
    assert (entry.next_step, [each.step for each in entry.rows]) == (begun.next_step, [0]) == (1, [0])


@pytest.mark.parametrize("end", ["", "-wal"])
def test_a_step_is_refused_once_a_file_of_the_journal_was_deleted(journal: Journal, tmp_path: Path, end: str) -> None:
    entry = Entry(NAME)
    journal.append(entry, [row(0)], None)
    path = tmp_path / f"journal.sqlite3{end}"
    path.unlink()
    for _ in range(2):
        with pytest.raises(FailedPreconditionError, match="deleted or replaced"):
            journal.append(entry, [row(1)], row(0))
        path.touch()
    assert entry.next_step == 1


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        for page in range(path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\xff" * (0 if page == 0 else 64))


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("end", "damage", "problem"),
    [
        ("", cut, "restore it, or choose another file"),
        ("", overwrite, "restore it, or choose another file"),
        ("", empty, "was cut to 0 bytes; restore it, or delete it and"),
        ("", delete, "was cut to 0 bytes; restore it, or delete it and"),
        ("-wal", delete, "was deleted, and may have contained the newest steps; restore it, or create an empty file"),
    ],
)
def test_a_file_that_was_damaged_since_a_kill_is_refused(
    journal: Journal, tmp_path: Path, end: str, damage: Callable[[Path], None], problem: str
) -> None:
    entry = Entry(NAME)
    for step in range(100):
        journal.append(entry, [row(step)], None)
    journal.sync()
    journal.append(entry, [row(100)], None)
    killed = tmp_path / "killed"
    killed.mkdir()
    for file in tmp_path.glob("journal.sqlite3*"):
        shutil.copy(file, killed)
    path = killed / "journal.sqlite3"
    damage(killed / f"journal.sqlite3{end}")
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=problem):
            Journal(path)
    if "create an empty file" in problem:
        path.with_name(f"{path.name}-wal").touch()
        with closing(Journal(path)) as again:
            assert [len(entry.rows) for entry in again.open()] == [100]


@pytest.mark.parametrize("change", ["response = x'05000000'", "step = 7", "policy_version = 8", "trajectory = 2"])
def test_a_step_that_was_changed_is_reported(journal: Journal, tmp_path: Path, change: str) -> None:
    journal.append(Entry(NAME), [row(0), row(1)], None)
    journal.append(Entry(NAME._replace(uid="other")), [row(0)], None)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite3")) as other, other:
        other.execute(f"UPDATE steps SET {change} WHERE trajectory = 1 AND step = 1")
    with pytest.raises(FailedPreconditionError, match=r"step 1 of its trajectory \d was changed or is missing"):
        list(journal.open())


def test_a_journal_whose_process_was_killed_while_it_closed_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is deleted by then."""
    path = tmp_path / "journal.sqlite3"
    with closing(Journal(path)) as journal:
        journal.append(Entry(NAME), [row(0)], None)
        monkeypatch.setattr(JournalFiles, "close", lambda files: shutil.copytree(tmp_path, tmp_path / "killed"))
    monkeypatch.undo()
    with closing(Journal(tmp_path / "killed" / path.name)) as again:
        assert [len(entry.rows) for entry in again.open()] == [1]


def test_a_file_that_is_damaged_while_it_is_open_is_reported(journal: Journal, tmp_path: Path) -> None:
    entry, choice = Entry(NAME), Sampled([1], [3] * 5000, [-0.5] * 5000, "stop")
    for step in range(100):
        journal.append(entry, [Row.of(choice, step, 7, {}, has_logprobs=True, is_masked=False)], None)
    journal.sync()
    overwrite(tmp_path / "journal.sqlite3")
    with pytest.raises(FailedPreconditionError, match=r"cannot be read: .* malformed; restart the recorder"):
        list(journal.open())


@pytest.mark.parametrize("content", ["other", "no database at all, but long enough to be looked at as one" * 20])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    if content == "other":
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE mine (value)")
        database.close()
    else:
        path.write_text(content)
    before = path.read_bytes()
    with pytest.raises(InvalidArgumentError, match="choose another file"):
        Journal(path)
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"cannot write .*: No such file"):
        Journal(tmp_path / "nowhere" / "journal")
