"""The answers of a run, as plain values that the APIs translate."""

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
    """outcomes: one per row of the request. refused: why rows were refused, by index, in the order of the rows."""

    outcomes: list[Outcome]
    refused: Mapping[int, GristmillError] = MappingProxyType({})


class Position(NamedTuple):
    """A position in a model's training order; positions compare in that order."""

    batch: int
    epoch: int = 0
    mini_batch: int = 0


@dataclass(frozen=True, slots=True)
class Admissions:
    """waits: whether the run notices when there is more capacity."""

    admissions: Sequence[Admission]
    retry_after_s: float = 0.0
    reason: str = ""
    waits: bool = True


@dataclass(frozen=True, slots=True)
class RewardUpdate:
    """A reward: `value` for scalar rewards; `token_values`, one per response token, for rewards per token."""

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
    """awaits: the columns that trainers still have to write, if it is FORWARD."""

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


GroupState = Literal["open", "complete", "sealed", "dropped"]


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """batch: the batch it was sealed into. reason: why it was dropped; `batch_failed` with its batch. tag: "" for
    none."""

    round: int
    uid: str
    state: GroupState
    batch: int | None = None
    reason: str = ""
    tag: str = ""


@dataclass(frozen=True, slots=True)
class TagGroups:
    """How many groups of a tag are in each state; each group counts once."""

    open: int
    complete: int
    sealed: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Moved:
    """position: the rank's next after an acknowledgement; the committed one after a commit."""

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
    """Per rank, the next position to acknowledge."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """run_id: created with the run. generation: how often its log was found shorter than confirmed, plus 1.
    config_json: the settings that are not defaults. resolved_config_json: all settings.
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
    groups_dropped: Mapping[str, int]
    tags: Mapping[str, TagGroups]
    models: Sequence[ModelProgress]
    failed_batches: Mapping[int, str]
