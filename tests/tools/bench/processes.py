"""`gristmill serve` as a process of its own, to be timed, stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FREE_PORTS = ("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0")


class Served(NamedTuple):
    process: subprocess.Popen[bytes]
    grpc_address: str
    http_url: str
    ready_s: float
    """From the start of the process until it was ready."""


@contextmanager
def served(flags: Sequence[str] = ()) -> Iterator[Served]:
    """Ready when it is given, and gone afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        announced = Path(directory) / "announced.json"
        command = [str(Path(sys.executable).with_name("gristmill")), "serve", "--announce", str(announced)]
        begin = time.perf_counter()
        process = subprocess.Popen(
            [*command, *FREE_PORTS, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while not announced.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"gristmill serve ended with {process.returncode}")
                time.sleep(0.005)
            ready = time.perf_counter() - begin
            addresses = json.loads(announced.read_text())
            yield Served(process, addresses["grpc_address"], addresses["http_url"], ready)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time that the process has taken so far."""
    # What stands before the name's end may hold spaces; user and system time are the 14th and 15th of all.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def scrape(service: Served) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{service.http_url}/metrics") as answer:
        return str(answer.read().decode())
