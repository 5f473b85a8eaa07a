"""Records one trajectory: numbers its steps, appends them to the journal, and delivers them to the service in order.

A row states whether it is the last of its trajectory. So the newest step is delivered only when another one follows or
the trajectory ends. A background task per trajectory delivers the steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from gristmill import RowOutcome
from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
)
from gristmill_recorder.journal import Entry, Journal
from gristmill_recorder.metrics import Metrics
from gristmill_recorder.refusals import CallsUnderWay, Conflict, TrajectoryOver
from gristmill_recorder.rows import Row
from gristmill_recorder.run import Run

_log = logging.getLogger("gristmill.recorder")

_MAX_ROWS = 64
_PAUSE_S = 1.0
_WAIT_S = 30.0
# Other errors are temporary: the service is unreachable, or has no capacity.
_LASTING = (AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, NotFoundError)
_OVER = {
    RowOutcome.SEALED: "sealed: its group is in a sealed batch, without this trajectory",
    RowOutcome.DROPPED: "dropped: the group was dropped, or the trajectory was aborted",
    RowOutcome.SUPERSEDED: "superseded: there is a higher attempt",
}
ACCEPTED, ABORTED, REFUSED = "accepted", "aborted", "refused"


class Recording:
    """A trajectory. Use it on one event loop. entry: its state, as in the journal. on_closed: called when all steps are
    delivered, or dropped."""

    def __init__(
        self,
        entry: Entry,
        journal: Journal,
        run: Run,
        metrics: Metrics,
        on_closed: Callable[[Recording], None],
    ) -> None:
        self.name = entry.name
        self.calls = 0
        self.used_at = time.monotonic()
        self.entry = entry
        self._journal, self._run, self._metrics, self._on_closed = journal, run, metrics, on_closed
        # The epoch in which the service accepted the delivered steps; None if it is unknown.
        self._epochs, self._epoch = run.epochs, None if entry.delivered else run.epochs.number
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        metrics.row_bytes += sum(row.nbytes for row in entry.rows)

    def row(self, step: int) -> Row | None:
        """Returns a recorded step; None if the trajectory is closed."""
        newest = self.entry.rows[-1] if self.entry.rows else None
        return newest if newest is not None and newest.step == step else self._journal.row(self.entry.id, step)

    @contextmanager
    def calling(self) -> Iterator[Recording]:
        """Counts a call as in progress within the block. Raises TrajectoryOver if the trajectory is closed."""
        self._check_open()
        self.calls += 1
        try:
            yield self
        finally:
            self.calls -= 1
            self.used_at = time.monotonic()
            if not (self.calls or self.entry.next_step or self.entry.outcome):
                self._on_closed(self)

    def record(self, rows: Sequence[Row], base: Row | None) -> None:
        """Records the next steps, one per choice of a call. When it returns, they are in the journal.

        base: the step that the call continues; None if it is not known.

        Raises FailedPreconditionError if the journal cannot be written, and TrajectoryOver if the trajectory was closed
        in the meantime; then nothing was recorded.
        """
        self._check_open()
        if not rows:
            return
        with self._metrics.journal_seconds.time():
            self._journal.append(self.entry, rows, base or (self.entry.rows[-1] if self.entry.rows else None))
        self._add(rows)
        self.entry.ends |= {row.said: row.step for row in rows if row.said is not None}
        # The answer waits for this method, so delivery starts later.
        asyncio.get_running_loop().call_soon(self.deliver)

    async def finish(self, reward: float | None, wait_s: float) -> None:
        """Ends the trajectory. Idempotent. reward: of its last step; None if `set_reward` sets it later.

        Returns when the service has the whole trajectory, or after wait_s seconds; then the remaining steps are
        delivered later. Raises Conflict if the trajectory ended with another reward, or calls are in progress.
        """
        if self.entry.is_ended:
            check_same_end(self.entry, reward)
        elif not self._over.is_set():
            if self.calls:
                raise CallsUnderWay(f"{self.name}: {self.calls} calls are in progress; finish it after their answers")
            self._journal.end(self.entry.id, reward)
            self.entry.is_ended, self.entry.reward = True, reward
            self.deliver()
        await self.wait_closed(wait_s)

    def close_superseded(self) -> None:
        """Closes the trajectory without the service, which has a higher attempt or will have it."""
        self._close(_OVER[RowOutcome.SUPERSEDED])

    def abort(self, reason: str) -> None:
        """Stops recording the trajectory, and aborts it in the service by a background task. Idempotent.

        Raises Conflict if the trajectory has ended, and FailedPreconditionError if the journal cannot be written.
        """
        check_not_ended(self.entry)
        self._journal.abort(self.entry, f"{ABORTED}: {reason}")
        self._over.clear()
        self._clear()
        self.deliver()

    async def wait_closed(self, wait_s: float) -> None:
        """Returns when the trajectory is closed, or after wait_s seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), wait_s)

    async def stop(self) -> None:
        """Stops the delivery. Undelivered rows stay in the journal."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def is_abandoned(self, since: float) -> bool:
        """Returns whether the trajectory is open and had no call since this monotonic time."""
        return not (self.calls or self.entry.is_ended or self.entry.outcome) and self.used_at < since

    @property
    def is_closed(self) -> bool:
        return self._over.is_set()

    @property
    def is_idle(self) -> bool:
        """Whether no delivery is in progress."""
        return self._task is None

    def _check_open(self) -> None:
        if self.entry.is_ended or self.entry.outcome:
            raise over(self.entry)

    def _due(self) -> list[Row]:
        """Returns the rows to deliver now: all but the newest, until the trajectory has ended."""
        most = len(self.entry.rows) - (not self.entry.is_ended)
        rows = [self.entry.rows[position] for position in range(min(most, _MAX_ROWS))]
        if self.entry.is_ended and len(rows) == len(self.entry.rows):
            rows[-1].is_last, rows[-1].reward = True, self.entry.reward
        return rows

    def deliver(self) -> None:
        """Starts a background task that delivers the due rows or the abort, if there are any."""
        if self._task is None and (self.entry.outcome or self._due()):
            self._task = asyncio.create_task(self._send(), name=f"deliver {self.name}")

    async def _send(self) -> None:
        try:
            while not self._over.is_set() and (self.entry.outcome or self._due()):
                await self._send_next()
        finally:
            self._task = None

    async def _send_next(self) -> None:
        is_abort = bool(self.entry.outcome)
        try:
            await (self._send_abort() if is_abort else self._send_rows(self._due()))
        except _LASTING as error:
            if self.entry.outcome and not is_abort:
                # The trajectory was aborted in the meantime.
                return
            self._metrics.delivery_failures.labels(error.code).inc()
            _log.error("%s: steps refused by the service: %s", self.name, error)
            self._close(f"{REFUSED}: {error}")
        except GristmillError as error:
            self._metrics.delivery_failures.labels(error.code).inc()
            _log.warning("%s: delivery failed, will be retried: %s", self.name, error)
            await asyncio.sleep(_PAUSE_S)

    async def _send_abort(self) -> None:
        name, reason = self.name, self.entry.outcome.partition(": ")[2]
        if self._journal.has_higher_attempt(name):
            self.close_superseded()
            return
        try:
            await self._run.client.abort_trajectory(
                name.uid, name.sample, round=name.round, reason=reason, attempt=name.attempt
            )
        except NotFoundError:
            if not await self._run.client.begin_groups([name.uid], name.round, wait_s=_WAIT_S):
                await asyncio.sleep(_PAUSE_S)
        else:
            self._close(self.entry.outcome)

    async def _send_rows(self, rows: Sequence[Row]) -> None:
        if not self.entry.delivered:
            self._epoch = self._epochs.number
        outcomes = await self._run.client.submit([row.fields(self.name) for row in rows])
        self._epochs.accepted(outcomes.count(RowOutcome.ACCEPTED))
        # A trajectory that was submitted by one call is complete.
        is_end = rows[-1].is_last and rows[0].step > 0
        if is_end:
            await self._epochs.status(self._run.client.status)
        if self.entry.outcome:
            return
        if is_end and self._epoch != self._epochs.number:
            self._deliver_again()
            return
        for _ in rows:
            self._metrics.row_bytes -= self.entry.rows.popleft().nbytes
        self.entry.delivered += len(rows)
        if lost := next((outcome for outcome in outcomes if outcome in _OVER), None):
            self._close(_OVER[lost])
        elif rows[-1].is_last:
            self._close(ACCEPTED)
        else:
            self._note_delivered()

    def _deliver_again(self) -> None:
        _log.info("%s: delivered again, because the service may have lost steps that it had accepted", self.name)
        rows = [*self._journal.rows(self.entry.id)]
        self._clear()
        self._add(rows)
        self.entry.delivered = 0

    def _note_delivered(self) -> None:
        try:
            self._journal.deliver(self.entry)
        except FailedPreconditionError as error:
            # After a restart these steps are delivered again, as duplicates.
            _log.error("%s: delivery not journaled: %s", self.name, error)

    def _close(self, outcome: str) -> None:
        if self._over.is_set():
            return
        self.entry.outcome = outcome
        self._clear()
        self._metrics.closed.labels(outcome.partition(":")[0]).inc()
        self._over.set()
        try:
            self.journal_outcome()
        except FailedPreconditionError as error:
            # Until then this object answers later calls.
            _log.error("%s: outcome not journaled, will be retried: %s", self.name, error)

    def journal_outcome(self) -> None:
        """Stores the outcome of a closed trajectory, and frees this object. Raises FailedPreconditionError if the
        journal cannot be written."""
        if self.entry.id:
            is_refused = self.entry.outcome.startswith(REFUSED)
            self._journal.close_trajectory(self.entry.id, self.entry.outcome, keeps_rows=is_refused)
        self._on_closed(self)

    def _add(self, rows: Sequence[Row]) -> None:
        self.entry.rows += rows
        self._metrics.row_bytes += sum(row.nbytes for row in rows)

    def _clear(self) -> None:
        self._metrics.row_bytes -= sum(row.nbytes for row in self.entry.rows)
        self.entry.rows.clear()


def over(entry: Entry) -> TrajectoryOver:
    """Returns the error of calls of a trajectory that is ended or closed."""
    if entry.is_ended and entry.outcome in ("", ACCEPTED):
        return TrajectoryOver(f"{entry.name}: it has ended; sample it again with the next attempt (.../attempt/N/v1)")
    return TrajectoryOver(f"{entry.name}: it is closed: {entry.outcome}; stop this agent")


def check_not_ended(entry: Entry) -> None:
    """Raises Conflict if the trajectory has ended and the service accepted its steps: only the service can abort it
    then."""
    if entry.is_ended and not entry.outcome.startswith((REFUSED, ABORTED)):
        raise Conflict(f"{entry.name}: it has ended; call abort_trajectory of RolloutClient to abort it")


def check_same_end(entry: Entry, reward: float | None) -> None:
    """Raises Conflict if the trajectory has ended with another reward."""
    if entry.reward != reward:
        raise Conflict(
            f"{entry.name}: reward is {reward}, but it has ended with reward {entry.reward}; finish it only once"
        )
