"""The claims of this process: their leases are renewed in the background, where Redis' health is looked at, too.

It takes a timer's thread, one that looks, and one for each server of Redis that has runs, so that one that hangs costs
no other its runs. They are the store's own: a lease must not wait behind what the service's threads have to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import redis
import structlog

from gristmill.errors import GristmillError
from gristmill_service.storage.redis.connection import REDIS_ERRORS, Client, server_of, translated, watched_master
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.scripts import Outcome, Owner, Scripts
from gristmill_service.storage.redis.servers import Health

_log = structlog.get_logger(__name__)

_THREADS = 16
_LOOK_S = 0.5


class Leases:
    """Thread-safe. owner: this process, known once it is reachable."""

    def __init__(self, client: Client, scripts: Scripts, health: Health, lease_s: float) -> None:
        self.owner: Owner | None = None
        self._client, self._scripts, self._health, self._lease_s = client, scripts, health, lease_s
        self._logs: dict[str, RedisRunLog] = {}
        self._master: tuple[str, int] | None = None
        self._stopped = threading.Event()
        self._under_way: dict[object, Future[None]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "gristmill-leases")
        self._timer = threading.Thread(target=self._keep, name="gristmill-leases", daemon=True)
        self._timer.start()

    @property
    def lease_ms(self) -> int:
        return int(1000 * self._lease_s)

    def get(self, name: str) -> RedisRunLog | None:
        """The log of a run that this process has claimed."""
        return self._logs.get(name)

    def add(self, name: str, log: RedisRunLog, claimed_at: float) -> None:
        """claimed_at: the time before the claim was asked for."""
        log.renewed(claimed_at + self._lease_s)
        self._logs[name] = log

    def discard(self, name: str, log: RedisRunLog) -> None:
        if self._logs.get(name) is log:
            del self._logs[name]

    def close(self) -> None:
        self._stopped.set()
        self._timer.join()
        self._pool.shutdown()

    def _keep(self) -> None:
        renews_at, pause = 0.0, min(self._lease_s / 3, _LOOK_S)
        while not self._stopped.wait(pause):
            self._start(self, self._look)
            if time.monotonic() >= renews_at:
                renews_at = time.monotonic() + self._lease_s / 3 - pause / 2
                self._renew_all()

    def _start(self, what: object, task: Callable[[], None]) -> None:
        """Runs a task, unless it is still under way."""
        if what not in self._under_way or self._under_way[what].done():
            self._under_way[what] = self._pool.submit(self._run, task)

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # noqa: BLE001 - there is a next time
            _log.exception("task failed", task="leases")

    def _renew_all(self) -> None:
        by_server = dict[redis.Redis, dict[str, RedisRunLog]]()
        for name, log in list(self._logs.items()):
            try:
                by_server.setdefault(server_of(self._client, log.keys.head), {})[name] = log
            except REDIS_ERRORS as error:
                # No node of the cluster has it.
                _log.warning("lease not renewed", run=name, reason=str(error))
        for server, logs in by_server.items():
            self._start(server, partial(self._renew, server, logs))

    def _renew(self, server: redis.Redis, logs: dict[str, RedisRunLog]) -> None:
        """Renews the leases of runs that are on the same server."""
        owner, asked = self.owner, time.monotonic()
        assert owner is not None, "a run was claimed"
        claims = [(log.keys, log.token, log.reaches) for log in logs.values()]
        try:
            with translated(self._client):
                answers = self._scripts.renew(server, owner, self.lease_ms, claims)
        except GristmillError as error:
            _log.warning("leases not renewed", runs=len(logs), reason=str(error))
            return
        for (name, log), answer in zip(logs.items(), answers, strict=True):
            if isinstance(answer, Exception):
                _log.warning("lease not renewed", run=name, reason=str(answer))
            elif answer[0] is Outcome.DONE:
                log.renewed(asked + self._lease_s)
                try:
                    log.compare(answer[1])
                except GristmillError as error:
                    _log.warning("a former owner's report was not read", run=name, reason=str(error))
            else:
                log.lose()
                is_fenced = answer[0] is Outcome.FENCED
                _log.warning("run taken over by another process" if is_fenced else "log too short", run=name)

    def _look(self) -> None:
        """Leaves a server that the sentinels do not name as the master any more, and checks what the new one has."""
        # Without an answer, whoever needs the master says so.
        with suppress(redis.RedisError):
            before, self._master = self._master, watched_master(self._client)
            if before not in (None, self._master):
                _log.warning("Redis has another master", before=before, now=self._master)
                self._renew_all()
        self._health.refresh()
