"""The gRPC methods of the API: each converts its request to arguments of a function of `calls`, and the answer back."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, fields
from functools import lru_cache, partial
from typing import Any, NamedTuple, get_args

import numpy as np
from google.protobuf.descriptor import Descriptor

import gristmill
from gristmill._wire.codecs import row_codec
from gristmill._wire.codecs.columns_codec import ColumnsRequest
from gristmill._wire.codecs.shard_messages import message_of
from gristmill._wire.codecs.submit_codec import Submission
from gristmill._wire.columns import Array
from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import GristmillError, InvalidArgumentError
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from gristmill_service import tracing
from gristmill_service.access import caller
from gristmill_service.api import calls
from gristmill_service.api.admission import Kind, Slot
from gristmill_service.api.bounds import DOCUMENT, check_json, check_message, most_bytes
from gristmill_service.api.context import ApiContext
from gristmill_service.api.errors import refusal
from gristmill_service.api.row_requests import RowsRequest
from gristmill_service.config import Model
from gristmill_service.monitoring.health.report import RunReport
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.machine.answers import (
    Admissions,
    BatchAnswer,
    BatchState,
    GroupAnswer,
    GroupState,
    Position,
    RewardUpdate,
    ShardAnswer,
)
from gristmill_service.run.machine.decisions.resume import Checkpoint

# Large enough to be fast, and small enough for clients with gRPC's default limit of 4 MiB per message.
_PIECE_BYTES = 1 << 20

Parse = Callable[[bytes], Any]

_MODELS: dict[int, Model] = {
    run_pb2.MODEL_UNSPECIFIED: "policy",
    run_pb2.MODEL_POLICY: "policy",
    run_pb2.MODEL_CRITIC: "critic",
}
_MODEL_NUMBERS: dict[Model, Any] = {"policy": run_pb2.MODEL_POLICY, "critic": run_pb2.MODEL_CRITIC}
_GROUP_STATES: dict[GroupState, Any] = {
    state: run_pb2.GroupState.Value(f"GROUP_STATE_{state.upper()}") for state in get_args(GroupState)
}

_check_rows = partial(check_message, descriptor=rollout_pb2.SubmitRowsRequest.DESCRIPTOR)


class Method(NamedTuple):
    """A method.

    path: its path in gRPC. name: its name in metrics and logs. call: its name in the table of roles; empty if it needs
    no role. kind: the kind of its slot. message: describes its request.
    answer(api, slot, request): a coroutine that returns a message or the answer's bytes, or an asynchronous generator
        of these.
    is_large: whether the answer takes as much memory as a large request. most_bytes: see `bounds.most_bytes`.
    """

    path: str
    name: str
    call: str
    kind: Kind
    message: Descriptor
    parse: Parse
    answer: Callable[[ApiContext, Slot, Any], Any]
    is_stream: bool
    is_large: bool = False
    most_bytes: int | None = 1 << 20


def methods(api: ApiContext) -> Iterator[Method]:
    """Yields every method of the API."""
    parsers: dict[str, Parse] = {
        # protobuf's classes would copy these requests too often.
        "SubmitRows": partial(Submission, most_bytes=api.max_message_bytes, check=_check_rows),
        "WriteColumns": ColumnsRequest,
    }
    for contract in (run_pb2, rollout_pb2, trainer_pb2):
        for service in contract.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                # GetRun becomes get_run.
                call = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower()
                yield Method(
                    f"/{service.full_name}/{method.name}",
                    method.name,
                    call,
                    "stream" if method.server_streaming else "call",
                    method.input_type,
                    parsers.get(method.name) or getattr(contract, method.input_type.name).FromString,
                    _ANSWERS[call],
                    method.server_streaming,
                    method.name == "ListGroups",
                    most_bytes(call),
                )


# --- Runs


async def create_run(api: ApiContext, slot: Slot, request: run_pb2.CreateRunRequest) -> run_pb2.CreateRunResponse:
    config = _config(request.config_json)
    warnings, created = await calls.create_run(api, request.run, config)
    return run_pb2.CreateRunResponse(warnings=warnings, created=created)


async def get_run(api: ApiContext, slot: Slot, request: run_pb2.GetRunRequest) -> run_pb2.GetRunResponse:
    return run_pb2.GetRunResponse(status=_status(await calls.get_run(api, request.run)))


async def get_health(api: ApiContext, slot: Slot, request: run_pb2.GetHealthRequest) -> run_pb2.GetHealthResponse:
    # This call needs no token, so only callers with one get the directory.
    run_store = api.run_store.partition(" ")[0] if caller.current() is caller.ANYONE else api.run_store
    return run_pb2.GetHealthResponse(
        not_ready=api.unhealthy_reason(), version=gristmill.__version__, started=api.started, run_store=run_store
    )


async def list_runs(api: ApiContext, slot: Slot, request: run_pb2.ListRunsRequest) -> run_pb2.ListRunsResponse:
    return run_pb2.ListRunsResponse(runs=await calls.list_runs(api))


async def list_groups(api: ApiContext, slot: Slot, request: run_pb2.ListGroupsRequest) -> AsyncIterator[bytes]:
    archived, parts = await calls.list_groups(api, request.run, request.round, request.uids)
    yield run_pb2.ListGroupsResponse(archived=archived).SerializeToString()
    async for groups in parts:
        # One list at a time, because this is Python code that holds the GIL.
        yield await api.encode_groups(_encoded_groups, groups)


async def finish_run(api: ApiContext, slot: Slot, request: run_pb2.FinishRunRequest) -> run_pb2.FinishRunResponse:
    return run_pb2.FinishRunResponse(batches=await calls.finish_run(api, request.run))


async def delete_run(api: ApiContext, slot: Slot, request: run_pb2.DeleteRunRequest) -> run_pb2.DeleteRunResponse:
    await calls.delete_run(api, request.run)
    return run_pb2.DeleteRunResponse()


async def announce_policy_version(
    api: ApiContext, slot: Slot, request: run_pb2.AnnouncePolicyVersionRequest
) -> run_pb2.AnnouncePolicyVersionResponse:
    await calls.announce_policy_version(api, request.run, request.version)
    return run_pb2.AnnouncePolicyVersionResponse()


async def wait_policy_version(
    api: ApiContext, slot: Slot, request: run_pb2.WaitPolicyVersionRequest
) -> run_pb2.WaitPolicyVersionResponse:
    version = await calls.wait_policy_version(api, slot, request.run, request.at_least, request.wait_s)
    return run_pb2.WaitPolicyVersionResponse(version=version)


# --- Rollout workers


async def begin_groups(
    api: ApiContext, slot: Slot, request: rollout_pb2.BeginGroupsRequest
) -> rollout_pb2.BeginGroupsResponse:
    begun = await calls.begin_groups(
        api, slot, request.run, request.round, request.uids, request.n_samples, request.tags, request.wait_s
    )
    return _admissions(begun)


async def submit_rows(api: ApiContext, slot: Slot, request: Submission) -> rollout_pb2.SubmitRowsResponse:
    outcomes, errors = await calls.submit_rows(
        api, slot, request.run, request.nbytes, lambda _: RowsRequest.of(request.rows(), request.refuses_by_row)
    )
    slot.note_wrong(errors.values())
    # Usually all rows of a request have the same outcome, and reading an enum's value is slow.
    is_one = bool(outcomes) and outcomes.count(outcomes[0]) == len(outcomes)
    numbers: list[Any] = [outcomes[0].value] * len(outcomes) if is_one else [outcome.value for outcome in outcomes]
    refused, request_id = [_refused(*one) for one in errors.items()], tracing.request_id() if errors else ""
    return rollout_pb2.SubmitRowsResponse(outcomes=numbers, refused=refused, request_id=request_id)


def _refused(row: int, error: GristmillError) -> rollout_pb2.RefusedRow:
    one = refusal(error)
    return rollout_pb2.RefusedRow(
        row=row, code=one.code, type=one.type, message=one.message, retry_after_s=one.retry_after_s or 0.0
    )


async def set_rewards(
    api: ApiContext, slot: Slot, request: rollout_pb2.SetRewardsRequest
) -> rollout_pb2.SetRewardsResponse:
    rewards = [_reward(reward) for reward in request.rewards]
    return rollout_pb2.SetRewardsResponse(changed=await calls.set_rewards(api, request.run, rewards))


async def abort_trajectories(
    api: ApiContext, slot: Slot, request: rollout_pb2.AbortTrajectoriesRequest
) -> rollout_pb2.AbortTrajectoriesResponse:
    keys = [_key(key) for key in request.trajectories]
    attempt = request.attempt if request.HasField("attempt") else None
    changed = await calls.abort_trajectories(api, request.run, keys, request.reason, attempt)
    return rollout_pb2.AbortTrajectoriesResponse(changed=changed)


async def abort_groups(
    api: ApiContext, slot: Slot, request: rollout_pb2.AbortGroupsRequest
) -> rollout_pb2.AbortGroupsResponse:
    changed = await calls.abort_groups(api, request.run, request.round, list(request.uids), request.reason)
    return rollout_pb2.AbortGroupsResponse(changed=changed)


async def seal_batch(
    api: ApiContext, slot: Slot, request: rollout_pb2.SealBatchRequest
) -> rollout_pb2.SealBatchResponse:
    sealed = await calls.seal_batch(api, request.run, request.batch if request.HasField("batch") else None)
    return rollout_pb2.SealBatchResponse(batch=sealed.batch, prompts=sealed.prompts)


# --- Trainer ranks


async def get_batch(api: ApiContext, slot: Slot, request: trainer_pb2.GetBatchRequest) -> bytes:
    wanted = None
    if request.HasField("shard"):
        # The answer includes that of GetShard, which a rank's token permits only for its own rank.
        api.gate.check(caller.current(), "get_shard", request.run, request.shard.rank)
        wanted = _query(request.shard, request.batch)
    trains = _model(request.trains) if request.trains else None
    batch, shard = await calls.get_batch(
        api, slot, request.run, request.batch, request.ranks, trains, request.wait_s, wanted
    )
    if batch.state is not BatchState.PUBLISHED:
        return _batch(batch).SerializeToString()
    encoded = _published_batch(batch.plan)
    if shard is None:
        return encoded
    # Concatenating encoded messages merges their fields.
    return encoded + trainer_pb2.GetBatchResponse(shard=_shard(shard)).SerializeToString()


@lru_cache(maxsize=1)
def _published_batch(plan: bytes) -> bytes:
    """Encodes the message once for all ranks: a plan is large, and all ranks request it at the same time."""
    return trainer_pb2.GetBatchResponse(
        state=trainer_pb2.BATCH_STATE_PUBLISHED, plan_json=plan.decode()
    ).SerializeToString()


async def get_shard(api: ApiContext, slot: Slot, request: trainer_pb2.GetShardRequest) -> trainer_pb2.GetShardResponse:
    return _shard(await calls.get_shard(api, slot, request.run, _query(request), request.wait_s))


def _query(request: trainer_pb2.GetShardRequest, batch: int | None = None) -> calls.ShardQuery:
    """Converts a request for a shard. batch: the batch, if this is part of a request for a batch."""
    position = _optional_position(request)
    if batch is not None:
        position = _position(request.position)._replace(batch=batch)
    return calls.ShardQuery(_model(request.model), request.rank, position, request.incarnation, request.forward)


async def read_shard(api: ApiContext, slot: Slot, request: trainer_pb2.ReadShardRequest) -> AsyncIterator[bytes]:
    """Yields the encoded answers without creating a message object for each piece."""
    address = ShardAddress(_model(request.model), request.mini_batch, request.rank)
    columns = list(request.columns) if request.chooses_columns else None
    shard = await calls.read_shard(api, request.run, request.batch, address, columns, accepts_zstd=request.accepts_zstd)
    async for piece in shard.pieces:
        if shard.is_zstd:
            yield message_of(piece, is_zstd=True)
            continue
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE_BYTES):
            yield message_of(view[start : start + _PIECE_BYTES], is_zstd=False)


async def read_table(api: ApiContext, slot: Slot, request: trainer_pb2.ReadTableRequest) -> AsyncIterator[bytes]:
    file = await calls.read_table(api, request.run, request.batch)
    for start in range(0, len(file), _PIECE_BYTES):
        yield trainer_pb2.ReadTableResponse(data=file[start : start + _PIECE_BYTES]).SerializeToString()


async def export_batch(api: ApiContext, slot: Slot, request: trainer_pb2.ExportBatchRequest) -> AsyncIterator[bytes]:
    async for steps in calls.export_batch(api, request.run, None if request.all else request.batch):
        rows = await calls.of_size(4 * int(steps.tokens.total), row_codec.encode, steps)
        yield trainer_pb2.ExportBatchResponse(rows=rows).SerializeToString()


async def write_columns(api: ApiContext, slot: Slot, request: ColumnsRequest) -> trainer_pb2.WriteColumnsResponse:
    lacking = await calls.write_columns(
        api, request.run, request.batch, request.mini_batch, request.rank, request.incarnation, request.tensors
    )
    return trainer_pb2.WriteColumnsResponse(lacking=lacking)


async def acknowledge(
    api: ApiContext, slot: Slot, request: trainer_pb2.AcknowledgeRequest
) -> trainer_pb2.AcknowledgeResponse:
    model, position = _model(request.model), _position(request.position)
    moved = await calls.acknowledge(
        api, request.run, model, request.rank, position, request.incarnation, request.commit
    )
    return trainer_pb2.AcknowledgeResponse(next=_position_message(moved.position), generation=moved.generation)


async def commit(api: ApiContext, slot: Slot, request: trainer_pb2.CommitRequest) -> trainer_pb2.CommitResponse:
    model, position = _model(request.model), _position(request.position)
    moved = await calls.commit(api, request.run, model, position, request.incarnation)
    return trainer_pb2.CommitResponse(committed=_position_message(moved.position), generation=moved.generation)


async def resume(api: ApiContext, slot: Slot, request: trainer_pb2.ResumeRequest) -> trainer_pb2.ResumeResponse:
    checkpoint = Checkpoint(_optional_position(request), request.run_id, request.generation, request.give_up_reason)
    if request.dp_size < 0:
        raise InvalidArgumentError(
            f"dp_size {request.dp_size} is negative; send the number of ranks, or 0 for no change"
        )
    how = checkpoint, request.launch, request.dp_size, request.ranks
    resumed = await calls.resume(api, request.run, _model(request.model), *how)
    return trainer_pb2.ResumeResponse(
        incarnation=resumed.incarnation,
        position=_position_message(resumed.position),
        run_id=resumed.run_id,
        generation=resumed.generation,
    )


# --- Conversions between messages and values. They raise InvalidArgumentError.


def _config(config_json: str) -> Any:
    check_json(config_json.encode(), DOCUMENT, "config_json")
    try:
        # orjson would convert integers beyond 64 bits to floats, but errors must name the original value.
        return json.loads(config_json)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"config_json is not valid JSON: {error}; send the settings as an object") from None


def _model(number: int) -> Model:
    if number not in _MODELS:
        raise InvalidArgumentError(f"model {number} does not exist; expected one of {', '.join(get_args(Model))}")
    return _MODELS[number]


def _position(message: run_pb2.Position) -> Position:
    return Position(message.batch, message.epoch, message.mini_batch)


def _optional_position(message: Any) -> Position | None:
    """Returns the `position` field of a request; None if it is unset."""
    return _position(message.position) if message.HasField("position") else None


def _key(message: rollout_pb2.TrajectoryKey) -> TrajectoryKey:
    return TrajectoryKey(message.round, message.uid, message.sample)


def _reward(message: rollout_pb2.Reward) -> RewardUpdate:
    key = _key(message.trajectory)
    values = message.token_values
    if message.HasField("value") == bool(values):
        raise InvalidArgumentError(f"{key}: the reward needs exactly one value; set either value or token_values")
    return RewardUpdate(
        trajectory=key,
        step=message.step if message.HasField("step") else None,
        value=message.value if message.HasField("value") else None,
        token_values=_token_values(values, key) if values else None,
    )


def _token_values(values: bytes, key: TrajectoryKey) -> Array:
    if len(values) % 8:
        raise InvalidArgumentError(f"{key}: token_values has {len(values)} bytes; send one float64 per response token")
    return np.frombuffer(values, np.float64)


def _position_message(position: Position) -> run_pb2.Position:
    return run_pb2.Position(batch=position.batch, epoch=position.epoch, mini_batch=position.mini_batch)


def _admissions(view: Admissions) -> rollout_pb2.BeginGroupsResponse:
    numbers: list[Any] = [admission.value for admission in view.admissions]
    reason, version = view.reason, view.policy_version
    return rollout_pb2.BeginGroupsResponse(
        admissions=numbers, retry_after_s=view.retry_after_s, reason=reason, policy_version=version
    )


def _batch(view: BatchAnswer) -> trainer_pb2.GetBatchResponse:
    return trainer_pb2.GetBatchResponse(
        state=view.state.value,  # type: ignore[arg-type]
        plan_json=view.plan.decode(),
        awaits=[trainer_pb2.AwaitedColumn(**place._asdict()) for place in view.awaits],
    )


def _shard(view: ShardAnswer) -> trainer_pb2.GetShardResponse:
    location = view.location
    return trainer_pb2.GetShardResponse(
        state=view.state.value,  # type: ignore[arg-type]
        position=None if view.position is None else _position_message(view.position),
        size_bytes=0 if location is None else location.size,
        shared_memory_path="" if location is None else location.shared_memory_path or "",
        incarnation=view.incarnation,
    )


def _encoded_groups(views: list[GroupAnswer]) -> bytes:
    page = run_pb2.ListGroupsResponse(
        groups=[
            run_pb2.GroupStatus(
                uid=view.uid,
                round=view.round,
                state=_GROUP_STATES[view.state],
                batch=0 if view.batch is None else view.batch,
                reason=view.reason,
                tag=view.tag,
            )
            for view in views
        ]
    )
    return page.SerializeToString()


def _status(report: RunReport) -> run_pb2.RunStatus:
    status = report.status
    return run_pb2.RunStatus(
        **{one.name: getattr(status, one.name) for one in fields(status) if one.name not in ("models", "tags")},
        ranks=[
            run_pb2.RankProgress(model=_MODEL_NUMBERS[progress.model], rank=rank, next=_position_message(position))
            for progress in status.models
            for rank, position in enumerate(progress.next)
        ],
        models=[
            run_pb2.ModelProgress(
                model=_MODEL_NUMBERS[progress.model],
                committed=_position_message(progress.committed),
                incarnation=progress.incarnation,
                resumes=progress.resumes,
            )
            for progress in status.models
        ],
        tags={tag: run_pb2.TagGroups(**asdict(groups)) for tag, groups in status.tags.items()},
        health=_health_to(report),
    )


def _health_to(report: RunReport) -> run_pb2.RunHealth:
    return run_pb2.RunHealth(
        state=report.state,
        summary=report.summary,
        findings=[
            run_pb2.Finding(level=level, text=text, for_s=None if since is None else max(0.0, report.now - since))
            for level, text, since in report.findings
        ],
        still_s=max(0.0, report.now - report.last_event),
    )


_ANSWERS: dict[str, Callable[[ApiContext, Slot, Any], Any]] = {
    function.__name__: function
    for function in (
        create_run,
        get_run,
        get_health,
        list_runs,
        list_groups,
        finish_run,
        delete_run,
        announce_policy_version,
        wait_policy_version,
        begin_groups,
        submit_rows,
        set_rewards,
        abort_trajectories,
        abort_groups,
        seal_batch,
        get_batch,
        get_shard,
        read_shard,
        read_table,
        export_batch,
        write_columns,
        acknowledge,
        commit,
        resume,
    )
}
