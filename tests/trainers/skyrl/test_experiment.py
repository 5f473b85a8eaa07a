"""A whole experiment of SkyRL's, as its entry point runs it, with the trainer of the example and of the guide."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import tests.trainers.skyrl.cpu_patches  # noqa: F401  isort: skip

import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.tracking import Tracking

from gristmill import RolloutClient
from gristmill.adapters.skyrl import GristmillFullyAsyncPPOTrainer, GristmillPPOTrainer
from tests.on_loop import Service
from tests.trainers.skyrl import cpu_workers
from tests.trainers.skyrl.play import Engine, Prompts, config, save_model
from tests.trainers.skyrl.run import ASYNC, LEARNING
from tests.trainers.skyrl.sampling import Sampler

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/trainers/skyrl.md").read_text()

Logs = list[dict[str, Any]]


def on_cpu(experiment: Any) -> Any:
    """The experiment with what needs no GPU: no engine, and the tests' prompts and sampler."""

    class OnCpu(experiment):  # type: ignore[misc]
        def get_train_dataset(self) -> Prompts:
            return Prompts(40)

        def get_inference_client(self) -> Engine:
            return Engine()

        def get_generator(self, cfg: SkyRLTrainConfig, *_: Any) -> Sampler:
            return Sampler(cfg, Path(cfg.trainer.export_path) / "calls.jsonl")

    return OnCpu


def settings(directory: Path, **more: Any) -> SkyRLTrainConfig:
    """What SkyRL finds good, of two steps."""
    save_model(directory / "model")
    sizes = {"trainer__micro_train_batch_size_per_gpu": 4, "trainer__max_training_steps": 2}
    cfg = config(directory, **LEARNING | sizes | more)
    validate_cfg(cfg)
    return cfg


@pytest.fixture
def logs(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> Logs:
    """What SkyRL's own tracker logs, of experiments whose workers are those of the CPU."""
    workers = ModuleType("fsdp_worker")
    workers.__dict__.update(vars(cpu_workers))
    monkeypatch.setitem(sys.modules, "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker", workers)
    logged: Logs = []
    log = Tracking.log

    def logging(self: Tracking, data: dict[str, Any], step: int, commit: bool = False) -> None:
        logged.append(data)
        log(self, data, step, commit)

    monkeypatch.setattr(Tracking, "log", logging)
    return logged


def test_the_example_trains(
    service: Service, run_name: str, tmp_path: Path, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_ADDRESS", service.grpc_address)
    spec = spec_from_file_location("skyrl_grpo", ROOT / "examples/skyrl_grpo.py")
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    on_cpu(example.Experiment)(settings(tmp_path, trainer__run_name=run_name, trainer__ckpt_interval=1)).run()
    numbers = {"gristmill/score_mean", "gristmill/rows", "policy/policy_loss", "loss/avg_final_rewards", "timing/step"}
    assert [numbers - log.keys() for log in logs] == [set(), set()]
    places = [json.loads(path.read_text())["policy"]["batch"] for path in sorted(tmp_path.glob("*/*/gristmill.json"))]
    assert places == [1, 2]
    with RolloutClient(service.grpc_address, run_name) as client:
        status = client.status()
        assert (status.policy_version, status.batches_freed) == (2, 2)


@pytest.mark.parametrize(
    ("block", "more", "kind"),
    [("experiment", {}, GristmillPPOTrainer), ("async", ASYNC, GristmillFullyAsyncPPOTrainer)],
)
def test_the_guides_experiments_train(
    service: Service, run_name: str, tmp_path: Path, logs: Logs, block: str, more: dict[str, Any], kind: type
) -> None:
    match = re.search(rf"<!-- skyrl-{block} -->\n```python\n(.*?)```", GUIDE, re.DOTALL)
    assert match is not None
    code = match[1].replace("127.0.0.1:50051", service.grpc_address).replace("my-run", run_name)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 10, "what a user writes"
    names: dict[str, Any] = {"BasePPOExp": BasePPOExp}
    exec(code, names)
    experiment = on_cpu(names["Experiment"])(settings(tmp_path, **more))
    experiment.run()
    assert type(experiment.trainer) is kind
    assert [log["gristmill/rows"] > 0 for log in logs if "gristmill/rows" in log] == [True, True]
