"""Measures what splicing costs: `python -m tests.engines.vllm.cost`, in the environment of `make test-vllm`.

A call that continues a long conversation, through a recorder that splices it, over the same call without a recorder.
The engine has the prompt in its prefix cache in both cases. Prints the medians and their ratio.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

from gristmill_service.settings import Settings
from tests.engines import tiny_model
from tests.engines.rollout import MODEL
from tests.engines.vllm.conftest import running
from tests.on_loop import Service
from tests.recorder.recorders import create_run, end, start
from tests.serving import FREE_PORTS

SIZES = (2_000, 15_000, 60_000)
ROUNDS = 15
_MESSAGE = 180
_ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "temperature": 0}


def conversation(tokens: int) -> list[dict[str, str]]:
    """Messages of 180 tokens each, by turns, which end with a user's. A token is a byte."""
    roles = ("user", "assistant")
    count = tokens // _MESSAGE | 1
    return [{"role": roles[number % 2], "content": f"{number:08d}" * (_MESSAGE // 8 - 2)} for number in range(count)]


def median_ms(client: openai.OpenAI, asked: dict[str, Any]) -> float:
    """The first call, which puts the prompt into the cache, does not count."""
    times = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        client.chat.completions.create(**asked)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def measure(engine: str, recorder: str, tokens: int) -> tuple[float, float]:
    """Returns the milliseconds of a call without a recorder, and of a spliced call."""
    with (
        openai.OpenAI(base_url=f"{engine}/v1", api_key="none", max_retries=0) as direct,
        openai.OpenAI(base_url=f"{recorder}/v1", api_key="none", max_retries=0) as recorded,
    ):
        messages: list[Any] = conversation(tokens)
        said = recorded.chat.completions.create(messages=messages, **_ASKED).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
        asked = {**_ASKED, "messages": messages}
        return median_ms(direct, asked), median_ms(recorded, asked)


def main() -> None:
    service = Service(Settings(**FREE_PORTS, store="memory"))
    service.start()
    create_run(service.grpc_address, "cost", merge="tree")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        tiny_model.save(folder, 70_000)
        with running(folder, "--max-model-len", "70000") as engine:
            flags = ("--journal", str(folder / "journal"), "--splice", "on")
            recorder = start(folder / "log", engine, service.grpc_address, *flags)
            for number, tokens in enumerate(SIZES):
                before = recorder.metric('splices_total{result="spliced"}')
                plain, spliced = measure(engine, recorder.base("cost", f"uid-{number}"), tokens)
                assert recorder.metric('splices_total{result="spliced"}') == before + ROUNDS + 1
                print(f"{tokens} tokens: {plain:.1f} ms, spliced {spliced:.1f} ms: {spliced / plain:.2f}", flush=True)
            end(recorder)
    service.stop()


if __name__ == "__main__":
    main()
