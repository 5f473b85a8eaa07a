"""Calls of the page for what somebody asks to see: settings, groups by uid, samples of open groups, distributions,
costs. They only read."""

from __future__ import annotations

from typing import Annotated, TypeVar

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from gristmill_service.api.http.dependencies import ContextDep, RunDep
from gristmill_service.api.http.models import Int64
from gristmill_service.api.http.page.page import ViewsDep, view_of
from gristmill_service.monitoring.views import groups
from gristmill_service.monitoring.views import run_settings as settings
from gristmill_service.monitoring.views.batch_view import BatchDistributions
from gristmill_service.monitoring.views.groups import FoundGroups, GroupSamples, OpenRowTokens
from gristmill_service.monitoring.views.row_view import RowTokens, ShownTokens
from gristmill_service.monitoring.views.run_settings import BatchCosts, RunSettings
from gristmill_service.monitoring.views.token_texts import TokenTexts
from gristmill_service.run.machine.events import GroupKey

router = APIRouter(prefix="/v1/runs/{run}", tags=["page"])

UidQuery = Annotated[str, Query(min_length=1, description="The group's uid.")]
RoundQuery = Annotated[int, Query(ge=0, lt=2**31, description="The group's round.")]
StartQuery = Annotated[int, Query(ge=0, lt=2**31, description="The first token to tell of.")]
T = TypeVar("T", bound=ShownTokens)


@router.get("/settings")
def run_settings(run: RunDep) -> RunSettings:
    """Every setting of the run, with its default."""
    return settings.run_settings(run)


@router.get("/find")
def find_groups(
    run: RunDep, uid: Annotated[str, Query(min_length=1, max_length=1000, description="Part of it.")]
) -> FoundGroups:
    """The groups whose uid contains this text, and what became of them."""
    return groups.find_groups(run, uid)


@router.get("/samples")
def group_samples(run: RunDep, uid: UidQuery, round: RoundQuery = 0) -> GroupSamples:
    """The samples of a group that is not sealed: what of each has come, and which are complete."""
    return groups.group_samples(run, GroupKey(round, uid))


@router.get("/samples/{sample}/rows/{step}")
def group_row(
    run: RunDep,
    context: ContextDep,
    sample: Int64,
    step: Int64,
    uid: UidQuery,
    round: RoundQuery = 0,
    start: StartQuery = 0,
) -> OpenRowTokens:
    """The tokens of a step of a group that is not sealed, 2,000 at a time, and what they say where the service has a
    tokenizer."""
    return _with_texts(groups.row_tokens(run, GroupKey(round, uid), sample, step, start), context.token_texts)


@router.get("/batches/{batch}/distributions")
async def batch_distributions(run: RunDep, views: ViewsDep, batch: Int64) -> BatchDistributions:
    """Histograms of the trajectories' scores, response tokens and turns, and why they stopped."""
    return (await view_of(views, run, batch)).distributions()


@router.get("/batches/{batch}/rows/{row}")
async def batch_row(
    run: RunDep,
    views: ViewsDep,
    context: ContextDep,
    batch: Int64,
    row: Int64,
    start: StartQuery = 0,
) -> RowTokens:
    """The tokens of one training row, 2,000 at a time, and what they say where the service has a tokenizer."""
    view = await view_of(views, run, batch)
    async with views.turn:
        told = await run_in_threadpool(view.tokens, run, row, start)
    return _with_texts(told, context.token_texts)


@router.get("/batches/{batch}/costs")
async def batch_costs(run: RunDep, views: ViewsDep, batch: Int64) -> BatchCosts:
    """What the batch costs as it is configured, and what it would with other settings: planned anew for each, from its
    own rows. Takes seconds for a large batch."""
    async with views.turn:
        return await run_in_threadpool(settings.batch_costs, run, batch)


def _with_texts(told: T, texts: TokenTexts | None) -> T:
    return told if texts is None else told.model_copy(update={"texts": texts.of(set(told.tokens))})
