"""Whatever is killed while agents call, each answer that an agent has read is trained, and once.

`RECORDED_CALLS=1000 RECORDER_KILLS=20` makes it longer.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.recorder.engine import END, Engine
from tests.recorder.recorders import StartRecorder, batches, create_run
from tests.serving import StartService

pytestmark = pytest.mark.slow

AGENTS, TURNS = 6, 3
TRAJECTORIES = int(os.environ.get("RECORDED_CALLS", "72")) // (AGENTS * TURNS)
KILLS = int(os.environ.get("RECORDER_KILLS", "3"))
RUN = "my-run"


def send(url: str, body: dict[str, Any]) -> bytes:
    """A whole answer, nothing where none came."""
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=60) as answer:
            read: bytes = answer.read()
            return read
    except HTTPError as refused:
        refused.close()
    except (OSError, HTTPException):
        pass
    time.sleep(0.02)
    return b""


def ask(base: str, turn: str, history: list[dict[str, str]], *, is_streamed: bool) -> str:
    """Makes a call until it is answered, as agents' libraries do; returns what the answer said."""
    for attempt in count():
        text = f"{turn}/{attempt}"
        messages = [*history, {"role": "user", "content": f"say {text}"}]
        answer = send(f"{base}/v1/chat/completions", {"model": "toy", "messages": messages, "stream": is_streamed})
        if answer.endswith(b"[DONE]\n\n" if is_streamed else b"}"):
            return text
    raise AssertionError


def agent(url: str, number: int) -> list[str]:
    """Runs some trajectories; returns the answers that were read whole."""
    read = []
    for name in (f"{number}-{trajectory}" for trajectory in range(TRAJECTORIES)):
        base = f"{url}/runs/{RUN}/uid/{name}/sample/0"
        history: list[dict[str, str]] = []
        for turn in range(TURNS):
            read.append(ask(base, f"{name}/{turn}", history, is_streamed=(number + turn) % 2 == 0))
            said = {"role": "user", "content": f"say {read[-1]}"}, {"role": "assistant", "content": read[-1]}
            history += said
        while not send(f"{base}/finish", {"reward": 1.0}):
            pass
    return read


@pytest.mark.parametrize("splice", ["off", "on"])
def test_what_was_read_is_trained_once_whatever_is_killed(
    start_recorder: StartRecorder, start_service: StartService, engine: Engine, tmp_path: Path, splice: str
) -> None:
    flags = ("--journal-dir", str(tmp_path / "runs"), "--shared-memory-dir", str(tmp_path))
    service = start_service(*flags)
    create_run(service.grpc_address, RUN, max_buffered_batches=10_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
    chance = random.Random(7)

    def recorder() -> Any:
        flags = ("--http-address", listen, "--finish-wait-s", "1", "--splice", splice)
        return start_recorder(engine.url, service.grpc_address, *flags)

    running = recorder()
    with ThreadPoolExecutor(AGENTS) as pool:
        agents = [pool.submit(agent, f"http://{listen}", number) for number in range(AGENTS)]
        for kill in range(KILLS):
            time.sleep(chance.uniform(0.05, 0.3))
            if kill == 1:
                service.process.kill()
                service.process.wait()
                service = start_service(*flags, "--grpc-address", service.grpc_address)
            else:
                running.kill()
                running = recorder()
        read = [text for one in agents for text in one.result()]
    trained = Counter(
        text
        for rows in batches(service.grpc_address, RUN, AGENTS * TRAJECTORIES)
        for row in rows
        for text in bytes(token if token < END else 10 for token in row.trained).decode().split()
    )
    assert {text: trained[text] for text in read} == dict.fromkeys(read, 1)
    assert set(trained.values()) == {1}
