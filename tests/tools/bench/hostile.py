"""Measures what a caller that floods the service costs others: the turns of another run next to it, and memory beyond
what the limits say. Each has a token of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gristmill import RolloutClient
from gristmill._client.connection.credentials import Credentials
from gristmill_service.access.tokens import create_token
from tests.tools.bench.figures import Figure, p99, seconds
from tests.tools.bench.flooding import RUN, Flood
from tests.tools.bench.processes import Served, cpu_s, served
from tests.tools.bench.submissions import config
from tests.tools.bench.submit import turn_rows

SLICES, TURNS = 4, 200
SETTLED_S, ALONE_S = 0.3, 4.0
MIB = 1 << 20
MAX_ROW_BYTES, MAX_MESSAGE_BYTES = 256 * MIB, 16 * MIB
APIS, AT_ONCE = 2, 32
"""Requests that each API reads at once."""


def figures() -> Iterator[Figure]:
    worst = peak = worst_elsewhere = 0.0
    quiet_ms = 0.0
    for way in Flood("", "", "").ways():
        times = _measure(way)
        peak, worst_elsewhere = max(peak, times.over), max(worst_elsewhere, times.elsewhere)
        if times.ratio > worst:
            worst, quiet_ms = times.ratio, times.quiet * 1e3
        yield Figure(f"hostile.{way}_p99_ratio", times.ratio, "x without load", None, times.quiet * 1e3, "ms")
        yield Figure(f"hostile.{way}_elsewhere_p99_ratio", times.elsewhere, "x without load", None)
        yield Figure(f"hostile.{way}_cores", times.cores, "cores", None)
    yield Figure("hostile.neighbour_p99_ratio", worst, "x without load", 10.0, quiet_ms, "ms")
    yield Figure("hostile.elsewhere_p99_ratio", worst_elsewhere, "x without load", None)
    limits = MAX_ROW_BYTES + APIS * AT_ONCE * MAX_MESSAGE_BYTES
    yield Figure("hostile.memory_ratio", peak / limits, "x limits", 1.5, limits / MIB, "MiB")


class _Slowdown(NamedTuple):
    """quiet: the p99 of a turn's seconds without load. ratio: the p99 during the flood over that. elsewhere: the same
    of turns at another service of this machine, which the flood does not call: what two cores do. over: the service's
    most bytes over idle ones. cores: the cores that the service takes for the flood alone."""

    quiet: float
    ratio: float
    elsewhere: float
    over: float
    cores: float


def _measure(way: str) -> _Slowdown:
    with ExitStack() as opened:
        path = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "tokens.yaml"
        tokens = {run: create_token(path, run, ["worker"], [run], None) for run in ("victim", RUN)}
        flags = ["--store", "memory", "--tokens-file", str(path), "--max-row-bytes", str(MAX_ROW_BYTES)]
        flags += ["--max-message-bytes", str(MAX_MESSAGE_BYTES)]
        services = [opened.enter_context(served(flags)) for _ in range(2)]
        _create(services[0], RUN, tokens[RUN])
        clients = [opened.enter_context(_client(service, "victim", tokens["victim"])) for service in services]
        for number, client in enumerate(clients):
            client.create_run(_settings())
            _turns(client, f"first-{number}")
        idle = _memory(services[0], "VmRSS")
        flood = opened.enter_context(_flooded(way, services[0], tokens[RUN]))
        times = [_Times() for _ in clients]
        for number in range(SLICES):
            # In alternation, so that what else the machine does slows both.
            for name, sign in (("quiet", signal.SIGSTOP), ("busy", signal.SIGCONT)):
                flood.send_signal(sign)
                time.sleep(SETTLED_S)
                for client, measured in zip(clients, times, strict=True):
                    getattr(measured, name).extend(_turns(client, f"{name}-{number}"))
        over = _memory(services[0], "VmHWM") - idle
        here, elsewhere = times
        return _Slowdown(p99(here.quiet), here.ratio, elsewhere.ratio, over, _cores(services[0]))


@dataclass
class _Times:
    """Seconds of turns, without load and during the flood."""

    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return p99(self.busy) / p99(self.quiet)


def _turns(client: RolloutClient, name: str) -> list[float]:
    return [seconds(lambda row=row: client.submit([row])) for row in turn_rows(TURNS, name)]  # type: ignore[misc]


def _client(service: Served, run: str, token: str) -> RolloutClient:
    return RolloutClient(service.grpc_address, run, credentials=Credentials(token=token))


@contextmanager
def _flooded(way: str, service: Served, token: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.tools.bench.flooding", way, service.grpc_address, service.http_url, token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)


def _cores(service: Served) -> float:
    begin, spent = time.monotonic(), cpu_s(service.process.pid)
    time.sleep(ALONE_S)
    return (cpu_s(service.process.pid) - spent) / (time.monotonic() - begin)


def _create(service: Served, run: str, token: str) -> None:
    with _client(service, run, token) as client:
        client.create_run(_settings())


def _settings() -> dict[str, object]:
    settings: dict[str, object] = config().model_dump(mode="json", exclude_defaults=True)
    return settings


def _memory(service: Served, field: str) -> int:
    for line in Path(f"/proc/{service.process.pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
