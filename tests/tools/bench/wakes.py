"""Measures how soon ranks that wait for a batch are woken, and how much producers lose meanwhile."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np

from gristmill import RolloutClient
from gristmill._wire.addresses import Position
from gristmill.v1 import run_pb2, trainer_pb2
from tests.tools.bench.figures import Figure
from tests.tools.bench.other_side import SETTLED_S, OtherSide, other_side
from tests.tools.bench.ranks import Ranks
from tests.tools.bench.submissions import SAMPLES, SHORT, Sender, tables

RANKS, WAKES = 64, 20
WAITING = 256


def figures() -> Iterator[Figure]:
    with other_side() as side:
        yield from _woken(side)
        yield _producers(side)


def _woken(side: OtherSide) -> Iterator[Figure]:
    """From a batch's publication until a waiting rank has its answer, with a connection for each; and the same of bare
    gRPC, whose handlers wait for one event."""
    run = "woken"
    side.create(run, train_batch_size=1, policy_mini_batch_size=1, n_samples_per_prompt=2)
    ours, bare = Ranks(side.grpc_address, RANKS), Ranks(side.bare_address, RANKS)
    ours_s: list[float] = []
    bare_s: list[float] = []
    with ThreadPoolExecutor(1) as pool, RolloutClient(side.grpc_address, run) as client:
        for number in range(WAKES + 2):
            request = trainer_pb2.GetBatchRequest(run=run, batch=number, wait_s=20).SerializeToString()
            ours.ask("/gristmill.v1.TrainerService/GetBatch", request)
            side.until_waiting(RANKS)
            filled = pool.submit(_complete_group, client, f"prompt-{number}")
            answered = ours.answered()
            filled.result()
            published = json.loads(side.call("Published", run.encode()))[number]
            bare.ask("/bare/Wait", b"")
            time.sleep(SETTLED_S)
            release = pool.submit(side.call, "Release", b"")
            released = bare.answered()
            if number >= 2:
                ours_s += [at - published for at in answered]
                bare_s += [at - json.loads(release.result()) for at in released]
            _acknowledge(side, run, number)
    ours.close()
    bare.close()
    side.delete(run)
    for name, percent, reach in (("p99", 99, 5.0), ("median", 50, None)):
        value, limit = (float(np.percentile(latencies, percent)) * 1e3 for latencies in (ours_s, bare_s))
        yield Figure(f"wake.{name}_ms", value, "ms", reach, limit, "ms, bare gRPC")
        if name == "p99":
            yield Figure("wake.p99_ratio", value / limit, "x bare gRPC", 1.2, limit, "ms")


def _complete_group(client: RolloutClient, uid: str) -> None:
    for sample in range(2):
        with client.trajectory(uid, sample) as trajectory:
            trajectory.step([1, 2], [3, 4], reward=float(sample), is_last_step=True)
    client.flush()


def _acknowledge(side: OtherSide, run: str, batch: int) -> None:
    request = trainer_pb2.AcknowledgeRequest(run=run, model=run_pb2.MODEL_POLICY, position=Position(batch).message())
    request.commit = True
    side.transport.call(side.transport.trainers.Acknowledge, request)


def _producers(side: OtherSide) -> Figure:
    """Rows per second that producers get accepted, a group at a time so that the run changes often, with and without
    ranks that wait for its first batch."""
    groups = [
        table.take(np.arange(at, at + SAMPLES))
        for table in tables(SHORT, 12 << 20)
        for at in range(0, len(table), SAMPLES)
    ]
    sender, numbers = Sender(side.grpc_address, groups), iter(range(1000))

    def sent(waiting: int) -> float:
        run = f"produced-{next(numbers)}"
        side.create(run)
        with _waiting(side, run, waiting):
            return sender.seconds(run)

    sent(0)
    rounds = []
    for number in range(10):
        # Either is first as often, so that drift cancels.
        first, second = (0, WAITING) if number % 2 else (WAITING, 0)
        taken = {first: sent(first), second: sent(second)}
        rounds.append((taken[0], taken[WAITING]))
    sender.close()
    ratio = statistics.median(without / among for without, among in rounds)
    rows = sender.rows / statistics.median(without for without, _ in rounds)
    return Figure("wake.producer_ratio", ratio, "x", 0.95, rows, "rows/s, nobody waiting", at_most=False)


@contextmanager
def _waiting(side: OtherSide, run: str, count: int) -> Iterator[None]:
    """That many ranks wait for the run's first batch; the run is deleted afterwards, which ends their wait."""
    request = trainer_pb2.GetBatchRequest(run=run, wait_s=30)
    calls = [side.transport.trainers.GetBatch for _ in range(count)]
    with ThreadPoolExecutor(max(1, count)) as pool:
        waits: list[Future[Any]] = [pool.submit(call, request, timeout=60) for call in calls]
        side.until_waiting(count)
        yield
        side.delete(run)
        assert all(isinstance(wait.exception(), grpc.RpcError) for wait in waits)
