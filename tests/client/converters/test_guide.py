"""The guide's examples are run here word for word, on recorded rollouts and against a service that takes them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill import RolloutClient, RowOutcome
from tests.client.converters import recorded, stand_ins
from tests.on_loop import Service

GUIDE = (Path(__file__).parents[3] / "docs" / "converters.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- converters-([\w-]+) -->\n```python\n(.*?)```", GUIDE, re.DOTALL))
CONFIG = {"train_batch_size": 8, "n_samples_per_prompt": 2, "policy_mini_batch_size": 8, "micro_batch": {"size": 1}}


def skyrl() -> dict[str, Any]:
    ids, output = recorded.skyrl_output("whole")
    generator = SimpleNamespace(generate=lambda batch: output)
    return {"run_async": lambda made: made, "generator": generator, "input_batch": {"trajectory_ids": ids}}


def verl() -> dict[str, Any]:
    manager = SimpleNamespace(generate_sequences=lambda prompts: recorded.verl_batch())
    return {"agent_loop_manager": manager, "prompts": None}


def verl_queue() -> dict[str, Any]:
    keys, rows = recorded.verl_queue()
    queue = SimpleNamespace(kv_batch_get=lambda keys, partition_id: rows)
    return {"tq": queue, "meta": SimpleNamespace(keys=keys, partition_id="train")}


def slime() -> dict[str, Any]:
    status = stand_ins.Status.COMPLETED
    samples = [
        [
            stand_ins.Sample(index=index, group_index=0, tokens=[1, 2, 3], response_length=1, reward=1.0, status=status)
            for index in range(2)
        ]
    ]
    made = SimpleNamespace(samples=samples)
    return {"generate_rollout": lambda *_: made, "args": None, "rollout_id": 0, "data_source": None}


def trl() -> dict[str, Any]:
    trainer = SimpleNamespace(_generate_and_score_completions=lambda inputs: recorded.trl_output())
    return {"trainer": trainer, "inputs": [], "rewards": [1.0, 0.0, 1.0, 0.5]}


def trl_async() -> dict[str, Any]:
    return {"samples": recorded.trl_samples()}


def prime_rl() -> dict[str, Any]:
    sample = stand_ins.TrainingSample([1, 2, 3], [False, True, True], [0.0, -0.5, -0.5], [1.0] * 3, "math")
    traces = [SimpleNamespace(reward=reward) for reward in (0.0, 1.0)]
    return {"trace_to_samples": lambda trace: [sample], "survivors": traces, "group_ids": ["a", "a"]}


ROWS = {"skyrl": 4, "verl": 3, "verl-queue": 3, "slime": 2, "trl": 4, "trl-async": 2, "prime-rl": 2}
NAMES = {
    "skyrl": skyrl,
    "verl": verl,
    "verl-queue": verl_queue,
    "slime": slime,
    "trl": trl,
    "trl-async": trl_async,
    "prime-rl": prime_rl,
}


def test_every_example_is_run() -> None:
    assert EXAMPLES.keys() == NAMES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_service_takes_what_the_example_submits(name: str, service: Service, run_name: str) -> None:
    with RolloutClient(service.grpc_address, run_name, token_rewards=name == "skyrl") as client:
        client.create_run(CONFIG | {"step_wise": name == "verl-queue"})
        names = NAMES[name]() | {"client": client}
        exec(EXAMPLES[name], names)
    assert names["outcomes"] == [RowOutcome.ACCEPTED] * ROWS[name]
    assert service.runs.get(run_name).status().rows_accepted == ROWS[name]
