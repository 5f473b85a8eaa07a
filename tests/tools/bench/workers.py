"""Rollout workers in a few processes, a thread and a connection for each, that send turns which were encoded before.

The same workers send to the service and to bare gRPC, by turns. `python -m tests.tools.bench.workers COUNT FIRST` is
one of the processes, whose orders are loads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import numpy as np

from gristmill._wire.codecs.submit_codec import encode
from gristmill._wire.columns import Ragged
from gristmill._wire.steps import Steps
from gristmill.v1 import rollout_pb2, rows_pb2
from tests.tools.bench.submissions import SAMPLES
from tests.tools.bench.teams import Team, lead, team

SUBMIT = "/gristmill.v1.RolloutService/SubmitRows"
TURN_PROMPT, TURN_RESPONSE = 600, 200
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_START_S = 0.3
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Load:
    """Where turns go and for how long; the run has taken none. every_s: how often each worker sends one; None: as soon
    as it is answered.
    samples: turns of a group."""

    address: str
    method: str
    run: str
    seconds: float
    every_s: float | None = None
    samples: int = SAMPLES


@dataclass(frozen=True)
class Sent:
    """latencies_s: of each turn. rate: turns that were answered within the time, a second."""

    latencies_s: list[float]
    rate: float

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.latencies_s, share))


@contextmanager
def workers(count: int) -> Iterator[Workers]:
    with team("tests.tools.bench.workers", count) as processes:
        yield Workers(processes)


class Workers:
    def __init__(self, processes: Team) -> None:
        self._processes = processes

    def send(self, load: Load, meanwhile: Callable[[], object] = lambda: None) -> Sent:
        """Returns when all workers have sent. meanwhile: called while they send."""
        self._processes.order(asdict(load))
        meanwhile()
        answered = self._processes.answers()
        in_time = sum(is_in_time for _, is_in_time in answered)
        return Sent([latency for latency, _ in answered], in_time / load.seconds)


class Worker:
    """One of them. Turns of its own groups are the same tokens under other names: encoding would cost the machine."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._calls: dict[tuple[str, str], grpc.UnaryUnaryMultiCallable] = {}

    def connect(self, load: Load) -> None:
        key = load.address, load.method
        if key not in self._calls:
            channel = grpc.insecure_channel(load.address, _OPTIONS)
            grpc.channel_ready_future(channel).result(_TIMEOUT_S)
            self._calls[key] = channel.unary_unary(load.method)

    def send(self, load: Load, turns: list[bytes], start: float) -> list[tuple[float, bool]]:
        """Gives how long each answer took, and whether it came within the time."""
        call, end = self._calls[load.address, load.method], start + load.seconds
        answers: list[tuple[float, bool]] = []
        answer = b""
        for number in self._numbers(load, start, end):
            turn = turns[number % load.samples].replace(_PLACEHOLDER, self._uid(number // load.samples))
            begin = time.monotonic()
            answer = call(turn, timeout=_TIMEOUT_S)
            answered = time.monotonic()
            answers.append((answered - begin, answered <= end))
        if load.method == SUBMIT:
            outcomes = rollout_pb2.SubmitRowsResponse.FromString(answer).outcomes
            assert list(outcomes) == [rows_pb2.ROW_OUTCOME_ACCEPTED], outcomes
        return answers

    def _numbers(self, load: Load, start: float, end: float) -> Iterator[int]:
        """Counts turns from 0, each when it is due. Paced workers send all of theirs, late ones too."""
        if load.every_s is None:
            time.sleep(max(0.0, start - time.monotonic()))
            yield from itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())
            return
        # Spread over the interval, so that they do not send all at once.
        first = start + load.every_s * (self._number * 0.618 % 1)
        for number in range(round(load.seconds / load.every_s)):
            time.sleep(max(0.0, first + number * load.every_s - time.monotonic()))
            yield number

    def _uid(self, group: int) -> bytes:
        return f"{self._number:03d}-{group:06d}".encode()


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


def carry_out(members: list[Worker], pool: ThreadPoolExecutor, order: dict[str, Any]) -> list[tuple[float, bool]]:
    load = Load(**order)
    for worker in members:
        worker.connect(load)
    turns, start = _turns(load.run), time.monotonic() + _START_S
    return [turn for sent in pool.map(lambda worker: worker.send(load, turns, start), members) for turn in sent]


if __name__ == "__main__":
    lead(Worker, carry_out)
