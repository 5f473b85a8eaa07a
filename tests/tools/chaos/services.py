"""The services under test, in real processes, and what is done to them: one with a journal, or replicas on Redis."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.redis.proxy import Proxy
from tests.redis.servers import RedisServer, free_port

_GRISTMILL = str(Path(sys.executable).with_name("gristmill"))
LEASE_S = 2.0


class Service:
    """One `gristmill serve` at addresses that stay."""

    def __init__(self, log: Path, *flags: str) -> None:
        self.grpc_address, self.http_port = f"127.0.0.1:{free_port()}", free_port()
        self._log = log.open("a")
        self._command = [_GRISTMILL, "serve", "--grpc-address", self.grpc_address, "--shutdown-grace-s", "10"]
        self._command += ["--http-address", f"127.0.0.1:{self.http_port}", *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def await_ready(self, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/healthz", timeout=2):
                return
            if self._process is not None and self._process.poll() is not None:
                raise RuntimeError(f"gristmill serve ended with {self._process.returncode}; see {self._log.name}")
            time.sleep(0.02)
        raise RuntimeError(f"gristmill serve is not ready after {timeout_s} s; see {self._log.name}")

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def end(self) -> int:
        """Asks it to stop, and waits. The exit status."""
        self.signal(signal.SIGTERM)
        assert self._process is not None
        return self._process.wait(timeout=30)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        if self._process is not None:
            self.kill()
        self._log.close()


class Mode(ABC):
    """faults: the faults that can be injected, by name; each returns once its cause is over. They take times drawn by
    `draw`. often: how many times more than the others a kind comes. rolled_back_since: set by a fault after which the
    store may hold only what it held then. may_fail_batches: whether it may lose a part of what it held, so that batches
    fail, which has to be reported."""

    may_roll_back = False
    may_fail_batches = False
    often: Sequence[str] = ()

    def __init__(self, directory: Path, draw: random.Random) -> None:
        self.directory, self._draw = directory, draw
        self.rolled_back_since: float | None = None
        self.faults: dict[str, Callable[[], None]] = {}
        self.services: list[Service] = []

    @property
    def address(self) -> str:
        return ",".join(service.grpc_address for service in self.services)

    def start(self) -> None:
        for service in self.services:
            service.start()
        for service in self.services:
            service.await_ready()

    @abstractmethod
    def left(self) -> list[str]:
        """All that is still stored although every run was deleted."""

    def close(self) -> None:
        for service in self.services:
            service.close()

    def _pause_s(self, most: float) -> float:
        return self._draw.random() * most

    def _kill(self, service: Service) -> None:
        service.kill()
        time.sleep(self._pause_s(0.3))
        service.start()
        service.await_ready()

    def _restart(self, service: Service) -> None:
        status = service.end()
        if status != 0:
            raise RuntimeError(f"a service that was asked to stop ended with {status}")
        service.start()
        service.await_ready()

    def _stop_for(self, service: Service, seconds: float) -> None:
        service.signal(signal.SIGSTOP)
        time.sleep(seconds)
        service.signal(signal.SIGCONT)


class JournalMode(Mode):
    def __init__(self, directory: Path, draw: random.Random) -> None:
        super().__init__(directory, draw)
        self._journal, self._shards = directory / "journal", directory / "shards"
        self._shards.mkdir()
        flags = ("--journal-dir", str(self._journal), "--shared-memory-dir", str(self._shards))
        service = Service(directory / "service.log", *flags)
        self.services = [service]
        self.faults = {
            "service killed": lambda: self._kill(service),
            "service restarted": lambda: self._restart(service),
            "service paused": lambda: self._stop_for(service, 0.5 + self._pause_s(1.0)),
            "journal torn": self._tear,
        }

    def _tear(self) -> None:
        """As a process' death may: the end of the log is half of a transaction."""
        self.services[0].kill()
        for path in self._journal.glob("run-*/journal.sqlite-wal"):
            with path.open("ab") as file:
                file.write(self._draw.randbytes(self._draw.randint(1, 60)))
        self.services[0].start()
        self.services[0].await_ready()

    def left(self) -> list[str]:
        kept = [path for path in self._journal.iterdir() if path.name not in ("lock", "reserve")]
        return [str(path) for path in (*kept, *self._shards.glob("gristmill-*/run-*"))]


