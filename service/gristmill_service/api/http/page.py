"""The page at `/` and its own calls: signing in, health of runs, pictures of their batches, and details. All but
signing in only read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, TypeVar, cast

import xxhash
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from gristmill.errors import UnauthenticatedError
from gristmill_service.access.caller import ANYONE
from gristmill_service.api.http.dependencies import ApiDep, RunDep
from gristmill_service.api.http.guards.identified import COOKIE
from gristmill_service.api.http.models import Int64
from gristmill_service.config import Model
from gristmill_service.monitoring.health import health
from gristmill_service.monitoring.health.health import Overview, RunHealth, RunSummary, Timeline
from gristmill_service.monitoring.views import groups
from gristmill_service.monitoring.views import run_settings as settings
from gristmill_service.monitoring.views.batch_history import BatchHistory, batch_history
from gristmill_service.monitoring.views.batch_view import (
    BatchBreaks,
    BatchDistributions,
    BatchPicture,
    BatchScores,
    BatchViewCache,
)
from gristmill_service.monitoring.views.groups import FoundGroups, GroupSamples, OpenRowTokens
from gristmill_service.monitoring.views.run_settings import BatchCosts, RunSettings
from gristmill_service.monitoring.views.tokens import RowTokens, ShownTokens, TokenTexts
from gristmill_service.run.machine.batch_records import MOST as MOST_POINTS
from gristmill_service.run.machine.events import GroupKey

router = APIRouter(prefix="/v1", tags=["page"])
page = APIRouter(include_in_schema=False)

_SHOWN_RUNS = 1_000
_DAY_S = 24 * 60 * 60
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Uids and reasons are arbitrary text: even if one were rendered as markup, it could not load or run anything.
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
UidQuery = Annotated[str, Query(min_length=1, description="The group's uid.")]
RoundQuery = Annotated[int, Query(ge=0, lt=2**31, description="The group's round.")]
StartQuery = Annotated[int, Query(ge=0, lt=2**31, description="The first token to show.")]
T = TypeVar("T", bound=ShownTokens)


# --- Signing in


class SignIn(BaseModel):
    token: str = Field(description="As in `authorization: Bearer TOKEN`.", max_length=8192, pattern=r"^[!-~]+$")


class SignedIn(BaseModel):
    name: str = Field(description="The caller's name.")
    roles: list[str] = Field(description="What it may do.")


@router.post("/session")
async def sign_in(request: Request, response: Response, body: SignIn, api: ApiDep) -> SignedIn:
    """Stores a token for the page, as a cookie for a day."""
    identity = await api.gate.identify(f"Bearer {body.token}")
    if identity is ANYONE:
        raise UnauthenticatedError("the token is not known here; ask the service's operator for one")
    # A proxy may have terminated TLS.
    schemes = (request.url.scheme, request.headers.get("x-forwarded-proto"))
    response.set_cookie(COOKIE, body.token, max_age=_DAY_S, httponly=True, samesite="strict", secure="https" in schemes)
    return SignedIn(name=identity.name, roles=sorted(identity.roles))


@router.delete("/session", status_code=204)
async def sign_out(response: Response) -> None:
    """Forgets the token."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")


# --- Runs and batches


@router.get("/overview", response_model=Overview)
async def overview(request: Request, api: ApiDep) -> Response:
    """Every run and its state, as far as this process owns it. Has an ETag."""
    owned = {run.name: run for run in api.runs.own()}
    names = api.gate.visible(await api.runs.names())[:_SHOWN_RUNS]
    runs: list[RunSummary] = []
    for name in names:
        runs.append(health.summary(owned[name]) if name in owned else RunSummary(run=name))
        # Other calls are answered between runs, of which there may be hundreds.
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
    """Figures of all batches that the run ever published, freed ones too: scores, rows, padding, staleness,
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
    start: Annotated[int, Query(ge=0, lt=2**63, description="The first group to show.")] = 0,
) -> Response:
    """Scores and advantages of a batch's groups, 200 at a time; advantages before `loss_reduction` scales them."""
    view = await views.get(run, batch)
    return await _computed(lambda: view.scores(start))


# --- Details


@router.get("/runs/{run}/settings")
async def run_settings(run: RunDep) -> RunSettings:
    """Every setting of the run, with its default."""
    return settings.run_settings(run)


@router.get("/runs/{run}/find")
async def find_groups(
    run: RunDep, uid: Annotated[str, Query(min_length=1, max_length=1000, description="Part of it.")]
) -> FoundGroups:
    """The groups whose uid contains this text, and what became of them."""
    return await groups.find_groups(run, uid)


@router.get("/runs/{run}/samples")
async def group_samples(run: RunDep, uid: UidQuery, round: RoundQuery = 0) -> GroupSamples:
    """The samples of a group that is not sealed: the steps that came, and which samples are complete."""
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
    """The tokens of a step of a group that is not sealed, 2,000 at a time, and what they say where the service has a
    tokenizer."""
    return _row_with_texts(await groups.row_tokens(run, GroupKey(round, uid), sample, step, start), api.token_texts)


@router.get("/runs/{run}/batches/{batch}/distributions")
async def batch_distributions(run: RunDep, views: ViewsDep, batch: Int64) -> BatchDistributions:
    """Histograms of the trajectories' scores, response tokens and turns, and why they stopped."""
    return await asyncio.to_thread((await views.get(run, batch)).distributions)


@router.get("/runs/{run}/batches/{batch}/rows/{row}")
async def batch_row(
    run: RunDep,
    views: ViewsDep,
    api: ApiDep,
    batch: Int64,
    row: Int64,
    start: StartQuery = 0,
) -> RowTokens:
    """The tokens of one training row, 2,000 at a time, and what they say where the service has a tokenizer."""
    view = await views.get(run, batch)
    return _row_with_texts(await view.tokens(run, row, start), api.token_texts)


@router.get("/runs/{run}/batches/{batch}/costs")
async def batch_costs(run: RunDep, views: ViewsDep, batch: Int64) -> BatchCosts:
    """What the batch costs as it is configured, and what it would with other settings: planned again for each, from its
    own rows. Takes seconds for a large batch."""
    return await settings.batch_costs(run, batch, views.one_by_one)


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
    """Answers with an ETag that ignores `now`: a poll without other changes is answered 304."""
    etag = f'"{xxhash.xxh3_64_hexdigest(document.model_dump_json(exclude={"now"}).encode())}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(document.model_dump_json(exclude_unset=True), media_type="application/json", headers=headers)


def _shipped(folder: Traversable, path: str = "") -> Iterator[tuple[str, tuple[bytes, str, str]]]:
    """Yields the path, the content, the media type and the version of each file of the page."""
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
