"""Rollouts over HTTP: groups, rows, rewards, aborts, sealing."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request
from google.protobuf.message import DecodeError

from gristmill._wire.codecs import row_codec
from gristmill._wire.codecs.row_codec import Sent
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import rows_pb2
from gristmill_service.api import calls
from gristmill_service.api.http import models
from gristmill_service.api.http.dependencies import ApiDep, RunDep, RunName, SlotDep
from gristmill_service.api.http.json_bodies import rows_of
from gristmill_service.config import RunConfig
from gristmill_service.off_loop import OneByOne
from gristmill_service.run.machine.answers import RewardUpdate

router = APIRouter(prefix="/v1/runs/{run}", tags=["rollouts"])

PROTOBUF = "application/x-protobuf"
_SMALL_BYTES = 64 << 10


@router.post("/groups")
async def begin_groups(run: RunName, api: ApiDep, slot: SlotDep, body: models.BeginGroups) -> models.GroupsBegun:
    """Admits prompt groups: as many of the uids, in order, as there is capacity for."""
    sizes, tags = models.one_each(body.n_samples, body.uids), models.one_each(body.tag, body.uids)
    begun = await calls.begin_groups(api, slot, run, body.round, body.uids, sizes, tags, body.wait_s)
    return models.GroupsBegun(
        admissions=[admission.name.lower() for admission in begun.admissions],  # type: ignore[misc]
        retry_after_s=begun.retry_after_s,
        reason=begun.reason,
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
async def submit_rows(request: Request, run: RunDep, api: ApiDep) -> models.RowsSubmitted:
    """Submits rows of any trajectories in any order. All rows of the request are taken, or none is."""
    body, kind = await request.body(), request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == PROTOBUF:
        outcomes = await calls.submit_rows(api, run.name, len(body), lambda _: _from_protobuf(body))
    elif len(body) <= _SMALL_BYTES:
        outcomes = await calls.submit_rows(api, run.name, 0, lambda opened: _from_json(opened.config, body))
    else:
        # A parsed document takes tens of times its bytes.
        one_by_one: OneByOne = request.app.state.json_rows
        sent = await one_by_one(_from_json, run.config, body)
        outcomes = await calls.submit_rows(api, run.name, len(body), lambda _: sent)
    return models.RowsSubmitted.model_construct(outcomes=[outcome.name.lower() for outcome in outcomes])


@router.post("/rewards")
async def set_rewards(run: RunName, api: ApiDep, body: models.SetRewards) -> models.Changed:
    """Sets rewards that were pending: all of the request, or none."""
    return models.Changed(changed=await calls.set_rewards(api, run, [_reward(reward) for reward in body.rewards]))


@router.post("/trajectories:abort")
async def abort_trajectories(run: RunName, api: ApiDep, body: models.AbortTrajectories) -> models.Changed:
    """Aborts trajectories: their groups complete without them."""
    keys = [_key(trajectory) for trajectory in body.trajectories]
    return models.Changed(changed=await calls.abort_trajectories(api, run, keys, body.reason, body.attempt))


@router.post("/groups:abort")
async def abort_groups(run: RunName, api: ApiDep, body: models.AbortGroups) -> models.Changed:
    """Drops whole prompt groups."""
    return models.Changed(changed=await calls.abort_groups(api, run, body.round, body.uids, body.reason))


@router.post("/seal")
async def seal_batch(run: RunName, api: ApiDep, body: models.SealBatch | None = None) -> models.BatchSealed:
    """Seals all complete groups into a batch now, also fewer than train_batch_size."""
    sealed = await calls.seal_batch(api, run, None if body is None else body.batch)
    return models.BatchSealed(batch=sealed.batch, prompts=sealed.prompts)


def _from_protobuf(body: bytes) -> Sent:
    try:
        message = rows_pb2.Rows.FromString(body)
    except DecodeError:
        raise InvalidArgumentError(
            f"the body of {len(body)} bytes is not a gristmill.v1.Rows message, or ends early; send one as {PROTOBUF}"
        ) from None
    return Sent(row_codec.decode(message), None)


def _from_json(config: RunConfig, body: bytes) -> Sent:
    return Sent(from_rows(rows_of(body), step_wise=config.step_wise, columns=config.columns), None)


def _key(trajectory: models.Trajectory) -> TrajectoryKey:
    return TrajectoryKey(trajectory.round, trajectory.uid, trajectory.sample)


def _reward(reward: models.Reward) -> RewardUpdate:
    if isinstance(reward.reward, list):
        return RewardUpdate(_key(reward), reward.step, token_values=np.array(reward.reward, np.float64))
    return RewardUpdate(_key(reward), reward.step, value=reward.reward)