class ReplicasMode(Mode):
    """Services that share what is in Redis, and take over each other's runs."""

    def _serve(self, urls: Sequence[str], *flags: str) -> None:
        for number, url in enumerate(urls):
            one = ("--store", "redis", "--redis-url", url, "--lease-s", str(LEASE_S), *flags)
            self.services.append(Service(self.directory / f"service-{number}.log", *one))

    def _service_faults(self) -> dict[str, Callable[[], None]]:

        def any_service() -> Service:
            return self._draw.choice(self.services)

        return {
            "replica killed": lambda: self._kill(any_service()),
            "replica restarted": lambda: self._restart(any_service()),
            "replica paused": lambda: self._stop_for(any_service(), LEASE_S + 0.5 + self._pause_s(1.0)),
        }

    def left(self) -> list[str]:
        # The probe ends by itself, within a second; what deleted runs left is removed soon after.
        deadline = time.monotonic() + 5
        while True:
            keys = [key.decode() for key in self._keys() if not key.endswith(b":probe")]
            if not keys or time.monotonic() > deadline:
                return keys
            time.sleep(0.1)

    @abstractmethod
    def _keys(self) -> Iterable[bytes]: ...


class RedisMode(ReplicasMode):
    may_roll_back = True

    def __init__(self, directory: Path, draw: random.Random, replicas: int = 3) -> None:
        super().__init__(directory, draw)
        self._redis = RedisServer(directory / "redis", appendonly="always").start()
        self._proxies = [Proxy(self._redis.port).start() for _ in range(replicas)]
        self._serve([proxy.url for proxy in self._proxies])

        def any_proxy() -> Proxy:
            return draw.choice(self._proxies)

        self.faults = self._service_faults() | {
            "redis killed": self._kill_redis,
            "redis restarted": self._redis.restart,
            "redis paused": self._pause_redis,
            "redis rolled back": self._roll_back_redis,
            "replica without redis": lambda: self._without_redis(any_proxy()),
            "connections cut": lambda: any_proxy().cut(),
            "answer lost": lambda: any_proxy().lose_next_reply(),
            "redis slow": lambda: self._slow(any_proxy()),
        }

    def _kill_redis(self) -> None:
        self._redis.kill()
        time.sleep(self._pause_s(0.5))
        self._redis.start()

    def _roll_back_redis(self) -> None:
        """As when a backup is restored, or a replica is promoted that was behind."""
        self.rolled_back_since = time.time()
        copy = self._redis.directory.with_name("redis-copy")
        self._redis.pause()
        shutil.copytree(self._redis.directory, copy)
        self._redis.resume()
        time.sleep(0.3 + self._pause_s(1.5))
        self._redis.kill()
        shutil.rmtree(self._redis.directory)
        copy.rename(self._redis.directory)
        self._redis.start()

    def _pause_redis(self) -> None:
        self._redis.pause()
        time.sleep(0.3 + self._pause_s(2.0))
        self._redis.resume()

    def _without_redis(self, proxy: Proxy) -> None:
        proxy.refuse()
        time.sleep(0.5 + self._pause_s(LEASE_S + 1.0))
        proxy.accept()

    def _slow(self, proxy: Proxy) -> None:
        proxy.delay(0.05)
        time.sleep(0.5 + self._pause_s(1.0))
        proxy.delay(0)

    def _keys(self) -> Iterable[bytes]:
        return self._redis.client().scan_iter()

    def close(self) -> None:
        super().close()
        for proxy in self._proxies:
            proxy.close()
        self._redis.kill()
