"""Measures what a caller that floods the service costs others: the turns of another run beside it, and memory beyond
what the limits say. Each has a token of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gristmill import RolloutClient
from gristmill._client.connection.credentials import Credentials
from gristmill_service.access.tokens import create_token
from tests.bench.figures import Figure, seconds
from tests.bench.flooding import RUN, Flood
from tests.bench.processes import Served, served
from tests.bench.submissions import config
from tests.bench.submit import turn_rows

TURNS = 1_000
MIB = 1 << 20
MAX_ROW_BYTES, MAX_MESSAGE_BYTES = 256 * MIB, 16 * MIB
DOORS, AT_ONCE = 2, 32
"""Requests that each door reads at once."""


def figures() -> Iterator[Figure]:
    worst = peak = 0.0
    quiet_ms = 0.0
    for way in Flood("", "", "").ways():
        quiet, busy, over = _beside(way)
        ratio = busy / quiet
        peak = max(peak, over)
        if ratio > worst:
            worst, quiet_ms = ratio, quiet * 1e3
        yield Figure(f"hostile.{way}_p99_ratio", ratio, "x beside nobody", None, quiet * 1e3, "ms")
    yield Figure("hostile.neighbour_p99_ratio", worst, "x beside nobody", 3.0, quiet_ms, "ms")
    limits = MAX_ROW_BYTES + DOORS * AT_ONCE * MAX_MESSAGE_BYTES
    yield Figure("hostile.memory_ratio", peak / limits, "x limits", 1.5, limits / MIB, "MiB")


def _beside(way: str) -> tuple[float, float, float]:
    """The p99 of a turn's seconds beside nobody and beside the flood, and the service's most bytes over idle ones."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokens.yaml"
        tokens = {run: create_token(path, run, ["worker"], [run], None) for run in ("victim", RUN)}
        flags = ["--store", "memory", "--tokens-file", str(path), "--max-row-bytes", str(MAX_ROW_BYTES)]
        flags += ["--max-message-bytes", str(MAX_MESSAGE_BYTES)]
        with served(flags) as service:
            _create(service, RUN, tokens[RUN])
            victim = Credentials(token=tokens["victim"])
            with RolloutClient(service.grpc_address, "victim", credentials=victim) as client:
                client.create_run(_settings())
                quiet = _p99(client, "quiet")
                idle = _memory(service, "VmRSS")
                with _flooded(way, service, tokens[RUN]):
                    busy = _p99(client, "busy")
                return quiet, busy, _memory(service, "VmHWM") - idle


def _p99(client: RolloutClient, name: str) -> float:
    found = [seconds(lambda row=row: client.submit_rows([row])) for row in turn_rows(TURNS, name)]  # type: ignore[misc]
    return float(np.quantile(found[50:], 0.99))


@contextmanager
def _flooded(way: str, service: Served, token: str) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.bench.flooding", way, service.grpc_address, service.http_url, token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield


def _create(service: Served, run: str, token: str) -> None:
    with RolloutClient(service.grpc_address, run, credentials=Credentials(token=token)) as client:
        client.create_run(_settings())


def _settings() -> dict[str, object]:
    found: dict[str, object] = config().model_dump(mode="json", exclude_defaults=True)
    return found


def _memory(service: Served, field: str) -> int:
    for line in Path(f"/proc/{service.process.pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
