"""A recorder that dies or cannot deliver loses nothing that was answered, and delivers nothing twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import openai

from gristmill_recorder.journal import Journal
from gristmill_service.service import Service
from tests.recorder.engine import END, Engine, prompt_of
from tests.recorder.recorders import Recorder, StartRecorder, create_run, post, trained
from tests.serving import StartService

AWAY = "127.0.0.1:9"


def ask(client: openai.OpenAI, *texts: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text} for text in texts]
    return client.chat.completions.create(model="toy", messages=messages, **more)


def until(recorder: Recorder, name: str, value: float) -> None:
    while recorder.metric(name) != value:
        time.sleep(0.02)


def test_what_was_answered_outlives_a_kill_before_it_was_submitted(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str
) -> None:
    first = start_recorder(engine.url, AWAY)
    with first.openai(run) as client:
        ask(client, "say one")
        ask(client, "say one", "say two", n=2)
    first.kill()
    second = start_recorder(engine.url, service.grpc_address)
    with second.openai(run) as client:
        ask(client, "say three")
    assert second.finish(run, reward=3.0) == {"steps": 4, "outcome": "accepted"}
    rows = trained(service.grpc_address, run)
    assert [bytes(row.trained[:-1]) for row in rows] == [b"one", b"two", b"two #1", b"three"]
    assert rows[1].tokens == [
        *prompt_of([{"role": "user", "content": f"say {n}"} for n in ("one", "two")]),
        *b"two",
        END,
    ]
    assert rows[-1].reward == 3.0


def test_an_end_that_was_answered_is_delivered_by_the_next_start(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str
) -> None:
    first = start_recorder(engine.url, AWAY, "--finish-wait-s", "0")
    with first.openai(run) as client:
        ask(client, "say one")
    end = f"{first.base(run)}/finish"
    assert post(end, {"reward": 1.0}) == (202, {"steps": 1, "outcome": "waiting for the service"})
    first.kill()
    second = start_recorder(engine.url, service.grpc_address)
    until(second, 'closed_trajectories_total{outcome="accepted"}', 1)
    assert second.finish(run, reward=1.0) == {"steps": 1, "outcome": "accepted"}
    assert post(f"{second.base(run)}/finish", {"reward": 2.0})[0] == 409
    assert len(trained(service.grpc_address, run)) == 1


def test_steps_that_the_service_had_already_count_once(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str
) -> None:
    """Killed at every point of a conversation, it goes on where it was."""
    for turn in range(2):
        recorder = start_recorder(engine.url, service.grpc_address)
        with recorder.openai(run) as client:
            ask(client, *(f"say {number}" for number in range(turn + 1)))
        while turn % 2 and service.runs.get(run).status().rows_accepted < turn:
            time.sleep(0.01)
        recorder.kill()
    recorder = start_recorder(engine.url, service.grpc_address)
    assert recorder.finish(run) == {"steps": 2, "outcome": "accepted"}
    assert [bytes(row.trained[:-1]) for row in trained(service.grpc_address, run)] == [b"0", b"1"]
    assert service.runs.get(run).status().rows_accepted == 2


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


def test_a_stop_delivers_what_may_go_and_keeps_the_rest(
    start_recorder: StartRecorder, engine: Engine, service: Service, run: str, tmp_path: Path
) -> None:
    first = start_recorder(engine.url, service.grpc_address)
    with first.openai(run) as client:
        ask(client, "say one")
        ask(client, "say two")
    assert first.stop() == 0
    assert service.runs.get(run).status().rows_accepted == 1
    journal = Journal(tmp_path / "journal.sqlite3")
    (left,) = journal.open()
    journal.close()
    assert bytes(left.rows[-1].response.astype("u1")[:-1]) == b"two"
