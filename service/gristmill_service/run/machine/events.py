"""The events of a run, as small values in one ordered log.

An event has a decision's result, not its reasons. It refers to rows of tokens, and does not contain them. Only
`state.apply` interprets events; `codec` encodes them.
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
    """A group to begin: its number of samples, and its environment or task."""

    key: GroupKey
    samples: int
    tag: str = ""


class RowRef(NamedTuple):
    """Refers to a row's tokens: the number of a table in the run's log, and the row's index in it."""

    table: int
    row: int


class RowName(NamedTuple):
    """Names a row of a prompt group. The content under a name never changes."""

    sample: int
    attempt: int
    step: int


COLUMNS = -1
"""The row's index in a RowRef to a table that has a column that a trainer wrote, and no tokens."""


class StoredRow(NamedTuple):
    """The state's description of an accepted row.

    digest: of the whole row without its key, to recognize a repeated row however it was sent.
    nbytes, tokens: of what is stored of it, and of the whole row.
    parent: the row of its group whose first tokens it begins with, which are not stored again; None if it is stored
        whole.
    check: the digest of what is stored of it, empty if that is the same.
    reward: the step's reward, None while it is pending. reward_rest: what the exact sum of its rewards per token has
        beyond that. reward_digest: of rewards per token.
    late_rewards: rewards per token, float64, that were set after the row arrived.
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
    reward_rest: float = 0.0

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
    """float64, one per response token; empty for a scalar reward."""


@dataclass(frozen=True, slots=True)
class RowSchema:
    """The optional columns of a run's rows, in which all rows agree. None: not known yet, or not applicable."""

    logprobs: bool | None = None
    token_rewards: bool | None = None
    token_advantages: bool | None = None


ROW_KINDS = {
    "logprobs": {True: "rollout_logprobs", False: "no rollout_logprobs"},
    "token_rewards": {True: "one reward per response token", False: "one reward a step"},
    "token_advantages": {True: "one advantage per response token", False: "one advantage a trajectory"},
}
"""The words for each field of a `RowSchema`, for errors."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of events."""


@dataclass(frozen=True, slots=True)
class GroupsAdmitted(Event):
    groups: tuple[NewGroup, ...]
    at: float


@dataclass(frozen=True, slots=True)
class GroupTagged(Event):
    """A group that began without a tag gets one."""

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
    """attempt: the highest attempt that is given up, unless rows of a higher one are stored."""

    trajectory: TrajectoryKey
    reason: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class GroupClosed(Event):
    """The group continues with its complete trajectories; all others are aborted."""

    group: GroupKey
    reason: str


@dataclass(frozen=True, slots=True)
class GroupDropped(Event):
    group: GroupKey
    reason: str


@dataclass(frozen=True, slots=True)
class BatchSealed(Event):
    """The groups, in this order, are batch number `batch`. Logged before anything of it is computed.

    short_tags: tags of which it has fewer groups than `tag_shares` asks for.
    """

    batch: int
    groups: tuple[GroupKey, ...]
    policy_version: int
    short_tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TagWait(Event):
    """Since when, in the run's own time, the next batch waits only for `tag_shares`; None: it does not."""

    since: float | None


@dataclass(frozen=True, slots=True)
class TagSharesLapsed(Event):
    """The next batch is sealed without the missing groups of `tag_shares`, for which it has waited long enough."""


@dataclass(frozen=True, slots=True)
class BatchPublished(Event):
    """awaits: the columns that trainers have to write before training: these are forward shards. record: figures to
    store permanently, if it is published for the first time.
    """

    batch: int
    mini_batches: Mapping[Model, int]
    nbytes: int
    awaits: tuple[str, ...] = ()
    record: Figures | None = None


class WrittenColumn(NamedTuple):
    """The state's description of a column that a trainer wrote for a shard.

    digest: of the received bytes, to recognize a repeated write. table: the number of the table with the values. check:
        the digest of these.
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
    """The columns written for the batch are void: its trainer was restarted, or they are lost."""

    batch: int


@dataclass(frozen=True, slots=True)
class BatchWithdrawn(Event):
    """The batch's shards are lost or outdated, or it failed for another number of ranks: it will be built again from
    the same rows."""

    batch: int


@dataclass(frozen=True, slots=True)
class BatchFailed(Event):
    """The batch cannot be built. keeps_rows: whether another number of ranks may help, so that its rows stay until
    every model is past it."""

    batch: int
    reason: str
    keeps_rows: bool = False


@dataclass(frozen=True, slots=True)
class BatchGivenUp(Event):
    """A trainer resumed after the batch and gave a reason, under which its groups are dropped."""

    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationBegan(Event):
    """The log was found shorter than confirmed. reached: the furthest position known to be acknowledged, by model: a
    checkpoint of an earlier generation beyond it does not fit any more.
    """

    generation: int
    reached: Mapping[Model, Position]


@dataclass(frozen=True, slots=True)
class BatchFreed(Event):
    """Every model is past the batch, and it is in a checkpoint or failed: its rows and shards may be removed."""

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
class RanksBegan(Event):
    """Ranks began to train at their own positions, as an incarnation that is theirs alone."""

    model: Model
    ranks: tuple[int, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Resized(Event):
    """The trainer has another number of data-parallel ranks."""

    dp_size: int


@dataclass(frozen=True, slots=True)
class PolicyVersionAnnounced(Event):
    version: int


@dataclass(frozen=True, slots=True)
class RunFinished(Event):
    pass
