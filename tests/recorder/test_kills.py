"""A recorder that dies or cannot deliver loses nothing that was answered, and delivers nothing twice."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from gristmill_recorder.journal import Journal
from tests.on_loop import Service
from tests.recorder.engine import END, Engine, prompt_of
from tests.recorder.recorders import Recorder, Restarted, StartRecorder, batches, create_run, post, trained
from tests.serving import StartService

pytestmark = pytest.mark.slow

AWAY = "127.0.0.1:9"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux limits the files of another process")


def ask(client: openai.OpenAI, *texts: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text} for text in texts]
    return client.chat.completions.create(model="toy", messages=messages, **more)


def test_what_was_answered_outlives_a_kill_before_it_was_submitted(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str
) -> None:
    first = start_recorder(engine.url, AWAY, "--finish-wait-s", "0")
    with first.openai(run, "ended") as client:
        ask(client, "say done")
    end = f"{first.base(run, 'ended')}/finish"
    assert post(end, {"reward": 1.0}) == (202, {"steps": 1, "outcome": "waiting for the service"})
    with first.openai(run) as client:
        ask(client, "say one")
        ask(client, "say one", "say two", n=2)
    first.kill()
    second = start_recorder(engine.url, service.grpc_address)
    while not second.metric('closed_trajectories_total{outcome="accepted"}'):
        time.sleep(0.02)
    assert second.finish(run, reward=1.0, uid="ended") == {"steps": 1, "outcome": "accepted"}
    assert post(f"{second.base(run, 'ended')}/finish", {"reward": 2.0})[0] == 409
    with second.openai(run) as client:
        ask(client, "say three")
    assert second.finish(run, reward=3.0) == {"steps": 4, "outcome": "accepted"}
    (done,), rows = batches(service.grpc_address, run, 2)
    assert bytes(done.trained[:-1]) == b"done"
    assert [bytes(row.trained[:-1]) for row in rows] == [b"one", b"two", b"two #1", b"three"]
    prompt = prompt_of([{"role": "user", "content": f"say {number}"} for number in ("one", "two")])
    assert rows[1].tokens == [*prompt, *b"two", END]
    assert rows[-1].reward == 3.0


def test_an_abort_outlives_a_kill_while_the_service_is_away(
    start_recorder: StartRecorder, engine: Engine, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, n_samples_per_prompt=2)
    first = start_recorder(engine.url, AWAY)
    for sample in range(2):
        with first.openai(run_name, sample=sample) as client:
            ask(client, "say hi")
    assert post(f"{first.base(run_name)}/abort", {}) == (200, {"outcome": "aborted"})
    first.kill()
    second = start_recorder(engine.url, service.grpc_address)
    assert second.finish(run_name, sample=1) == {"steps": 1, "outcome": "accepted"}
    assert len(trained(service.grpc_address, run_name)) == 1


def test_steps_that_the_service_had_already_count_once(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str, tmp_path: Path
) -> None:
    """A kill and a stop within a conversation: it goes on where it was."""
    first = start_recorder(engine.url, service.grpc_address)
    with first.openai(run) as client:
        ask(client, "say 0")
        ask(client, "say 0", "say 1")
    while not service.runs.get(run).status().rows_accepted:
        time.sleep(0.01)
    first.kill()
    second = start_recorder(engine.url, service.grpc_address)
    with second.openai(run) as client:
        ask(client, *(f"say {number}" for number in range(3)))
    assert second.stop() == 0
    assert service.runs.get(run).status().rows_accepted == 2
    journal = Journal(tmp_path / "journal.sqlite3")
    (left,) = journal.open()
    journal.close()
    assert bytes(left.rows[-1].response.astype("u1")[:-1]) == b"2"
    third = start_recorder(engine.url, service.grpc_address)
    assert third.finish(run) == {"steps": 3, "outcome": "accepted"}
    assert [bytes(row.trained[:-1]) for row in trained(service.grpc_address, run)] == [b"0", b"1", b"2"]
    assert service.runs.get(run).status().rows_accepted == 3


def test_calls_are_answered_while_the_service_is_away_and_delivered_when_it_is_back(
    start_recorder: StartRecorder, start_service: StartService, engine: Engine, tmp_path: Path
) -> None:
    flags = ("--journal-dir", str(tmp_path / "runs"), "--shared-memory-dir", str(tmp_path))
    before = start_service(*flags)
    create_run(before.grpc_address, "my-run")
    recorder = start_recorder(engine.url, before.grpc_address)
    with recorder.openai("my-run") as client:
        ask(client, "say one")
        before.process.kill()
        before.process.wait()
        ask(client, "say two")
        after = start_service(*flags, "--grpc-address", before.grpc_address)
        ask(client, "say three")
    assert recorder.finish("my-run")["steps"] == 3
    rows = trained(after.grpc_address, "my-run")
    assert [bytes(row.trained[:-1]) for row in rows] == [b"one", b"two", b"three"]


def test_an_end_that_cannot_be_journaled_may_be_repeated(
    start_recorder: StartRecorder, start_service: StartService, engine: Engine, tmp_path: Path
) -> None:
    flags = ("--journal-dir", str(tmp_path / "runs"), "--shared-memory-dir", str(tmp_path))
    before = start_service(*flags)
    create_run(before.grpc_address, "my-run")
    recorder = start_recorder(engine.url, before.grpc_address, "--finish-wait-s", "0")
    with recorder.openai("my-run") as client:
        ask(client, "say one")
        before.process.kill()
        before.process.wait()
        assert recorder.finish("my-run")["outcome"] == "waiting for the service"
        (tmp_path / "journal.sqlite3").unlink()
        start_service(*flags, "--grpc-address", before.grpc_address)
        while not recorder.metric('closed_trajectories_total{outcome="accepted"}'):
            time.sleep(0.02)
        assert recorder.finish("my-run") == {"steps": 1, "outcome": "accepted"}
        with pytest.raises(openai.APIStatusError, match="it has ended"):
            ask(client, "say two")


def test_a_recorder_stops_within_its_grace_though_the_service_does_not_answer(
    start_recorder: StartRecorder, restarted: Restarted, engine: Engine
) -> None:
    recorder = start_recorder(engine.url, restarted.address, "--finish-wait-s", "0", "--shutdown-grace-s", "1")
    for run in ("one", "two"):
        create_run(restarted.address, run)
        with recorder.openai(run) as client:
            ask(client, "say one")
    with restarted.frozen():
        for run in ("one", "two"):
            assert recorder.finish(run)["outcome"] == "waiting for the service"
        began = time.monotonic()
        assert recorder.stop() == 0
        assert time.monotonic() - began < 10
    again = start_recorder(engine.url, restarted.address)
    while again.metric('closed_trajectories_total{outcome="accepted"}') < 2:
        time.sleep(0.02)
    assert "Traceback" not in recorder.log.read_text()


@contextmanager
def full_disk(recorder: Recorder, run: str) -> Iterator[None]:
    """A block in which nothing can be written to the journal. Calls of the run fill the disk."""
    limits = resource.prlimit(recorder.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(recorder.process.pid, resource.RLIMIT_FSIZE, (200_000, limits[1]))
    with recorder.openai(run, "refused") as client:
        while "journal not synced" not in recorder.log.read_text():
            with suppress(openai.InternalServerError):
                ask(client, "say " + "x" * 1000)
    yield
    resource.prlimit(recorder.process.pid, resource.RLIMIT_FSIZE, limits)


@ON_LINUX
def test_the_journal_is_synced_again_after_its_disk_was_full(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str, tmp_path: Path
) -> None:
    recorder, journal = start_recorder(engine.url, service.grpc_address), tmp_path / "journal.sqlite3"
    with recorder.openai(run) as client:
        ask(client, "say one")
        with full_disk(recorder, run):
            pass
        ask(client, "say two")
    while journal.stat().st_size < 200_000:
        time.sleep(0.02)
    assert recorder.finish(run) == {"steps": 2, "outcome": "accepted"}
    assert recorder.stop() == 0


@ON_LINUX
def test_a_trajectory_that_was_accepted_while_the_disk_was_full_is_closed_in_the_journal_once_it_has_space(
    start_recorder: StartRecorder, restarted: Restarted, engine: Engine
) -> None:
    create_run(restarted.address, "my-run")
    recorder = start_recorder(engine.url, restarted.address, "--finish-wait-s", "0", "--idle-abort-s", "1")
    with recorder.openai("my-run") as client:
        ask(client, "say one")
    restarted.kill()
    assert recorder.finish("my-run")["outcome"] == "waiting for the service"
    with full_disk(recorder, "my-run"):
        restarted.start()
        while not recorder.metric('closed_trajectories_total{outcome="accepted"}'):
            time.sleep(0.02)
        assert recorder.finish("my-run") == {"steps": 1, "outcome": "accepted"}
    while recorder.metric("open_trajectories"):
        time.sleep(0.02)
    assert recorder.finish("my-run") == {"steps": 1, "outcome": "accepted"}
    recorder.kill()
    again = start_recorder(engine.url, restarted.address)
    assert "resumed" not in again.log.read_text()
    assert again.finish("my-run") == {"steps": 1, "outcome": "accepted"}
