"""Rows as workers send them: tables of about 4 MiB, which is what the client puts into a message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import numpy as np

from gristmill._client.connection.transport import Transport
from gristmill._wire.codecs.row_codec import encode
from gristmill._wire.columns import Ragged
from gristmill._wire.steps import Steps
from gristmill.v1 import rollout_pb2, run_pb2
from gristmill_service.config import RunConfig, parse_config
from tests.tools.bench.workloads import Workload

MESSAGE_BYTES = 4 << 20
SAMPLES = 8
LONG, SHORT = (2_000, 16_000), (200, 500)
"""Tokens of a row, least and most; a quarter of them is its response."""

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_METHOD = "/gristmill.v1.RolloutService/SubmitRows"
_SENDERS = 4


def config(**more: object) -> RunConfig:
    """A run that seals nothing by itself."""
    return parse_config(
        {
            "train_batch_size": 1 << 16,
            "n_samples_per_prompt": SAMPLES,
            "policy_mini_batch_size": 1 << 16,
            "step_wise": True,
            "micro_batch": {"max_tokens": 65_536},
            **more,
        }
    )


@contextmanager
def run_of_its_own(address: str, name: str, **more: object) -> Iterator[None]:
    """A run of `config`, which is deleted afterwards."""
    transport = Transport(address, 60.0, "bench")
    made = config(**more).model_dump_json(exclude_defaults=True)
    transport.call(transport.runs.CreateRun, run_pb2.CreateRunRequest(run=name, config_json=made))
    try:
        yield
    finally:
        transport.call(transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=name))
        transport.close()


def tables(lengths: tuple[int, int], nbytes: int) -> Iterator[Steps]:
    """Whole groups of single-step trajectories with logprobs, of about that many bytes in all, some MiB per table."""
    rng = np.random.default_rng(11)
    pool = rng.integers(0, 150_000, 4 << 20, dtype=np.int32)
    logprobs = -rng.random(2 << 20, dtype=np.float32)
    groups = 0
    while nbytes > 0:
        totals: list[int] = []
        size = 0
        while size < MESSAGE_BYTES * 0.97:
            more = rng.integers(*lengths, SAMPLES)
            totals += more.tolist()
            size += 5 * int(more.sum())
        table = _table(pool, logprobs, np.array(totals, np.int64), groups, int(rng.integers(0, 1 << 20)))
        groups += len(totals) // SAMPLES
        nbytes -= size
        yield table


def _table(pool: np.ndarray, logprobs: np.ndarray, totals: np.ndarray, first: int, at: int) -> Steps:
    count, responses = len(totals), totals // 4
    samples = np.arange(count, dtype=np.int32) % SAMPLES
    return Steps(
        uids=[f"prompt-{first + row // SAMPLES}" for row in range(count)],
        rounds=np.zeros(count, np.int32),
        samples=samples,
        steps=np.zeros(count, np.int32),
        attempts=np.zeros(count, np.int32),
        is_last_steps=np.ones(count, np.bool_),
        stop_reasons=["stop"] * count,
        policy_versions=np.zeros(count, np.int32),
        tokens=Ragged.from_lengths(pool[at : at + int(totals.sum())], totals),
        prompt_lengths=totals - responses,
        loss_mask=Ragged.from_lengths(np.ones(int(responses.sum()), np.uint8), responses),
        logprobs=Ragged.from_lengths(logprobs[: int(responses.sum())], responses),
        rewards=samples.astype(np.float64),
        token_rewards=None,
        rewards_pending=np.zeros(count, np.bool_),
    )


def split(work: Workload) -> Iterator[Steps]:
    """A workload's rows in tables of at most a message."""
    steps = work.steps
    start, size = 0, 0
    for row, length in enumerate([*steps.tokens.lengths.tolist(), MESSAGE_BYTES]):
        if size + 5 * length > MESSAGE_BYTES and row > start:
            yield _compact(steps.take(np.arange(start, row)))
            start, size = row, 0
        size += 5 * length


def _compact(table: Steps) -> Steps:
    def fresh(column: Ragged) -> Ragged:
        return Ragged.from_arrays(column.arrays(), column.values.dtype)

    logprobs = None if table.logprobs is None else fresh(table.logprobs)
    return replace(table, tokens=fresh(table.tokens), loss_mask=fresh(table.loss_mask), logprobs=logprobs)


class Sender:
    """Sends the same messages to run after run of a service, encoded before, so that little of the machine goes into
    that."""

    def __init__(self, address: str, batches: list[Steps]) -> None:
        self._channels = [grpc.insecure_channel(address, [*_OPTIONS, ("sender", at)]) for at in range(_SENDERS)]
        self._rows = [rollout_pb2.SubmitRowsRequest(rows=encode(table)).SerializeToString() for table in batches]
        self.nbytes = sum(map(len, self._rows))
        self.rows = sum(map(len, batches))

    def seconds(self, run: str) -> float:
        """Seconds of all messages, over several connections at once. The run exists and is empty."""
        # Of a field that comes twice the last one counts.
        name = rollout_pb2.SubmitRowsRequest(run=run).SerializeToString()
        requests = [rows + name for rows in self._rows]
        with ThreadPoolExecutor(_SENDERS) as pool:
            begin = time.perf_counter()
            list(pool.map(self._send, range(_SENDERS), [requests[at::_SENDERS] for at in range(_SENDERS)]))
            return time.perf_counter() - begin

    def _send(self, at: int, requests: list[bytes]) -> None:
        send = self._channels[at].unary_unary(_METHOD)
        for request in requests:
            send(request, timeout=60)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
