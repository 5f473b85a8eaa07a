"""A run, and a bridge that runs next to a test."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill import RolloutClient
from gristmill.adapters.prime_rl import Bridge, Gristmill
from tests.adapters.prime_rl.trainer import Trainer
from tests.on_loop import Service

DP_SIZE = 2
CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 2},
    "dp_size": DP_SIZE,
    "layout": "packed",
    "seal_order": "admission",
}


def group(number: int) -> list[dict[str, Any]]:
    """The samples of one prompt, of which a step of two ranks is made: each token is the number."""
    row = {"uid": f"p{number:03d}", "prompt_token_ids": [number], "loss_mask": [1], "rollout_logprobs": [-1.0]}
    return [row | {"sample": sample, "response_ids": [number], "reward": float(sample)} for sample in range(2)]


def trained(trainer: Trainer) -> list[int]:
    """The groups that the trainer's weights have seen, in order; of whole steps."""
    for ranks in trainer.weights:
        assert len({token for tokens in ranks for token in tokens}) == 1
        assert [len(tokens) for tokens in ranks] == [2, 2]
    return [ranks[0][0] for ranks in trainer.weights]


def eventually(is_so: Callable[[], bool]) -> None:
    """Waits until then; a hang ends by pytest's timeout."""
    while not is_so():
        time.sleep(0.01)


class Running:
    """A bridge in a thread."""

    def __init__(self, bridge: Bridge) -> None:
        self.error: BaseException | None = None
        self._bridge, self._thread = bridge, threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._bridge.run()
        except Exception as error:  # noqa: BLE001
            # Where the test waits for the trainer instead, its output says why nothing came.
            traceback.print_exc()
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self._bridge.stop()
        self._thread.join()

    def finished(self) -> None:
        """Waits until the bridge has ended by itself."""
        self._thread.join()
        if self.error is not None:
            raise self.error


@pytest.fixture
def rollouts(service: Service, run_name: str) -> Iterator[RolloutClient]:
    with RolloutClient(service.grpc_address, run_name, timeout_s=20) as client:
        yield client


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path, DP_SIZE)


@pytest.fixture
def bridge(service: Service, run_name: str, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts a bridge; stopped with the test."""
    started: list[Running] = []

    def start(**options: Any) -> Running:
        settings: dict[str, Any] = {"dp_size": DP_SIZE, "checkpoint_dir": tmp_path / "checkpoints"} | options
        started.append(Running(Bridge(Gristmill(service.grpc_address, run_name), tmp_path, **settings)))
        return started[-1]

    yield start
    for running in started:
        running.stop()
