"""Runs over HTTP: their creation, state, policy version and end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from gristmill_service.api import calls
from gristmill_service.api.http import models
from gristmill_service.api.http.dependencies import AnyRun, ApiDep, RunDep, RunName, SlotDep
from gristmill_service.api.http.guards.admitted import HELD
from gristmill_service.run.machine.answers import GroupAnswer, ModelProgress

router = APIRouter(prefix="/v1/runs", tags=["runs"])

_BYTES_PER_KEY = 8


@router.post("")
async def create_run(body: models.CreateRun, api: ApiDep) -> models.RunCreated:
    """Creates a run. If the run exists, the same configuration succeeds, and another configuration is answered 409."""
    warnings, created = await calls.create_run(api, body.run, body.config)
    return models.RunCreated(warnings=warnings, created=created)


@router.get("")
async def list_runs(api: ApiDep) -> models.RunNames:
    """Returns the names of all runs."""
    return models.RunNames(runs=await calls.list_runs(api))


@router.get("/{run}")
async def get_run(run: AnyRun, api: ApiDep) -> models.RunState:
    """Returns a run's state."""
    status = (await calls.get_run(api, run)).status
    same = models.RunState.model_fields.keys() - {"config", "resolved_config", "models", "tags"}
    values = {name: getattr(status, name) for name in same}
    return models.RunState(
        **values,
        config=orjson.loads(status.config_json),
        resolved_config=orjson.loads(status.resolved_config_json),
        models=[_model(progress) for progress in status.models],
        tags={tag: models.TagGroups.model_validate(groups) for tag, groups in status.tags.items()},
    )


@router.delete("/{run}", status_code=204)
async def delete_run(run: AnyRun, api: ApiDep) -> None:
    """Ends a run immediately and removes its rows, shards and state."""
    await calls.delete_run(api, run)


@router.get("/{run}/groups", responses={200: {"model": models.Groups}})
async def list_groups(
    request: Request,
    run: RunDep,
    api: ApiDep,
    slot: SlotDep,
    uids: Annotated[models.Listed[str], Query(description="Return these groups, archived ones too.")] = [],  # noqa: B006
    round: Annotated[models.Int32, Query(description="The round of `uids`.")] = 0,
) -> Response:
    """Returns the prompt groups that are in no freed batch, or those with the given uids."""
    archived, parts = await calls.list_groups(api, run.name, round, uids)
    # The keys are in memory until the last part is sent.
    keys = len(uids) or run.read(lambda state, _: len(state.open) + len(state.closed.listed))
    held = request.scope[HELD] = _BYTES_PER_KEY * keys
    await slot.hold(held)
    return StreamingResponse(_groups(archived, parts), media_type="application/json")


@router.post("/{run}/finish")
async def finish_run(run: RunName, api: ApiDep) -> models.RunFinished:
    """Ends the rollouts: seals complete groups and drops open groups. Idempotent."""
    return models.RunFinished(batches=await calls.finish_run(api, run))


@router.get("/{run}/policy-version")
async def wait_policy_version(
    run: RunName,
    api: ApiDep,
    slot: SlotDep,
    at_least: models.Int32 = -1,
    wait_s: Annotated[float, Query(description="Seconds to wait; the service may answer earlier.")] = 0.0,
) -> models.PolicyVersion:
    """Returns the policy version. Waits until it is at least `at_least`."""
    return models.PolicyVersion(version=await calls.wait_policy_version(api, slot, run, at_least, wait_s))


@router.put("/{run}/policy-version", status_code=204)
async def announce_policy_version(run: RunName, api: ApiDep, body: models.PolicyVersion) -> None:
    """Sets the policy version from which rollouts sample. It never decreases."""
    await calls.announce_policy_version(api, run, body.version)


async def _groups(archived: int, parts: AsyncIterator[list[GroupAnswer]]) -> AsyncIterator[bytes]:
    """Yields the document, which may have tens of megabytes, in parts. Each is computed after the previous is sent."""
    yield b'{"archived":%d,"groups":[' % archived
    is_first = True
    async for part in parts:
        document = orjson.dumps(part)[1:-1]
        yield document if is_first else b"," + document
        is_first = False
    yield b"]}"


def _model(progress: ModelProgress) -> models.ModelStatus:
    return models.ModelStatus(
        model=progress.model,
        committed=models.Place.of(progress.committed),
        incarnation=progress.incarnation,
        next=[models.Place.of(position) for position in progress.next],
        resumes=progress.resumes,
    )
