"""Batches and shards over HTTP, acknowledgement, commit and resume."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Literal, TypeVar
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.api import calls
from gristmill_service.api.calls import ShardQuery
from gristmill_service.api.http import models
from gristmill_service.api.http.dependencies import AnyRun, ApiDep, RunDep, RunName, SlotDep
from gristmill_service.api.http.guards.bodies import BODY
from gristmill_service.api.http.tables import json_pieces, safetensors_file
from gristmill_service.config import Model
from gristmill_service.off_loop import OneByOne
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.rollout_lines import json_lines
from gristmill_service.run.machine.answers import Position, ShardAnswer
from gristmill_service.run.machine.decisions.resume import Checkpoint

T = TypeVar("T")

router = APIRouter(prefix="/v1/runs/{run}", tags=["trainers"])

_FILE = {"schema": {"type": "string", "format": "binary"}}
_TENSORS_BODY = {
    "requestBody": {
        "required": True,
        "description": "A safetensors file with the names, shapes and dtypes that these tensors have in the shard.",
        "content": {"application/octet-stream": _FILE},
    }
}
_TABLE = {"application/json": {"schema": {"type": "object"}}, "application/octet-stream": _FILE}
_Wait = Annotated[float, Query(description="Seconds to wait; the service may answer earlier, with state pending.")]


@router.get("/batches/{batch}", responses={200: {"model": models.Batch}})
async def get_batch(
    run: RunName,
    api: ApiDep,
    slot: SlotDep,
    batch: models.Int64,
    wait_s: _Wait = 0.0,
    rank: Annotated[
        models.Listed[models.Int32], Query(description="The ranks whose columns `awaits` lists; empty: all.")
    ] = [],  # noqa: B006
    trains: Annotated[
        Model | None,
        Query(
            description="The model of the calling trainer, whose ranks ask for the batch: they are done with those "
            "before it. After a rollback, batches after its ranks' next are refused."
        ),
    ] = None,
) -> Response:
    """Returns a batch's plan. Waits until the batch is published, or waits for columns that trainers write."""
    answer, _ = await calls.get_batch(api, slot, run, batch, rank, trains, wait_s)
    # The plan is stored as JSON, and may be large.
    plan = b',"plan":' + answer.plan if answer.plan else b""
    awaits = b',"awaits":' + orjson.dumps([place._asdict() for place in answer.awaits]) if answer.awaits else b""
    body = b'{"state":"' + answer.state.name.lower().encode() + b'"' + plan + awaits + b"}"
    return Response(body, media_type="application/json")


@router.get("/shards")
async def get_shard(
    run: RunName,
    api: ApiDep,
    slot: SlotDep,
    rank: models.Int32,
    model: Model = "policy",
    batch: Annotated[models.Int64 | None, Query(description="None: the rank's next shard.")] = None,
    epoch: models.Int32 | None = None,
    mini_batch: models.Int32 | None = None,
    incarnation: Annotated[models.Int64, Query(description="The caller's incarnation; 0: not checked.")] = 0,
    forward: Annotated[bool, Query(description="Whether the forward shard is accepted.")] = False,
    wait_s: _Wait = 0.0,
) -> models.Shard:
    """Returns the location of a shard: the shard at an address, or the next that the rank must acknowledge. Waits until
    it (with `forward`, its forward shard) is published."""
    if batch is None and (epoch is not None or mini_batch is not None):
        raise InvalidArgumentError("epoch and mini_batch need batch, which is not set; set batch, or leave them out")
    position = None if batch is None else Position(batch, epoch or 0, mini_batch or 0)
    wanted = ShardQuery(model, rank, position, incarnation, forward)
    return _shard(run, await calls.get_shard(api, slot, run, wanted, wait_s))


@router.get(
    "/batches/{batch}/{model}/{mini_batch}/{rank}",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": _FILE}}},
)
async def read_shard(
    run: AnyRun,
    api: ApiDep,
    batch: models.Int64,
    model: Model,
    mini_batch: models.Int32,
    rank: models.Int32,
    columns: Annotated[
        models.Listed[str] | None,
        Query(description="The declared columns to include, separated by commas or repeated; all by default."),
    ] = None,
) -> StreamingResponse:
    """Returns the shard's safetensors file."""
    names = None if columns is None else [name for some in columns for name in some.split(",") if name]
    shard = await calls.read_shard(api, run, batch, ShardAddress(model, mini_batch, rank), names)
    return StreamingResponse(await _begun(shard.pieces), media_type="application/octet-stream")


