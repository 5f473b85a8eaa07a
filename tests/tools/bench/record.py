"""What a recorder costs: added to a call of an agent, and calls per second on one core.

An engine in a process of its own answers with what vLLM would answer, made before: turns of agents whose prompts grow
from 1,000 to 4,500 tokens, of 200 sampled tokens each with their logprobs. It answers at once, or takes a while when
many calls are to be in progress. The steps go to a service.
`python -m tests.tools.bench.record` is the engine.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from aiohttp import web

from gristmill import RolloutClient
from tests.rows import make_config
from tests.tools.bench.figures import Figure
from tests.tools.bench.processes import cpu_s, served

TURNS, FIRST_PROMPT, TURN_TOKENS, SAMPLED = 8, 1000, 500, 200
ALONE_S = 15.0
AT_ONCE, ANSWER_S, AT_ONCE_S = 64, 1.28, 25.0
"""Calls in progress, and how many seconds the engine takes for each: 50 calls per second."""
AGENTS, SECONDS, WARM_S = 32, 8.0, 1.0
RUN = make_config(
    train_batch_size=100_000, policy_mini_batch_size=100_000, merge="tree", micro_batch={"max_tokens": 65_536}
)
_TURN, _WAIT = "x-turn", "x-wait"
_DIRECT = "ms, the call without a recorder"


def figures() -> Iterator[Figure]:
    with (
        served(("--store", "memory")) as service,
        _engine() as engine,
        _recorder(engine, service.grpc_address) as recorder,
    ):
        with RolloutClient(service.grpc_address, "bench") as client:
            client.create_run(RUN)
        yield from _added(asyncio.run(_pairs(engine, recorder.url, 1, 0.0, ALONE_S)), "", (1.0, 5.0))
        # Half of the time an agent waits for the call without a recorder.
        of_many = asyncio.run(_pairs(engine, recorder.url, 2 * AT_ONCE, ANSWER_S, AT_ONCE_S))
        yield from _added(of_many, f".{AT_ONCE}", (1.5, 6.0))
        yield Figure("record.calls_s", asyncio.run(_saturated(recorder)), "calls/s", 500.0, at_most=False)


def _added(pairs: Sequence[tuple[float, float]], of: str, reach: tuple[float, float]) -> Iterator[Figure]:
    """What the recorder adds. of: the end of the figures' names."""
    direct, through = np.array(pairs).T * 1e3
    bound = [float(np.quantile(direct, share)) for share in (0.5, 0.99)]
    yield Figure(f"record.p50_ms{of}", float(np.median(through - direct)), "ms", reach[0], bound[0], _DIRECT)
    p99 = float(np.quantile(through, 0.99)) - bound[1]
    yield Figure(f"record.p99_ms{of}", p99, "ms", reach[1], bound[1], _DIRECT)


class Recorder(NamedTuple):
    url: str
    pid: int


