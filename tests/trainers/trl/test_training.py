"""Whole trainings through gristmill: one that learns, and ones that are killed."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.on_loop import Service
from tests.trainers.trl.jobs import run, said, started
from tests.trainers.trl.train import LEARNING, Job, trainer_of


def job_of(service: Service, run_name: str, directory: Path, **more: Any) -> Job:
    directory.mkdir(exist_ok=True)
    gristmill = {"address": service.grpc_address, "run": run_name}
    return Job(str(directory / "out"), str(directory / "weights.safetensors"), gristmill=gristmill, **more)


def test_a_policy_learns_in_20_steps(service: Service, run_name: str, tmp_path: Path) -> None:
    trainer = trainer_of(job_of(service, run_name, tmp_path, config=LEARNING))
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 20
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.8
    status = service.runs.get(run_name).status()
    assert (status.batches_freed, status.policy_version) == (20, 20)
    assert {"gristmill/score_mean", "gristmill/padding_share", "entropy", "step_time"} <= trainer.state.log_history[
        0
    ].keys()


KILLED = [
    pytest.param({"save_steps": 4}, id="between batches", marks=pytest.mark.slow),
    pytest.param({"save_steps": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 4}, id="within a batch"),
    pytest.param({"save_steps": 5, "gradient_accumulation_steps": 20}, id="over epochs", marks=pytest.mark.slow),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("more", KILLED)
def test_a_trainer_that_is_killed_and_resumed_ends_with_the_weights_of_one_that_was_not(
    service: Service, run_name: str, tmp_path: Path, more: dict[str, Any]
) -> None:
    check_resumed(service, run_name, tmp_path, LEARNING | {"max_steps": 8, "save_strategy": "steps"} | more)


def check_resumed(service: Service, run_name: str, tmp_path: Path, config: dict[str, Any], ranks: int = 1) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with started(job_of(service, f"{run_name}-whole", whole, config=config), whole, ranks) as undisturbed:
        job = job_of(service, run_name, killed, config=config)
        assert run(replace(job, kill_at=7), killed, ranks) == (-signal.SIGKILL if ranks == 1 else 1)
        assert not Path(job.weights).exists()
        assert run(replace(job, resume=True), killed, ranks) == 0, said(killed)
        assert undisturbed.wait(timeout=300) == 0
    ours, theirs = load_file(killed / "weights.safetensors"), load_file(whole / "weights.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # What was generated before the kill was trained, not generated again.
    statuses = [service.runs.get(name).status() for name in (run_name, f"{run_name}-whole")]
    assert len({(status.rows_accepted, status.batches_freed) for status in statuses}) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_that_are_killed_and_resumed_end_with_the_weights_of_those_that_were_not(
    service: Service, run_name: str, tmp_path: Path
) -> None:
    # Trainer cannot load an optimizer's tensors for several processes on the CPU (the device is "cpu:0"): SGD has none.
    steps = {
        "optim": "sgd",
        "learning_rate": 5.0,
        "save_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    config = LEARNING | {"max_steps": 8, "save_strategy": "steps", "steps_per_generation": 4} | steps
    check_resumed(service, run_name, tmp_path, config, ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_that_are_killed_are_continued_by_one(service: Service, run_name: str, tmp_path: Path) -> None:
    two = {"optim": "sgd", "learning_rate": 5.0, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    config = LEARNING | two | {"steps_per_generation": 8, "max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    job, path = job_of(service, run_name, tmp_path / "job", config=config), tmp_path / "job"
    assert run(replace(job, kill_at=5), path, ranks=2) == 1
    one = config | {"gradient_accumulation_steps": 8, "steps_per_generation": 16}
    assert run(replace(job, config=one, resume=True), path) == 0, said(path)
    status = service.runs.get(run_name).status()
    assert (status.batches_freed, status.rows_accepted) == (4, 4 * 64)
