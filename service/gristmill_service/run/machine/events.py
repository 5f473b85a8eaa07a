"""What can happen to a run, as small values in one ordered log.

An event says what was decided, never how. Rows of tokens are referenced, not contained. Only `state.apply` gives events
their meaning; `codec` writes them down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gristmill._wire.steps import TrajectoryKey
from gristmill_service.config import Model
from gristmill_service.pipeline.figures import Figures
from gristmill_service.run.machine.answers import ColumnPlace, Position


class GroupKey(NamedTuple):
    """Names one prompt group of a run."""

    round: int
    uid: str

    def __str__(self) -> str:
        return f"uid {self.uid!r} round {self.round}" if self.round else f"uid {self.uid!r}"


class NewGroup(NamedTuple):
    """A group that begins: of how many samples it is made, and its environment or task."""

    key: GroupKey
    samples: int
    tag: str = ""


class RowRef(NamedTuple):
    """Where a row's tokens are: in which table of the run's log, and which row of it."""

    table: int
    row: int


class RowName(NamedTuple):
    """Names a row of a prompt group. Whatever becomes of the row, its content stays the same under this name."""

    sample: int
    attempt: int
    step: int


COLUMNS = -1
"""In place of a row's number in a RowRef: the table has no tokens, but a column that a trainer wrote."""


class StoredRow(NamedTuple):
    """What the state knows of one accepted row.

    digest: of all of the row but its key, to tell a repeated row from another one, however each was sent.
    nbytes, tokens: of what is stored of it, and of the whole row.
    parent: the row of its group that has the tokens with which it begins, so that they are not stored with it; None
        where all of it is. check: of what is stored of it, empty where that is the digest.
    reward: the step's reward, None while it is pending; reward_digest: of the values, where they are per token.
    late_rewards: those values, float64, where they came after the row.
    """

    trajectory: TrajectoryKey
    step: int
    attempt: int
    is_last: bool
    ref: RowRef
    digest: bytes
    nbytes: int
    response_length: int
    version: int
    reward: float | None
    reward_digest: bytes = b""
    advantage: float | None = None
    late_rewards: bytes = b""
    tokens: int = 0
    parent: RowName | None = None
    check: bytes = b""

    def __str__(self) -> str:
        return f"{self.trajectory} step {self.step}"

    @property
    def name(self) -> RowName:
        return RowName(self.trajectory.sample, self.attempt, self.step)

    @property
    def group(self) -> GroupKey:
        return GroupKey(self.trajectory.round, self.trajectory.uid)


class SetReward(NamedTuple):
    trajectory: TrajectoryKey
    step: int
    value: float
    digest: bytes = b""
    token_values: bytes = b""
    """float64, one a response token, where rewards are given so."""


@dataclass(frozen=True, slots=True)
class RowSchema:
    """Which columns the rows of a run carry; all rows agree. None: not known yet, or not applicable."""

    logprobs: bool | None = None
    token_rewards: bool | None = None
    token_advantages: bool | None = None


ROW_KINDS = {
    "logprobs": {True: "rollout_logprobs", False: "no rollout_logprobs"},
    "token_rewards": {True: "one reward per response token", False: "one reward a step"},
    "token_advantages": {True: "one advantage per response token", False: "one advantage a trajectory"},
}
"""What each field of a `RowSchema` says of a row, for errors."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was decided."""


@dataclass(frozen=True, slots=True)
class GroupsAdmitted(Event):
    groups: tuple[NewGroup, ...]
    at: float


@dataclass(frozen=True, slots=True)
class GroupTagged(Event):
    """A group that began without a tag is given one."""

    group: GroupKey
    tag: str


@dataclass(frozen=True, slots=True)
class SchemaFixed(Event):
    schema: RowSchema


@dataclass(frozen=True, slots=True)
class RowsStored(Event):
    rows: tuple[StoredRow, ...]


@dataclass(frozen=True, slots=True)
class RewardsSet(Event):
    rewards: tuple[SetReward, ...]


