"""Real environments of verifiers, scored by their own rubrics, from an engine that speaks vLLM's format to shards."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import verifiers as vf
from datasets import Dataset

from gristmill import AsyncRolloutClient, FailedPreconditionError, Shard, TrainerClient, UnavailableError
from gristmill.environments.feeding import Progress
from gristmill.environments.verifiers import feed
from tests.on_loop import Service
from tests.recorder.engine import END, Engine, logprobs_for, serving

CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "step_wise": True,
    "merge": "prefix",
    "micro_batch": {"size": 8},
}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with serving(Engine()) as engine:
        yield engine


def client_of(engine: Engine) -> vf.ClientConfig:
    return vf.ClientConfig(api_base_url=f"{engine.url}/v1", api_key_var="NO_KEY", max_retries=0)


def asking(*questions: str) -> Dataset:
    """Of each the right answer is 2."""
    return Dataset.from_list([{"question": question, "answer": "2"} for question in questions])


async def exact(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


EXACT = vf.Rubric(funcs=[exact])


def documented(name: str) -> str:
    """A block of the document."""
    text = (Path(__file__).parents[3] / "docs/environments.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    return str(code)


class Guessing(vf.MultiTurnEnv):
    """A number is guessed until it is 7."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        return [{"role": "user", "content": "say 3" if messages[-1]["content"] == "9" else "say 7"}]

    @vf.stop
    async def is_guessed(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == "7"


async def number_of_guesses(completion: vf.Messages) -> float:
    return float(sum(message["role"] == "assistant" for message in completion))


async def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: one number
        b: another
    """
    return f"say {a + b}"


async def run_feed(
    service: Service,
    run: str,
    env: vf.Environment,
    engine: Engine,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Progress:
    async with AsyncRolloutClient(service.grpc_address, run) as client:
        await client.create_run(CONFIG | (config or {}))
        return await feed(client, env, engine=client_of(engine), model="toy", **{"max_retries": 0, **options})


def shard_of(service: Service, run: str) -> Shard:
    with TrainerClient(service.grpc_address, run, 0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        return shard


def trained(shard: Shard) -> dict[str, str]:
    """What is trained of each group, as text, where a full stop ends a turn. Its samples train the same."""
    found: dict[str, str] = {}
    for row, uid in enumerate(shard.metadata["uids"]):
        mask = shard["loss_mask"][row].bool()
        tokens = shard["sequences"][row][-len(mask) :][mask].tolist()
        text = "".join("." if token == END else chr(token) for token in tokens)
        assert found.setdefault(uid, text) == text
    return found


def test_a_single_turn_environment_trains_the_answers_with_its_rubrics_rewards(
    service: Service, run_name: str, engine: Engine
) -> None:
    env = vf.SingleTurnEnv(dataset=asking("say 2", "say 3"), system_prompt="add", rubric=EXACT, env_id="sums")
    sampling = {"temperature": 0.5, "max_tokens": 8}
    progress = asyncio.run(run_feed(service, run_name, env, engine, sampling_args=sampling))
    assert (progress.groups, progress.trajectories, progress.reward) == (2, 4, 2.0)
    assert {(body["temperature"], body["max_completion_tokens"]) for body in engine.requests} == {(0.5, 8)}
    shard = shard_of(service, run_name)
    assert trained(shard) == {"sums/0": "2.", "sums/1": "3."}
    rewards = dict(zip(shard.metadata["uids"], shard["rewards"].sum(1).tolist(), strict=True))
    assert rewards == {"sums/0": 1.0, "sums/1": 0.0}
    assert shard.metadata["tags"] == ["sums"] * 4
    expected = np.array([logprobs_for(2)] * 4, np.float32)
    np.testing.assert_array_equal(shard["rollout_logprobs"].numpy(), expected)
    assert shard["policy_version"].tolist() == [0] * 4


def test_a_multi_turn_environment_is_a_row_of_which_the_guesses_are_trained(
    service: Service, run_name: str, engine: Engine
) -> None:
    rubric = vf.Rubric(funcs=[number_of_guesses])
    env = Guessing(dataset=asking("say 9", "say 3"), rubric=rubric, max_turns=3)
    progress = asyncio.run(run_feed(service, run_name, env, engine, {"trajectory_score": "sum"}))
    assert (progress.trajectories, progress.mean_reward) == (4, 2.5)
    shard = shard_of(service, run_name)
    assert trained(shard) == {"Guessing/0": "9.3.7.", "Guessing/1": "3.7."}
    assert sorted(shard["rewards"].sum(1).tolist()) == [2.0, 2.0, 3.0, 3.0]
    row = shard.metadata["uids"].index("Guessing/0")
    text = bytes(token for token in shard["sequences"][row].tolist() if 0 < token < 256).decode()
    assert text == "user\nsay 9\nassistant\n9\nuser\nsay 3\nassistant\n3\nuser\nsay 7\nassistant\n7"


def test_a_tool_environment_trains_the_call_and_the_answer_and_not_what_the_tool_said(
    service: Service, run_name: str, engine: Engine
) -> None:
    calls = [f'call add {{"a": 1, "b": {b}}}' for b in (1, 2)]
    env = vf.ToolEnv(dataset=asking(*calls), tools=[add], rubric=EXACT, env_id="tools")
    progress = asyncio.run(run_feed(service, run_name, env, engine))
    assert (progress.trajectories, progress.mean_reward) == (4, 0.5)
    assert engine.requests[0]["tools"][0]["function"]["name"] == "add"
    expected = {f"tools/{n}": f'<tool_call>add {{"a": 1, "b": {n + 1}}}</tool_call>.{n + 2}.' for n in range(2)}
    assert trained(shard_of(service, run_name)) == expected


def test_the_environments_of_a_group_are_its_groups_tags(service: Service, run_name: str, engine: Engine) -> None:
    single = vf.SingleTurnEnv(dataset=asking("say 2"), rubric=EXACT)
    guessing = Guessing(dataset=asking("say 3"), rubric=EXACT, max_turns=1)
    env = vf.EnvGroup([single, guessing], env_names=["sums", "guesses"], env_id="both")
    asyncio.run(run_feed(service, run_name, env, engine))
    shard = shard_of(service, run_name)
    found = {*zip(shard.metadata["uids"], shard.metadata["tags"], strict=True)}
    assert found == {("both/0", "sums"), ("both/1", "guesses")}


async def place(completions: list[vf.Messages]) -> list[float]:
    return [float(number) for number in range(len(completions))]


def test_a_rubric_over_groups_scores_each_group_as_a_whole(service: Service, run_name: str, engine: Engine) -> None:
    env = vf.SingleTurnEnv(dataset=asking("say 2", "say 3"), rubric=vf.Rubric(funcs=[place]))
    progress = asyncio.run(run_feed(service, run_name, env, engine))
    assert (progress.trajectories, progress.mean_reward) == (4, 0.5)
    assert sorted(shard_of(service, run_name)["rewards"].sum(1).tolist()) == [0.0, 0.0, 1.0, 1.0]


class Advantages(vf.Rubric):
    """Gives twice the reward as advantage."""

    @property
    def has_advantages(self) -> bool:
        return True

    async def score_group(self, states: list[vf.State]) -> None:
        await super().score_group(states)
        for state in states:
            for step in state["trajectory"]:
                step["advantage"] = 2 * state["reward"]


def test_the_advantages_of_a_rubric_are_those_of_the_run(service: Service, run_name: str, engine: Engine) -> None:
    env = vf.SingleTurnEnv(dataset=asking("say 2", "say 3"), rubric=Advantages(funcs=[place]))
    asyncio.run(run_feed(service, run_name, env, engine, {"advantage_estimator": "none"}))
    assert sorted(shard_of(service, run_name)["advantages"][:, -1].tolist()) == [0.0, 0.0, 2.0, 2.0]


@pytest.mark.parametrize(("rubric", "estimator"), [(Advantages, "grpo"), (vf.Rubric, "none")])
def test_advantages_that_nobody_takes_or_gives_are_refused(
    service: Service, run_name: str, engine: Engine, rubric: type[vf.Rubric], estimator: str
) -> None:
    env = vf.SingleTurnEnv(dataset=asking("say 2"), rubric=rubric(funcs=[exact]))
    with pytest.raises(FailedPreconditionError, match="create it with"):
        asyncio.run(run_feed(service, run_name, env, engine, {"advantage_estimator": estimator}))
    assert not engine.requests


def test_a_task_that_the_engine_refuses_is_dropped_for_the_kind_of_error(
    service: Service, run_name: str, engine: Engine
) -> None:
    env = vf.SingleTurnEnv(dataset=asking("fail 500", "say 2", "say 3"), rubric=EXACT, env_id="sums")
    progress = asyncio.run(run_feed(service, run_name, env, engine))
    assert (progress.groups, progress.trajectories, progress.failures) == (3, 4, 2)
    assert trained(shard_of(service, run_name)).keys() == {"sums/1", "sums/2"}
    dropped = service.runs.get(run_name).status().groups_dropped
    assert dropped == {"ModelError -> InternalServerError": 1}


def test_an_engine_that_is_away_ends_the_feeding(service: Service, run_name: str, engine: Engine) -> None:
    env = vf.SingleTurnEnv(dataset=asking(*["fail 503"] * 20), rubric=EXACT)
    with pytest.raises(UnavailableError, match="told to fail"):
        asyncio.run(run_feed(service, run_name, env, engine, concurrent_groups=1))
    assert len(engine.requests) <= 8


def test_an_answer_that_is_cut_has_the_stop_reason_length(service: Service, run_name: str, engine: Engine) -> None:
    env = vf.SingleTurnEnv(dataset=asking("say 2222", "say 2333"), rubric=EXACT, env_id="long", max_seq_len=28)
    asyncio.run(run_feed(service, run_name, env, engine))
    shard = shard_of(service, run_name)
    assert shard.metadata["stop_reasons"] == ["length"] * 4
    assert trained(shard) == {"long/0": "2", "long/1": "2"}


def test_an_engine_without_token_ids_is_refused_and_says_the_remedy(
    service: Service, run_name: str, engine: Engine
) -> None:
    env = vf.SingleTurnEnv(dataset=asking("tokenless 2"), rubric=EXACT)
    with pytest.raises(FailedPreconditionError, match=r"the engine gave no token ids.*such as vLLM"):
        asyncio.run(run_feed(service, run_name, env, engine))


def test_the_documented_worker_feeds_a_run(
    service: Service, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env = vf.SingleTurnEnv(dataset=asking(*[f"say {n}" for n in range(8)]), rubric=EXACT, env_id="wordle")
    monkeypatch.setattr(vf, "load_environment", lambda name: env, raising=False)
    code = documented("environments-verifiers").replace("127.0.0.1:50051", service.grpc_address)
    exec(code.replace("http://127.0.0.1:8000", engine.url), {"__name__": "worker"})
    assert capsys.readouterr().out.count("Progress(groups=") == 3
    status = service.runs.get("my-run").status()
    assert (status.finished, status.batches_sealed, status.rows_accepted) == (True, 3, 96)


def test_a_part_of_the_examples_is_fed_under_another_name_through_a_client_that_stays_open(
    service: Service, run_name: str, engine: Engine
) -> None:
    env = vf.SingleTurnEnv(dataset=asking("say 1", "say 2", "say 3"), rubric=EXACT, env_id="sums")

    async def work() -> Progress:
        async with AsyncRolloutClient(service.grpc_address, run_name) as client:
            await client.create_run(CONFIG)
            chat = vf.OpenAIChatCompletionsClient(client_of(engine))
            part = env.get_dataset().select([0, 2])
            progress = await feed(client, env, engine=chat, model="toy", examples=part, tag="odd")
            assert not chat.client.is_closed()
            await chat.close()
            return progress

    assert asyncio.run(work()).groups == 2
    shard = shard_of(service, run_name)
    assert (trained(shard), set(shard.metadata["tags"])) == ({"odd/0": "1.", "odd/2": "3."}, {"odd"})


_SCRIPT = """
import asyncio, sys
import verifiers as vf
from datasets import Dataset
from gristmill import AsyncRolloutClient
from gristmill.environments.verifiers import feed

async def main(address, run, url):
    rows = Dataset.from_list([{"question": "wait 60 for it", "answer": ""} for n in range(9)])
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(), env_id="slow")
    async with AsyncRolloutClient(address, run=run) as client:
        await feed(client, env, engine=vf.ClientConfig(api_base_url=url, api_key_var="NO_KEY"), model="toy")

asyncio.run(main(*sys.argv[1:]))
"""


def test_ctrl_c_ends_a_worker_and_leaves_no_group_open(
    service: Service, run_name: str, engine: Engine, tmp_path: Path
) -> None:
    async def groups() -> list[str]:
        async with AsyncRolloutClient(service.grpc_address, run_name) as client:
            await client.create_run(CONFIG)
            return [group.state for group in await client.groups()]

    asyncio.run(groups())
    script = tmp_path / "worker.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, str(script), service.grpc_address, run_name, f"{engine.url}/v1"]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while worker.poll() is None and not engine.requests:
            time.sleep(0.1)
        worker.send_signal(signal.SIGINT)
        _, errors = worker.communicate(timeout=60)
    finally:
        worker.kill()
    assert worker.returncode == -signal.SIGINT, errors
    assert errors.strip().endswith("KeyboardInterrupt")
    states = asyncio.run(groups())
    assert states
    assert set(states) == {"dropped"}, errors
