"""The page at `/` and the calls that only it uses: signing in, health of runs, pictures of batches, and details. All
of them except signing in are read-only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, TypeVar
from urllib.parse import quote

import xxhash
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from gristmill.errors import UnauthenticatedError
from gristmill_service.access.caller import ANYONE
from gristmill_service.api.http.dependencies import ApiDep, RunDep
from gristmill_service.api.http.guards.admitted import THROTTLED
from gristmill_service.api.http.guards.browsers import COOKIE
from gristmill_service.api.http.models import Int64
from gristmill_service.config import Model
from gristmill_service.monitoring.health import health
from gristmill_service.monitoring.health.health import Overview, RunHealth, RunSummary, Timeline
from gristmill_service.monitoring.health.report import listed
from gristmill_service.monitoring.views import groups
from gristmill_service.monitoring.views import run_settings as settings
from gristmill_service.monitoring.views.batch_history import BatchHistory, batch_history
from gristmill_service.monitoring.views.batch_view import (
    BatchBreaks,
    BatchDistributions,
    BatchPicture,
    BatchScores,
    BatchView,
)
from gristmill_service.monitoring.views.groups import FoundGroups, GroupSamples, OpenRowTokens
from gristmill_service.monitoring.views.run_settings import RunSettings
from gristmill_service.monitoring.views.tokens import RowTokens, ShownTokens, TokenTexts
from gristmill_service.off_loop import OneByOne
from gristmill_service.run.machine.batch_records import MOST as MOST_POINTS
from gristmill_service.run.machine.events import GroupKey

router = APIRouter(prefix="/v1", tags=["page"])
page = APIRouter(include_in_schema=False)

_SHOWN_RUNS = 1_000
_DAY_S = 24 * 60 * 60
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Uids and reasons are arbitrary text. Even if one were rendered as markup, it could not load or run anything.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def _batch_view(request: Request, run: RunDep, batch: Int64) -> BatchView:
    one_by_one: OneByOne = request.app.state.batch_views
    return await one_by_one(BatchView, run.name, batch, run.config, await run.numbers(batch))


ViewDep = Annotated[BatchView, Depends(_batch_view)]
UidQuery = Annotated[str, Query(min_length=1, description="The group's uid.")]
RoundQuery = Annotated[int, Query(ge=0, lt=2**31, description="The group's round.")]
StartQuery = Annotated[int, Query(ge=0, lt=2**31, description="The first token to show.")]
T = TypeVar("T", bound=ShownTokens)


# --- Signing in


class SignIn(BaseModel):
    token: str = Field(description="As in `authorization: Bearer TOKEN`.", max_length=8192, pattern=r"^[!-~]+$")


class SignedIn(BaseModel):
    name: str = Field(description="The caller's name.")
    roles: list[str] = Field(description="The caller's roles.")


@router.post("/session")
async def sign_in(request: Request, response: Response, body: SignIn, api: ApiDep) -> SignedIn:
    """Stores a token for the page in a cookie that expires after a day."""
    pace = partial(api.admission.pace, request.scope[THROTTLED])
    identity = await api.gate.identify(f"Bearer {body.token}", pace)
    if identity is ANYONE:
        raise UnauthenticatedError("the token is unknown; request one from the service's operator")
    # A proxy may have terminated TLS.
    schemes = (request.url.scheme, request.headers.get("x-forwarded-proto"))
    value, is_secure = quote(body.token, safe=""), "https" in schemes
    response.set_cookie(COOKIE, value, max_age=_DAY_S, httponly=True, samesite="strict", secure=is_secure)
    return SignedIn(name=identity.name, roles=sorted(identity.roles))


@router.delete("/session", status_code=204)
async def sign_out(response: Response) -> None:
    """Deletes the cookie with the token."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")


# --- Runs and batches


@router.get("/overview", response_model=Overview)
async def overview(request: Request, api: ApiDep) -> Response:
    """Returns all runs, with the state of those that this process owns and of dormant ones. The answer has an ETag."""
    owned = {run.name: run for run in api.runs.own()}
    names = api.gate.visible(await api.runs.names())[:_SHOWN_RUNS]
    described = await api.runs.descriptions(names)
    runs: list[RunSummary] = []
    for name in names:
        runs.append(health.summary(owned[name]) if name in owned else listed(name, described.get(name)))
        # There may be hundreds of runs, so other calls are answered in between.
        await asyncio.sleep(0)
    document = Overview(now=time.time(), not_ready=api.unhealthy_reason(), grpc_address=api.grpc_address, runs=runs)
    return _versioned(request, document)


@router.get("/runs/{run}/health", response_model=RunHealth)
async def run_health(request: Request, run: RunDep) -> Response:
    """Returns a run's state, what blocks it and since when. The answer has an ETag."""
    return _versioned(request, health.health(run))


@router.get("/runs/{run}/timeline", response_model=Timeline)
async def run_timeline(
    run: RunDep,
    model: Model = "policy",
    seconds: Annotated[float, Query(gt=0, le=86_400, description="The length of the period, until now.")] = 600.0,
) -> Response:
    """Returns the mini-batches that each rank has acknowledged since this process owns the run, with times."""
    return _json(health.timeline(run, model, seconds))


@router.get("/runs/{run}/history", response_model=BatchHistory)
async def run_history(
    request: Request,
    run: RunDep,
    points: Annotated[
        int, Query(ge=1, le=MOST_POINTS, description="The maximum number of points; neighbors are merged.")
    ] = 256,
) -> Response:
    """Returns figures of all batches that the run has published, including freed batches: scores, rows, padding,
    staleness, waits, seconds in each stage. The run stores them in its log. The answer has an ETag."""
    return _versioned(request, batch_history(run, points))


