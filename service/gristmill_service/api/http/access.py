"""How handlers reach what they work on: the backend, the run named in the path, and whether the caller has gone."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Path, Request

from gristmill_service.api.backend import Backend
from gristmill_service.run.run import Run


async def _backend(request: Request) -> Backend:
    return cast(Backend, request.app.state.backend)


BackendDep = Annotated[Backend, Depends(_backend)]


def _run(backend: BackendDep, run: Annotated[str, Path(description="The run's name.")]) -> Run:
    return backend.runs.get(run)


RunDep = Annotated[Run, Depends(_run)]


async def gone(request: Request) -> None:
    """Returns when the caller has closed the connection. The body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
