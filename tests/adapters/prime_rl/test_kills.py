"""Bridge and trainer are killed in the middle: the weights are those of a training that nobody disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from gristmill import RolloutClient
from tests.adapters.prime_rl.conftest import CONFIG, DP_SIZE, group, trained
from tests.adapters.prime_rl.trainer import Trainer
from tests.on_loop import Service

ROOT = Path(__file__).parents[3]
STEPS = 24
Process = AbstractContextManager[subprocess.Popen[bytes]]


@pytest.fixture
def produced(rollouts: RolloutClient) -> Iterator[None]:
    """Rollouts that come as there is room for them: four batches of two steps wait at most."""
    rollouts.create_run(CONFIG)

    def produce() -> None:
        for number in range(1, STEPS + 1):
            rollouts.begin_groups([f"p{number:03d}"])
            rollouts.submit(group(number))
        rollouts.finish()

    producer = threading.Thread(target=produce)
    producer.start()
    yield
    producer.join()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Killed by -9 at the end, if it has not ended by itself."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])}
    started = subprocess.Popen([sys.executable, "-m", *map(str, arguments)], cwd=ROOT, env=environment)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def trained_steps(output_dir: Path) -> int:
    return max((int(path.parent.name[5:]) for path in output_dir.glob("broadcasts/*/STABLE")), default=0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_bridge_and_a_killed_trainer_change_no_weights(
    service: Service, rollouts: RolloutClient, produced: None, stack: ExitStack, tmp_path: Path
) -> None:
    def bridge() -> Process:
        options = ("--run", rollouts.run, "--output-dir", tmp_path, "--dp-size", DP_SIZE)
        return process("gristmill.adapters.prime_rl", service.grpc_address, *options)

    def trainer() -> Process:
        return process("tests.adapters.prime_rl.trainer", tmp_path, DP_SIZE, STEPS, 3)

    def until(step: int) -> None:
        while trained_steps(tmp_path) < step:
            time.sleep(0.01)

    with bridge():
        with trainer():
            until(5)
        survivor = stack.enter_context(trainer())
        until(10)
    with bridge() as last:
        until(16)
        survivor.kill()
        with trainer():
            assert last.wait() == 0
    final = Trainer(tmp_path, DP_SIZE)
    final.resume()
    assert trained(final) == list(range(1, STEPS + 1))
    assert rollouts.status().batches_freed == STEPS // 2
