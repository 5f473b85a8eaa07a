"""A crowd: 256 ranks wait for one batch while 256 workers each send a turn every half second, compared with bare gRPC.

The bare server takes the same turns, and releases as many waiters by one event.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.tools.bench.bare import DISCARD, Bare, bare
from tests.tools.bench.figures import Figure
from tests.tools.bench.processes import Served, cpu_s, served
from tests.tools.bench.submissions import run_of_its_own
from tests.tools.bench.teams import Team, team
from tests.tools.bench.workers import SUBMIT, Load, Sent, Workers, workers

WORKERS = RANKS = 256
EVERY_S = 0.5
SAMPLES = 4
WAKES = 3
"""In a round: each worker completes a group in two seconds, and all of them together a batch."""
BATCH_S = SAMPLES * EVERY_S
LOAD_S = WAKES * BATCH_S
ROUNDS = 3


@dataclass
class Seen:
    """One side's rounds. spreads_s: from the first to the last rank that was awake, of each wake."""

    cpu_ms: list[float] = field(default_factory=list)
    p99_s: list[float] = field(default_factory=list)
    p50_s: list[float] = field(default_factory=list)
    spreads_s: list[float] = field(default_factory=list)

    def add(self, sent: Sent, cpu_s: float) -> None:
        self.cpu_ms.append(cpu_s / len(sent.latencies_s) * 1e3)
        self.p99_s.append(sent.quantile(0.99))
        self.p50_s.append(sent.quantile(0.5))


def figures() -> Iterator[Figure]:
    ours, limit = Seen(), Seen()
    with (
        served() as service,
        bare(RANKS + 64) as limit_server,
        workers(WORKERS) as sending,
        team("tests.tools.bench.waiting_ranks", RANKS) as ranks,
    ):
        with run_of_its_own(service.grpc_address, "warm"):
            sending.send(Load(service.grpc_address, SUBMIT, "warm", 1.0, EVERY_S))
        sending.send(Load(limit_server.address, DISCARD, "warm", 1.0, EVERY_S))
        for number in range(ROUNDS):
            if number % 2:
                _bare_round(limit_server, ranks, sending, limit)
            _round(service, ranks, sending, f"crowd-{number}", ours)
            if not number % 2:
                _bare_round(limit_server, ranks, sending, limit)
    yield from _compared(ours, limit)


def _compared(ours: Seen, limit: Seen) -> Iterator[Figure]:
    median = statistics.median
    cpu = median(mine / bound for mine, bound in zip(ours.cpu_ms, limit.cpu_ms, strict=True))
    yield Figure("crowd.turn_cpu_ratio", cpu, "x bare gRPC", 1.7, median(limit.cpu_ms), "ms")
    for name, mine, bound, reach in (
        ("turn_p99", ours.p99_s, limit.p99_s, 2.0),
        ("turn_p50", ours.p50_s, limit.p50_s, None),
        ("wake_spread", ours.spreads_s, limit.spreads_s, 3.0),
    ):
        value, least = median(mine), median(bound)
        yield Figure(f"crowd.{name}_ratio", value / least, "x bare gRPC", reach, least * 1e3, "ms")


def _round(service: Served, ranks: Team, sending: Workers, run: str, seen: Seen) -> None:
    """The workers' own turns complete batch after batch, for each of which all ranks wait."""

    def wake() -> None:
        for batch in range(WAKES):
            ranks.order({"address": service.grpc_address, "run": run, "batch": batch})
            seen.spreads_s.append(_spread(ranks.answers()))

    shape = {"n_samples_per_prompt": SAMPLES, "train_batch_size": WORKERS, "policy_mini_batch_size": WORKERS}
    with run_of_its_own(service.grpc_address, run, dp_size=RANKS, max_buffered_batches=2 * WAKES, **shape):
        load = Load(service.grpc_address, SUBMIT, run, LOAD_S, EVERY_S, SAMPLES)
        before = cpu_s(service.process.pid)
        sent = sending.send(load, meanwhile=wake)
        seen.add(sent, cpu_s(service.process.pid) - before)


def _bare_round(server: Bare, ranks: Team, sending: Workers, seen: Seen) -> None:
    def wake() -> None:
        for _ in range(WAKES):
            ranks.order({"address": server.address})
            time.sleep(BATCH_S)
            server.release()
            seen.spreads_s.append(_spread(ranks.answers()))

    before = cpu_s(server.pid)
    sent = sending.send(Load(server.address, DISCARD, "bare", LOAD_S, EVERY_S, SAMPLES), meanwhile=wake)
    seen.add(sent, cpu_s(server.pid) - before)


def _spread(times: list[float]) -> float:
    return max(times) - min(times)
