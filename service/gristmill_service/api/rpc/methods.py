"""The methods of the contract over gRPC: each translates a request for a function of `calls`, and its answer back."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import gristmill
from gristmill._wire.codecs import row_codec
from gristmill._wire.codecs.columns_codec import ColumnsRequest
from gristmill._wire.codecs.shard_messages import message_of
from gristmill._wire.codecs.submit_codec import Submission
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from gristmill_service.access import caller
from gristmill_service.api import calls, messages
from gristmill_service.api.admission import Kind, Slot
from gristmill_service.api.context import ApiContext
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.machine.answers import BatchState, GroupAnswer
from gristmill_service.run.machine.commands.trainer_commands import Checkpoint

_GROUPS_AT_ONCE = 2048
# Large enough to be fast, small enough for clients that keep gRPC's limit of 4 MiB per message.
_PIECE_BYTES = 1 << 20

Parse = Callable[[bytes], Any]


class Method(NamedTuple):
    """path: as gRPC has it. name: in metrics and logs. call: in the table of roles; empty where it needs none. kind: of
    its slot. answer(api, slot, request): a coroutine that returns a message, or the answer's bytes, or an asynchronous
    generator of them. is_large: whether the answer takes as much memory as a large request."""

    path: str
    name: str
    call: str
    kind: Kind
    parse: Parse
    answer: Callable[[ApiContext, Slot, Any], Any]
    is_stream: bool
    is_large: bool = False


def methods(api: ApiContext) -> Iterator[Method]:
    """Yields every method of the contract."""
    parsers: dict[str, Parse] = {
        # protobuf's own classes would copy these too often.
        "SubmitRows": partial(Submission, most_bytes=api.max_message_bytes),
        "WriteColumns": ColumnsRequest,
    }
    for contract in (run_pb2, rollout_pb2, trainer_pb2):
        for service in contract.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                # Of GetRun it is get_run.
                call = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower()
                yield Method(
                    f"/{service.full_name}/{method.name}",
                    method.name,
                    call,
                    "stream" if method.server_streaming else "call",
                    parsers.get(method.name) or getattr(contract, method.input_type.name).FromString,
                    _ANSWERS[call],
                    method.server_streaming,
                    method.name == "ListGroups",
                )


# --- Runs


async def create_run(api: ApiContext, slot: Slot, request: run_pb2.CreateRunRequest) -> run_pb2.CreateRunResponse:
    config = messages.config_mapping(request.config_json)
    warnings, created = await calls.create_run(api, request.run, config)
    return run_pb2.CreateRunResponse(warnings=warnings, created=created)


async def get_run(api: ApiContext, slot: Slot, request: run_pb2.GetRunRequest) -> run_pb2.GetRunResponse:
    status, assessment = await calls.get_run(api, request.run)
    return run_pb2.GetRunResponse(status=messages.status_to(status, assessment))


async def get_health(api: ApiContext, slot: Slot, request: run_pb2.GetHealthRequest) -> run_pb2.GetHealthResponse:
    return run_pb2.GetHealthResponse(not_ready=api.unhealthy_reason(), version=gristmill.__version__)


async def list_runs(api: ApiContext, slot: Slot, request: run_pb2.ListRunsRequest) -> run_pb2.ListRunsResponse:
    return run_pb2.ListRunsResponse(runs=await calls.list_runs(api))


async def list_groups(api: ApiContext, slot: Slot, request: run_pb2.ListGroupsRequest) -> AsyncIterator[bytes]:
    groups = await calls.list_groups(api, request.run)
    for start in range(0, len(groups), _GROUPS_AT_ONCE):
        # One at a time: it is Python that runs in the pool, too.
        yield await api.encode_groups(_encoded_groups, groups[start : start + _GROUPS_AT_ONCE])


def _encoded_groups(groups: list[GroupAnswer]) -> bytes:
    return messages.groups_to(groups).SerializeToString()


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
    return messages.admissions_to(begun)


async def submit_rows(api: ApiContext, slot: Slot, request: Submission) -> rollout_pb2.SubmitRowsResponse:
    outcomes = await calls.submit_rows(api, request.run, request.nbytes, lambda config: request.rows())
    return rollout_pb2.SubmitRowsResponse(outcomes=messages.outcomes_to(outcomes))


async def set_rewards(
    api: ApiContext, slot: Slot, request: rollout_pb2.SetRewardsRequest
) -> rollout_pb2.SetRewardsResponse:
    rewards = [messages.reward_of(reward) for reward in request.rewards]
    return rollout_pb2.SetRewardsResponse(changed=await calls.set_rewards(api, request.run, rewards))


async def abort_trajectories(
    api: ApiContext, slot: Slot, request: rollout_pb2.AbortTrajectoriesRequest
) -> rollout_pb2.AbortTrajectoriesResponse:
    keys = [messages.key_of(key) for key in request.trajectories]
    changed = await calls.abort_trajectories(api, request.run, keys, request.reason)
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
        # It is what GetShard answers, which a rank's token is bound to.
        api.gate.check(caller.current(), "get_shard", request.run, request.shard.rank)
        wanted = _query(request.shard, request.batch)
    trains = messages.model_of(request.trains) if request.trains else None
    batch, shard = await calls.get_batch(
        api, slot, request.run, request.batch, request.ranks, trains, request.wait_s, wanted
    )
    if batch.state is not BatchState.PUBLISHED:
        return messages.batch_to(batch).SerializeToString()
    encoded = _published_batch(batch.plan)
    if shard is None:
        return encoded
    # One message behind another is the message that has the fields of both.
    return encoded + trainer_pb2.GetBatchResponse(shard=messages.shard_to(shard)).SerializeToString()


@lru_cache(maxsize=1)
def _published_batch(plan: bytes) -> bytes:
    """The message, once for all ranks that ask for a batch: a plan is large, and they ask at once."""
    return trainer_pb2.GetBatchResponse(
        state=trainer_pb2.BATCH_STATE_PUBLISHED, plan_json=plan.decode()
    ).SerializeToString()


async def get_shard(api: ApiContext, slot: Slot, request: trainer_pb2.GetShardRequest) -> trainer_pb2.GetShardResponse:
    return messages.shard_to(await calls.get_shard(api, slot, request.run, _query(request), request.wait_s))


def _query(request: trainer_pb2.GetShardRequest, batch: int | None = None) -> calls.ShardQuery:
    """batch: the one whose shard is wanted, where the request is part of one for a batch."""
    position = messages.optional_position(request)
    if batch is not None:
        position = messages.position_of(request.position)._replace(batch=batch)
    return calls.ShardQuery(
        messages.model_of(request.model), request.rank, position, request.incarnation, request.forward
    )


async def read_shard(api: ApiContext, slot: Slot, request: trainer_pb2.ReadShardRequest) -> AsyncIterator[bytes]:
    """Without a message object for each piece."""
    address = ShardAddress(messages.model_of(request.model), request.mini_batch, request.rank)
    columns = list(request.columns) if request.chooses_columns else None
    shard = await calls.read_shard(api, request.run, request.batch, address, columns, accepts_zstd=request.accepts_zstd)
    async for piece in shard.pieces:
        if shard.is_zstd:
            yield message_of(piece, is_zstd=True)
            continue
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE_BYTES):
            yield message_of(view[start : start + _PIECE_BYTES], is_zstd=False)


async def export_batch(api: ApiContext, slot: Slot, request: trainer_pb2.ExportBatchRequest) -> AsyncIterator[bytes]:
    async for steps in calls.export_batch(api, request.run, request.batch):
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
    model, position = messages.model_of(request.model), messages.position_of(request.position)
    moved = await calls.acknowledge(
        api, request.run, model, request.rank, position, request.incarnation, request.commit
    )
    return trainer_pb2.AcknowledgeResponse(next=messages.position_to(moved.position), generation=moved.generation)


async def commit(api: ApiContext, slot: Slot, request: trainer_pb2.CommitRequest) -> trainer_pb2.CommitResponse:
    model, position = messages.model_of(request.model), messages.position_of(request.position)
    moved = await calls.commit(api, request.run, model, position, request.incarnation)
    return trainer_pb2.CommitResponse(committed=messages.position_to(moved.position), generation=moved.generation)


async def resume(api: ApiContext, slot: Slot, request: trainer_pb2.ResumeRequest) -> trainer_pb2.ResumeResponse:
    checkpoint = Checkpoint(
        messages.optional_position(request), request.run_id, request.generation, request.give_up_reason
    )
    model, dp_size = messages.model_of(request.model), messages.dp_size_of(request.dp_size)
    resumed = await calls.resume(api, request.run, model, checkpoint, request.launch, dp_size)
    return trainer_pb2.ResumeResponse(
        incarnation=resumed.incarnation,
        position=messages.position_to(resumed.position),
        run_id=resumed.run_id,
        generation=resumed.generation,
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
        export_batch,
        write_columns,
        acknowledge,
        commit,
        resume,
    )
}
