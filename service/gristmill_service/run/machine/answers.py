"""The answers of a run, as plain values that the gRPC and HTTP APIs translate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal, NamedTuple

from gristmill._wire.columns import Array
from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import GristmillError
from gristmill_service.config import Model
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.storage.shard_store import ShardLocation


class ColumnPlace(NamedTuple):
    """A column of one of the policy's shards."""

    mini_batch: int
    rank: int
    column: str


class Admission(Enum):
    """The result for one uid of `begin_groups`; values are those of the proto enum."""

    ADMITTED = 1
    NO_ROOM = 2
    SEALED = 3
    DROPPED = 4


class Outcome(Enum):
    """The result for one submitted row; values are those of the proto enum."""

    ACCEPTED = 1
    DUPLICATE = 2
    SEALED = 3
    DROPPED = 4
    SUPERSEDED = 5
    REFUSED = 6


class BatchState(Enum):
    """The state of a batch; values are those of the proto enum. A failed batch raises BatchFailedError instead."""

    PENDING = 1
    PUBLISHED = 2
    END = 3
    FORWARD = 4


class Taken(NamedTuple):
    """The result of submitting rows. outcomes: one per row. refused: the errors of refused rows, by row index."""

    outcomes: list[Outcome]
    refused: Mapping[int, GristmillError] = MappingProxyType({})


class Position(NamedTuple):
    """A position in a model's training order; positions compare in that order."""

    batch: int
    epoch: int = 0
    mini_batch: int = 0


@dataclass(frozen=True, slots=True)
class Admissions:
    """The result of `begin_groups`. policy_version: the one that was announced last. waits: whether waiting callers are
    woken when there is more capacity."""

    admissions: Sequence[Admission]
    policy_version: int
    retry_after_s: float = 0.0
    reason: str = ""
    waits: bool = True


@dataclass(frozen=True, slots=True)
class RewardUpdate:
    """The reward of one step: `value` if it is scalar, `token_values` if there is one per response token. step: None
    for the last step."""

    trajectory: TrajectoryKey
    step: int | None = None
    value: float | None = None
    token_values: Array | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    batch: int
    prompts: int


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The state of a batch. plan: the plan of a published batch. awaits: the columns that trainers still have to write
    for a FORWARD batch."""

    state: BatchState
    plan: bytes = b""
    awaits: Sequence[ColumnPlace] = ()


@dataclass(frozen=True, slots=True)
class ShardAnswer:
    state: BatchState
    position: Position | None = None
    address: ShardAddress | None = None
    location: ShardLocation | None = None
    incarnation: int = 0


GroupState = Literal["open", "complete", "sealed", "dropped", "unknown"]


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """One group; unknown: it was never begun. batch: the batch that a sealed group is in. reason: why the group was
    dropped, or why it is not complete; if the reason is `batch_failed`, `batch` is the failed batch. tag: "" for none,
    and for archived groups."""

    round: int
    uid: str
    state: GroupState
    batch: int | None = None
    reason: str = ""
    tag: str = ""


@dataclass(frozen=True, slots=True)
class TagGroups:
    """The number of groups of one tag in each state; each group counts once."""

    open: int
    complete: int
    sealed: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of an acknowledgement (position: the rank's next) or of a commit (position: the committed one)."""

    position: Position
    generation: int


@dataclass(frozen=True, slots=True)
class Resumed:
    incarnation: int
    position: Position
    run_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class ModelProgress:
    model: Model
    committed: Position
    incarnation: int
    next: Sequence[Position]
    """Each rank's next position to acknowledge."""
    resumes: int
    """How often a trainer resumed all ranks from a checkpoint."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of a run.

    run_id: an id that is created with the run. generation: 1 plus the number of rollbacks, in which the log lost
    events that were already confirmed. config_json: the settings that differ from their defaults.
    resolved_config_json: all settings. next_round: the round after the highest of any group that was ever begun.
    """

    run: str
    run_id: str
    generation: int
    config_json: str
    resolved_config_json: str
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
    tags: Mapping[str, TagGroups]
    models: Sequence[ModelProgress]
    failed_batches: Mapping[int, str]
