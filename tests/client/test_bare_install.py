"""The built wheel works for rollouts with grpcio, protobuf and numpy alone, against a service of the whole install."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.serving import ServiceProcess

ROOT = Path(__file__).parents[2]
PINS = [f"{name}=={version(name)}" for name in ("grpcio", "numpy", "protobuf")]

# What a worker does, in an interpreter that has nothing else.
WORKER = """
import asyncio, importlib.util, json, sys
import gristmill
from gristmill.converters import from_skyrl

address, run = sys.argv[1:]
config = {"train_batch_size": 2, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}

def work():
    with gristmill.RolloutClient(address, run) as client:
        client.create_run(config)
        client.begin_groups(["a", "b"])
        with client.trajectory("a", 0) as trajectory:
            trajectory.step([1, 2], [3], reward=1.0, is_last_step=True)
        output = {"prompt_token_ids": [[1]], "response_ids": [[2, 3]], "rewards": [0.5], "trajectory_ids": [("b", 0)]}
        outcomes = [outcome.name for outcome in client.submit(from_skyrl(output))]
        return outcomes, client.finish(), client.status().rows_accepted

async def work_async():
    async with gristmill.AsyncRolloutClient(address, run) as client:
        return await client.policy_version()

try:
    gristmill.TrainerClient
except ImportError as error:
    refusal = str(error)

absent = ["torch", "safetensors", "pydantic", "fastapi", "orjson", "yaml"]
present = [name for name in absent if importlib.util.find_spec(name)]
loaded = [name for name in sys.modules if name.startswith("gristmill_service")]
print(json.dumps([*work(), asyncio.run(work_async()), refusal, present + loaded, gristmill.__file__]))
"""


def run_quietly(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def bare_python() -> Path:
    """An interpreter with the pinned packages, kept in build/ for as long as pins and Python stay the same."""
    key = hashlib.sha256(" ".join([sys.version, str(ROOT), *PINS]).encode()).hexdigest()[:12]
    kept = ROOT / "build" / f"bare-{key}"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="bare-draft-", dir=kept.parent))
        venv.create(draft, with_pip=True)
        run_quietly(str(draft / "bin" / "python"), "-m", "pip", "install", "--quiet", *PINS)
        try:
            # Whole from the moment that it is there; another test process may have been faster.
            draft.rename(kept)
        except OSError:
            return draft / "bin" / "python"
    return kept / "bin" / "python"


@pytest.mark.slow
def test_the_wheel_works_for_rollouts_with_only_grpcio_protobuf_and_numpy(
    service_process: ServiceProcess, run_name: str, tmp_path: Path
) -> None:
    run_quietly(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("gristmill-*.whl")
    python, installed = str(bare_python()), tmp_path / "installed"
    run_quietly(python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), str(wheel))
    # -P and -s: nothing of this checkout or of the user's is found.
    done = subprocess.run(
        [python, "-P", "-s", "-c", WORKER, service_process.grpc_address, run_name],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes, batches, rows, policy_version, refusal, foreign, where = json.loads(done.stdout)
    assert (outcomes, batches, rows, policy_version) == (["ACCEPTED"], 1, 2, 0)
    assert "pip install torch" in refusal
    assert foreign == []
    assert where.startswith(str(installed))
