"""The state of a run, as `RolloutClient.status` returns it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill._wire.addresses import MODELS, Position
from gristmill.v1 import run_pb2

_NAMES = {number: name for name, number in MODELS.items()}
_SAME = (
    *("run", "run_id", "generation", "policy_version", "finished", "groups_open", "groups_complete", "groups_room"),
    *("batches_sealed", "batches_published", "batches_freed", "row_bytes", "shard_bytes"),
    *("rows_accepted", "rows_duplicate", "groups_archived", "next_round"),
)


@dataclass(frozen=True, slots=True)
class ModelProgress:
    """The progress of one model's training.

    committed: the commit position; batches before it are freed after all ranks acknowledged them. incarnation: grows
    with each resume, from a number that depends on the run. next: the next position that each rank will acknowledge.
    resumes: how often a trainer resumed all ranks from a checkpoint.
    """

    committed: Position
    incarnation: int
    next: tuple[Position, ...]
    resumes: int


@dataclass(frozen=True, slots=True)
class TagGroups:
    """The number of groups of one tag: incomplete, complete but not sealed, sealed into a batch, and dropped."""

    open: int
    complete: int
    sealed: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason why the run is slow or does not progress. level: failed, stuck, slow or note. for_s: for how many
    seconds; None if unknown."""

    level: str
    text: str
    for_s: float | None


@dataclass(frozen=True, slots=True)
class RunHealth:
    """The service's assessment of a run. state: failed, stuck, no trainer, training, collecting, idle or finished.
    summary: the reason for the state in one sentence. findings: the most severe first. still_s: seconds since the last
    event."""

    state: str
    summary: str
    findings: tuple[Finding, ...]
    still_s: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run.

    run_id: a unique id. A run that is created later under the same name has another one. generation: grows by one when
        the service has lost a part of the run that it had acknowledged.
    config: all settings of the run, with the service's defaults; not printed.
    finished: whether `finish` was called.
    groups_open, groups_complete, groups_room: the number of incomplete groups, of complete groups that are not sealed,
        and of further groups that the service admits now.
    batches_sealed, batches_published, batches_freed: counted from 0; batches_sealed is the number of the next batch.
    row_bytes, shard_bytes: the bytes that the service stores now.
    groups_dropped: the number of dropped groups, by reason.
    groups_archived: the number of closed groups that `groups` lists only if they are named.
    next_round: the round after the highest of any group that was ever begun.
    models: the progress of `policy`, and of `critic` if the run has one.
    failed_batches: why batches could not be built, by batch number.
    tags: the groups of each tag.
    """

    run: str
    run_id: str
    generation: int
    config: Mapping[str, Any] = field(repr=False)
    policy_version: int
    finished: bool
    groups_open: int
    groups_complete: int
    groups_room: int
    batches_sealed: int
    batches_published: int
    batches_freed: int
    row_bytes: int
    shard_bytes: int
    rows_accepted: int
    rows_duplicate: int
    groups_archived: int
    next_round: int
    groups_dropped: Mapping[str, int]
    models: Mapping[str, ModelProgress]
    failed_batches: Mapping[int, str]
    tags: Mapping[str, TagGroups]
    health: RunHealth


def status_of(message: run_pb2.RunStatus) -> RunStatus:
    """Reads the service's answer."""
    return RunStatus(
        **{name: getattr(message, name) for name in _SAME},
        config=json.loads(message.resolved_config_json),
        groups_dropped=dict(message.groups_dropped),
        models={_NAMES[progress.model]: _progress(progress, message) for progress in message.models},
        failed_batches=dict(message.failed_batches),
        tags={
            tag: TagGroups(counts.open, counts.complete, counts.sealed, counts.dropped)
            for tag, counts in message.tags.items()
        },
        health=_health(message.health),
    )


def _progress(progress: run_pb2.ModelProgress, message: run_pb2.RunStatus) -> ModelProgress:
    ranks = sorted((rank for rank in message.ranks if rank.model == progress.model), key=lambda rank: rank.rank)
    return ModelProgress(
        Position.of(progress.committed),
        progress.incarnation,
        tuple(Position.of(rank.next) for rank in ranks),
        progress.resumes,
    )


def _health(health: run_pb2.RunHealth) -> RunHealth:
    findings = (
        Finding(finding.level, finding.text, finding.for_s if finding.HasField("for_s") else None)
        for finding in health.findings
    )
    return RunHealth(health.state, health.summary, tuple(findings), health.still_s)
