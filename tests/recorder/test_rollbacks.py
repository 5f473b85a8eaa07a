"""A service that lost steps which it had accepted gets them again, so that no trajectory lacks a step."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from gristmill import RolloutClient
from tests.on_loop import Service
from tests.recorder.engine import Engine
from tests.recorder.recorders import Recorder, Restarted, StartRecorder, batches, create_run, post

RUN = "my-run"


def say(recorder: Recorder, run: str, step: int, uid: str = "a") -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"say {number}"} for number in range(step + 1)]
    assert post(f"{recorder.base(run, uid)}/v1/chat/completions", {"model": "toy", "messages": messages})[0] == 200


def wait_for_rows(address: str, run: str, rows: int) -> None:
    with RolloutClient(address, run, timeout_s=20) as client:
        while client.status().rows_accepted < rows:
            time.sleep(0.02)


@pytest.mark.parametrize("is_recorder_killed", [False, True])
def test_steps_of_a_service_that_was_restored_from_a_snapshot_are_delivered_again(
    restarted: Restarted, start_recorder: StartRecorder, engine: Engine, tmp_path: Path, is_recorder_killed: bool
) -> None:
    address, runs = restarted.address, tmp_path / "runs"
    create_run(address, RUN)
    recorder = start_recorder(engine.url, address)
    for step in range(2):
        say(recorder, RUN, step)
    wait_for_rows(address, RUN, 1)
    restarted.kill()
    shutil.copytree(runs, tmp_path / "snapshot")
    restarted.start()
    for step in range(2, 4):
        say(recorder, RUN, step)
    for step in range(3):
        say(recorder, RUN, step, "b")
    wait_for_rows(address, RUN, 5)
    restarted.kill()
    shutil.rmtree(runs)
    shutil.move(tmp_path / "snapshot", runs)
    restarted.start()
    if is_recorder_killed:
        recorder.kill()
        recorder = start_recorder(engine.url, address)
    say(recorder, RUN, 4)
    for uid, steps in (("a", 5), ("b", 3)):
        assert recorder.finish(RUN, uid=uid) == {"steps": steps, "outcome": "accepted"}
    said = [[bytes(row.trained[:-1]).decode() for row in rows] for rows in batches(address, RUN, 2)]
    assert said == [["0", "1", "2", "3", "4"], ["0", "1", "2"]]


def test_a_trajectory_whose_run_is_deleted_and_created_again_is_whole_in_the_new_run(
    recorder: Recorder, service: Service, run: str
) -> None:
    for step in range(3):
        say(recorder, run, step)
    wait_for_rows(service.grpc_address, run, 2)
    with RolloutClient(service.grpc_address, run, timeout_s=20) as client:
        client.delete_run()
    create_run(service.grpc_address, run)
    say(recorder, run, 3)
    assert recorder.finish(run) == {"steps": 4, "outcome": "accepted"}
    (rows,) = batches(service.grpc_address, run, 1)
    assert [bytes(row.trained[:-1]).decode() for row in rows] == ["0", "1", "2", "3"]
