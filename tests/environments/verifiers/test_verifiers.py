"""A real environment of verifiers.v1 with its own taskset, harness and reward, from token ids to shards."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import verifiers.v1 as vf
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gristmill import AsyncRolloutClient, FailedPreconditionError, RolloutClient, Shard, TrainerClient, UnavailableError
from gristmill.environments.feeding import Progress
from gristmill.environments.verifiers import feed
from tests.environments.toy_tokenizer import END, VOCABULARY, tokenizer_in
from tests.on_loop import Service
from tests.recorder import engine as chat_engine
from tests.rows import make_config

CONFIG = make_config(
    train_batch_size=2, n_samples_per_prompt=2, policy_mini_batch_size=2, merge="tree", micro_batch={"size": 8}
)
WORDS = list(VOCABULARY)


class Engine:
    """Takes and gives token ids as vLLM's /inference/v1/generate, in the form that `renderers.client.generate` reads
    (renderers 0.1.12). Answers 0, and then the sum."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.is_away = self.gives_masks = False

    def app(self) -> Starlette:
        routes = [
            Route("/inference/v1/generate", self.generate, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
        ]
        return Starlette(routes=routes)

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": []})

    async def generate(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        if self.is_away:
            return JSONResponse({"error": {"message": "loading"}}, 503)
        prompt = "".join(WORDS[token] for token in body["token_ids"])
        text = "0" if prompt.count("assistant") == 1 else str(1 + int(prompt.partition("1+")[2][0]))
        tokens = [VOCABULARY[text], VOCABULARY[END]]
        logprobs = [{"token": f"token_id:{token}", "logprob": -0.5} for token in tokens]
        choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": logprobs}, "finish_reason": "stop"}
        masks = {"sampling_mask": [[0, token] for token in tokens]} if self.gives_masks else {}
        return JSONResponse({"request_id": "1", "choices": [choice | masks]})


@pytest.fixture
def engine() -> Iterator[tuple[Engine, str]]:
    """One, and its URL."""
    engine = Engine()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(engine.app(), log_config=None, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join()


@pytest.fixture(autouse=True)
def _one_loop_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of renderers belongs to the first loop that waits for it; a worker has one."""
    monkeypatch.setattr("renderers.client._max_prompt_len_lock", asyncio.Lock())


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> vf.Env:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    config = {"taskset": {"id": "guessing-v1"}, "agent": {"runtime": {"type": "subprocess"}}}
    return vf.load_environment(vf.SingleAgentEnvConfig(**config))


async def run_feed(
    service: Service, run: str, env: vf.Env, client: vf.ClientConfig, model: Path, **settings: Any
) -> Progress:
    async with AsyncRolloutClient(service.grpc_address, run) as rollouts:
        await rollouts.create_run(CONFIG | settings)
        return await feed(rollouts, env, vf.ModelContext(str(model), client, vf.Sampling(max_tokens=4)))


def shard_of(service: Service, run: str) -> Shard:
    with TrainerClient(service.grpc_address, run, 0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        return shard


def test_an_environment_trains_what_was_sampled_with_its_tasks_rewards(
    service: Service, run_name: str, engine: tuple[Engine, str], env: vf.Env, tmp_path: Path
) -> None:
    seen, url = engine
    progress = asyncio.run(run_feed(service, run_name, env, vf.TrainClientConfig(base_url=url), tokenizer_in(tmp_path)))
    assert (progress.groups, progress.trajectories, progress.reward) == (2, 4, 2.0)
    assert {body["sampling_params"]["max_tokens"] for body in seen.requests} == {4}
    shard = shard_of(service, run_name)
    assert shard.metadata["tags"] == ["guessing-v1"] * 4
    rows = set()
    for row in range(4):
        mask = shard["loss_mask"][row].bool()
        tokens = shard["sequences"][row]
        attended = tokens[shard["attention_mask"][row].bool()]
        text = "".join(WORDS[token] for token in attended.tolist())
        answers = "".join(WORDS[token] for token in tokens[-len(mask) :][mask].tolist())
        rows.add((text, answers, float(shard["rewards"][row].sum())))
    said = "<|im_start|>user\n1+{0}=<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"
    said += "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n{1}<|im_end|>"
    expected = {(said.format(1, 2), f"0{END}2{END}", 1.0), (said.format(2, 3), f"0{END}3{END}", 0.0)}
    assert rows == expected
    assert set(shard["rollout_logprobs"][shard["loss_mask"].bool()].tolist()) == {-0.5}


def test_a_sampled_token_keeps_the_tokens_from_which_it_was_sampled(
    service: Service, run_name: str, engine: tuple[Engine, str], env: vf.Env, tmp_path: Path
) -> None:
    engine[0].gives_masks = True
    column = {"name": "sampling_mask", "dtype": "int32", "scope": "response", "shape": [None]}
    client = vf.TrainClientConfig(base_url=engine[1])
    asyncio.run(run_feed(service, run_name, env, client, tokenizer_in(tmp_path), columns=[column]))
    shard = shard_of(service, run_name)
    mask, counts = shard["loss_mask"].bool(), shard["sampling_mask_offsets"].diff()
    assert counts.tolist() == (2 * mask.flatten()).tolist()
    tokens = shard["sequences"][:, -mask.shape[1] :][mask]
    assert shard["sampling_mask"].tolist() == [kept for token in tokens.tolist() for kept in (0, token)]


def test_the_documented_worker_feeds_a_run(
    service: Service, engine: tuple[Engine, str], env: vf.Env, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = (Path(__file__).parents[3] / "docs/environments.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- environments-verifiers -->\n```python\n(.*?)```", document, re.DOTALL)
    replaced = {
        "127.0.0.1:50051": service.grpc_address,
        "http://127.0.0.1:8000/v1": engine[1],
        "Qwen/Qwen3-4B": str(tokenizer_in(tmp_path)),
        "gsm8k-v1": "guessing-v1",
        "docker": "subprocess",
    }
    for documented, here in replaced.items():
        code = code.replace(documented, here)
    with RolloutClient(service.grpc_address, "my-run") as client:
        client.create_run(CONFIG)
        exec(code, {"__name__": "worker"})
        assert client.status().rows_accepted == 8
    assert "Progress(groups=2" in capsys.readouterr().out


def test_an_engine_that_is_down_ends_the_feeding(
    service: Service,
    run_name: str,
    engine: tuple[Engine, str],
    env: vf.Env,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away, url = engine
    away.is_away, tasks = True, [*env.taskset]
    monkeypatch.setattr(env.taskset, "load", lambda: [task.with_data(name=str(n)) for n in range(9) for task in tasks])
    with pytest.raises(UnavailableError, match="loading"):
        asyncio.run(run_feed(service, run_name, env, vf.TrainClientConfig(base_url=url), tokenizer_in(tmp_path)))


def test_a_client_that_gives_no_token_ids_is_refused(
    service: Service, run_name: str, env: vf.Env, tmp_path: Path
) -> None:
    with chat_engine.serving(chat_engine.Engine()) as chat:
        client = vf.EvalClientConfig(base_url=f"{chat.url}/v1")
        with pytest.raises(FailedPreconditionError, match="a model call has no token ids"):
            asyncio.run(run_feed(service, run_name, env, client, tmp_path))
