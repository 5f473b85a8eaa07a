"""Rollouts over HTTP: groups, rows, rewards, aborts, sealing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from fastapi import APIRouter, Request
from google.protobuf.message import DecodeError
from starlette.concurrency import run_in_threadpool

from gristmill._wire.codecs import row_codec
from gristmill._wire.extras import check_extras
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import rows_pb2
from gristmill_service.api.context import ApiContext
from gristmill_service.api.http import models
from gristmill_service.api.http.dependencies import ContextDep, RunDep, gone
from gristmill_service.api.http.guards.bodies import CALLER
from gristmill_service.api.http.json_bodies import rows_of, turn
from gristmill_service.api.questions import ask_groups
from gristmill_service.run.machine.answers import RewardUpdate
from gristmill_service.run.run import Run

router = APIRouter(prefix="/v1/runs/{run}", tags=["rollouts"])

PROTOBUF = "application/x-protobuf"
_SMALL_BYTES = 64 << 10


@router.post("/groups")
async def begin_groups(
    request: Request, run: RunDep, context: ContextDep, body: models.BeginGroups
) -> models.GroupsBegun:
    """Admits prompt groups: as many of the uids, in order, as there is room for."""
    sizes, tags = models.one_each(body.n_samples, body.uids), models.one_each(body.tag, body.uids)
    question = ask_groups(run, body.round, body.uids, sizes, tags, context.gate.quota())
    view = await context.long_poll.ask_async(question, body.wait_s, gone(request))
    return models.GroupsBegun(
        admissions=[admission.name.lower() for admission in view.admissions],  # type: ignore[misc]
        retry_after_s=view.retry_after_s,
        reason=view.reason,
    )


_ROWS_BODY = {
    "requestBody": {
        "required": True,
        "description": f"JSON, or the message gristmill.v1.Rows as {PROTOBUF}; either may be gzip-encoded.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["rows"],
                    "properties": {"rows": {"type": "array", "items": models.Row.model_json_schema()}},
                }
            },
            PROTOBUF: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post("/rows", openapi_extra=_ROWS_BODY)
async def submit_rows(request: Request, run: RunDep, context: ContextDep) -> models.RowsSubmitted:
    """Submits rows of any trajectories in any order. All rows of the request are taken, or none is."""
    body, kind = await request.body(), request.headers.get("content-type", "").partition(";")[0].strip().lower()
    decode = _from_protobuf if kind == PROTOBUF else _from_json
    if decode is _from_protobuf or len(body) <= _SMALL_BYTES:
        return await run_in_threadpool(_submit, context, run, decode, body)
    return await run_in_threadpool(_submit_in_turn, context, run, body, request.scope[CALLER])


@router.post("/rewards")
def set_rewards(run: RunDep, body: models.SetRewards) -> models.Changed:
    """Gives rewards that were pending. All of the request are set, or none is."""
    return models.Changed(changed=run.set_rewards([_reward(reward) for reward in body.rewards]))


@router.post("/trajectories:abort")
def abort_trajectories(run: RunDep, body: models.AbortTrajectories) -> models.Changed:
    """Gives up trajectories: their groups complete without them."""
    return models.Changed(changed=run.abort_trajectories([_key(key) for key in body.trajectories], body.reason))


@router.post("/groups:abort")
def abort_groups(run: RunDep, body: models.AbortGroups) -> models.Changed:
    """Gives up whole prompt groups."""
    return models.Changed(changed=run.abort_groups(body.round, body.uids, body.reason))


@router.post("/seal")
def seal_batch(run: RunDep, body: models.SealBatch | None = None) -> models.BatchSealed:
    """Seals what is complete into a batch now, also fewer groups than train_batch_size."""
    sealed = run.seal(None if body is None else body.batch)
    return models.BatchSealed(batch=sealed.batch, prompts=sealed.prompts)


def _submit_in_turn(context: ApiContext, run: Run, body: bytes, caller: str) -> models.RowsSubmitted:
    with turn(caller):
        return _submit(context, run, _from_json, body)


def _submit(context: ApiContext, run: Run, decode: Callable[[Run, bytes], Steps], body: bytes) -> models.RowsSubmitted:
    outcomes = run.submit(decode(run, body), quota=context.gate.quota())
    return models.RowsSubmitted.model_construct(outcomes=[outcome.name.lower() for outcome in outcomes])


def _from_protobuf(run: Run, body: bytes) -> Steps:
    try:
        message = rows_pb2.Rows.FromString(body)
    except DecodeError:
        raise InvalidArgumentError(
            f"the body of {len(body)} bytes is not a gristmill.v1.Rows message, or ends early; send one as {PROTOBUF}"
        ) from None
    return check_extras(row_codec.decode(message), run.config.columns)


def _from_json(run: Run, body: bytes) -> Steps:
    columns = run.config.columns
    return check_extras(from_rows(rows_of(body), step_wise=run.config.step_wise, columns=columns), columns)


def _key(trajectory: models.Trajectory) -> TrajectoryKey:
    return TrajectoryKey(trajectory.round, trajectory.uid, trajectory.sample)


def _reward(reward: models.Reward) -> RewardUpdate:
    if isinstance(reward.reward, list):
        return RewardUpdate(_key(reward), reward.step, token_values=np.array(reward.reward, np.float64))
    return RewardUpdate(_key(reward), reward.step, value=reward.reward)
