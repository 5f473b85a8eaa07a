"""Calls of the page for what somebody asks to see: settings, groups by uid, samples of open groups, distributions,
costs. They only read."""

from __future__ import annotations

import asyncio
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query

from gristmill_service.api.http.dependencies import ApiDep, RunDep
from gristmill_service.api.http.models import Int64
from gristmill_service.api.http.page.page import ViewsDep
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
async def run_settings(run: RunDep) -> RunSettings:
    """Every setting of the run, with its default."""
    return settings.run_settings(run)


@router.get("/find")
async def find_groups(
    run: RunDep, uid: Annotated[str, Query(min_length=1, max_length=1000, description="Part of it.")]
) -> FoundGroups:
    """The groups whose uid contains this text, and what became of them."""
    return await groups.find_groups(run, uid)


@router.get("/samples")
async def group_samples(run: RunDep, uid: UidQuery, round: RoundQuery = 0) -> GroupSamples:
    """The samples of a group that is not sealed: what of each has come, and which are complete."""
    return groups.group_samples(run, GroupKey(round, uid))


@router.get("/samples/{sample}/rows/{step}")
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
    return _with_texts(await groups.row_tokens(run, GroupKey(round, uid), sample, step, start), api.token_texts)


@router.get("/batches/{batch}/distributions")
async def batch_distributions(run: RunDep, views: ViewsDep, batch: Int64) -> BatchDistributions:
    """Histograms of the trajectories' scores, response tokens and turns, and why they stopped."""
    return await asyncio.to_thread((await views.get(run, batch)).distributions)


@router.get("/batches/{batch}/rows/{row}")
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
    return _with_texts(await view.tokens(run, row, start), api.token_texts)


@router.get("/batches/{batch}/costs")
async def batch_costs(run: RunDep, views: ViewsDep, batch: Int64) -> BatchCosts:
    """What the batch costs as it is configured, and what it would with other settings: planned again for each, from its
    own rows. Takes seconds for a large batch."""
    return await settings.batch_costs(run, batch, views.one_by_one)


def _with_texts(row: T, texts: TokenTexts | None) -> T:
    return row if texts is None else row.model_copy(update={"texts": texts.of(set(row.tokens))})
