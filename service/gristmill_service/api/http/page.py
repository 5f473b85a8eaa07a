"""The page at `/`, and what it asks for: how runs are, and pictures of their batches. Reads only."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Annotated, Any, cast

import orjson
import xxhash
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from gristmill_service.api.http import page_models as models
from gristmill_service.api.http.dependencies import ContextDep, RunDep
from gristmill_service.api.http.models import Int64
from gristmill_service.config import Model
from gristmill_service.monitoring.batch_view import BatchView, BatchViewCache
from gristmill_service.monitoring.health import health, timeline
from gristmill_service.monitoring.history import HistoryRecorder
from gristmill_service.run.run import Run

router = APIRouter(prefix="/v1", tags=["page"])
page = APIRouter(include_in_schema=False)

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Uids and reasons are anybody's text: were one ever taken for markup, it could load and run nothing.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _watch(request: Request) -> HistoryRecorder:
    return cast(HistoryRecorder, request.app.state.watch)


def _album(request: Request) -> BatchViewCache:
    return cast(BatchViewCache, request.app.state.album)


_WatchDep = Annotated[HistoryRecorder, Depends(_watch)]
_AlbumDep = Annotated[BatchViewCache, Depends(_album)]


@router.get("/overview", response_model=models.Overview)
def overview(request: Request, context: ContextDep, watch: _WatchDep) -> Response:
    """Every run and how it is, as far as this process decides for it. Has an ETag."""
    now, own = time.time(), {run.name: run for run in context.runs.own()}
    runs = [_summary(own[name], watch, now) if name in own else {"run": name} for name in context.runs.names()]
    return _versioned(request, {"trouble": context.unhealthy_reason(), "runs": runs[: models.SHOWN_RUNS]}, now)


@router.get("/runs/{run}/health", response_model=models.Health)
def run_health(request: Request, run: RunDep, watch: _WatchDep) -> Response:
    """How a run is, what holds it up and since when. Has an ETag."""
    now = time.time()
    return _versioned(request, health(run, watch.seen(run), now), now)


@router.get("/runs/{run}/timeline", response_model=models.Timeline)
def run_timeline(
    run: RunDep,
    watch: _WatchDep,
    model: Model = "policy",
    seconds: Annotated[float, Query(gt=0, le=86_400, description="How far back.")] = 600.0,
) -> Response:
    """When each rank acknowledged which mini-batch, as far as this process saw it; half a second late at most."""
    return _json(timeline(run, watch.seen(run), model, time.time(), seconds))


@router.get("/runs/{run}/batches/{batch}/picture", response_model=models.BatchView)
async def batch_picture(
    run: RunDep,
    album: _AlbumDep,
    batch: Int64,
    model: Model = "policy",
    mini_batch: Annotated[int | None, Query(description="One alone, in finer bars; null: all that fit.")] = None,
) -> Response:
    """Each shard of a published batch: of each row its prompt, observation, trained and padding tokens, and loads."""
    picture = await _picture(album, run, batch)
    return await run_in_threadpool(lambda: _json(picture.shards(model, mini_batch)))


@router.get("/runs/{run}/batches/{batch}/breaks", response_model=models.Breaks)
async def batch_breaks(run: RunDep, album: _AlbumDep, batch: Int64) -> Response:
    """Where merging broke: the token that differs, and those around it. Token ids only."""
    return _json((await _picture(album, run, batch)).breaks())


@router.get("/runs/{run}/batches/{batch}/scores", response_model=models.Scores)
async def batch_scores(
    run: RunDep,
    album: _AlbumDep,
    batch: Int64,
    start: Annotated[int, Query(ge=0, lt=2**63, description="The first group to tell of.")] = 0,
) -> Response:
    """Scores and advantages of a batch's groups, 200 at a time; advantages before `loss_reduction` scales them."""
    picture = await _picture(album, run, batch)
    return await run_in_threadpool(lambda: _json(picture.scores(start)))


async def _picture(album: BatchViewCache, run: Run, batch: int) -> BatchView:
    kept = album.kept(run, batch)
    if kept is not None:
        return kept
    # One at a time, and who waits for it holds no thread: those are for submissions, too.
    async with album.turn:
        return await run_in_threadpool(album.get, run, batch)


def _summary(run: Run, watch: HistoryRecorder, now: float) -> dict[str, Any]:
    told = health(run, watch.seen(run), now)
    published = [batch["batch"] for batch in told["batches"] if batch["state"] == "published"]
    return {name: told[name] for name in models.RunSummary.model_fields if name in told} | {
        "newest_batch": max(published, default=None),
        "findings": len([one for one in told["findings"] if one["level"] != "note"]),
    }


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def _versioned(request: Request, body: dict[str, Any], now: float) -> Response:
    """With what time it is here, which alone is no news: who asks again and again is told that nothing happened."""
    etag = f'"{xxhash.xxh3_64_hexdigest(orjson.dumps(body))}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(orjson.dumps(body | {"now": now}), media_type="application/json", headers=headers)


def _shipped() -> dict[str, tuple[bytes, str, str]]:
    """The page's files: of each its bytes, kind and version."""
    found = {}
    for entry in files("gristmill_service").joinpath("dashboard").iterdir():
        suffix = f".{entry.name.rpartition('.')[2]}"
        if suffix in _KINDS:
            data = entry.read_bytes()
            found[entry.name] = (data, _KINDS[suffix], f'"{xxhash.xxh3_64_hexdigest(data)}"')
    return found


_FILES = _shipped()


@page.get("/")
async def index(request: Request) -> Response:
    return _file(request, "index.html")


@page.get("/page/{name}")
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
