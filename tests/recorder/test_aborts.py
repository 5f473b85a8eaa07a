"""An abort reaches the service whatever happens meanwhile, and ends nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill import RolloutClient
from tests.on_loop import Service
from tests.recorder.engine import Engine
from tests.recorder.recorders import Recorder, Restarted, StartRecorder, create_run, post, trained

RUN = "my-run"


def say(recorder: Recorder, *texts: str, sample: int = 0, more: str = "", run: str = RUN) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"say {text}"} for text in texts]
    document = {"model": "toy", "messages": messages}
    status, answer = post(f"{recorder.base(run, sample=sample, more=more)}/v1/chat/completions", document)
    assert status == 200, answer


def test_an_abort_reaches_a_service_that_was_unreachable_while_steps_waited_for_it(
    restarted: Restarted, start_recorder: StartRecorder, engine: Engine
) -> None:
    create_run(restarted.address, RUN, n_samples_per_prompt=2)
    recorder = start_recorder(engine.url, restarted.address)
    say(recorder, "one")
    restarted.kill()
    say(recorder, "one", "two")
    assert post(f"{recorder.base(RUN)}/abort", {}) == (200, {"outcome": "aborted"})
    restarted.start()
    say(recorder, "other", sample=1)
    assert recorder.finish(RUN, sample=1)["outcome"] == "accepted"
    assert [bytes(row.trained[:-1]) for row in trained(restarted.address, RUN)] == [b"other"]


@pytest.mark.parametrize("is_waiting", [False, True])
def test_an_abort_that_waits_for_the_service_leaves_a_later_attempt_untouched(
    restarted: Restarted, start_recorder: StartRecorder, engine: Engine, is_waiting: bool
) -> None:
    create_run(restarted.address, RUN)
    recorder = start_recorder(engine.url, restarted.address)
    say(recorder, "old")
    restarted.kill()
    if is_waiting:
        say(recorder, "old", "older")
    assert post(f"{recorder.base(RUN)}/abort", {}) == (200, {"outcome": "aborted"})
    say(recorder, "new", more="/attempt/1")
    say(recorder, "new", "newer", more="/attempt/1")
    restarted.start()
    ended = post(f"{recorder.base(RUN, more='/attempt/1')}/finish", {"reward": 1.0})
    assert ended == (200, {"steps": 2, "outcome": "accepted"})
    assert [bytes(row.trained[:-1]) for row in trained(restarted.address, RUN)] == [b"new", b"newer"]


def test_a_trajectory_whose_end_the_service_refused_is_aborted(
    recorder: Recorder, service: Service, run_name: str
) -> None:
    create_run(service.grpc_address, run_name, n_samples_per_prompt=2)
    with RolloutClient(service.grpc_address, run_name, timeout_s=20) as rollouts:
        rollouts.trajectory("a", 0).step([1], [2], rollout_logprobs=[-1.0])
    for sample, status in enumerate((409, 200)):
        say(recorder, "mine", sample=sample, run=run_name)
        assert post(f"{recorder.base(run_name, sample=sample)}/finish", {"reward": 1.0})[0] == status
    for _ in range(2):
        assert post(f"{recorder.base(run_name)}/abort", {}) == (200, {"outcome": "aborted"})
    assert [bytes(row.trained[:-1]) for row in trained(service.grpc_address, run_name)] == [b"mine"]
