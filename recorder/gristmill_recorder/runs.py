"""Manages the runs of a recorder, and their open trajectories."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection

from gristmill import FailedPreconditionError
from gristmill_recorder.journal import Entry, Journal
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.names import TrajectoryName
from gristmill_recorder.recording import REFUSED, Recording, check_not_ended, check_same_end, over
from gristmill_recorder.refusals import Conflict
from gristmill_recorder.run import PATIENCE_S, Run, Service

_log = logging.getLogger("gristmill.recorder")


class Runs:
    """All runs of a recorder. Use it on one event loop. columns: those that rows get."""

    def __init__(self, service: Service, journal: Journal, columns: Collection[str], metrics: Metrics) -> None:
        self._service, self._journal, self._columns, self._metrics = service, journal, columns, metrics
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
        if (run := self._runs.get(name)) is None:
            run = self._runs[name] = Run(name, self._service, self._columns, self._metrics)
        run.used_at = time.monotonic()
        return run

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
        await recording.wait_closed(PATIENCE_S)
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

    async def drop_unused(self) -> None:
        """Frees the connections, tasks and series of unused runs that have no open trajectories."""
        used = {name.run for name in self._open}
        unused = [name for name, run in self._runs.items() if run.is_unused and name not in used]
        # A call during a close begins its run anew.
        for run in [self._runs.pop(name) for name in unused]:
            await run.close()

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
        await self._service.close()

    def _add(self, entry: Entry) -> Recording:
        run = self.run(entry.name.run)
        recording = Recording(entry, self._journal, run, self._metrics, self._forget)
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
