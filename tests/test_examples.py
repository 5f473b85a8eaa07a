"""The programs of `examples/`, run as they are but for the address and how long they go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.on_loop import Service

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(service: Service, name: str, *arguments: object) -> str:
    """What the example prints."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), "--address", service.grpc_address, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rewards(output: str) -> list[float]:
    return [float(reward) for reward in re.findall(r"reward (\d\.\d\d)", output)]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_documented_and_run_by_a_test(example: Path) -> None:
    """Those of trainers are run with the real ones, in tests/trainers."""
    assert f"[{example.name}]({example.name})" in (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert any(example.stem in path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize(("name", "steps"), [("grpo.py", 6), ("ppo_values.py", 8)])
def test_a_trainer_in_one_file_learns(service: Service, run_name: str, name: str, steps: int) -> None:
    learned = rewards(run(service, name, "--run", run_name, "--steps", steps))
    assert len(learned) == steps
    assert learned[-1] > learned[0] + 0.1
    assert service.runs.get(run_name).status().batches_freed == steps


def test_agents_play_at_once_and_their_run_is_plotted(service: Service, run_name: str, tmp_path: Path) -> None:
    output = run(service, "agents_asyncio.py", "--run", run_name)
    assert re.match(r"16 groups: \{'sealed': 16\}; \d+ agents failed; \d+ turns; 2 batches", output)
    *_, last = run(service, "advantage_plot.py", run_name, "--out", tmp_path / "plot.png").splitlines()
    assert re.match(r"12\d trajectories of 2 batches", last)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert service.runs.get(run_name).status().batches_sealed == 2


def test_a_run_is_logged_to_tensorboard(service: Service, run_name: str, tmp_path: Path) -> None:
    run(service, "trackers.py", "--run", run_name, "--steps", 2, "--to", "tensorboard", "--logs", tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    scores = events.Scalars("gristmill/score_mean")
    assert [event.step for event in scores] == [0, 1]
    assert 0 < scores[0].value < 1
    assert events.Scalars("gristmill/rows")[0].value == 64


def test_a_run_is_logged_to_weights_and_biases_with_no_network(service: Service, run_name: str, tmp_path: Path) -> None:
    run(service, "trackers.py", "--run", run_name, "--steps", 2, "--to", "wandb", "--logs", tmp_path)
    [log] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # Records are binary, and hold the names as they are.
    assert b"gristmill/score_mean" in log.read_bytes()
