"""An abort reaches the service whatever happens meanwhile, and ends nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recorder.engine import Engine
from tests.recorder.recorders import Recorder, StartRecorder, create_run, post, trained
from tests.serving import ServiceProcess, StartService

RUN = "my-run"


class Restarted:
    """A service that a test kills, and starts again at the same address."""

    def __init__(self, start: StartService, directory: Path) -> None:
        self._start = start
        self._flags = ("--journal-dir", str(directory / "runs"), "--shared-memory-dir", str(directory))
        self._process: ServiceProcess = start(*self._flags)
        self.address = self._process.grpc_address

    def kill(self) -> None:
        self._process.process.kill()
        self._process.process.wait()

    def start(self) -> None:
        self._process = self._start(*self._flags, "--grpc-address", self.address)


@pytest.fixture
def service(start_service: StartService, tmp_path: Path) -> Restarted:
    return Restarted(start_service, tmp_path)


def say(recorder: Recorder, *texts: str, sample: int = 0, more: str = "") -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"say {text}"} for text in texts]
    document = {"model": "toy", "messages": messages}
    status, answer = post(f"{recorder.base(RUN, sample=sample, more=more)}/v1/chat/completions", document)
    assert status == 200, answer


def test_an_abort_reaches_a_service_that_was_unreachable_while_steps_waited_for_it(
    start_recorder: StartRecorder, service: Restarted, engine: Engine
) -> None:
    create_run(service.address, RUN, n_samples_per_prompt=2)
    recorder = start_recorder(engine.url, service.address)
    say(recorder, "one")
    service.kill()
    say(recorder, "one", "two")
    assert post(f"{recorder.base(RUN)}/abort", {}) == (200, {"outcome": "aborted"})
    service.start()
    say(recorder, "other", sample=1)
    assert recorder.finish(RUN, sample=1)["outcome"] == "accepted"
    assert [bytes(row.trained[:-1]) for row in trained(service.address, RUN)] == [b"other"]


@pytest.mark.parametrize("is_waiting", [False, True])
def test_an_abort_that_waits_for_the_service_leaves_a_later_attempt_untouched(
    start_recorder: StartRecorder, service: Restarted, engine: Engine, is_waiting: bool
) -> None:
    create_run(service.address, RUN)
    recorder = start_recorder(engine.url, service.address)
    say(recorder, "old")
    service.kill()
    if is_waiting:
        say(recorder, "old", "older")
    assert post(f"{recorder.base(RUN)}/abort", {}) == (200, {"outcome": "aborted"})
    say(recorder, "new", more="/attempt/1")
    say(recorder, "new", "newer", more="/attempt/1")
    service.start()
    ended = post(f"{recorder.base(RUN, more='/attempt/1')}/finish", {"reward": 1.0})
    assert ended == (200, {"steps": 2, "outcome": "accepted"})
    assert [bytes(row.trained[:-1]) for row in trained(service.address, RUN)] == [b"new", b"newer"]