@dataclass(frozen=True, slots=True)
class TrajectoryAborted(Event):
    trajectory: TrajectoryKey
    reason: str


@dataclass(frozen=True, slots=True)
class GroupClosed(Event):
    """The group goes on with the trajectories that are complete; all others of it are aborted."""

    group: GroupKey
    reason: str


@dataclass(frozen=True, slots=True)
class GroupDropped(Event):
    group: GroupKey
    reason: str


@dataclass(frozen=True, slots=True)
class BatchSealed(Event):
    """The groups, in this order, are batch number `batch`. Logged before anything of it is computed.

    short_tags: those of which it has fewer groups than `tag_shares` asks for.
    """

    batch: int
    groups: tuple[GroupKey, ...]
    policy_version: int
    short_tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TagWait(Event):
    """The next batch waits for nothing but `tag_shares` from now on, in the run's own time; None: not any more."""

    since: float | None


@dataclass(frozen=True, slots=True)
class TagSharesLapsed(Event):
    """The next batch is sealed without what it lacks of `tag_shares`, which it waited for long enough."""


@dataclass(frozen=True, slots=True)
class BatchPublished(Event):
    """awaits: the columns that trainers have to write before it can be trained: these are its forward shards. record:
    what is kept of the batch for good, where it is published for the first time."""

    batch: int
    mini_batches: Mapping[Model, int]
    nbytes: int
    awaits: tuple[str, ...] = ()
    record: Figures | None = None


class WrittenColumn(NamedTuple):
    """What the state knows of a column that a trainer wrote for a shard.

    digest: of the bytes that came, to tell a repeated write from another one. table: where the rows' values are; check:
    of these.
    """

    digest: bytes
    table: int
    check: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class ColumnsWritten(Event):
    """A trainer wrote columns for a shard of a batch that waits for them."""

    batch: int
    columns: Mapping[ColumnPlace, WrittenColumn]


@dataclass(frozen=True, slots=True)
class ColumnsDropped(Event):
    """What was written for the batch counts no more: its trainer was started again, or what was written is lost."""

    batch: int


@dataclass(frozen=True, slots=True)
class BatchWithdrawn(Event):
    """Its shards are gone, or no longer what ranks need, or it failed for ranks that are no more; it will be built
    again from the same rows."""

    batch: int


@dataclass(frozen=True, slots=True)
class BatchFailed(Event):
    """It cannot be built. keeps_rows: for another number of ranks it may be, so that its rows stay until every model is
    past it."""

    batch: int
    reason: str
    keeps_rows: bool = False


@dataclass(frozen=True, slots=True)
class BatchGivenUp(Event):
    """A checkpoint stepped over the batch, and somebody said so: its groups are dropped for this reason."""

    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationBegan(Event):
    """The log was found shorter than what had been promised. reached: the furthest position that is known to be
    acknowledged, by model; a checkpoint of an earlier generation that lies beyond it does not fit any more."""

    generation: int
    reached: Mapping[Model, Position]


@dataclass(frozen=True, slots=True)
class BatchFreed(Event):
    """Every model is past the batch, and it is in a checkpoint or failed: what is kept of it may go."""

    batch: int


@dataclass(frozen=True, slots=True)
class Acknowledged(Event):
    model: Model
    rank: int
    next: Position


@dataclass(frozen=True, slots=True)
class PositionCommitted(Event):
    model: Model
    position: Position


@dataclass(frozen=True, slots=True)
class ModelResumed(Event):
    model: Model
    position: Position
    incarnation: int
    launch: str


@dataclass(frozen=True, slots=True)
class Resized(Event):
    """The trainer has another number of data-parallel ranks from now on."""

    dp_size: int


@dataclass(frozen=True, slots=True)
class PolicyVersionAnnounced(Event):
    version: int


@dataclass(frozen=True, slots=True)
class RunFinished(Event):
    pass
