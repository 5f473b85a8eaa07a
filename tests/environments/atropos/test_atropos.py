"""A real environment of Atropos, started as its users start it, feeds a run by its own code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
import uvicorn

from gristmill import RolloutClient, Shard, TrainerClient
from gristmill.environments.atropos.routes import Routes, TrainerFacts
from tests.environments.atropos.engine import SumEngine, logprob_of
from tests.environments.toy_tokenizer import END, VOCABULARY, tokenizer_in
from tests.on_loop import Service

CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 4},
    "max_seq_len": 64,
}
STEPS = 3

Serve = Callable[[Any], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves an application on a free port; gives its URL."""
    running: list[tuple[uvicorn.Server, threading.Thread, socket.socket]] = []

    def start(app: Any) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        running.append((server, thread, listener))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread, listener in running:
        server.should_exit = True
        thread.join()
        listener.close()


def environment(routes: str, engine: str, tokenizer: Path, log: TextIO) -> subprocess.Popen[bytes]:
    flags = {
        "env.rollout_server_url": routes,
        "env.tokenizer_name": str(tokenizer),
        "env.wandb_name": "sums",
        "env.use_wandb": "false",
        "env.group_size": "2",
        "env.max_token_length": "32",
        "env.total_steps": str(STEPS),
        "env.max_batches_offpolicy": "1",
        "openai.base_url": f"{engine}/v1",
        "openai.server_type": "vllm",
        "openai.model_name": str(tokenizer),
        "openai.api_key": "x",
    }
    command = [sys.executable, str(Path(__file__).with_name("sums.py")), "serve"]
    for name, value in flags.items():
        command += [f"--{name}", value]
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | offline)


def trained(shard: Shard) -> list[tuple[str, str, float]]:
    """Of each row its prompt, what it trains, and its reward."""
    words = [*VOCABULARY]
    found = []
    for row in range(4):
        mask = torch.nn.functional.pad(shard["loss_mask"][row].bool(), (len(shard["sequences"][row]) - 2, 0))
        tokens, attended = shard["sequences"][row], shard["attention_mask"][row].bool()
        prompt = "".join(words[token] for token in tokens[attended & ~mask].tolist())
        answer = "".join(words[token] for token in tokens[mask].tolist())
        found.append((prompt, answer, float(shard["rewards"][row].sum())))
    return found


def test_it_feeds_a_run_and_ends_when_its_steps_are_trained(
    service: Service, run_name: str, serve: Serve, tmp_path: Path
) -> None:
    engine = SumEngine()
    routes = serve(Routes(service.grpc_address, run_name, TrainerFacts("project", "group")).app())
    log = tmp_path / "environment.log"
    with log.open("w") as written:
        process = environment(routes, serve(engine.app()), tokenizer_in(tmp_path), written)
    try:
        with RolloutClient(service.grpc_address, run_name) as client:
            client.create_run(CONFIG)
            with TrainerClient(service.grpc_address, run_name, 0) as trainer:
                batches = iter(trainer)
                for _ in range(STEPS + 1):
                    (shard,) = next(batches).mini_batches()
                    check(shard)
                    shard.ack()
            status = process.wait(timeout=150)
            assert (status, dict(client.status().groups_dropped)) == (0, {}), log.read_text()
    finally:
        process.kill()
        process.wait()
    assert set(engine.prompts[0]) < set(VOCABULARY) | set(END + "<|im_start|>")


def check(shard: Shard) -> None:
    """Two groups, each with a right answer and a wrong one."""
    found = trained(shard)
    for question, answer, reward in found:
        asked = question.removeprefix("<|im_start|>user\n1+").removesuffix("=<|im_end|>\n<|im_start|>assistant\n")
        assert (answer == f"{1 + int(asked)}{END}") == (reward == 1.0)
    assert sorted(reward for _, _, reward in found) == [0.0, 0.0, 1.0, 1.0]
    assert shard.metadata["tags"] == ["sums"] * 4
    responses = shard["sequences"][:, -2:].tolist()
    assert shard["rollout_logprobs"].tolist() == [[logprob_of(token) for token in row] for row in responses]
    assert sorted((shard["advantages"][:, -1] > 0).tolist()) == [False, False, True, True]
