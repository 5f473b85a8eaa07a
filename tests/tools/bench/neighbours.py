"""Measures how soon the ranks of one run are woken while another run is slow: its store answers after half a second, or
its workers wait with thousands of groups each for which there is no room while it changes."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from gristmill._client.connection.transport import Transport
from gristmill.errors import GristmillError
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from tests.redis.proxy import Proxy
from tests.redis.servers import RedisServer
from tests.tools.bench.figures import Figure
from tests.tools.bench.processes import served
from tests.tools.bench.ranks import Ranks
from tests.tools.bench.submissions import config

RANKS, WAKES = 16, 15
STORE_DELAY_S = 0.5
WAITERS, GROUPS = 16, 20_000
CHANGE_EVERY_S = 0.2
_SETTLED_S = 0.25
_BEGUN_S = 3.0
_SLOW = "slow"
_GET_BATCH = "/gristmill.v1.TrainerService/GetBatch"

Work = Callable[[Transport, int], object]


def figures() -> Iterator[Figure]:
    quiet, busy = _with_waiters()
    slow = _with_a_slow_store()
    quiet_ms, busy_ms, slow_ms = (float(np.percentile(latencies, 99)) * 1e3 for latencies in (quiet, busy, slow))
    yield Figure("wake.loaded_ms", max(busy_ms, slow_ms), "ms", 50.0, quiet_ms, "ms, without load")
    yield Figure("wake.slow_store_ms", slow_ms, "ms", None, quiet_ms, "ms, without load")
    yield Figure("wake.waiters_ms", busy_ms, "ms", None, quiet_ms, "ms, without load")


def _with_waiters() -> tuple[list[float], list[float]]:
    """Latencies without load, and next to a run that is full, where each worker asks for thousands of groups."""
    with served(["--store", "memory"]) as service:
        transport = Transport(service.grpc_address, 60.0, "bench")
        quiet = _woken(service.grpc_address, transport, "quiet")
        _create(transport, _SLOW, max_buffered_batches=1, train_batch_size=1, policy_mini_batch_size=1)
        _call(transport, "rollouts.BeginGroups", rollout_pb2.BeginGroupsRequest(run=_SLOW, uids=["full"]))
        with _busy(service.grpc_address, [_wait_for_groups] * WAITERS + [_change]):
            busy = _woken(service.grpc_address, transport, "busy")
        transport.close()
    return quiet, busy


def _with_a_slow_store() -> list[float]:
    """From the answer of the call that wakes, which takes the store's time itself, to the last rank's."""
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory())
        server = opened.enter_context(RedisServer(Path(directory), appendonly="no"))
        proxy = opened.enter_context(Proxy(server.port))
        flags = ["--store", "redis", "--redis-url", proxy.url, "--lease-s", "10"]
        address = opened.enter_context(served(flags)).grpc_address
        transport = Transport(address, 60.0, "bench")
        opened.callback(transport.close)
        _create(transport, _SLOW)
        runs = [_create(transport, f"woken-{number}") for number in range(WAKES)]
        proxy.delay(STORE_DELAY_S / 2)
        with _busy(address, [_begin] * 2 + [_wait_for_batch] * 4):
            latencies = _wakes(address, transport, runs, from_answer=True)
        proxy.delay(0)
    return latencies


# Waking.


def _woken(address: str, transport: Transport, name: str) -> list[float]:
    return _wakes(address, transport, [_create(transport, f"{name}-{number}") for number in range(WAKES)])


def _wakes(address: str, transport: Transport, runs: list[str], from_answer: bool = False) -> list[float]:
    """Seconds from a run's end, which its ranks wait for, until each of them knows. One wake of each run."""
    ranks, latencies = Ranks(address, RANKS), []
    for run in runs:
        ranks.ask(_GET_BATCH, trainer_pb2.GetBatchRequest(run=run, wait_s=30).SerializeToString())
        time.sleep(_SETTLED_S)
        answers: list[float] = []
        waiting = threading.Thread(target=lambda answers=answers: answers.extend(ranks.answered()))
        waiting.start()
        begin = time.monotonic()
        _call(transport, "runs.FinishRun", run_pb2.FinishRunRequest(run=run))
        begin = time.monotonic() if from_answer else begin
        waiting.join()
        latencies += [max(0.0, answered - begin) for answered in answers]
    ranks.close()
    return latencies


# The slow run.


@contextmanager
def _busy(address: str, work: Sequence[Work]) -> Iterator[None]:
    """Each of these over and over, in a thread and with a connection of its own, until the slow run is deleted."""
    ended = threading.Event()

    def keep_on(number: int, one: Work) -> None:
        transport = Transport(address, 60.0, f"busy-{number}")
        while not ended.is_set():
            with suppress(GristmillError, grpc.RpcError):
                one(transport, number)
        transport.close()

    threads = [threading.Thread(target=keep_on, args=named) for named in enumerate(work)]
    for thread in threads:
        thread.start()
    time.sleep(_BEGUN_S)
    yield
    ended.set()
    transport = Transport(address, 60.0, "bench")
    _call(transport, "runs.DeleteRun", run_pb2.DeleteRunRequest(run=_SLOW))
    for thread in threads:
        thread.join()
    transport.close()


def _wait_for_groups(transport: Transport, number: int) -> None:
    uids = [f"{number}-{index}" for index in range(GROUPS)]
    _call(transport, "rollouts.BeginGroups", rollout_pb2.BeginGroupsRequest(run=_SLOW, uids=uids, wait_s=25), 25)


def _change(transport: Transport, number: int) -> None:
    request = run_pb2.AnnouncePolicyVersionRequest(run=_SLOW, version=int(time.monotonic() * 100))
    _call(transport, "runs.AnnouncePolicyVersion", request)
    time.sleep(CHANGE_EVERY_S)


def _wait_for_batch(transport: Transport, number: int) -> None:
    _call(transport, "trainers.GetBatch", trainer_pb2.GetBatchRequest(run=_SLOW, batch=number, wait_s=25), 25)


def _begin(transport: Transport, number: int) -> None:
    request = rollout_pb2.BeginGroupsRequest(run=_SLOW, uids=[f"{number}-{time.monotonic_ns()}"])
    _call(transport, "rollouts.BeginGroups", request)


def _create(transport: Transport, run: str, **more: object) -> str:
    made = config(**more).model_dump_json(exclude_defaults=True)
    _call(transport, "runs.CreateRun", run_pb2.CreateRunRequest(run=run, config_json=made))
    return run


def _call(transport: Transport, name: str, request: Any, wait_s: float = 0.0) -> Any:
    service, _, method = name.partition(".")
    return transport.call(getattr(getattr(transport, service), method), request, wait_s=wait_s)
