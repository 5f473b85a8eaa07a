"""The claims that this process holds: it renews their leases, and sees to it that it talks to the right master."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import redis
import structlog

from gristmill.errors import GristmillError, UnavailableError
from gristmill_service.storage.redis.run_log import RedisRunLog
from gristmill_service.storage.redis.scripts import ControlKeys, Outcome, Owner, Scripts
from gristmill_service.storage.redis.servers.connection import Client, translated, watched_master

_log = structlog.get_logger(__name__)

_RENEWERS = 16
_CHECK_MASTER_S = 0.5


class Leases:
    """Thread-safe. owner: this process, known once it is reachable."""

    def __init__(self, client: Client, scripts: Scripts, prefix: str, lease_s: float) -> None:
        self.owner: Owner | None = None
        self._client, self._scripts, self._prefix, self._lease_s = client, scripts, prefix, lease_s
        self._logs: dict[str, RedisRunLog] = {}
        self._lock = threading.Lock()
        self._master: tuple[str, int] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="gristmill-leases", daemon=True)
        self._thread.start()

    @property
    def lease_ms(self) -> int:
        return int(1000 * self._lease_s)

    def get(self, name: str) -> RedisRunLog | None:
        """The log of a run that this process has claimed."""
        with self._lock:
            return self._logs.get(name)

    def add(self, name: str, log: RedisRunLog, claimed_at: float) -> None:
        """claimed_at: the time before the claim was asked for."""
        log.renewed(claimed_at + self._lease_s)
        with self._lock:
            self._logs[name] = log

    def discard(self, name: str, log: RedisRunLog) -> None:
        with self._lock:
            if self._logs.get(name) is log:
                del self._logs[name]

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _keep(self) -> None:
        """Renews each run's lease in a thread of its own, as far as there are some: one that hangs must not cost the
        others their runs."""
        renewal_due, pause = 0.0, min(self._lease_s / 3, _CHECK_MASTER_S)
        with ThreadPoolExecutor(_RENEWERS, "gristmill-lease") as pool:
            under_way: dict[object, Future[None]] = {self: pool.submit(self._check_master)}
            while not self._stopped.wait(pause):
                under_way = {what: task for what, task in under_way.items() if not task.done()}
                if self not in under_way:
                    under_way[self] = pool.submit(self._check_master)
                if time.monotonic() < renewal_due:
                    continue
                renewal_due = time.monotonic() + self._lease_s / 3 - pause / 2
                for name, log in self._all():
                    if log not in under_way:
                        under_way[log] = pool.submit(self._renew, name, log)

    def _check_master(self) -> None:
        """Leaves a server that the sentinels do not name as the master any more, and checks what the new one has."""
        try:
            master = watched_master(self._client)
        except redis.RedisError:
            # Whoever needs it says so.
            return
        before, self._master = self._master, master
        if before not in (None, master):
            _log.warning("Redis has another master", before=before, now=master)
            for name, log in self._all():
                self._renew(name, log)

    def _renew(self, name: str, log: RedisRunLog) -> None:
        owner, asked = self.owner, time.monotonic()
        assert owner is not None, "a run was claimed"
        keys = ControlKeys(self._prefix, name)
        try:
            with translated(self._client):
                outcome = self._scripts.renew(keys, log.token, owner, self.lease_ms, log.last_number)
        except UnavailableError as error:
            _log.warning("lease not renewed", run=name, reason=str(error))
        except Exception:  # noqa: BLE001 - there is a next time
            _log.exception("lease not renewed", run=name)
        else:
            if outcome is Outcome.DONE:
                log.renewed(asked + self._lease_s)
                self._check_reported(name, log)
                return
            log.lose()
            _log.warning(
                "run taken over by another process" if outcome is Outcome.FENCED else "log too short", run=name
            )

    def _check_reported(self, name: str, log: RedisRunLog) -> None:
        try:
            log.check_reported()
        except GristmillError as error:
            _log.warning("a former owner's report was not read", run=name, reason=str(error))

    def _all(self) -> list[tuple[str, RedisRunLog]]:
        with self._lock:
            return list(self._logs.items())
