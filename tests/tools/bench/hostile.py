"""Measures what a caller that floods the service costs others: the turns of another run compared with those at a second
service of the same machine in the same seconds, and memory. Each caller has a token of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gristmill import RolloutClient
from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.transport import Transport
from gristmill.v1 import trainer_pb2
from gristmill_service.access.tokens import create_token
from tests.tools.bench.figures import Figure, p99
from tests.tools.bench.flooding import BATCHES, RUN, Flood
from tests.tools.bench.processes import Served, cpu_s, served
from tests.tools.bench.submissions import config
from tests.tools.bench.submit import turn_rows

FLOOD_S, SETTLED_S, ENDED_S = 12.0, 4.0, 6.0
EVERY_S = 0.025
"""A turn begins this often, whether or not those before have ended: a stall counts for each turn that it delays."""
MIB = 1 << 20
MAX_ROW_BYTES, MAX_MESSAGE_BYTES = 256 * MIB, 16 * MIB
APIS, AT_ONCE = 2, 32
"""Requests that each API reads at once."""
REFUSED = (
    "wrong_bodies",
    "refused",
    "refused_rows",
    "costly_rows",
    "rows_refused_alone",
    "refused_tokens",
    "large_acknowledgements",
)
SHARD_TOKENS = 4 << 20


def figures() -> Iterator[Figure]:
    worst, peak, kept = {True: 0.0, False: 0.0}, 0.0, 0.0
    for way in Flood("", "", "").ways():
        cost = measure(way)
        worst[way in REFUSED] = max(worst[way in REFUSED], cost.ratio)
        peak, kept = max(peak, cost.peak), max(kept, cost.kept)
        yield Figure(f"hostile.{way}_p99_ratio", cost.ratio, "x control", None, cost.control_ms, "ms")
        yield Figure(f"hostile.{way}_kept_mib", cost.kept / MIB, "MiB", None)
    yield Figure("hostile.neighbour_p99_ratio", worst[False], "x control", 3.0)
    yield Figure("hostile.neighbour_of_refused_p99_ratio", worst[True], "x control", 10.0)
    yield Figure("hostile.kept_mib", kept / MIB, "MiB", 96.0)
    limits = MAX_ROW_BYTES + APIS * AT_ONCE * MAX_MESSAGE_BYTES
    yield Figure("hostile.memory_ratio", peak / limits, "x limits", 1.5, limits / MIB, "MiB")


class Cost(NamedTuple):
    """ms, control_ms: the p99 of turns at the flooded service, and at the other one. peak, kept: bytes of the flooded
    service in addition to those before, at most and after the flood. cores: the cores that it uses during the flood."""

    ms: float
    control_ms: float
    longest_ms: float
    peak: float
    kept: float
    cores: float

    @property
    def ratio(self) -> float:
        return self.ms / self.control_ms


def measure(way: str) -> Cost:
    with ExitStack() as opened:
        path = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "tokens.yaml"
        tokens = {
            run: create_token(path, run, ["worker", "trainer"], [runs], None)
            for run, runs in (("victim", "victim"), (RUN, f"{RUN}*"))
        }
        flags = ["--store", "memory", "--tokens-file", str(path), "--max-row-bytes", str(MAX_ROW_BYTES)]
        flags += ["--max-message-bytes", str(MAX_MESSAGE_BYTES)]
        services = [opened.enter_context(served(flags)) for _ in range(2)]
        _create(services[0], tokens[RUN])
        neighbours = [opened.enter_context(_client(service, "victim", tokens["victim"])) for service in services]
        for client in neighbours:
            client.create_run(_settings())
            client.submit(turn_rows(100, "first"))
        idle = _memory(services[0], "VmRSS")
        with _flooded(way, services[0], tokens[RUN]):
            time.sleep(SETTLED_S)
            begin, spent = time.monotonic(), cpu_s(services[0].process.pid)
            here, elsewhere = _turns(neighbours)
            cores = (cpu_s(services[0].process.pid) - spent) / (time.monotonic() - begin)
        time.sleep(ENDED_S)
        neighbours[0].submit(turn_rows(10, "last"))
        peak, kept = (_memory(services[0], field) - idle for field in ("VmHWM", "VmRSS"))
        return Cost(1e3 * p99(here), 1e3 * p99(elsewhere), 1e3 * max(here), peak, kept, cores)


def _turns(clients: list[RolloutClient]) -> list[list[float]]:
    """Returns the seconds of each client's turns, from the time at which each was to begin. The clients alternate."""
    times: list[list[float]] = [[] for _ in clients]
    begin = time.monotonic() + 0.1

    def keep_on(number: int, client: RolloutClient) -> None:
        rows = turn_rows(int(FLOOD_S / EVERY_S), f"turn-{number}")
        for turn, row in enumerate(rows):
            due = begin + EVERY_S * (turn + number / len(clients))
            time.sleep(max(0.0, due - time.monotonic()))
            client.submit([row])
            times[number].append(time.monotonic() - due)

    threads = [threading.Thread(target=keep_on, args=one) for one in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def _client(service: Served, run: str, token: str) -> RolloutClient:
    return RolloutClient(service.grpc_address, run, credentials=Credentials(token=token))


@contextmanager
def _flooded(way: str, service: Served, token: str) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.tools.bench.flooding", way, service.grpc_address, service.http_url, token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.send_signal(signal.SIGKILL)


def _create(service: Served, token: str) -> None:
    with _client(service, RUN, token) as client:
        client.create_run(_settings())
    with _client(service, BATCHES, token) as client:
        client.create_run(
            {**_settings(), "train_batch_size": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
        )
        rows = turn_rows(8, "shard")
        for row in rows:
            row["prompt_token_ids"] = np.ones(SHARD_TOKENS // len(rows), np.int32)
        client.submit(rows)
    transport = Transport(service.grpc_address, 60.0, "bench", Credentials(token=token))
    answer = transport.call(transport.trainers.GetBatch, trainer_pb2.GetBatchRequest(run=BATCHES, wait_s=30), wait_s=30)
    assert answer.state == trainer_pb2.BATCH_STATE_PUBLISHED
    transport.close()


def _settings() -> dict[str, object]:
    settings: dict[str, object] = config().model_dump(mode="json", exclude_defaults=True)
    return settings


def _memory(service: Served, field: str) -> int:
    for line in Path(f"/proc/{service.process.pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
