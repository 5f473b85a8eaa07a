"""The JSON bodies of the HTTP API, with examples for its documentation page. Names follow the specification."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gristmill_service.api.bounds import MOST_ENTRIES
from gristmill_service.config import Model
from gristmill_service.pipeline.plan_document import PlanDocument
from gristmill_service.run.machine.answers import GroupState, Position
from gristmill_service.validation_messages import shown

_Item = TypeVar("_Item")
Many = Annotated[list[_Item], Field(fail_fast=True)]
"""A list of which only the first invalid item is reported, because each error takes time."""
Listed = Annotated[list[_Item], Field(fail_fast=True, max_length=MOST_ENTRIES)]
"""The groups, trajectories or others that a request is about."""


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "true and false are not numbers; send a number")
    return value


Int32 = Annotated[int, BeforeValidator(_no_bool), Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, BeforeValidator(_no_bool), Field(ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(strict=True)]
"""A float that is not parsed from a string or a boolean."""


class Body(BaseModel):
    """The body of a request. It reports only one unknown field, because each error takes time."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, body: object) -> object:
        if isinstance(body, dict) and (unknown := body.keys() - cls.model_fields):
            name = shown(min(unknown, key=str))
            raise PydanticCustomError("extra_forbidden", "unknown field {name}; remove it", {"name": name})
        return body


CONFIG_EXAMPLE = {
    "train_batch_size": 4,
    "n_samples_per_prompt": 8,
    "policy_mini_batch_size": 2,
    "micro_batch": {"max_tokens": 16384},
    "step_wise": True,
    "merge": "prefix",
    "dp_size": 2,
}


class CreateRun(Body):
    run: str = Field(description="The run's name.", examples=["guess-1"])
    config: dict[str, Any] = Field(
        description="The run's settings; the documentation lists them.", examples=[CONFIG_EXAMPLE]
    )


class RunCreated(BaseModel):
    warnings: list[str] = Field(description="Settings that are allowed but probably unintended.")
    created: bool = Field(description="False if the run already existed with this configuration.")


class RunNames(BaseModel):
    runs: list[str] = Field(examples=[["guess-1"]])


class BeginGroups(Body):
    uids: Listed[str] = Field(examples=[["prompt-17", "prompt-18"]])
    round: Int32 = Field(0, description="The pass over the uids, such as the dataset epoch.")
    wait_s: float = Field(0.0, description="Seconds to wait for capacity; the service may answer earlier.")
    n_samples: Int32 | Listed[Int32] = Field(
        default=[],
        description="The number of samples of each group, or one number for all; 0 or absent: the run's default.",
    )
    tag: str | Listed[str] = Field(default=[], description="The environment or task of each group, or one for all.")


def one_each(values: _Item | list[_Item], uids: list[str]) -> list[_Item]:
    """Returns one value per group. values: one value for all groups, or a list with one value per group."""
    return values if isinstance(values, list) else [values] * len(uids)


class GroupsBegun(BaseModel):
    admissions: list[Literal["admitted", "no_room", "sealed", "dropped"]] = Field(description="One per uid, in order.")
    retry_after_s: float = Field(description="If the run lacks capacity for a group: seconds to wait before retrying.")
    reason: str = Field(description="Why the run lacks capacity.")
    policy_version: int = Field(description="The policy version that was announced last; 0 before any.")