@router.get(
    "/batches/{batch}/table",
    response_class=StreamingResponse,
    responses={200: {"content": _TABLE}},
)
async def read_table(
    request: Request,
    run: RunName,
    api: ApiDep,
    batch: models.Int64,
    format: Annotated[
        Literal["json", "safetensors"],
        Query(description="json: an object with one list per column. safetensors: a file with one tensor per column."),
    ] = "json",
) -> Response:
    """Returns the numbers of a batch's training rows, without their tokens: one entry per row in each column."""
    table = await calls.read_table(api, run, batch)
    one_by_one: OneByOne = request.app.state.batch_views
    if format == "safetensors":
        return Response(await one_by_one(safetensors_file, table), media_type="application/octet-stream")
    return StreamingResponse(_pieces(json_pieces(table), one_by_one), media_type="application/json")


@router.put("/batches/{batch}/policy/{mini_batch}/{rank}", openapi_extra=_TENSORS_BODY)
async def write_columns(
    request: Request,
    run: RunName,
    api: ApiDep,
    batch: models.Int64,
    mini_batch: models.Int32,
    rank: models.Int32,
    incarnation: Annotated[models.Int64, Query(description="The trainer's incarnation, as returned with the shard.")],
) -> models.ColumnsWritten:
    """Writes columns of `source: trainer` for a shard, in the shard's shape. The same bytes again change nothing."""
    body = request.scope[BODY]
    return models.ColumnsWritten(
        lacking=await calls.write_columns(api, run, batch, mini_batch, rank, incarnation, body)
    )


@router.get(
    "/batches/{batch}/rollouts",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
)
async def export_batch(request: Request, run: RunDep, api: ApiDep, batch: models.Int64) -> StreamingResponse:
    """Returns the rows of a sealed batch as a rollout file (JSON lines), from which `gristmill batch` rebuilds it."""
    lines = _lines(calls.export_batch(api, run.name, batch), run.config.columns, request.app.state.json_rows)
    return StreamingResponse(await _begun(lines), media_type="application/x-ndjson")


@router.post("/ack")
async def acknowledge(run: RunName, api: ApiDep, body: models.Acknowledge) -> models.Acknowledged:
    """Moves a rank past the mini-batch at this position, after the rank has trained on it."""
    position = body.position.position()
    moved = await calls.acknowledge(api, run, body.model, body.rank, position, body.incarnation, body.commit)
    return models.Acknowledged(next=models.Place.of(moved.position), generation=moved.generation)


@router.post("/commit")
async def commit(run: RunName, api: ApiDep, body: models.Commit) -> models.Committed:
    """Records that the trainer's checkpoint includes everything before this position, so that it may be freed."""
    moved = await calls.commit(api, run, body.model, body.position.position(), body.incarnation)
    return models.Committed(committed=models.Place.of(moved.position), generation=moved.generation)


@router.post("/resume")
async def resume(run: RunName, api: ApiDep, body: models.Resume) -> models.Resumed:
    """Moves all ranks of a model to a position as a new incarnation, or starts some ranks at their own positions."""
    position = None if body.position is None else body.position.position()
    checkpoint = Checkpoint(position, body.run_id, body.generation, body.give_up_reason)
    resumed = await calls.resume(api, run, body.model, checkpoint, body.launch, body.dp_size, body.ranks)
    return models.Resumed(
        incarnation=resumed.incarnation,
        position=models.Place.of(resumed.position),
        run_id=resumed.run_id,
        generation=resumed.generation,
    )


async def _begun(pieces: AsyncIterator[T]) -> AsyncIterator[T]:
    """Returns the pieces after the first is read, so that an error before it sets the status of the answer."""
    first = [await anext(pieces)]

    async def begun() -> AsyncIterator[T]:
        yield first.pop()
        async for piece in pieces:
            yield piece

    return begun()


async def _lines(
    tables: AsyncIterator[Steps], columns: Sequence[ColumnSpec], one_by_one: OneByOne
) -> AsyncIterator[bytes]:
    async for steps in tables:
        yield await one_by_one(b"".join, json_lines(steps, columns))


async def _pieces(pieces: Iterator[bytes], one_by_one: OneByOne) -> AsyncIterator[bytes]:
    while (piece := await one_by_one(next, pieces, None)) is not None:
        yield piece


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
