"""Batches and shards over HTTP, acknowledgement, commit and resume."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from gristmill._wire.codecs import tensor_file
from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.api.http import models
from gristmill_service.api.http.dependencies import ContextDep, RunDep, gone
from gristmill_service.api.questions import ask_batch, ask_shard
from gristmill_service.api.shard_columns import file_with
from gristmill_service.config import Model
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.rollout_lines import json_lines
from gristmill_service.run.machine.answers import Position, ShardAnswer
from gristmill_service.run.machine.commands.trainer_commands import Checkpoint

router = APIRouter(prefix="/v1/runs/{run}", tags=["trainers"])

_TENSORS_BODY = {
    "requestBody": {
        "required": True,
        "description": "A safetensors file: tensors of the names, shapes and dtypes that the shard's would have.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_Wait = Annotated[float, Query(description="Seconds to wait; the service may answer earlier, with state pending.")]


@router.get("/batches/{batch}", responses={200: {"model": models.Batch}})
async def get_batch(
    request: Request,
    run: RunDep,
    context: ContextDep,
    batch: models.Int64,
    wait_s: _Wait = 0.0,
    rank: Annotated[list[models.Int32], Query(description="Of whose shards awaits tells; else of all.")] = [],  # noqa: B006
    trains: Annotated[
        Model | None,
        Query(description="Whose trainer asks; after a rollback it is refused what lies behind these ranks' next."),
    ] = None,
) -> Response:
    """A batch's plan, waiting until it is published, or until it waits for columns that trainers write."""
    view = await context.long_poll.ask_async(ask_batch(run, batch, rank, trains), wait_s, gone(request))
    # The plan is JSON already, and may be large.
    plan = b',"plan":' + view.plan if view.plan else b""
    awaits = b',"awaits":' + orjson.dumps([place._asdict() for place in view.awaits]) if view.awaits else b""
    body = b'{"state":"' + view.state.name.lower().encode() + b'"' + plan + awaits + b"}"
    return Response(body, media_type="application/json")


@router.get("/shards")
async def get_shard(
    request: Request,
    run: RunDep,
    context: ContextDep,
    rank: models.Int32,
    model: Model = "policy",
    batch: Annotated[models.Int64 | None, Query(description="None: the rank's next shard.")] = None,
    epoch: models.Int32 | None = None,
    mini_batch: models.Int32 | None = None,
    incarnation: Annotated[models.Int64, Query(description="The caller's; 0: not checked.")] = 0,
    forward: Annotated[bool, Query(description="Whether the forward shard is wanted, too.")] = False,
    wait_s: _Wait = 0.0,
) -> models.Shard:
    """Where a shard is, by its address or the next that the rank has to acknowledge; waits until it is published, or,
    with `forward`, until its forward shard is."""
    if batch is None and (epoch is not None or mini_batch is not None):
        raise InvalidArgumentError("epoch and mini_batch name a place within a batch; give batch too, or none of them")
    position = None if batch is None else Position(batch, epoch or 0, mini_batch or 0)
    question = ask_shard(run, model, rank, position, incarnation, is_forward=forward)
    return _shard(run.name, await context.long_poll.ask_async(question, wait_s, gone(request)))


@router.get(
    "/batches/{batch}/{model}/{mini_batch}/{rank}",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
def read_shard(
    run: str,
    context: ContextDep,
    batch: models.Int64,
    model: Model,
    mini_batch: models.Int32,
    rank: models.Int32,
    columns: Annotated[
        list[str] | None,
        Query(description="Of the declared columns those wanted, with commas between or each by itself; else all."),
    ] = None,
) -> StreamingResponse:
    """The shard's safetensors file."""
    pieces: Iterator[bytes | memoryview]
    pieces = whole = iter(context.runs.read_shard(run, batch, ShardAddress(model, mini_batch, rank)))
    if columns is not None:
        pieces = file_with([name for given in columns for name in given.split(",") if name], whole)
    # The first piece before the status line: what is refused is refused with its status.
    first = iter([next(pieces, b"")])
    return StreamingResponse(chain(first, pieces), media_type="application/octet-stream")


@router.put("/batches/{batch}/policy/{mini_batch}/{rank}", openapi_extra=_TENSORS_BODY)
async def write_columns(
    request: Request,
    run: RunDep,
    batch: models.Int64,
    mini_batch: models.Int32,
    rank: models.Int32,
    incarnation: Annotated[models.Int64, Query(description="The trainer's, as it came with the shard.")],
) -> models.ColumnsWritten:
    """Columns of `source: trainer` for a shard, whole and in its shape. The same bytes again change nothing."""
    body = await request.body()

    def write() -> int:
        return run.write(batch, mini_batch, rank, incarnation, tensor_file.decode(body))

    return models.ColumnsWritten(lacking=await run_in_threadpool(write))


@router.get(
    "/batches/{batch}/rollouts",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
)
def export_batch(run: RunDep, batch: models.Int64) -> StreamingResponse:
    """The rows of a sealed batch as a rollout file, JSON lines, to lay it out again with `gristmill batch`."""
    tables = run.export(batch)
    first: Iterator[Steps] = iter([next(tables)])
    columns = run.config.columns
    lines = (line for steps in chain(first, tables) for line in json_lines(steps, columns))
    return StreamingResponse(lines, media_type="application/x-ndjson")


@router.post("/ack")
def acknowledge(run: RunDep, body: models.Acknowledge) -> models.Acknowledged:
    """A rank has trained on the mini-batch at this position and moves past it."""
    moved = run.acknowledge(body.model, body.rank, body.position.position(), body.incarnation, body.commit)
    return models.Acknowledged(next=models.Place.of(moved.position), generation=moved.generation)


@router.post("/commit")
def commit(run: RunDep, body: models.Commit) -> models.Committed:
    """All before this position is safe in the trainer's checkpoint and may be freed."""
    moved = run.commit(body.model, body.position.position(), body.incarnation)
    return models.Committed(committed=models.Place.of(moved.position), generation=moved.generation)


@router.post("/resume")
def resume(run: RunDep, body: models.Resume) -> models.Resumed:
    """Puts all ranks of a model to a position, under a new incarnation."""
    position = None if body.position is None else body.position.position()
    checkpoint = Checkpoint(position, body.run_id, body.generation, body.give_up_reason)
    resumed = run.resume(body.model, checkpoint, body.launch, body.dp_size)
    return models.Resumed(
        incarnation=resumed.incarnation,
        position=models.Place.of(resumed.position),
        run_id=resumed.run_id,
        generation=resumed.generation,
    )


def _shard(run: str, view: ShardAnswer) -> models.Shard:
    address, location, position = view.address, view.location, view.position
    path = None
    if address is not None and position is not None:
        shard = f"{address.model}/{address.mini_batch}/{address.rank}"
        path = f"/v1/runs/{quote(run, safe='')}/batches/{position.batch}/{shard}"
    return models.Shard(
        state=view.state.name.lower(),  # type: ignore[arg-type]
        position=None if position is None else models.Place.of(position),
        size_bytes=0 if location is None else location.size,
        shared_memory_path=None if location is None else location.shared_memory_path,
        path=path,
        incarnation=view.incarnation,
    )
