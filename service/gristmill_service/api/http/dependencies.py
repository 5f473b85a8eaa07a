"""Dependencies of handlers: the parts of the service, the slot of the request, and the run in the path."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Path, Request

from gristmill_service.api.admission import Slot
from gristmill_service.api.context import ApiContext
from gristmill_service.api.http.guards.admitted import SLOT
from gristmill_service.run.run import Run


async def _api(request: Request) -> ApiContext:
    return cast(ApiContext, request.app.state.api)


async def _slot(request: Request) -> Slot:
    return cast(Slot, request.scope[SLOT])


ApiDep = Annotated[ApiContext, Depends(_api)]
SlotDep = Annotated[Slot, Depends(_slot)]
AnyRun = Annotated[str, Path(description="The run's name.")]
"""The name in the path, unchecked: the call also accepts a run that this process does not own."""


async def _run(api: ApiDep, run: AnyRun) -> Run:
    return await api.runs.get(run)


RunDep = Annotated[Run, Depends(_run)]


async def _run_name(run: RunDep) -> str:
    return run.name


RunName = Annotated[str, Depends(_run_name)]
"""The name of a run that this process owns. Checked before the body is parsed."""
