"""The events of a run: small values in one ordered log.

An event records the result of a decision, not its reasons. It refers to token rows, and does not contain them. Only
`state.apply` interprets events; `codec` encodes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gristmill._wire.steps import TrajectoryKey
from gristmill_service.config import Model
from gristmill_service.pipeline.credit.baselines import BaselineKey
from gristmill_service.pipeline.figures import Figures
from gristmill_service.run.machine.answers import ColumnPlace, Position


class GroupKey(NamedTuple):
    """The key of a prompt group within a run."""

    round: int
    uid: str

    def __str__(self) -> str:
        return f"uid {self.uid!r} round {self.round}" if self.round else f"uid {self.uid!r}"


class NewGroup(NamedTuple):
    """A group to begin. samples: its number of trajectories. tag: its environment or task."""

    key: GroupKey
    samples: int
    tag: str = ""


class RowRef(NamedTuple):
    """A reference to a stored row: the number of a table in the run's log, and the row's index in the table."""

    table: int
    row: int


class RowName(NamedTuple):
    """The name of a row within its prompt group. The content under a name never changes."""

    sample: int
    attempt: int
    step: int


COLUMNS = -1
"""The `row` of a `RowRef` to a table that contains a column written by a trainer instead of rows of tokens."""


class StoredRow(NamedTuple):
    """The state's description of an accepted row.

    digest: of the whole row without its key, to recognize a row that is sent again in whole or in part.
    nbytes: the bytes that are stored for the row. tokens: the number of tokens of the whole row.
    parent: the row of the same group whose first tokens this row repeats; they are not stored again. None if the row
        is stored whole.
    check: the digest of the row as it is stored; empty if it equals `digest`.
    reward: the step's reward; None while it is pending. reward_rest: the rounding error of `reward`, if it is a sum of
        rewards per token. reward_digest: the digest of rewards per token.
    late_rewards: rewards per token, float64, that were set after the row arrived.
    agent, episode: the role and the joint rollout of the trajectory; empty if it has none.
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
    agent: str = ""
    episode: str = ""

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
    """The optional columns of a run, which every row has or none. None: not determined yet, or not applicable.

    components: the names in the `reward_components` of any last step so far.
    agents, partitions: those of any row so far.
    """

    logprobs: bool | None = None
    token_rewards: bool | None = None
    token_advantages: bool | None = None
    components: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()


ROW_KINDS = {
    "logprobs": {True: "rollout_logprobs", False: "no rollout_logprobs"},
    "token_rewards": {True: "one reward per response token", False: "one reward a step"},
    "token_advantages": {True: "one advantage per response token", False: "one advantage a trajectory"},
}
"""How errors describe each value of a `RowSchema` field."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of events."""


@dataclass(frozen=True, slots=True)
class GroupsAdmitted(Event):
    groups: tuple[NewGroup, ...]
    at: float


@dataclass(frozen=True, slots=True)
class GroupTagged(Event):
    """Sets the tag of a group that began without one."""

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
    """Aborts all attempts up to the higher of `attempt` and the stored one."""

    trajectory: TrajectoryKey
    reason: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class GroupClosed(Event):
    """Aborts the group's incomplete trajectories; the group continues with the complete ones."""

    group: GroupKey
    reason: str


@dataclass(frozen=True, slots=True)
class GroupDropped(Event):
    group: GroupKey
    reason: str


@dataclass(frozen=True, slots=True)
class BatchSealed(Event):
    """These groups form batch number `batch`, in this order. Logged before the batch is computed.

    short_tags: the tags of which the batch has fewer groups than `tag_shares` requires.
    """

    batch: int
    groups: tuple[GroupKey, ...]
    policy_version: int
    short_tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TagWait(Event):
    """since: the time since when only `tag_shares` keeps the next batch from being sealed; None if it does not."""

    since: float | None


@dataclass(frozen=True, slots=True)
class TagSharesLapsed(Event):
    """The wait for `tag_shares` timed out: the next batch is sealed without the missing groups."""


@dataclass(frozen=True, slots=True)
class BatchPublished(Event):
    """The shards of a batch are published: forward shards if `awaits` is not empty.

    awaits: the columns that trainers must write before training. record: the figures to store permanently, when the
    batch is published for the first time. baselines: the run's after the batch, if it keeps any.
    """

    batch: int
    mini_batches: Mapping[Model, int]
    nbytes: int
    awaits: tuple[str, ...] = ()
    record: Figures | None = None
    baselines: dict[BaselineKey, float] | None = None


class WrittenColumn(NamedTuple):
    """The state's description of a column that a trainer wrote for a shard.

    digest: of the received bytes, to recognize a repeated write. table: the number of the table with the values. check:
        the digest of the table's values.
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
    """The columns written for the batch are discarded, because its trainer was restarted or they are lost."""

    batch: int


@dataclass(frozen=True, slots=True)
class BatchWithdrawn(Event):
    """The batch will be built again from the same rows, because its shards are lost or outdated, or because it failed
    for another number of ranks."""

    batch: int


@dataclass(frozen=True, slots=True)
class BatchFailed(Event):
    """The batch cannot be built. keeps_rows: whether its rows are kept until every model is past it, because it may be
    built for another number of ranks."""

    batch: int
    reason: str
    keeps_rows: bool = False


@dataclass(frozen=True, slots=True)
class BatchGivenUp(Event):
    """A trainer resumed after the batch. The batch's groups are dropped for the reason that the trainer sent."""

    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationBegan(Event):
    """The log lost events that were already confirmed, and a new generation of the run begins. reached: for each model,
    the furthest position known to be acknowledged; checkpoints of earlier generations beyond it do not fit.
    """

    generation: int
    reached: Mapping[Model, Position]


@dataclass(frozen=True, slots=True)
class BatchFreed(Event):
    """Every model is past the batch, and the batch is in a checkpoint or failed: its rows and shards may be removed."""

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
class RankCommitted(Event):
    """A rank committed for itself: the model's position is committed when all of its ranks have done so."""

    model: Model
    rank: int
    position: Position


@dataclass(frozen=True, slots=True)
class ModelResumed(Event):
    model: Model
    position: Position
    incarnation: int
    launch: str


@dataclass(frozen=True, slots=True)
class RanksBegan(Event):
    """Ranks began to train under an incarnation that only they have.

    position: where they begin; None: at their own positions.
    """

    model: Model
    ranks: tuple[int, ...]
    incarnation: int
    position: Position | None = None


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
