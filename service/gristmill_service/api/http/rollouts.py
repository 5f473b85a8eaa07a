"""Rollouts over HTTP: groups, rows, rewards, aborts, sealing."""

from __future__ import annotations

from functools import partial

import numpy as np
from fastapi import APIRouter, Request
from google.protobuf.message import DecodeError

from gristmill._wire.codecs import row_codec, submit_codec
from gristmill._wire.codecs.row_codec import Sent
from gristmill._wire.columns import Int64s
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import GristmillError, InvalidArgumentError
from gristmill.v1 import rows_pb2
from gristmill_service.api import calls
from gristmill_service.api.bounds import PROTOBUF, check_message
from gristmill_service.api.errors import refusal
from gristmill_service.api.http import models
from gristmill_service.api.http.dependencies import ApiDep, RunDep, RunName, SlotDep
from gristmill_service.api.http.guards.bodies import BODY
from gristmill_service.api.http.json_bodies import rows_of
from gristmill_service.api.row_requests import RowsRequest
from gristmill_service.off_loop import OneByOne
from gristmill_service.run.machine.answers import RewardUpdate
from gristmill_service.run.run import Run

router = APIRouter(prefix="/v1/runs/{run}", tags=["rollouts"])

# JSON takes longer to parse than a protobuf message of the same size.
_JSON_WEIGHT = 4


@router.post("/groups")
async def begin_groups(run: RunName, api: ApiDep, slot: SlotDep, body: models.BeginGroups) -> models.GroupsBegun:
    """Admits prompt groups: as many of the uids, in order, as the run has capacity for."""
    sizes, tags = models.one_each(body.n_samples, body.uids), models.one_each(body.tag, body.uids)
    begun = await calls.begin_groups(api, slot, run, body.round, body.uids, sizes, tags, body.wait_s)
    return models.GroupsBegun(
        admissions=[admission.name.lower() for admission in begun.admissions],  # type: ignore[misc]
        retry_after_s=begun.retry_after_s,
        reason=begun.reason,
        policy_version=begun.policy_version,
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
                    "properties": {
                        "rows": {"type": "array", "items": models.Row.model_json_schema()},
                        "refuse_by_row": {"type": "boolean", "default": False},
                    },
                }
            },
            PROTOBUF: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post("/rows", openapi_extra=_ROWS_BODY, response_model_exclude_defaults=True)
async def submit_rows(request: Request, run: RunDep, slot: SlotDep, api: ApiDep) -> models.RowsSubmitted:
    """Submits rows of any trajectories in any order. The service accepts all rows of the request or none; with
    `refuse_by_row` (JSON only) it refuses invalid rows individually."""
    body, kind = request.scope[BODY], request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == PROTOBUF:
        taken = await calls.submit_rows(api, slot, run.name, len(body), lambda _: _from_protobuf(body))
    else:
        # A parsed document needs tens of times the memory of its bytes.
        in_thread: OneByOne = request.app.state.json_rows
        read = partial(_from_json, body)
        taken = await calls.submit_rows(api, slot, run.name, _JSON_WEIGHT * len(body), read, in_thread)
    slot.note_wrong(taken.refused.values())
    return models.RowsSubmitted.model_construct(
        outcomes=[outcome.name.lower() for outcome in taken.outcomes],
        refused=[_refused(row, error) for row, error in taken.refused.items()],
    )


@router.post("/rewards")
async def set_rewards(run: RunName, api: ApiDep, body: models.SetRewards) -> models.Changed:
    """Sets pending rewards: all of the request, or none."""
    return models.Changed(changed=await calls.set_rewards(api, run, [_reward(reward) for reward in body.rewards]))


@router.post("/trajectories:abort")
async def abort_trajectories(run: RunName, api: ApiDep, body: models.AbortTrajectories) -> models.Changed:
    """Aborts trajectories. Their groups complete without them."""
    keys = [_key(trajectory) for trajectory in body.trajectories]
    return models.Changed(changed=await calls.abort_trajectories(api, run, keys, body.reason, body.attempt))


@router.post("/groups:abort")
async def abort_groups(run: RunName, api: ApiDep, body: models.AbortGroups) -> models.Changed:
    """Drops whole prompt groups."""
    return models.Changed(changed=await calls.abort_groups(api, run, body.round, body.uids, body.reason))


@router.post("/seal")
async def seal_batch(run: RunName, api: ApiDep, body: models.SealBatch | None = None) -> models.BatchSealed:
    """Seals all complete groups into a batch now, even if they are fewer than train_batch_size."""
    sealed = await calls.seal_batch(api, run, None if body is None else body.batch)
    return models.BatchSealed(batch=sealed.batch, prompts=sealed.prompts)


def _refused(row: int, error: GristmillError) -> models.RefusedRow:
    return models.RefusedRow.model_validate({"row": row, **refusal(error).values})


def _from_protobuf(body: bytes | memoryview) -> RowsRequest:
    try:
        check_message(body, rows_pb2.Rows.DESCRIPTOR)
        steps = row_codec.whole(submit_codec.read_rows(body))
    except DecodeError:
        raise InvalidArgumentError(
            f"the body of {len(body)} bytes is not a complete gristmill.v1.Rows message; send one as {PROTOBUF}"
        ) from None
    return RowsRequest.of(Sent(steps, None), by_row=False)


def _from_json(body: bytes, run: Run) -> RowsRequest:
    rows, by_row = rows_of(body)
    config = run.config

    def read(places: Int64s | None) -> Sent:
        picked = rows if places is None else [rows[place] for place in places.tolist()]
        return Sent(from_rows(picked, step_wise=config.step_wise, columns=config.columns), None)

    def attempt(row: int) -> str:
        # The row is not checked yet, so its fields may have any type.
        fields = rows[row] if isinstance(rows[row], dict) else {}
        return repr([fields.get(name) or 0 for name in ("round", "uid", "sample", "attempt")])

    return RowsRequest(len(rows), read, attempt, by_row)


def _key(trajectory: models.Trajectory) -> TrajectoryKey:
    return TrajectoryKey(trajectory.round, trajectory.uid, trajectory.sample)


def _reward(reward: models.Reward) -> RewardUpdate:
    if isinstance(reward.reward, list):
        return RewardUpdate(_key(reward), reward.step, token_values=np.array(reward.reward, np.float64))
    return RewardUpdate(_key(reward), reward.step, value=reward.reward)
