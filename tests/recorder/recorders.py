"""`gristmill record` as a process of a test's own, and what a test does with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import openai

from gristmill import RolloutClient, Shard, TrainerClient
from tests.rows import make_config
from tests.serving import ServiceProcess, StartService

CONFIG: dict[str, Any] = make_config(merge="tree", advantage_estimator="grpo", micro_batch={"size": 16})
"""Of a run in which each trajectory is a batch."""

_PROBED_S = 5.0


@dataclass(frozen=True)
class Recorder:
    """One that is ready."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def base(self, run: str, uid: str = "a", sample: int = 0, more: str = "") -> str:
        """The URL of a trajectory, which an agent's base URL begins with."""
        return f"{self.url}/runs/{run}/uid/{quote(uid, safe='')}/sample/{sample}{more}"

    def openai(self, run: str, uid: str = "a", sample: int = 0, more: str = "", **options: Any) -> openai.OpenAI:
        base = f"{self.base(run, uid, sample, more)}/v1"
        return openai.OpenAI(base_url=base, api_key="key", **{"max_retries": 0, **options})

    def finish(self, run: str, reward: float | None = 1.0, uid: str = "a", sample: int = 0) -> dict[str, Any]:
        body = {} if reward is None else {"reward": reward}
        status, answer = post(f"{self.base(run, uid, sample)}/finish", body)
        assert status in (200, 202), answer
        return answer

    def metric(self, name: str) -> float:
        """The sum over a metric's series whose names with labels begin so."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = [line.decode() for line in answer if line.startswith(f"gristmill_recorder_{name}".encode())]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def stop(self) -> int:
        """The exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


StartRecorder = Callable[..., Recorder]


class Restarted:
    """A service that a test kills, and starts again at the same address."""

    def __init__(self, start: StartService, directory: Path) -> None:
        self._start = start
        self._flags = ("--journal-dir", str(directory / "runs"), "--shared-memory-dir", str(directory))
        self._process: ServiceProcess = start(*self._flags)
        self.address = self._process.grpc_address

    def kill(self) -> None:
        self._process.process.kill()
        self._process.process.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A block in which the service does nothing, though its connections stay open."""
        self._process.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.process.send_signal(signal.SIGCONT)

    def start(self) -> None:
        self._process = self._start(*self._flags, "--grpc-address", self.address)


def start(log: Path, upstream: str, address: str, *flags: str) -> Recorder:
    """Returns when it is ready and has asked the engine what it gives, so that tests can count their own calls."""
    command = [str(Path(sys.executable).with_name("gristmill")), "record", "--upstream", upstream]
    command += ["--address", address, "--http-address", "127.0.0.1:0", *flags]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if "is ready" not in line:
        process.kill()
        process.wait()
        process.stdout.close()
        raise RuntimeError(f"gristmill record did not start: {log.read_text()}")
    deadline = time.monotonic() + _PROBED_S
    while " probed" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    return Recorder(process, line.split("ready: ")[1].split()[0], log)


def end(recorder: Recorder) -> None:
    recorder.process.terminate()
    try:
        recorder.process.wait(timeout=30)
    finally:
        recorder.process.kill()
        recorder.process.wait()
        if recorder.process.stdout is not None:
            recorder.process.stdout.close()


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Status and body of an answer, whatever it is."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def create_run(address: str, run: str, **more: Any) -> None:
    with RolloutClient(address, run, timeout_s=20) as client:
        client.create_run({**CONFIG, **more})


@dataclass(frozen=True)
class TrainedRow:
    """tokens: prompt and response without padding. trained: of these, which have loss_mask 1, with their logprobs."""

    tokens: list[int]
    trained: list[int]
    logprobs: list[float]
    reward: float


def trained(address: str, run: str) -> list[TrainedRow]:
    """The rows of the run's first batch as a trainer gets them."""
    (rows,) = batches(address, run, 1)
    return rows


def batches(address: str, run: str, count: int) -> list[list[TrainedRow]]:
    """The rows of the run's first batches, each of one mini-batch."""
    with TrainerClient(address, run, 0, timeout_s=20) as trainer:
        result = []
        for _, batch in zip(range(count), trainer, strict=False):
            (shard,) = batch.mini_batches()
            result.append(list(_rows(shard)))
            shard.ack()
    return result


def _rows(shard: Shard) -> Iterator[TrainedRow]:
    names = ("sequences", "attention_mask", "loss_mask", "rewards", "is_padding")
    sequences, attention, masks, rewards, padding = (shard[name].tolist() for name in names)
    logprobs = shard["rollout_logprobs"].tolist() if "rollout_logprobs" in shard else masks
    for row in range(len(sequences)):
        if padding[row]:
            continue
        tokens = [token for token, is_there in zip(sequences[row], attention[row], strict=True) if is_there]
        width = len(masks[row])
        tail = sequences[row][-width:]
        kept = [position for position in range(width) if masks[row][position]]
        own = [logprobs[row][position] for position in kept]
        yield TrainedRow(tokens, [tail[position] for position in kept], own, sum(rewards[row]))
