"""Rollout workers in a few processes, a thread and a connection for each, that send turns which were encoded before.

The same workers send to the service and to bare gRPC, by turns. `python -m tests.bench.workers WORKERS FIRST` is one of
the processes: it reads a `Load` a line, sends it, and answers with what it saw.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

import grpc
import numpy as np

from gristmill._wire.columns import Ragged
from gristmill._wire.steps import Steps
from gristmill._wire.submit_codec import encode
from gristmill.v1 import rollout_pb2, rows_pb2
from tests.bench.submissions import SAMPLES

SUBMIT = "/gristmill.v1.RolloutService/SubmitRows"
PROCESSES = 4
TURN_PROMPT, TURN_RESPONSE = 600, 200
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_START_S = 0.3
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Load:
    """Where turns go and for how long. every_s: how often each worker sends one; None: as soon as it is answered."""

    address: str
    method: str
    run: str
    seconds: float
    every_s: float | None = None


@dataclass(frozen=True)
class Sent:
    """latencies_s: of each turn that was answered within the time. seconds: how long the workers sent."""

    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.seconds

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.latencies_s, share))


class Workers:
    """The processes, which stay connected from one load to the next."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def send(self, load: Load, beside: Callable[[], object] = lambda: None) -> Sent:
        """Returns when all workers have sent. beside: called while they send."""
        for process in self._processes:
            assert process.stdin is not None
            print(json.dumps(asdict(load)), file=process.stdin, flush=True)
        beside()
        latencies: list[float] = []
        for process in self._processes:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise RuntimeError(f"a process of workers ended while it sent to {load.address}")
            latencies += json.loads(line)
        return Sent(latencies, load.seconds)


@contextmanager
def workers(count: int) -> Iterator[Workers]:
    share = count // PROCESSES
    with ExitStack() as opened:
        processes = []
        for number in range(PROCESSES):
            command = [sys.executable, "-m", "tests.bench.workers", str(share), str(number * share)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            opened.enter_context(process)
            assert process.stdin is not None
            opened.callback(process.stdin.close)
            processes.append(process)
        yield Workers(processes)


class Worker:
    """One of them. Turns of its own groups are the same tokens under other names: encoding would cost the machine."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._calls: dict[tuple[str, str], grpc.UnaryUnaryMultiCallable] = {}
        self._sent: dict[str, int] = {}
        self._turns: dict[str, list[bytes]] = {}

    def connect(self, load: Load) -> None:
        key = load.address, load.method
        if key not in self._calls:
            channel = grpc.insecure_channel(load.address, _OPTIONS)
            grpc.channel_ready_future(channel).result(_TIMEOUT_S)
            self._calls[key] = channel.unary_unary(load.method)
        self._turns = {load.run: self._turns.get(load.run) or _turns(load.run)}

    def send(self, load: Load, start: float) -> list[float]:
        """Gives how long each answer took, of those that came within the time."""
        call = self._calls[load.address, load.method]
        latencies: list[float] = []
        end, answer = start + load.seconds, b""
        # Paced workers are spread over the interval, so that they do not send all at once.
        due = start + (load.every_s or 0.0) * (self._number * 0.618 % 1)
        while (now := time.monotonic()) < end:
            if now < due:
                time.sleep(min(due, end) - now)
                continue
            turn = self._next_turn(load.run)
            begin = time.monotonic()
            answer = call(turn, timeout=_TIMEOUT_S)
            answered = time.monotonic()
            if answered <= end:
                latencies.append(answered - begin)
            due += load.every_s or 0.0
        if load.method == SUBMIT and answer:
            outcomes = rollout_pb2.SubmitRowsResponse.FromString(answer).outcomes
            assert list(outcomes) == [rows_pb2.ROW_OUTCOME_ACCEPTED], outcomes
        return latencies

    def _next_turn(self, run: str) -> bytes:
        number = self._sent.get(run, 0)
        self._sent[run] = number + 1
        uid = f"{self._number:03d}-{number // SAMPLES:06d}".encode()
        return self._turns[run][number % SAMPLES].replace(_PLACEHOLDER, uid)


_PLACEHOLDER = b"www-nnnnnn"


def _turns(run: str) -> list[bytes]:
    """A request of one turn for each sample of a group, under a placeholder of a uid."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 150_000, TURN_PROMPT + TURN_RESPONSE, dtype=np.int32)
    logprobs = -rng.random(TURN_RESPONSE, dtype=np.float32)
    return [encode(run, [_turn(tokens, logprobs, sample)]) for sample in range(SAMPLES)]


def _turn(tokens: np.ndarray, logprobs: np.ndarray, sample: int) -> Steps:
    return Steps(
        uids=[_PLACEHOLDER.decode()],
        rounds=np.zeros(1, np.int32),
        samples=np.array([sample], np.int32),
        steps=np.zeros(1, np.int32),
        attempts=np.zeros(1, np.int32),
        is_last_steps=np.ones(1, np.bool_),
        stop_reasons=["stop"],
        policy_versions=np.zeros(1, np.int32),
        tokens=Ragged.from_arrays([tokens], np.int32),
        prompt_lengths=np.array([TURN_PROMPT], np.int64),
        loss_mask=Ragged.from_arrays([np.ones(TURN_RESPONSE, np.uint8)], np.uint8),
        logprobs=Ragged.from_arrays([logprobs], np.float32),
        rewards=np.ones(1, np.float64),
        token_rewards=None,
        rewards_pending=np.zeros(1, np.bool_),
    )


def main(count: int, first: int) -> None:
    team = [Worker(first + number) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        for line in sys.stdin:
            load = Load(**json.loads(line))
            for worker in team:
                worker.connect(load)
            start = time.monotonic() + _START_S
            latencies = pool.map(lambda worker, load=load, start=start: worker.send(load, start), team)
            print(json.dumps([latency for of_worker in latencies for latency in of_worker]), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
