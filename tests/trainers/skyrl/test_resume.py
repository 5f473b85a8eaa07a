"""A trainer that is killed goes on from its own checkpoint, and trains what the run holds before it samples again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gristmill import FailedPreconditionError, RolloutClient
from gristmill.adapters.skyrl._session import Session
from tests.on_loop import Service
from tests.trainers.skyrl.play import save_model
from tests.trainers.skyrl.run import main
from tests.trainers.skyrl.sampling import calls_in

STEPS = 7
KEEPING: dict[str, Any] = {"trainer__ckpt_interval": 3, "trainer__resume_mode": "latest"}


def killed(ray_address: str, arguments: dict[str, Any], file: Path, lines: int) -> None:
    """Starts the training and kills it when the file has that many lines."""
    with (file.parent / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainers.skyrl.run", ray_address, json.dumps(arguments)],
            stdout=log,
            stderr=log,
        )
        try:
            while len(calls_in(file)) < lines:
                assert process.poll() is None, log.name
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    ("file", "lines"), [("calls.jsonl", 6), ("steps.jsonl", 5)], ids=["while it samples", "after a step"]
)
def test_a_trainer_that_was_killed_ends_with_the_same_weights(
    service: Service, run_name: str, ray_address: str, tmp_path: Path, file: str, lines: int
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for directory in (whole, broken):
        save_model(directory / "model")
    undisturbed = main(service.grpc_address, f"{run_name}-whole", str(whole), STEPS, **KEEPING)
    arguments: dict[str, Any] = {
        "address": service.grpc_address,
        "run": run_name,
        "directory": str(broken),
        "steps": STEPS,
    } | KEEPING
    killed(ray_address, arguments, broken / file, lines)
    sampled = len(calls_in(broken / "calls.jsonl"))
    with RolloutClient(service.grpc_address, run_name) as client:
        sealed = client.status().batches_sealed
        resumed = main(**arguments)
        assert client.status().batches_freed == STEPS
    assert [log["step"] for log in resumed.logs] == list(range(4, STEPS + 1)), "the checkpoint is of step 3"
    again = calls_in(broken / "calls.jsonl")[sampled:]
    assert [call["step"] for call in again] == list(range(sealed + 1, STEPS + 1)), "what was held is not sampled again"
    assert all(weight.equal(resumed.policy[name]) for name, weight in undisturbed.policy.items())


def test_a_fully_async_trainer_that_was_killed_trains_what_was_held(
    service: Service, run_name: str, ray_address: str, tmp_path: Path
) -> None:
    save_model(tmp_path / "model")
    arguments: dict[str, Any] = {
        "address": service.grpc_address,
        "run": run_name,
        "directory": str(tmp_path),
        "steps": STEPS,
        "is_async": True,
    } | KEEPING
    killed(ray_address, arguments, tmp_path / "steps.jsonl", 10)
    with RolloutClient(service.grpc_address, run_name) as client:
        held = {group.uid for group in client.groups() if group.batch is not None and group.batch >= 3}
        resumed = main(**arguments)
        assert held
        assert client.status().batches_freed == STEPS
        assert {group.state for group in client.groups()} <= {"sealed", "dropped"}
    assert {log["step"] for log in resumed.logs} == set(range(4, STEPS + 1))


@pytest.mark.usefixtures("ray_address")
def test_batches_are_freed_once_their_checkpoint_is_complete(
    service: Service, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model")
    complete = []

    def commit(session: Session, states: Any = None) -> None:
        if states is not None:
            complete.append(len(list(tmp_path.glob("checkpoints/*/policy/state.pt"))))
        committing(session, states)

    committing = Session.commit
    monkeypatch.setattr(Session, "commit", commit)
    main(service.grpc_address, run_name, str(tmp_path), 4, trainer__ckpt_interval=2)
    assert complete == [1, 2]


@pytest.mark.usefixtures("ray_address")
def test_a_training_goes_on_with_other_ranks(service: Service, run_name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    main(service.grpc_address, run_name, str(tmp_path), 3, **KEEPING)
    ranks = {"trainer__placement__policy_num_gpus_per_node": 2}
    resumed = main(service.grpc_address, run_name, str(tmp_path), 5, **KEEPING | ranks)
    assert [log["step"] for log in resumed.logs] == [4, 5]
    with RolloutClient(service.grpc_address, run_name) as client:
        status = client.status()
    assert (status.batches_freed, status.config["dp_size"]) == (5, 2)


@pytest.mark.usefixtures("ray_address")
def test_a_run_that_was_trained_is_not_restarted(service: Service, run_name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    main(service.grpc_address, run_name, str(tmp_path), 1)
    with pytest.raises(FailedPreconditionError, match=r"was trained up to batch 1 .* starts from the beginning"):
        main(service.grpc_address, run_name, str(tmp_path), 2)