class Agents:
    """Trajectories one after another: TURNS calls, and the end."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session, self._numbers = url, session, count()
        self._name = time.time_ns()

    def base(self) -> str:
        """Of the next trajectory."""
        return f"{self._url}/runs/bench/uid/{self._name}-{next(self._numbers)}/sample/0"

    async def call(self, base: str, turn: int, answer_s: float = 0.0) -> float:
        """How long a call took. answer_s: how long the engine takes."""
        began = time.perf_counter()
        async with self._session.post(
            f"{base}/v1/chat/completions", data=_REQUESTS[turn], headers={_TURN: str(turn), _WAIT: str(answer_s)}
        ) as answer:
            await answer.read()
            assert answer.status == 200, answer.status
        return time.perf_counter() - began

    async def finish(self, base: str) -> None:
        async with self._session.post(f"{base}/finish", json={"reward": 1.0}) as answer:
            assert answer.status in (200, 202), await answer.text()


async def _pairs(engine: str, recorder: str, agents: int, answer_s: float, seconds: float) -> list[tuple[float, float]]:
    """Latencies of calls without a recorder and with one: each agent makes the same call first so and then so."""
    pairs = list[tuple[float, float]]()
    end = time.monotonic() + seconds

    async def agent(number: int, plain: Agents, recorded: Agents) -> None:
        await asyncio.sleep(2 * answer_s * (number * 0.618 % 1))
        while time.monotonic() < end:
            base = recorded.base()
            for turn in range(TURNS):
                pairs.append((await plain.call(engine, turn, answer_s), await recorded.call(base, turn, answer_s)))
            await recorded.finish(base)

    async with _session() as session:
        plain, recorded = Agents(engine, session), Agents(recorder, session)
        await asyncio.gather(*(agent(number, plain, recorded) for number in range(agents)))
    return pairs[2 * agents :]


async def _saturated(recorder: Recorder) -> float:
    """Calls per second of the recorder's own time on a core, with their delivery to the service, while AGENTS call
    again as soon as they are answered. Of its own time, as the agents and the engine want the machine's cores, too."""
    start = time.monotonic() + WARM_S
    answered: list[float] = []

    async def agent(agents: Agents) -> None:
        while time.monotonic() < start + SECONDS:
            base = agents.base()
            for turn in range(TURNS):
                await agents.call(base, turn)
                answered.append(time.monotonic())
            await agents.finish(base)

    async with _session() as session:
        agents = Agents(recorder.url, session)
        tasks = [asyncio.create_task(agent(agents)) for _ in range(AGENTS)]
        await asyncio.sleep(WARM_S)
        spent_s, calls = cpu_s(recorder.pid), len(answered)
        await asyncio.sleep(SECONDS)
        spent_s, calls = cpu_s(recorder.pid) - spent_s, len(answered) - calls
        await asyncio.gather(*tasks)
    return calls / spent_s


def _session() -> aiohttp.ClientSession:
    headers = {"content-type": "application/json"}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)


@contextmanager
def _started(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The first line that a process says, and its id."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline(), process.pid
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextmanager
def _engine() -> Iterator[str]:
    with _started([sys.executable, "-m", "tests.tools.bench.record"]) as (line, _):
        yield line.strip()


@contextmanager
def _recorder(engine: str, address: str) -> Iterator[Recorder]:
    with tempfile.TemporaryDirectory() as directory:
        command = [
            str(Path(sys.executable).with_name("gristmill")),
            "record",
            "--upstream",
            engine,
            "--address",
            address,
        ]
        with _started([*command, "--http-address", "127.0.0.1:0", "--journal", f"{directory}/journal"]) as (line, pid):
            yield Recorder(line.split("ready: ")[1].split()[0], pid)


def _request(turn: int) -> bytes:
    messages = [{"role": "user", "content": "word " * (TURN_TOKENS // 2)} for _ in range(2 * turn + 2)]
    return json.dumps({"model": "toy", "messages": messages}).encode()


def _answer(turn: int) -> bytes:
    """vLLM's, whose prompts go on from one another."""
    tokens = np.random.default_rng(7).integers(0, 150_000, FIRST_PROMPT + TURNS * TURN_TOKENS)
    prompt = tokens[: FIRST_PROMPT + turn * TURN_TOKENS].tolist()
    response = tokens[len(prompt) : len(prompt) + SAMPLED].tolist()
    content = [
        {"token": f"t{token}", "logprob": -token / 65536, "bytes": [116], "top_logprobs": []} for token in response
    ]
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": response}
    choice |= {"message": {"role": "assistant", "content": "word " * SAMPLED}, "logprobs": {"content": content}}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": SAMPLED, "total_tokens": len(prompt) + SAMPLED}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "toy", "choices": [choice]}
    return json.dumps({**answer, "usage": usage, "prompt_token_ids": prompt, "prompt_logprobs": None}).encode()


_REQUESTS = [_request(turn) for turn in range(TURNS)]


async def _serve() -> None:
    answers = [_answer(turn) for turn in range(TURNS)]

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        if wait_s := float(request.headers[_WAIT]):
            await asyncio.sleep(wait_s)
        return web.Response(body=answers[int(request.headers[_TURN])], content_type="application/json")

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
