"""What both front doors stand on: the runs, who waits, what is measured, and the calls whose answer needs a wait.

Owns no state of a run and no word of gRPC or HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from gristmill._wire.row_codec import Sent
from gristmill._wire.steps import Steps, check
from gristmill.errors import InvalidArgumentError, ResourceExhaustedError
from gristmill_service.api.long_poll import Question, Waiting
from gristmill_service.config import Model
from gristmill_service.monitoring.metrics import Metrics
from gristmill_service.run.machine.answers import (
    Admission,
    Admissions,
    BatchAnswer,
    BatchState,
    Outcome,
    Position,
    ShardAnswer,
)
from gristmill_service.run.machine.events import GroupKey
from gristmill_service.run.run import Run
from gristmill_service.run.runs import Runs

_log = structlog.get_logger(__name__)
# Asked once a submission: structlog itself would first bind and format what nobody reads.
_tells = logging.getLogger(__name__).isEnabledFor


@dataclass(slots=True)
class Backend:
    runs: Runs
    waiting: Waiting
    metrics: Metrics
    max_message_bytes: int
    not_ready: str = "starting"
    """Why new work should go elsewhere; empty when ready."""

    def trouble(self) -> str:
        """Why the service is not ready; empty when it is."""
        return self.not_ready or self.runs.trouble()

    def submit_sent(self, run: Run, sent: Sent) -> list[Outcome]:
        """Rows as they came over the wire, which may lack what the service has already."""
        if sent.prefixes is None:
            return self.submit(run, check(sent.steps))
        # As if they had come whole: what a few bytes ask for must not be more than a request may be.
        size = 4 * int(sent.steps.tokens.total + sent.prefixes.lengths.sum())
        if size > self.max_message_bytes:
            raise InvalidArgumentError(
                f"the rows' tokens are {size} bytes with their prefixes and max_message_bytes is "
                f"{self.max_message_bytes}; send fewer rows a request, or raise the setting"
            )
        return self.submit(run, check(run.made_whole(sent.steps, sent.prefixes)))

    def submit(self, run: Run, steps: Steps) -> list[Outcome]:
        outcomes = run.submit(steps)
        if _tells(logging.DEBUG):
            _tell_submission(run.name, steps, outcomes)
        run.monitor.received(outcomes, steps)
        return outcomes

    def delete(self, name: str) -> None:
        self.runs.delete(name)

    def refuse_too_large(self, size: int) -> None:
        """Raises ResourceExhaustedError for a request of so many bytes, when that is beyond the limit."""
        if size > self.max_message_bytes:
            raise ResourceExhaustedError(
                f"the request has {size} bytes and max_message_bytes is {self.max_message_bytes}; send fewer rows a "
                "request, or raise the setting"
            )


def _tell_submission(run: str, steps: Steps, outcomes: Sequence[Outcome]) -> None:
    """What leads from a request's id to its groups, which the line of their batch's sealing names."""
    groups = sorted({str(GroupKey(*steps.key(row)[:2])) for row in range(len(steps))})
    first = steps.name(0) if len(steps) else ""
    accepted = outcomes.count(Outcome.ACCEPTED)
    _log.debug("rows submitted", run=run, rows=len(steps), accepted=accepted, first=first, groups=groups)


def ask_batch(run: Run, batch: int) -> Question[BatchAnswer]:
    return Question(run.changes, lambda: run.batch(batch), lambda view: view.state is not BatchState.PENDING)


def ask_shard(run: Run, model: Model, rank: int, position: Position | None, incarnation: int) -> Question[ShardAnswer]:
    return Question(
        run.changes,
        lambda: run.shard(model, rank, position, incarnation),
        lambda view: view.state is not BatchState.PENDING,
    )


def ask_policy_version(run: Run, at_least: int) -> Question[int]:
    return Question(run.changes, lambda: run.policy_version, lambda version: version >= at_least)


def ask_groups(run: Run, round_: int, uids: Sequence[str]) -> Question[Admissions]:
    """Admits what has room; settled once the first uid that had none at the first reading is answered."""
    waits_for: list[int] = []

    def is_settled(view: Admissions) -> bool:
        if not waits_for:
            waits_for.extend(index for index, found in enumerate(view.admissions) if found is Admission.NO_ROOM)
        return not waits_for or view.admissions[waits_for[0]] is not Admission.NO_ROOM

    return Question(run.changes, lambda: run.begin_groups(round_, uids), is_settled)
