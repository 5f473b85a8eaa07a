"""Services as processes of a test's own, several at once, which may be killed and stopped; and a load that shows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tests.api.apis import Api, GrpcApi, HttpApi, Json, Refused, row
from tests.serving import FREE_PORTS

T = TypeVar("T")

PATIENCE_S = 60.0
COMMAND = [str(Path(sys.executable).with_name("gristmill")), "serve"]

CONFIG: Json = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 4},
    "step_wise": True,
    "dp_size": 1,
    "max_buffered_batches": 100,
    "max_staleness": 200,
}
"""Batches of two groups of two trajectories of one step, with one shard each."""


class Service:
    """One that is starting; `ready` returns it when it serves. Its APIs are closed with it."""

    def __init__(self, command: Sequence[str], announced: Path, environment: Mapping[str, str] | None = None) -> None:
        self.announced, self.log_file = announced, announced.with_suffix(".log")
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen([*command], stdout=subprocess.PIPE, stderr=log, text=True, env=environment)

    def ready(self) -> Service:
        assert self.process.stdout is not None
        if "is ready" not in self.process.stdout.readline():
            raise AssertionError(f"gristmill serve did not start: {self.log}")
        self._addresses = json.loads(self.announced.read_text())
        return self

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def grpc_address(self) -> str:
        return str(self._addresses["grpc_address"])

    @property
    def http_url(self) -> str:
        return str(self._addresses["http_url"])

    @cached_property
    def grpc(self) -> GrpcApi:
        return GrpcApi(self.grpc_address)

    @cached_property
    def http(self) -> HttpApi:
        return HttpApi(self.http_url)

    def probe(self, path: str, timeout_s: float = 30.0) -> httpx.Response:
        return httpx.get(f"{self.http_url}{path}", timeout=timeout_s, trust_env=False)

    @property
    def trouble(self) -> str:
        """Why it is not ready, as /readyz says; empty when it is."""
        answer = self.probe("/readyz")
        return "" if answer.status_code == 200 else str(answer.json()["error"]["message"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def terminate(self) -> None:
        self.process.terminate()

    def stop(self, timeout_s: float = 30) -> int:
        """The exit status after SIGTERM."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def close(self) -> None:
        for api in ("grpc", "http"):
            if api in self.__dict__:
                getattr(self, api).close()
        if self.process.poll() is None:
            self.resume()
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Services:
    """Starts services in a directory of the test's own."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._all = directory, list[Service]()

    def start(self, count: int, *flags: str) -> list[Service]:
        """Starts that many at once, with these flags each, and returns when they are ready."""
        begun = [self.begin(*flags) for _ in range(count)]
        return [one.ready() for one in begun]

    def begin(self, *flags: str) -> Service:
        announced = self._directory / f"service-{len(self._all)}.json"
        command = [*COMMAND, "--announce", str(announced), "--shutdown-grace-s", "5"]
        for name, value in FREE_PORTS.items():
            command += [f"--{name.replace('_', '-')}", value]
        self._all.append(Service([*command, *flags], announced))
        return self._all[-1]

    def close(self) -> None:
        for one in self._all:
            one.close()


def on_redis(url: str, lease_s: float = 3.0, prefix: str = "gristmill") -> list[str]:
    """The flags of a replica. prefix: of their own for replicas that are to be alone with their runs."""
    return ["--store", "redis", "--redis-url", url, "--lease-s", str(lease_s), "--redis-prefix", prefix]


def group(uid: str, **fields: Any) -> list[Json]:
    """A whole group whose scores differ, one step each."""
    return [row(uid, sample, **fields) for sample in range(2)]


def patiently(call: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """Its answer, asked as a client does: again while it is unavailable."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except Refused as refused:
            if refused.code != "UNAVAILABLE" or time.monotonic() > deadline:
                raise
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def check(refused: Refused, *codes: str) -> None:
    """Raises what is refused for any other reason than these."""
    if refused.code not in codes:
        raise refused


def eventually(condition: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """What the condition gives once that is true. A call that is refused counts as not yet."""
    deadline = time.monotonic() + timeout_s
    value: Any = None
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except (Refused, httpx.TransportError) as error:
            value = error
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {timeout_s:.0f} s; last: {value!r}")


def owner(services: Sequence[Service], run: str) -> Service:
    """The one that owns the run: it alone reports its metrics."""

    def reporting() -> Service | None:
        for one in services:
            if f'gristmill_groups{{run="{run}"' in one.probe("/metrics").text:
                return one
        return None

    return eventually(reporting, f"somebody owns {run}")


def train(api: Api, run: str, batch: int, *, commit: bool = True) -> bytes:
    """Waits for the batch's shard, pulls it and acknowledges it."""
    shard = eventually(lambda: _published(api, run, batch), f"batch {batch} is published")
    data = patiently(lambda: api.read(run, batch, 0, 0))
    assert len(data) == shard["size_bytes"]
    patiently(lambda: api.acknowledge(run, 0, {"batch": batch, "epoch": 0, "mini_batch": 0}, commit=commit))
    return data


def _published(api: Api, run: str, batch: int) -> Json | None:
    shard = api.shard(run, 0, batch=batch, wait_s=1.0)
    return shard if shard["state"] == "published" else None


def uids_of(shard: bytes) -> list[str]:
    """The uids of the rows that a shard holds, in order."""
    length = int.from_bytes(shard[:8], "little")
    metadata = json.loads(shard[8 : 8 + length])["__metadata__"]
    return [uid for uid in json.loads(metadata["uids"]) if not uid.startswith("padding")]
