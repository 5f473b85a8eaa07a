"""The routes: which request is what, and what an error answers."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from gristmill.aio import AsyncRolloutClient
from gristmill.environments.atropos.environments import Environment, Environments, Registration, Run
from gristmill.environments.atropos.scored_data import Row, ScoredData, Takes, rows_of
from gristmill.errors import (
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)

_log = logging.getLogger("gristmill.atropos")

_ROOM_WAIT_S = 200.0
"""Environments give a post 300 s, and then post it again: the rest is for the rows themselves."""

_BODY_BYTES = 256 << 20

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Any]]


@dataclass(frozen=True)
class TrainerFacts:
    """What a trainer of Atropos registers with, for environments to know.

    wandb_project, wandb_group: where they log. checkpoint_dir, checkpoint_interval: where they keep their own state,
    and each how many batches; never for -1. num_steps: how many batches they run for where they are not told, -1: no
    number.
    """

    wandb_project: str
    wandb_group: str
    checkpoint_dir: str = ""
    checkpoint_interval: int = -1
    num_steps: int = -1


class Routes:
    """Feed a run of the service at `address`. room_wait_s: how long a post waits for room before it is sent away."""

    def __init__(self, address: str, run: str, facts: TrainerFacts, room_wait_s: float = _ROOM_WAIT_S) -> None:
        self._address = address
        self._run_name = run
        self._facts = facts
        self._room_wait_s = room_wait_s
        self._environments = Environments()

    def app(self) -> Starlette:
        handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/register-env"): self._register,
            ("POST", "/disconnect-env"): self._disconnect,
            ("POST", "/scored_data"): self._scored,
            ("POST", "/scored_data_list"): self._scored_list,
            ("GET", "/status-env"): self._status_env,
            ("GET", "/status"): self._status,
            ("GET", "/info"): self._info,
            ("GET", "/wandb_info"): self._wandb_info,
            ("GET", "/"): self._root,
        }
        of_trainers = [("POST", "/register"), *(("GET", path) for path in ("/batch", "/latest_example", "/reset_data"))]
        handlers |= dict.fromkeys(of_trainers, _of_trainers)
        routes = [Route(path, _answering(handler), methods=[verb]) for (verb, path), handler in handlers.items()]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with AsyncRolloutClient(self._address, self._run_name) as self._client:
            yield

    async def _run(self) -> Run:
        status = await self._client.status()
        return Run(json.loads(status.config_json), status)

    async def _root(self, request: Request) -> Any:
        return {"message": f"gristmill: the routes of Atropos' environments, before run {self._run_name!r}"}

    async def _wandb_info(self, request: Request) -> Any:
        return {"group": self._facts.wandb_group, "project": self._facts.wandb_project}

    async def _info(self, request: Request) -> Any:
        run = await self._run()
        return {"batch_size": run.batch_size, "max_token_len": run.config.get("max_seq_len") or -1}

    async def _status(self, request: Request) -> Any:
        run = await self._run()
        return {"current_step": run.step, "queue_size": run.groups_waiting}

    async def _register(self, request: Request) -> Any:
        registration = await _read(request, Registration)
        try:
            run = await self._run()
        except NotFoundError:
            # The environment asks again each second.
            return {"status": f"wait for run {self._run_name!r} to be created"}
        env_id = self._environments.register(registration, run)
        name = self._environments.find(env_id).name
        _log.info("run %r: environment %s has registered as %d", self._run_name, name, env_id)
        return {
            "status": "success",
            "env_id": env_id,
            "wandb_name": name,
            "checkpoint_dir": self._facts.checkpoint_dir,
            "starting_step": run.step,
            "checkpoint_interval": self._facts.checkpoint_interval,
            "num_steps": self._facts.num_steps,
        }

    async def _disconnect(self, request: Request) -> Any:
        self._environments.find(await _env_id(request)).is_connected = False
        return {"status": "success"}

    async def _status_env(self, request: Request) -> Any:
        return self._environments.status(await _env_id(request), await self._run())

    async def _scored(self, request: Request) -> Any:
        await self._submit([await _read(request, ScoredData)])
        return {"status": "received"}

    async def _scored_list(self, request: Request) -> Any:
        groups = await _read(request, list[ScoredData])
        await self._submit(groups)
        return {"status": "received", "groups_processed": len(groups)}

    async def _submit(self, groups: Sequence[ScoredData]) -> None:
        """All are checked before the first is submitted."""
        takes = takes_of((await self._run()).config)
        posted = [(group, self._environments.find(group.env_id)) for group in groups]
        read = [await run_in_threadpool(rows_of, group, takes) for group in groups]
        for (group, environment), rows in zip(posted, read, strict=True):
            await self._submit_group(group, environment, rows)

    async def _submit_group(self, group: ScoredData, environment: Environment, rows: list[Row]) -> None:
        """Returns when the run has taken the group, or has done with it before. The same group again changes nothing.

        Raises ResourceExhaustedError where the run has no room for it in time.
        """
        uid = group.uid(environment.name)
        begun = await self._client.begin_groups(
            [uid], wait_s=self._room_wait_s, n_samples=len(rows), tag=environment.tag
        )
        if not begun:
            await self._check_consumed(uid)
            return
        try:
            await self._client.submit_rows({"uid": uid, **row} for row in rows)
        except (InvalidArgumentError, FailedPreconditionError) as error:
            await self._client.abort_group(uid, reason=type(error).__name__)
            raise
        assert group.env_id is not None
        self._environments.sent.append(group.env_id)

    async def _check_consumed(self, uid: str) -> None:
        """A group that is not admitted has been before, or there is no room for it still."""
        if not any(known.uid == uid for known in await self._client.groups()):
            raise ResourceExhaustedError(
                f"run {self._run_name!r}: there was no room for a group for {self._room_wait_s:g} s; its trainer "
                "lags behind: fewer workers, or a smaller max_batches_offpolicy, pace the environment"
            )


def takes_of(config: Any) -> Takes:
    """What a run with these settings takes."""
    declared = [column for column in config.get("columns") or () if column.get("source", "rollout") == "rollout"]
    columns = {column["name"]: column["scope"] for column in declared}
    return Takes(columns, config.get("advantage_estimator") == "none")


async def _of_trainers(request: Request) -> Any:
    raise FailedPreconditionError(
        f"{request.url.path} is for trainers, which read their shards from the service: use gristmill.TrainerClient"
    )


class _EnvId(msgspec.Struct):
    env_id: int


async def _env_id(request: Request) -> int:
    return (await _read(request, _EnvId)).env_id


async def _read(request: Request, kind: type[T]) -> T:
    """The body, of which environments compress those that are large."""
    pieces, size = [], 0
    async for piece in request.stream():
        pieces.append(piece)
        size += len(piece)
        _check_size(size)
    compressed = request.headers.get("content-encoding", "").lower() == "gzip"
    return await run_in_threadpool(_decoded, b"".join(pieces), compressed, kind)


def _decoded(body: bytes, compressed: bool, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(_decompressed(body) if compressed else body, type=kind)
    except (msgspec.DecodeError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the body is not as it should be: {error}") from None


def _decompressed(body: bytes) -> bytes:
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    found = decompressor.decompress(body, _BODY_BYTES + 1)
    _check_size(len(found))
    if not decompressor.eof:
        raise InvalidArgumentError(f"the gzip body ends early, after {len(body)} bytes; send all of it")
    return found


def _check_size(size: int) -> None:
    if size > _BODY_BYTES:
        raise InvalidArgumentError(f"the body is larger than {_BODY_BYTES} bytes; post fewer groups at once")


def _answering(handler: Handler) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def answer(request: Request) -> JSONResponse:
        try:
            return JSONResponse(await handler(request))
        except GristmillError as error:
            # Environments log the status alone of what they posted.
            _log.warning("%s: %s", request.url.path, error)
            return JSONResponse({"detail": str(error)}, _status_of(error))

    return answer


def _status_of(error: GristmillError) -> int:
    """What is 500 or above an environment tries again, twice."""
    if isinstance(error, (ResourceExhaustedError, UnavailableError)):
        return 503
    if isinstance(error, NotFoundError):
        return 404
    return 409 if isinstance(error, FailedPreconditionError) else 422
