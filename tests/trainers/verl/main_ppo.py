"""`python -m verl.trainer.main_ppo` as a process of a test's own, with everything that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

_START_S = 600.0


class MainPpo:
    """One that trains a run; `log` has what it prints."""

    def __init__(self, overrides: Sequence[str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *overrides]
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent, start_new_session=True
            )

    def wait(self) -> None:
        """Until it has trained all."""
        assert self._process.wait(timeout=_START_S) == 0, self._end_of_log()

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Until the condition holds, which is asked often: what it waits for is soon over."""
        deadline = time.monotonic() + _START_S
        while not is_met():
            assert self._process.poll() is None, self._end_of_log()
            assert time.monotonic() < deadline, self._end_of_log()
            time.sleep(0.01)

    def kill(self) -> None:
        """As kill -9 does: Ray's processes and the workers end with the one that started them."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=60)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def metrics(self, name: str) -> list[float]:
        """One of the metrics that verl logged, step after step."""
        lines = [line for line in self.log.read_text().splitlines() if "step:" in line and f" {name}:" in line]
        values = [line.split(f" {name}:", 1)[1].split(" - ")[0] for line in lines]
        return [float(value.removeprefix("np.float64(").removeprefix("np.int64(").rstrip(")")) for value in values]

    def _end_of_log(self) -> str:
        return self.log.read_text()[-4000:]


def weights(checkpoints: Path, step: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Of each rank, as verl's checkpoint has them."""
    folder = checkpoints / f"global_step_{step}" / "actor"
    files = [folder / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    shards: list[dict[str, Any]] = [torch.load(file, weights_only=False) for file in files]
    return [
        {name: value.to_local() if hasattr(value, "to_local") else value for name, value in shard.items()}
        for shard in shards
    ]
