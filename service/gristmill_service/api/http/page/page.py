"""The page at `/`, and the calls that it makes: health of runs, and pictures of their batches. They only read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, cast

import xxhash
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from gristmill_service.api.http.dependencies import ApiDep, RunDep
from gristmill_service.api.http.models import Int64
from gristmill_service.config import Model
from gristmill_service.monitoring.health import health
from gristmill_service.monitoring.health.health import Overview, RunHealth, RunSummary, Timeline
from gristmill_service.monitoring.views.batch_history import BatchHistory, batch_history
from gristmill_service.monitoring.views.batch_view import BatchBreaks, BatchPicture, BatchScores, BatchViewCache
from gristmill_service.monitoring.views.token_texts import TokenTexts
from gristmill_service.run.machine.batch_records import MOST as MOST_POINTS

router = APIRouter(prefix="/v1", tags=["page"])
page = APIRouter(include_in_schema=False)

_SHOWN_RUNS = 1_000
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Uids and reasons are anybody's text: were one ever taken for markup, it could load and run nothing.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _views(request: Request) -> BatchViewCache:
    return cast(BatchViewCache, request.app.state.batch_views)


ViewsDep = Annotated[BatchViewCache, Depends(_views)]


@router.get("/overview", response_model=Overview)
async def overview(request: Request, api: ApiDep) -> Response:
    """Every run and its state, as far as this process owns it. Has an ETag."""
    own = {run.name: run for run in api.runs.own()}
    names = api.gate.visible(await api.runs.names())[:_SHOWN_RUNS]
    runs: list[RunSummary] = []
    for name in names:
        runs.append(health.summary(own[name]) if name in own else RunSummary(run=name))
        # Others are answered between hundreds of runs.
        await asyncio.sleep(0)
    document = Overview(now=time.time(), not_ready=api.unhealthy_reason(), grpc_address=api.grpc_address, runs=runs)
    return _versioned(request, document)


@router.get("/runs/{run}/health", response_model=RunHealth)
async def run_health(request: Request, run: RunDep) -> Response:
    """A run's state, what holds it up and since when. Has an ETag."""
    return _versioned(request, health.health(run))


@router.get("/runs/{run}/timeline", response_model=Timeline)
async def run_timeline(
    run: RunDep,
    model: Model = "policy",
    seconds: Annotated[float, Query(gt=0, le=86_400, description="How far back.")] = 600.0,
) -> Response:
    """The mini-batches that each rank acknowledged, and when, since this process owns the run."""
    return _json(health.timeline(run, model, seconds))


@router.get("/runs/{run}/history", response_model=BatchHistory)
async def run_history(
    request: Request,
    run: RunDep,
    points: Annotated[int, Query(ge=1, le=MOST_POINTS, description="The most to give: neighbours are added up.")] = 256,
) -> Response:
    """Figures of all batches that the run ever published, those that are freed, too: scores, rows, padding, staleness,
    waits, seconds in each stage. The run keeps them with its log. Has an ETag."""
    return _versioned(request, batch_history(run, points))


@router.get("/runs/{run}/batches/{batch}/picture", response_model=BatchPicture)
async def batch_picture(
    run: RunDep,
    views: ViewsDep,
    batch: Int64,
    model: Model = "policy",
    mini_batch: Annotated[int | None, Query(description="One alone, in finer bars; null: all that fit.")] = None,
) -> Response:
    """Each shard of a published batch: the prompt, observation, trained and padding tokens of each row, and loads."""
    view = await views.get(run, batch)
    return await _computed(lambda: view.picture(model, mini_batch))


@router.get("/runs/{run}/batches/{batch}/breaks", response_model=BatchBreaks)
async def batch_breaks(run: RunDep, views: ViewsDep, api: ApiDep, batch: Int64) -> Response:
    """The places where merging broke: the token that differs, and those around it. Token ids, and what they say where
    the service has a tokenizer."""
    view = await views.get(run, batch)
    return await _computed(lambda: _with_texts(view.breaks(), api.token_texts))


@router.get("/runs/{run}/batches/{batch}/scores", response_model=BatchScores)
async def batch_scores(
    run: RunDep,
    views: ViewsDep,
    batch: Int64,
    start: Annotated[int, Query(ge=0, lt=2**63, description="The first group to tell of.")] = 0,
) -> Response:
    """Scores and advantages of a batch's groups, 200 at a time; advantages before `loss_reduction` scales them."""
    view = await views.get(run, batch)
    return await _computed(lambda: view.scores(start))


async def _computed(document: Callable[[], BaseModel]) -> Response:
    """Makes a document that takes a while."""
    return await asyncio.to_thread(lambda: _json(document()))


def _with_texts(told: BatchBreaks, texts: TokenTexts | None) -> BatchBreaks:
    if texts is None:
        return told
    tokens = {token for pair in told.pairs for token in (pair.was, pair.now)}
    tokens.update(token for one in told.breaks for part in (one.before, one.was, one.now) for token in part)
    return told.model_copy(update={"texts": texts.of(tokens)})


def _json(document: BaseModel) -> Response:
    return Response(document.model_dump_json(), media_type="application/json")


def _versioned(request: Request, document: BaseModel) -> Response:
    """The document with an ETag, in which `now` is left out: a poll in which nothing else changed is answered 304."""
    etag = f'"{xxhash.xxh3_64_hexdigest(document.model_dump_json(exclude={"now"}).encode())}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(document.model_dump_json(exclude_unset=True), media_type="application/json", headers=headers)


def _shipped(folder: Traversable, path: str = "") -> Iterator[tuple[str, tuple[bytes, str, str]]]:
    """The path of each of the page's files, with its bytes, kind and version."""
    for entry in folder.iterdir():
        suffix = f".{entry.name.rpartition('.')[2]}"
        if entry.is_dir():
            yield from _shipped(entry, f"{path}{entry.name}/")
        elif suffix in _KINDS:
            data = entry.read_bytes()
            yield f"{path}{entry.name}", (data, _KINDS[suffix], f'"{xxhash.xxh3_64_hexdigest(data)}"')


_FILES = dict(_shipped(files("gristmill_service").joinpath("dashboard")))


@page.get("/")
async def index(request: Request) -> Response:
    return _file(request, "index.html")


@page.get("/page/{name:path}")
async def asset(request: Request, name: str) -> Response:
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    if name not in _FILES:
        raise HTTPException(404, f"the page has no file {name}")
    data, kind, etag = _FILES[name]
    headers = {**_HEADERS, "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)
