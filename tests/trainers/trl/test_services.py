"""Services that die while TRL trains: the trainer waits for them, and trains as if nothing had been."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.on_loop import Service
from tests.serving import ServiceProcess, StartService
from tests.trainers.trl.play import weights
from tests.trainers.trl.train import LEARNING, Job, trainer_of

CONFIG: dict[str, Any] = LEARNING | {
    "max_steps": 8,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "save_strategy": "steps",
    "save_steps": 3,
}


class Killing(TrainerCallback):  # type: ignore[misc]
    """Kills the service as these steps begin and end, and starts it again with its journal while training goes on."""

    def __init__(self, start: StartService, flags: tuple[str, ...], begins: int, ends: int) -> None:
        self._start, self._flags, self._begins, self._ends = start, flags, begins, ends
        self._running: ServiceProcess = start(*flags)
        self.address = self._running.grpc_address
        self._thread = threading.Thread()
        self.kills = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._begins:
            self._kill()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._ends:
            self._kill()

    def _kill(self) -> None:
        self._running.process.kill()
        self._running.process.wait()
        self.kills += 1
        self._thread = threading.Thread(target=self._again)
        self._thread.start()

    def _again(self) -> None:
        self._running = self._start(*self._flags, "--grpc-address", self.address)

    def close(self) -> None:
        self._thread.join()


def trained(address: str, run_name: str, directory: Path, *callbacks: TrainerCallback) -> dict[str, torch.Tensor]:
    gristmill = {"address": address, "run": run_name}
    trainer = trainer_of(Job(str(directory), "", gristmill=gristmill, config=CONFIG))
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    after: dict[str, torch.Tensor] = weights(trainer.model)
    return after


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("begins", "ends"), [(1, 3), (2, 5)], ids=["within a batch", "between batches"])
def test_a_service_that_is_killed_leaves_the_weights_as_they_would_have_been(
    service: Service, start_service: StartService, run_name: str, tmp_path: Path, begins: int, ends: int
) -> None:
    flags = ("--journal-dir", str(tmp_path / "runs"), "--shared-memory-dir", str(tmp_path))
    killing = Killing(start_service, flags, begins, ends)
    try:
        ours = trained(killing.address, run_name, tmp_path / "killed", killing)
    finally:
        killing.close()
    assert killing.kills == 2
    theirs = trained(service.grpc_address, run_name, tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