class Row(BaseModel):
    """One LLM call. Lists of per-token values have one entry per response token. The run's declared columns are
    additional fields with their names."""

    model_config = ConfigDict(extra="allow")

    uid: str = Field(description="Identifies the prompt; all its samples have the same uid.", examples=["prompt-17"])
    sample: int = Field(description="The index of the rollout of the prompt, from 0.", examples=[0])
    step: int = Field(0, description="The index of the LLM call in the trajectory, from 0.")
    is_last_step: bool = Field(True, description="Whether the trajectory ends with this step.")
    prompt_token_ids: list[int] = Field(examples=[[1, 5, 9]])
    response_ids: list[int] = Field(examples=[[7, 2]])
    loss_mask: list[int] = Field(description="1 for a token to train on, else 0.", examples=[[1, 1]])
    reward: float | list[float] | None = Field(
        None,
        description="One value for the step, or one per response token; null: set later by /rewards.",
        examples=[1.0],
    )
    round: int = Field(0, description="The pass over the uid in the run.")
    attempt: int = Field(0, description="A higher attempt supersedes all rows of a lower one.")
    rollout_logprobs: list[float] | None = Field(None, examples=[[-0.1, -0.7]])
    stop_reason: str = Field("", examples=["stop"])
    policy_version: int = Field(-1, description="The policy version that sampled the step; -1: unknown.")
    policy_versions: list[int] | None = Field(
        None, description="The version of each response token, if it changed within the step; the row's is the oldest."
    )
    advantage: float | list[float] | None = Field(None, description="Required with advantage_estimator: none.")
    reward_components: dict[str, float] | None = Field(
        None, description="On the last step: components of the trajectory's reward, by name, for gdpo."
    )
    step_key: str = Field("", description="A key of the step, such as a hash of the environment's state, for gigpo.")
    agent: str = Field("", description="The agent (role) of the trajectory; the same in all of its rows.")
    episode: str = Field(
        "", description="The joint rollout of several trajectories of the group; the same in all rows of a trajectory."
    )
    partition: str = Field("", description="A micro-batch has rows of one partition, such as a loss or an adapter.")
    tag: str = Field("", description="The environment or task; the same in all rows of a group.")


class RefusedRow(BaseModel):
    row: int = Field(description="The index of the row in the request.")
    code: str = Field(examples=["INVALID_ARGUMENT"])
    type: str = Field(description="The name of the Python client's error class.")
    message: str = Field(
        description="The error. It names the invalid row, which may be an earlier row of the trajectory and attempt."
    )
    retry_after_s: float | None = Field(
        None, description="Seconds to wait before sending the row again; null: do not retry."
    )


class RowsSubmitted(BaseModel):
    outcomes: list[Literal["accepted", "duplicate", "sealed", "dropped", "superseded", "refused"]] = Field(
        description="One per row, in order; refused occurs only with refuse_by_row."
    )
    refused: list[RefusedRow] = Field([], description="Why rows were refused; absent if no row was refused.")


class Trajectory(Body):
    uid: str = Field(examples=["prompt-17"])
    sample: Int32 = Field(examples=[0])
    round: Int32 = 0


class Reward(Trajectory):
    step: Int32 | None = Field(None, description="The index of the step; null: the last step.")
    reward: Number | Many[Number] = Field(
        description="One value, or one per response token, as in the run's rows.", examples=[1.0]
    )


class SetRewards(Body):
    rewards: Listed[Reward]


class AbortTrajectories(Body):
    trajectories: Listed[Trajectory]
    reason: str = Field(examples=["environment crashed"])
    attempt: Int32 | None = Field(None, description="Abort only this and lower attempts; null: any attempt.")


class AbortGroups(Body):
    uids: Listed[str] = Field(examples=[["prompt-17"]])
    round: Int32 = 0
    reason: str = Field(examples=["bad prompt"])


class Changed(BaseModel):
    changed: int = Field(description="How many trajectories or groups this call changed.")


class SealBatch(Body):
    batch: Int64 | None = Field(None, description="The expected number of the batch; makes the call idempotent.")


class BatchSealed(BaseModel):
    batch: int
    prompts: int


class RunFinished(BaseModel):
    batches: int = Field(description="The total number of batches of the run.")


class Place(Body):
    """A position in a model's training order."""

    batch: Int64
    epoch: Int32 = 0
    mini_batch: Int32 = 0

    @classmethod
    def of(cls, position: Position) -> Place:
        return cls(**position._asdict())

    def position(self) -> Position:
        return Position(self.batch, self.epoch, self.mini_batch)


class AwaitedColumn(BaseModel):
    """A column that a trainer must write for one of the policy's shards."""

    mini_batch: int
    rank: int
    column: str


class ColumnsWritten(BaseModel):
    lacking: int = Field(description="How many columns the batch is still missing, over all shards.")


class Batch(BaseModel):
    state: Literal["pending", "forward", "published", "end"] = Field(
        description="forward: only the forward shards are published; they lack what depends on missing columns."
    )
    plan: PlanDocument | None = Field(
        None, description="If published or forward: the plan, as `gristmill plan` prints it."
    )
    awaits: list[AwaitedColumn] = Field([], description="If forward: the missing columns.")


