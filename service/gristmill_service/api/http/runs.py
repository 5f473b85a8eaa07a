"""Runs over HTTP: their creation, state, policy version and end."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request

from gristmill_service.api.http import models
from gristmill_service.api.http.dependencies import ContextDep, RunDep, gone
from gristmill_service.api.questions import ask_policy_version
from gristmill_service.run.machine.answers import ModelProgress

router = APIRouter(prefix="/v1/runs", tags=["runs"])


@router.post("")
def create_run(body: models.CreateRun, context: ContextDep) -> models.RunCreated:
    """Creates a run. The same name and configuration again is answered alike; another configuration is 409."""
    warnings, created = context.runs.create(body.run, body.config)
    return models.RunCreated(warnings=warnings, created=created)


@router.get("")
def list_runs(context: ContextDep) -> models.RunNames:
    """The names of all runs."""
    return models.RunNames(runs=context.gate.visible(context.runs.names()))


@router.get("/{run}")
def get_run(run: RunDep) -> models.RunState:
    """A run's state."""
    status = run.status()
    same = models.RunState.model_fields.keys() - {"config", "models", "tags"}
    values = {name: getattr(status, name) for name in same}
    return models.RunState(
        **values,
        config=orjson.loads(status.config_json),
        models=[_model(progress) for progress in status.models],
        tags={tag: models.TagGroups.model_validate(found) for tag, found in status.tags.items()},
    )


@router.delete("/{run}", status_code=204)
def delete_run(run: str, context: ContextDep) -> None:
    """Ends a run at once and removes all it holds."""
    context.runs.delete(run)


@router.get("/{run}/groups")
def list_groups(run: RunDep) -> models.Groups:
    """Every prompt group that was ever admitted, and what became of it."""
    return models.Groups(groups=[models.Group(**asdict(view)) for view in run.groups()])


@router.post("/{run}/finish")
def finish_run(run: RunDep) -> models.RunFinished:
    """Says that no more rollouts come: what is complete is sealed, what is open dropped. Idempotent."""
    return models.RunFinished(batches=run.finish())


@router.get("/{run}/policy-version")
async def wait_policy_version(
    request: Request,
    run: RunDep,
    context: ContextDep,
    at_least: models.Int32 = -1,
    wait_s: Annotated[float, Query(description="Seconds to wait; the service may answer earlier.")] = 0.0,
) -> models.PolicyVersion:
    """The policy version, waiting until it is at least this."""
    version = await context.long_poll.ask_async(ask_policy_version(run, at_least), wait_s, gone(request))
    return models.PolicyVersion(version=version)


@router.put("/{run}/policy-version", status_code=204)
def announce_policy_version(run: RunDep, body: models.PolicyVersion) -> None:
    """Says which version rollouts sample from now. Never goes back."""
    run.announce(body.version)


def _model(progress: ModelProgress) -> models.ModelStatus:
    return models.ModelStatus(
        model=progress.model,
        committed=models.Place.of(progress.committed),
        incarnation=progress.incarnation,
        next=[models.Place.of(position) for position in progress.next],
    )
