"""The JSON bodies of the HTTP API, with examples for its page. Names are those of the specification."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gristmill_service.config import Model
from gristmill_service.pipeline.plan_document import PlanDocument
from gristmill_service.run.machine.answers import GroupState, Position
from gristmill_service.validation_messages import shown

_Item = TypeVar("_Item")
Many = Annotated[list[_Item], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a body may have millions, and each error takes time."""


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "true and false are no numbers; give a number")
    return value


Int32 = Annotated[int, BeforeValidator(_no_bool), Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, BeforeValidator(_no_bool), Field(ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(strict=True)]
"""A float that neither a string nor a boolean gives."""


class Body(BaseModel):
    """The body of a request. Several unknown fields are refused in one error, for the same reason."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, body: object) -> object:
        if isinstance(body, dict) and (unknown := body.keys() - cls.model_fields):
            name = shown(min(unknown, key=str))
            raise PydanticCustomError("extra_forbidden", "there is no field {name}", {"name": name})
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
        description="The run's settings, as in the documentation's configuration table.", examples=[CONFIG_EXAMPLE]
    )


class RunCreated(BaseModel):
    warnings: list[str] = Field(description="Settings that are allowed but probably not intended.")
    created: bool = Field(description="False when the same run existed already.")


class RunNames(BaseModel):
    runs: list[str] = Field(examples=[["guess-1"]])


class BeginGroups(Body):
    uids: Many[str] = Field(examples=[["prompt-17", "prompt-18"]])
    round: Int32 = Field(0, description="The pass over the uids, such as the dataset epoch.")
    wait_s: float = Field(0.0, description="Seconds to wait for capacity; the service may answer earlier.")
    n_samples: Int32 | Many[Int32] = Field(
        default=[], description="The number of samples of each group, or of all; 0 or absent: the run's."
    )
    tag: str | Many[str] = Field(default=[], description="The environment or task of each group, or of all of them.")


def one_each(values: _Item | list[_Item], uids: list[str]) -> list[_Item]:
    """Returns one value per group from a value for all, or from a list with one per group."""
    return values if isinstance(values, list) else [values] * len(uids)


class GroupsBegun(BaseModel):
    admissions: list[Literal["admitted", "no_room", "sealed", "dropped"]] = Field(description="One per uid, in order.")
    retry_after_s: float = Field(description="If a group has no capacity: how long to wait before asking again.")
    reason: str = Field(description="Why there is no room.")


class Row(BaseModel):
    """One LLM call. Lists of tokens' values have one entry per response token. Declared columns of the run are further
    fields with their names.
    """

    model_config = ConfigDict(extra="allow")

    uid: str = Field(description="Names the prompt; all its samples share it.", examples=["prompt-17"])
    sample: int = Field(description="Which rollout of the prompt, from 0.", examples=[0])
    step: int = Field(0, description="Which LLM call of the trajectory, from 0.")
    is_last_step: bool = Field(True, description="Whether the trajectory ends with it.")
    prompt_token_ids: list[int] = Field(examples=[[1, 5, 9]])
    response_ids: list[int] = Field(examples=[[7, 2]])
    loss_mask: list[int] = Field(description="1 if the token is trained, else 0.", examples=[[1, 1]])
    reward: float | list[float] | None = Field(
        None, description="One for the step, or one per response token; null: set later by /rewards.", examples=[1.0]
    )
    round: int = Field(0, description="The pass over the uid in the run.")
    attempt: int = Field(0, description="A higher attempt supersedes all rows of a lower one.")
    rollout_logprobs: list[float] | None = Field(None, examples=[[-0.1, -0.7]])
    stop_reason: str = Field("", examples=["stop"])
    policy_version: int = Field(-1, description="The policy version that sampled the step; -1 unknown.")
    policy_versions: list[int] | None = Field(
        None, description="The version of each response token, if it changed meanwhile; the row's is the oldest."
    )
    advantage: float | list[float] | None = Field(None, description="With advantage_estimator: none.")
    tag: str = Field("", description="The environment or task of the row's group; those of a group agree.")


class RefusedRow(BaseModel):
    row: int = Field(description="Its index in the request.")
    code: str = Field(examples=["INVALID_ARGUMENT"])
    type: str = Field(description="The name of the Python class.")
    message: str = Field(
        description="Names the row at fault, which may be an earlier one of the same trajectory and attempt."
    )
    retry_after_s: float | None = Field(None, description="After how many seconds to send the row again, if ever.")


class RowsSubmitted(BaseModel):
    outcomes: list[Literal["accepted", "duplicate", "sealed", "dropped", "superseded", "refused"]] = Field(
        description="One a row, in order; refused only with refuse_by_row."
    )
    refused: list[RefusedRow] = Field([], description="Why rows were refused; absent if none was.")


class Trajectory(Body):
    uid: str = Field(examples=["prompt-17"])
    sample: Int32 = Field(examples=[0])
    round: Int32 = 0


class Reward(Trajectory):
    step: Int32 | None = Field(None, description="Which step; null: the last.")
    reward: Number | Many[Number] = Field(
        description="One, or one per response token, like the run's rows.", examples=[1.0]
    )


class SetRewards(Body):
    rewards: Many[Reward]


class AbortTrajectories(Body):
    trajectories: Many[Trajectory]
    reason: str = Field(examples=["environment crashed"])
    attempt: Int32 | None = Field(None, description="Abort this attempt and lower ones only; null: any attempt.")


class AbortGroups(Body):
    uids: Many[str] = Field(examples=[["prompt-17"]])
    round: Int32 = 0
    reason: str = Field(examples=["bad prompt"])


class Changed(BaseModel):
    changed: int = Field(description="How many this call changed.")


class SealBatch(Body):
    batch: Int64 | None = Field(None, description="The number that the batch is to have; makes the call idempotent.")


class BatchSealed(BaseModel):
    batch: int
    prompts: int


class RunFinished(BaseModel):
    batches: int = Field(description="How many batches the run has in all.")


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
    """A column that trainers have to write for one of the policy's shards."""

    mini_batch: int
    rank: int
    column: str


class ColumnsWritten(BaseModel):
    lacking: int = Field(description="How many columns of shards the batch still waits for.")


class Batch(BaseModel):
    state: Literal["pending", "forward", "published", "end"] = Field(
        description="forward: its forward shards are there, without what depends on columns that trainers write."
    )
    plan: PlanDocument | None = Field(
        None, description="If published or forward: the plan, as `gristmill plan` prints it."
    )
    awaits: list[AwaitedColumn] = Field([], description="If forward: the columns that are still missing.")


class Shard(BaseModel):
    state: Literal["pending", "forward", "published", "end"]
    position: Place | None = None
    size_bytes: int = 0
    shared_memory_path: str | None = Field(None, description="A file that processes on the same machine may map.")
    path: str | None = Field(None, description="Where this API gives the shard's bytes.")
    incarnation: int


class Acknowledge(Body):
    model: Model = "policy"
    rank: Int32
    position: Place
    incarnation: Int64 = Field(0, description="As /resume or the shard gave it.")
    commit: bool = Field(False, description="Without checkpoints: also commit up to the rank that is furthest behind.")


class Acknowledged(BaseModel):
    next: Place
    generation: int = Field(description="The generation of the trainer's next checkpoints.")


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
        "", description="Names this start of the trainer, the same on all its ranks.", examples=["job-7"]
    )
    dp_size: Int32 = Field(0, ge=0, description="How many data-parallel ranks it has now; 0: as many as before.")
    run_id: str = Field("", description="The run of the checkpoint; empty: not checked.")
    generation: Int64 = Field(0, ge=0, description="The run's generation at the checkpoint; 0: not checked.")
    give_up_reason: str = Field(
        "", description="The reason under which skipped groups are dropped; empty: skipping is refused."
    )
    ranks: list[Int32] = Field(
        [], description="Not empty: these ranks begin where they are, and nothing else of the request counts."
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
    batch: int | None = Field(description="The batch that it was sealed into.")
    reason: str = Field(description="Why it was dropped.")
    tag: str = Field(description="Its environment or task; empty where it has none.")


class Groups(BaseModel):
    groups: list[Group]


class PolicyVersion(Body):
    version: Int32


class TagGroups(BaseModel):
    """How many groups of a tag are in each state; each group counts once."""

    model_config = ConfigDict(from_attributes=True)

    open: int = Field(description="Not complete.")
    complete: int = Field(description="Not sealed.")
    sealed: int = Field(description="Without groups of batches that could not be made.")
    dropped: int


class ModelStatus(BaseModel):
    model: Model
    committed: Place
    incarnation: int
    next: list[Place] = Field(description="Per rank, the next position to acknowledge.")


class RunState(BaseModel):
    run: str
    run_id: str = Field(description="Made when the run was created; another run of the same name has another one.")
    generation: int = Field(description="How often the run's log was found shorter than confirmed, plus 1.")
    config: dict[str, Any] = Field(description="The settings that are not the defaults.")
    resolved_config: dict[str, Any] = Field(description="Every setting, with the defaults filled in.")
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
    groups_dropped: dict[str, int]
    tags: dict[str, TagGroups] = Field(description="The groups of each tag.")
    models: list[ModelStatus]
    failed_batches: dict[int, str]


class ErrorDetail(BaseModel):
    code: str = Field(examples=["NOT_FOUND"])
    type: str = Field(description="The Python client's class for it.", examples=["NotFoundError"])
    message: str = Field(description="What was wrong, where, the value, and what to do.")
    retry_after_s: float | None = None
    batch: int | None = None


class Error(BaseModel):
    error: ErrorDetail