class Shard(BaseModel):
    state: Literal["pending", "forward", "published", "end"]
    position: Place | None = None
    size_bytes: int = 0
    shared_memory_path: str | None = Field(None, description="A file that processes on the same machine can map.")
    path: str | None = Field(None, description="The path of this API from which to read the shard's bytes.")
    incarnation: int


class Acknowledge(Body):
    model: Model = "policy"
    rank: Int32
    position: Place
    incarnation: Int64 = Field(0, description="The incarnation from /resume or the shard; 0: not checked.")
    commit: bool = Field(
        False, description="For a trainer without checkpoints: also commit what all ranks have acknowledged."
    )


class Acknowledged(BaseModel):
    next: Place
    generation: int = Field(description="The generation to store in the trainer's next checkpoints.")


class Commit(Body):
    model: Model = "policy"
    position: Place
    incarnation: Int64 = 0


class Committed(BaseModel):
    committed: Place
    generation: int


class Resume(Body):
    model: Model = "policy"
    position: Place | None = Field(None, description="null: stay at the committed position.")
    launch: str = Field(
        "", description="Identifies this start of the trainer; the same on all its ranks.", examples=["job-7"]
    )
    dp_size: Int32 = Field(0, ge=0, description="The trainer's number of data-parallel ranks now; 0: unchanged.")
    run_id: str = Field("", description="The run_id in the checkpoint; empty: not checked.")
    generation: Int64 = Field(0, ge=0, description="The run's generation at the checkpoint; 0: not checked.")
    give_up_reason: str = Field(
        "", description="Allows skipping, and is the reason of the groups dropped by it; empty: skipping is refused."
    )
    ranks: Listed[Int32] = Field(
        [], description="If not empty: start these ranks at their own positions, and ignore the other fields."
    )


class Resumed(BaseModel):
    incarnation: int
    position: Place
    run_id: str
    generation: int


class Group(BaseModel):
    uid: str
    round: int
    state: GroupState
    batch: int | None = Field(description="The batch that contains the group; null if it is not sealed.")
    reason: str = Field(description="Why the group was dropped, or is not complete.")
    tag: str = Field(description="The group's environment or task; empty if it has none.")


class Groups(BaseModel):
    archived: int = Field(description="Closed groups that are listed only if they are named.")
    groups: list[Group]


class PolicyVersion(Body):
    version: Int32


class TagGroups(BaseModel):
    """The number of groups of a tag in each state. Each group is counted once."""

    model_config = ConfigDict(from_attributes=True)

    open: int = Field(description="Groups that are not complete.")
    complete: int = Field(description="Complete groups that are not sealed.")
    sealed: int = Field(description="Sealed groups, except those of failed batches.")
    dropped: int


class ModelStatus(BaseModel):
    model: Model
    committed: Place
    incarnation: int
    next: list[Place] = Field(description="The next position to acknowledge, per rank.")
    resumes: int = Field(description="How often a trainer resumed all ranks from a checkpoint.")


class RunState(BaseModel):
    run: str
    run_id: str = Field(description="Identifies the run; a new run of the same name has a different one.")
    generation: int = Field(description="1 plus the number of times that confirmed events were lost from the log.")
    config: dict[str, Any] = Field(description="The settings that differ from the defaults.")
    resolved_config: dict[str, Any] = Field(description="All settings, including defaults.")
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
    groups_archived: int = Field(description="Closed groups that are listed only if they are named.")
    next_round: int = Field(description="The round after the highest of any group that was ever begun.")
    groups_dropped: dict[str, int]
    tags: dict[str, TagGroups] = Field(description="Numbers of groups, per tag.")
    models: list[ModelStatus]
    failed_batches: dict[int, str]


class ErrorDetail(BaseModel):
    code: str = Field(examples=["NOT_FOUND"])
    type: str = Field(description="The name of the Python client's error class.", examples=["NotFoundError"])
    message: str = Field(description="The location, the value, the reason and the remedy.")
    retry_after_s: float | None = None
    batch: int | None = None


class Error(BaseModel):
    error: ErrorDetail
