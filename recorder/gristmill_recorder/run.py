"""What a recorder knows of a run: whether it accepts steps, and its policy version."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from functools import cached_property, partial
from math import inf

from gristmill import (
    AsyncRolloutClient,
    DeadlineExceededError,
    GristmillError,
    NotFoundError,
    PermissionDeniedError,
    RunStatus,
    UnauthenticatedError,
)
from gristmill._client.connection.drivers import Awaited
from gristmill._client.connection.transport import Connection
from gristmill._client.run_status import status_of
from gristmill.v1 import run_pb2
from gristmill_recorder.epochs import Epochs
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.refusals import WrongCall

_log = logging.getLogger("gristmill.recorder")

_TIMEOUT_S = 30.0
PATIENCE_S = 2.0
_WATCH_S = 600.0
_PAUSE_S = 1.0
_IDLE_S = 3600.0
_FIRST_VERSION = 0
"""The policy version before the trainer announced any."""


class Service:
    """The service at `address`. All runs share one connection until they are known to exist.

    Raises InvalidArgumentError for an invalid address or certificate.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection = Connection(Awaited(), address, _TIMEOUT_S, "recorder")

    async def status(self, run: str) -> RunStatus:
        """Returns a run's status, and raises like `AsyncRolloutClient.status`."""
        request = run_pb2.GetRunRequest(run=run)
        return status_of((await self._connection.ask(self._connection.runs.GetRun, request)).status)

    def client(self, run: str) -> AsyncRolloutClient:
        """Returns a client of a run, with a connection of its own: the rows of one run do not delay another's."""
        return AsyncRolloutClient(self._address, run, timeout_s=_TIMEOUT_S)

    async def close(self) -> None:
        await self._connection.disconnect()


class Run:
    """A run. policy_version: the last one that the trainer announced; 0 before any. used_at: the monotonic time of the
    last call. columns: those that its rows get."""

    def __init__(self, name: str, service: Service, columns: Collection[str], metrics: Metrics) -> None:
        self.name, self.epochs, self.used_at = name, Epochs(), time.monotonic()
        self._service, self._columns, self._metrics = service, columns, metrics
        self.policy_version, self._samples = _FIRST_VERSION, inf
        self._is_known = False
        self._patient_until = 0.0
        self._checking: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    @cached_property
    def client(self) -> AsyncRolloutClient:
        return self._service.client(self.name)

    @property
    def is_unused(self) -> bool:
        """Whether the run can be forgotten until its next call: it does not exist, is finished, or had no call for an
        hour."""
        is_idle = time.monotonic() - self.used_at > _IDLE_S
        is_asking = self._checking is not None and not self._checking.done()
        return not is_asking and (is_idle or not self._is_known)

    async def check(self, sample: int) -> None:
        """Checks that the run accepts steps of this sample. If the service does not answer within two seconds, returns
        too, and steps wait in the journal. Raises WrongCall if the run does not accept them."""
        if not self._is_known:
            await self._check()
        if sample >= self._samples:
            raise WrongCall(
                f"sample {sample} is not in 0..{self._samples - 1}, the samples of a group of run {self.name!r}; "
                "renumber it, or create the run with more n_samples_per_prompt"
            )

    async def _check(self) -> None:
        if self._checking is None:
            self._patient_until = time.monotonic() + PATIENCE_S
            self._checking = asyncio.create_task(self._check_status(), name=f"check run {self.name}")
        checking = self._checking
        await asyncio.wait((checking,), timeout=max(0.0, self._patient_until - time.monotonic()))
        if checking.done():
            # Check again at the next call: the run may be created by then.
            self._checking = None
            checking.result()

    async def _check_status(self) -> None:
        while True:
            try:
                status = await self.epochs.status(partial(self._service.status, self.name))
                break
            except NotFoundError as error:
                raise WrongCall(str(error)) from None
            except (PermissionDeniedError, UnauthenticatedError) as error:
                raise WrongCall(f"the service refused the recorder's token for run {self.name!r}: {error}") from None
            except GristmillError as error:
                _log.warning("run %r: service unreachable, steps stay in the journal: %s", self.name, error)
                await asyncio.sleep(_PAUSE_S)
        if not status.config["step_wise"]:
            raise WrongCall(
                f"run {self.name!r} has step_wise: false and does not accept steps; create it with step_wise: true "
                "and merge: tree"
            )
        declared = {column["name"] for column in status.config["columns"]}
        if missing := sorted({*self._columns} - declared):
            raise WrongCall(
                f"run {self.name!r} does not declare the column {missing[0]}, which the recorder's --columns names; "
                f"create it with this column, or omit {missing[0]} from --columns"
            )
        config = status.config
        self._samples = (config["max_samples_per_prompt"] or config["n_samples_per_prompt"]) + config["surplus"]
        self._announced(status.policy_version)
        # A finished run has no more versions, and is checked again at each call.
        if not status.finished:
            self._is_known = True
            self._watch = asyncio.create_task(self._follow_versions(), name=f"versions of {self.name}")

    async def _follow_versions(self) -> None:
        """Returns when the run is deleted or finished: the next call checks whether there is another of this name."""
        awaited = self.policy_version + 1
        while True:
            try:
                with suppress(DeadlineExceededError):
                    self._announced(await self.client.wait_policy_version(awaited, _WATCH_S))
                    awaited = self.policy_version + 1
                if (await self.client.status()).finished:
                    self._forget()
                    return
            except NotFoundError as error:
                _log.info("run %r: no longer known: %s", self.name, error)
                self._forget()
                return
            except GristmillError as error:
                _log.info("run %r: policy version not updated, will be retried: %s", self.name, error)
                # Any version and sample: the service may have been restarted, with another run of this name.
                awaited, self._samples = 0, inf
                await asyncio.sleep(_PAUSE_S)

    def _announced(self, version: int) -> None:
        self.policy_version = version
        self._metrics.policy_version.labels(self.name).set(version)

    def _forget(self) -> None:
        self._is_known, self.policy_version, self._samples = False, _FIRST_VERSION, inf
        with suppress(KeyError):
            self._metrics.policy_version.remove(self.name)

    async def close(self) -> None:
        self._forget()
        for task in (self._checking, self._watch):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if "client" in vars(self):
            with suppress(GristmillError):
                await self.client.close()
