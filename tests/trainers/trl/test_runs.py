"""A trainer's way through its run: workers' rollouts, versions, ends, checkpoints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl.experimental import async_grpo

from gristmill import FailedPreconditionError, InvalidArgumentError, RolloutClient
from gristmill.adapters.trl import Gristmill, GristmillGRPOTrainer, run_settings
from tests.on_loop import Service
from tests.trainers.trl.play import config, policy, prompts_of, rollouts, submit, tokenizer
from tests.trainers.trl.train import LEARNING, Job, low, trainer_of

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/trainers/trl.md").read_text()


def fed_by_workers(service: Service, run_name: str, directory: Path, **options: Any) -> Any:
    """A trainer that takes up to ten batches of a run that has two, and is finished."""
    gristmill = Gristmill(
        service.grpc_address, run_name, rollouts="workers", settings={"step_wise": True, "merge": "prefix"}, **options
    )
    args = config(directory, max_steps=10)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(run_settings(args, gristmill, dp_size=1, pad_token_id=0))
        submit(client, rollouts(prompts=8), turns=True)
        client.finish()
    return GristmillGRPOTrainer(model=policy(), args=args, processing_class=tokenizer(), gristmill=gristmill)


def test_training_on_what_workers_submit_ends_with_the_run(service: Service, run_name: str, tmp_path: Path) -> None:
    published: list[int] = []
    trainer = fed_by_workers(service, run_name, tmp_path, publish_weights=lambda _, version: published.append(version))
    trainer.train()
    assert trainer.state.global_step == 2
    assert published == [0, 1, 2]
    status = service.runs.get(run_name).status()
    assert (status.policy_version, status.batches_freed) == (2, 2)
    logged = trainer.state.log_history[0]
    assert logged["reward"] == pytest.approx(logged["gristmill/score_mean"])
    assert {"entropy", "num_tokens", "completions/mean_length"} <= logged.keys()


def test_a_version_is_not_announced_where_nothing_hands_its_weights_over(
    service: Service, run_name: str, tmp_path: Path
) -> None:
    fed_by_workers(service, run_name, tmp_path).train()
    assert service.runs.get(run_name).status().policy_version == 0


def test_rows_without_the_log_probabilities_that_the_loss_needs_are_refused(
    service: Service, run_name: str, tmp_path: Path
) -> None:
    gristmill = Gristmill(service.grpc_address, run_name, rollouts="workers")
    args = config(tmp_path, gradient_accumulation_steps=1)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(run_settings(args, gristmill, dp_size=1, pad_token_id=0))
        for sample in range(4):
            with client.trajectory("p", sample) as trajectory:
                trajectory.step([2, 3], [4, 1], reward=float(sample), is_last_step=True)
    trainer = GristmillGRPOTrainer(model=policy(), args=args, processing_class=tokenizer(), gristmill=gristmill)
    with pytest.raises(InvalidArgumentError, match=r"rows have no rollout_logprobs.* or set old_logprobs='trainer'"):
        trainer.train()


def own(service: Service, run_name: str, directory: Path, settings: dict[str, Any], **more: Any) -> Any:
    """A trainer that generates and learns."""
    gristmill = {"address": service.grpc_address, "run": run_name, "settings": settings}
    return trainer_of(Job(str(directory), "", gristmill=gristmill, config=LEARNING | more))


def test_a_run_that_was_trained_is_not_restarted(service: Service, run_name: str, tmp_path: Path) -> None:
    own(service, run_name, tmp_path, {}, max_steps=1).train()
    with pytest.raises(FailedPreconditionError, match=r"was trained up to batch 1 .* resume from the last checkpoint"):
        own(service, run_name, tmp_path, {}, max_steps=1).train()


def test_a_checkpoint_is_made_before_the_run_is_full(service: Service, run_name: str, tmp_path: Path) -> None:
    own(service, run_name, tmp_path, {"max_buffered_batches": 2}, max_steps=5, save_strategy="steps").train()
    places = {
        path.parent.name: json.loads(path.read_text())["policy"]["batch"] for path in tmp_path.glob("*/gristmill.json")
    }
    assert places == {"checkpoint-2": 2, "checkpoint-4": 4, "checkpoint-5": 5}


def test_a_checkpoint_that_is_not_this_trainers_is_refused(service: Service, run_name: str, tmp_path: Path) -> None:
    own(service, run_name, tmp_path, {}, max_steps=1, save_strategy="steps").train()
    (tmp_path / "checkpoint-1" / "gristmill.json").unlink()
    with pytest.raises(InvalidArgumentError, match=r"gristmill\.json: cannot read the position in the run"):
        own(service, run_name, tmp_path, {}, max_steps=2).train(resume_from_checkpoint=True)


def test_a_completion_that_no_function_scores_is_refused(service: Service, run_name: str, tmp_path: Path) -> None:
    trainer = own(service, run_name, tmp_path, {}, max_steps=1)
    trainer.reward_funcs = [lambda completions, **_: [None] * len(completions)]
    with pytest.raises(InvalidArgumentError, match="no function scored the row; pass a reward"):
        trainer.train()


def snippet(name: str, address: str, run: str) -> str:
    match = re.search(rf"<!-- trl-{name} -->\n```python\n(.*?)```", GUIDE, re.DOTALL)
    assert match is not None
    return match[1].replace("127.0.0.1:50051", address).replace("my-run", run)


def test_the_guides_trainer_trains(service: Service, run_name: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {"model": policy(), "tokenizer": tokenizer(), "prompts": prompts_of(rollouts(prompts=4))}
    names["config"] = config(tmp_path, **LEARNING | {"max_steps": 1})
    names["reward"] = low
    code = snippet("trainer", service.grpc_address, run_name)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10, "what a user writes"
    exec(code, names)
    assert service.runs.get(run_name).status().batches_freed == 1


def test_the_guides_trainer_of_workers_rollouts_trains(service: Service, run_name: str, tmp_path: Path) -> None:
    pushed: list[int] = []
    names: dict[str, Any] = {"model": policy(), "tokenizer": tokenizer(), "config": config(tmp_path)}
    names |= {"GristmillGRPOTrainer": GristmillGRPOTrainer, "Gristmill": Gristmill}
    names["push"] = lambda model, version: pushed.append(version)
    code = snippet("workers", service.grpc_address, run_name)
    # The workers' part, before the trainer waits for it.
    exec(code[: code.index("trainer =")], names)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(run_settings(names["config"], names["gristmill"], dp_size=1, pad_token_id=0))
        submit(client, rollouts(prompts=4), turns=True)
    exec(code, names)
    assert pushed == [0, 1]


def test_the_guides_worker_is_one_of_trls(service: Service, run_name: str, tmp_path: Path) -> None:
    args = async_grpo.AsyncGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    made: dict[str, Any] = {}

    def trainer(**named: Any) -> Any:
        made.update(named)
        return SimpleNamespace(train=lambda: None)

    names = {"Gristmill": Gristmill, "args": args, "model": "m", "more": {}, "AsyncGRPOTrainer": trainer}
    exec(snippet("async", service.grpc_address, run_name), names)
    assert made["callbacks"] == [made["rollout_worker"]]


def test_the_example_learns(service: Service, run_name: str, tmp_path: Path) -> None:
    command = [sys.executable, "examples/trl_grpo.py", "--address", service.grpc_address, "--run", run_name]
    command += ["--directory", str(tmp_path)]
    # Of several threads each waits for the others on a busy machine.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = re.findall(r"\d\.\d\d", done.stdout.splitlines()[-1])
    assert float(first) < 0.4 < 0.6 < float(last)
