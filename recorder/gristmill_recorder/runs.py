"""Manages the runs of a recorder, and their open trajectories."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from math import inf

from gristmill import (
    AsyncRolloutClient,
    DeadlineExceededError,
    FailedPreconditionError,
    GristmillError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from gristmill_recorder.epochs import Epochs
from gristmill_recorder.journal import Entry, Journal
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.names import TrajectoryName
from gristmill_recorder.recording import REFUSED, Recording, check_not_ended, check_same_end, over
from gristmill_recorder.refusals import Conflict, WrongCall

_log = logging.getLogger("gristmill.recorder")

_TIMEOUT_S = 30.0
_PATIENCE_S = 2.0
_WATCH_S = 600.0
_PAUSE_S = 1.0
_FIRST_VERSION = 0
"""The policy version before the trainer announced any."""


class Run:
    """A run. policy_version: the last one that the trainer announced; 0 before any. columns: those that its rows
    get."""

    def __init__(self, name: str, client: AsyncRolloutClient, columns: Collection[str], metrics: Metrics) -> None:
        self.name, self.client, self.epochs, self._columns = name, client, Epochs(client), columns
        self.policy_version, self._samples = _FIRST_VERSION, inf
        self._metrics = metrics
        self._is_known = False
        self._patient_until = 0.0
        self._checking: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def is_unknown(self) -> bool:
        """Whether the service has not confirmed the run, and is not being asked."""
        return not self._is_known and self._checking is None

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
            self._patient_until = time.monotonic() + _PATIENCE_S
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
                status = await self.epochs.status()
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
        self._is_known = True
        self._watch = asyncio.create_task(self._follow_versions(), name=f"versions of {self.name}")

    async def _follow_versions(self) -> None:
        """Returns when the run is deleted: the next call checks whether there is another of this name."""
        awaited = self.policy_version + 1
        while True:
            try:
                self._announced(await self.client.wait_policy_version(awaited, _WATCH_S))
                awaited = self.policy_version + 1
            except DeadlineExceededError:
                continue
            except NotFoundError as error:
                _log.info("run %r: no longer known: %s", self.name, error)
                self._is_known, self.policy_version, self._samples = False, _FIRST_VERSION, inf
                return
            except GristmillError as error:
                _log.info("run %r: policy version not updated, will be retried: %s", self.name, error)
                # Any version and sample: the service may have been restarted, with another run of this name.
                awaited, self._samples = 0, inf
                await asyncio.sleep(_PAUSE_S)

    def _announced(self, version: int) -> None:
        self.policy_version = version
        self._metrics.policy_version.labels(self.name).set(version)

    async def close(self) -> None:
        for task in (self._checking, self._watch):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))
        with suppress(GristmillError):
            await self.client.close()


class Runs:
    """All runs of a recorder. Use it on one event loop. columns: those that rows get."""

    def __init__(self, address: str, journal: Journal, columns: Collection[str], metrics: Metrics) -> None:
        self._address, self._journal, self._columns, self._metrics = address, journal, columns, metrics
        self._runs: dict[str, Run] = {}
        self._open: dict[TrajectoryName, Recording] = {}
        # By names without their attempt: all open trajectories may be aborted at once.
        self._attempts = defaultdict[tuple[object, ...], set[int]](set)
        metrics.open.set_function(lambda: len(self._open))

    def resume(self) -> int:
        """Resumes the open trajectories of the journal. Returns their number."""
        for entry in self._journal.open():
            self._add(entry).deliver()
        return len(self._open)

    def run(self, name: str) -> Run:
        if name not in self._runs:
            client = AsyncRolloutClient(self._address, name, timeout_s=_TIMEOUT_S)
            self._runs[name] = Run(name, client, self._columns, self._metrics)
        return self._runs[name]

    def recording(self, name: TrajectoryName) -> Recording:
        """Returns the open trajectory, and opens it if it is new. Raises TrajectoryOver if it is closed."""
        if (recording := self._open.get(name)) is not None:
            return recording
        if (entry := self._journal.find(name)) is not None:
            raise over(entry)
        return self._add(Entry(name))

    async def finish(self, name: TrajectoryName, reward: float | None, wait_s: float) -> Entry:
        """Ends a trajectory like `Recording.finish`. Its outcome is "" until the service has acknowledged all of its
        steps. Raises Conflict also if no call was recorded, or the service refused the steps."""
        recording = self._open.get(name)
        if recording is not None and (recording.entry.next_step or recording.calls):
            await recording.finish(reward, wait_s)
            entry: Entry | None = recording.entry
        else:
            entry = self._journal.find(name)
            if entry is not None and entry.is_ended:
                check_same_end(entry, reward)
        if entry is None:
            raise Conflict(f"{name}: no call was recorded; check the run, uid and sample, or abort it")
        if entry.outcome.startswith(REFUSED):
            raise Conflict(f"{name}: {entry.outcome}")
        return entry

    async def abort(self, name: TrajectoryName, reason: str) -> None:
        """Aborts the trajectory, here and in the service; its group continues without it. If there is a higher attempt,
        only this one is closed. Idempotent.

        Returns when the service has aborted it, or after two seconds: then the abort waits in the journal. Raises
        WrongCall if the run does not exist, Conflict if the trajectory has ended or the service refuses the abort.
        """
        await self.run(name.run).check(name.sample)
        if (recording := self._open.get(name)) is None:
            entry = self._journal.find(name) or Entry(name)
            check_not_ended(entry)
            if entry.outcome and not entry.outcome.startswith(REFUSED):
                return
            recording = self._add(entry)
        self._abort(recording, reason)
        await recording.wait_closed(_PATIENCE_S)
        if recording.entry.outcome.startswith(REFUSED):
            raise Conflict(f"{name}: {recording.entry.outcome}")

    def _abort(self, recording: Recording, reason: str) -> None:
        if self._has_higher_attempt(recording.name):
            recording.close_superseded()
        else:
            recording.abort(reason)

    def _has_higher_attempt(self, name: TrajectoryName) -> bool:
        is_open = any(attempt > name.attempt for attempt in self._attempts.get(name[:4], ()))
        return is_open or self._journal.has_higher_attempt(name)

    async def abandon(self, idle_s: float) -> None:
        """Aborts open trajectories without a call for idle_s seconds: their groups would wait for them forever."""
        late = time.monotonic() - idle_s
        for recording in [*self._open.values()]:
            if not recording.is_abandoned(late):
                continue
            _log.warning("%s: idle trajectory aborted after %g s", recording.name, idle_s)
            try:
                self._abort(recording, f"the agent made no call for {idle_s:g} s")
            except FailedPreconditionError as error:
                _log.warning("%s: abort failed: %s", recording.name, error)
            await asyncio.sleep(0)

    def journal_outcomes(self) -> None:
        """Frees the closed trajectories whose outcome could not be journaled before, for example because the disk was
        full. Raises FailedPreconditionError if the journal still cannot be written."""
        for recording in [recording for recording in self._open.values() if recording.is_closed]:
            recording.journal_outcome()

    async def drop_unknown(self) -> None:
        """Frees the connections of runs that do not exist and have no open trajectories."""
        used = {name.run for name in self._open}
        for name in [name for name, run in self._runs.items() if run.is_unknown and name not in used]:
            await self._runs.pop(name).close()

    async def close(self, grace_s: float) -> None:
        """Delivers steps for at most grace_s seconds. Undelivered steps stay in the journal."""
        end = time.monotonic() + grace_s
        while time.monotonic() < end and not all(recording.is_idle for recording in self._open.values()):
            await asyncio.sleep(0.02)
        for recording in [*self._open.values()]:
            await recording.stop()
        # Clients wait for steps in flight, which the journal has, too. Those that still wait end with the event loop.
        if closing := [asyncio.create_task(run.close()) for run in self._runs.values()]:
            await asyncio.wait(closing, timeout=max(0.0, end - time.monotonic()))

    def _add(self, entry: Entry) -> Recording:
        run = self.run(entry.name.run)
        recording = Recording(entry, self._journal, run.client, run.epochs, self._metrics, self._forget)
        self._open[entry.name] = recording
        self._attempts[entry.name[:4]].add(entry.name.attempt)
        return recording

    def _forget(self, recording: Recording) -> None:
        # A newer recording may have this name.
        if self._open.get(recording.name) is recording:
            del self._open[recording.name]
            attempts = self._attempts[recording.name[:4]]
            attempts.discard(recording.name.attempt)
            if not attempts:
                del self._attempts[recording.name[:4]]