@router.get("/runs/{run}/batches/{batch}/picture", response_model=BatchPicture)
async def batch_picture(
    view: ViewDep,
    model: Model = "policy",
    mini_batch: Annotated[int | None, Query(description="Only this one, in finer bars; null: as many as fit.")] = None,
) -> Response:
    """Returns the prompt, observation, trained and padding tokens of rows in a batch's shards, and ranks' loads."""
    return await _computed(lambda: view.picture(model, mini_batch))


@router.get("/runs/{run}/batches/{batch}/breaks", response_model=BatchBreaks)
async def batch_breaks(view: ViewDep, api: ApiDep) -> Response:
    """Returns where merging failed: the different token and its neighbors, as ids, and as text with a tokenizer."""
    return await _computed(lambda: _with_texts(view.breaks(), api.token_texts))


@router.get("/runs/{run}/batches/{batch}/scores", response_model=BatchScores)
async def batch_scores(
    view: ViewDep, start: Annotated[int, Query(ge=0, lt=2**63, description="The first group to show.")] = 0
) -> Response:
    """Returns scores and advantages (before `loss_reduction` scales them) of a batch's groups, 200 groups at a time."""
    return await _computed(lambda: view.scores(start))


# --- Details


@router.get("/runs/{run}/settings")
async def run_settings(run: RunDep) -> RunSettings:
    """Returns every setting of the run, with its default."""
    return settings.run_settings(run)


@router.get("/runs/{run}/find")
async def find_groups(
    run: RunDep, uid: Annotated[str, Query(min_length=1, max_length=1000, description="Part of the uid.")]
) -> FoundGroups:
    """Returns the groups whose uid contains this text, archived ones only by their whole uid, and their states."""
    return await groups.find_groups(run, uid)


@router.get("/runs/{run}/samples")
async def group_samples(run: RunDep, uid: UidQuery, round: RoundQuery = 0) -> GroupSamples:
    """Returns the samples of a group that is not sealed: the steps received, and which samples are complete."""
    return groups.group_samples(run, GroupKey(round, uid))


@router.get("/runs/{run}/samples/{sample}/rows/{step}")
async def group_row(
    run: RunDep,
    api: ApiDep,
    sample: Int64,
    step: Int64,
    uid: UidQuery,
    round: RoundQuery = 0,
    start: StartQuery = 0,
) -> OpenRowTokens:
    """Returns the tokens of a step of an open group, 2,000 at a time, and their text if there is a tokenizer."""
    return _row_with_texts(await groups.row_tokens(run, GroupKey(round, uid), sample, step, start), api.token_texts)


@router.get("/runs/{run}/batches/{batch}/distributions")
async def batch_distributions(view: ViewDep) -> BatchDistributions:
    """Returns histograms of the trajectories' scores, response tokens and turns, and counts of their stop reasons."""
    return await asyncio.to_thread(view.distributions)


@router.get("/runs/{run}/batches/{batch}/rows/{row}")
async def batch_row(run: RunDep, view: ViewDep, api: ApiDep, row: Int64, start: StartQuery = 0) -> RowTokens:
    """Returns the tokens of one training row, 2,000 at a time, and their text if the service has a tokenizer."""
    return _row_with_texts(await view.tokens(run, row, start), api.token_texts)


def _row_with_texts(row: T, texts: TokenTexts | None) -> T:
    return row if texts is None else row.model_copy(update={"texts": texts.of(set(row.tokens))})


# --- Answers


async def _computed(document: Callable[[], BaseModel]) -> Response:
    """Computes a document in a thread."""
    return await asyncio.to_thread(lambda: _json(document()))


def _with_texts(view: BatchBreaks, texts: TokenTexts | None) -> BatchBreaks:
    if texts is None:
        return view
    tokens = {token for pair in view.pairs for token in (pair.was, pair.now)}
    tokens.update(token for one in view.breaks for part in (one.before, one.was, one.now) for token in part)
    return view.model_copy(update={"texts": texts.of(tokens)})


def _json(document: BaseModel) -> Response:
    return Response(document.model_dump_json(), media_type="application/json")


def _versioned(request: Request, document: BaseModel) -> Response:
    """Answers with an ETag that ignores `now`: if nothing else changed, the answer to a poll is 304."""
    etag = f'"{xxhash.xxh3_64_hexdigest(document.model_dump_json(exclude={"now"}).encode())}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(document.model_dump_json(exclude_unset=True), media_type="application/json", headers=headers)


def _shipped(folder: Traversable, path: str = "") -> Iterator[tuple[str, tuple[bytes, str, str]]]:
    """Yields the path, content, media type and version of each file of the page."""
    for entry in folder.iterdir():
        suffix = f".{entry.name.rpartition('.')[2]}"
        if entry.is_dir():
            yield from _shipped(entry, f"{path}{entry.name}/")
        elif suffix in _KINDS:
            data = entry.read_bytes()
            yield f"{path}{entry.name}", (data, _KINDS[suffix], f'"{xxhash.xxh3_64_hexdigest(data)}"')


_FILES = dict(_shipped(files("gristmill_service").joinpath("dashboard")))


@page.head("/")
@page.get("/")
async def index(request: Request) -> Response:
    return _file(request, "index.html")


@page.get("/docs")
async def docs(request: Request) -> Response:
    return _file(request, "docs/docs.html")


@page.get("/page/{name:path}")
async def asset(request: Request, name: str) -> Response:
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    if name not in _FILES:
        raise HTTPException(404, f"the page has no file {name}; reload the page")
    data, kind, etag = _FILES[name]
    headers = {**_HEADERS, "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)
