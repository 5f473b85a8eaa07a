"""Updates of two ranks through gristmill are those of TRL's two ranks from the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from gristmill import RolloutClient
from gristmill.adapters.trl import Gristmill, run_settings
from tests.on_loop import Service
from tests.trainers.trl.jobs import run, said, started
from tests.trainers.trl.play import config, difference, policy, rollouts, submit, tokenizer, weights
from tests.trainers.trl.train import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BOUND = 1e-4
STEPS: dict[str, dict[str, Any]] = {
    "whole prompts a rank": {"gradient_accumulation_steps": 2},
    "a prompt of both ranks": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2, "max_steps": 4},
}


@pytest.mark.parametrize("more", STEPS.values(), ids=STEPS)
def test_what_two_ranks_generate_is_trained_as_by_trl(
    service: Service, run_name: str, tmp_path: Path, more: dict[str, Any]
) -> None:
    settings = {"micro_batch": {"max_tokens": 40}, "balance": "tokens"}
    gristmill = {"address": service.grpc_address, "run": run_name, "settings": settings}
    check(tmp_path, more | {"shuffle_dataset": False}, gristmill)


@pytest.mark.parametrize("merge", ["prefix", "none"])
def test_turns_that_workers_submit_are_trained_by_two_ranks_as_by_trl(
    service: Service, run_name: str, tmp_path: Path, merge: str
) -> None:
    more = {"gradient_accumulation_steps": 2, "shuffle_dataset": False}
    settings = {"step_wise": True, "merge": merge, "micro_batch": {"size": 3}, "on_misaligned": "pad"}
    gristmill: dict[str, Any] = {"address": service.grpc_address, "run": run_name, "rollouts": "workers"}
    gristmill |= {"settings": settings, "old_logprobs": "trainer"}
    with RolloutClient(service.grpc_address, run_name) as client:
        pad_token_id = tokenizer().pad_token_id
        run_config = run_settings(
            config(tmp_path, **more), Gristmill(**gristmill), dp_size=1, pad_token_id=pad_token_id
        )
        # As the two ranks' configuration says it, which here is one rank's.
        both = {"dp_size": 2, "train_batch_size": 4, "policy_mini_batch_size": 4}
        client.create_run(run_config | both)
        submit(client, rollouts(prompts=4), turns=True)
    check(tmp_path, more, gristmill)


def check(directory: Path, more: dict[str, Any], gristmill: dict[str, Any]) -> None:
    def job(name: str, options: dict[str, Any] | None) -> Job:
        return Job(str(directory / name), str(directory / f"{name}.safetensors"), "replay", options, more)

    with started(job("theirs", None), directory / "theirs", ranks=2) as trl:
        assert run(job("ours", gristmill), directory / "ours", ranks=2) == 0, said(directory / "ours")
        assert trl.wait(timeout=300) == 0
    ours, theirs = (load_file(directory / f"{name}.safetensors") for name in ("ours", "theirs"))
    assert difference(ours, theirs, weights(policy())) < BOUND
