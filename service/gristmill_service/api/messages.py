"""Between the contract's messages and the values that a run takes and gives. Pure; raises InvalidArgumentError."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, get_args

import numpy as np

from gristmill._wire.columns import Array
from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from gristmill_service.config import Model
from gristmill_service.monitoring.health.health import Assessment
from gristmill_service.run.machine.answers import (
    Admissions,
    BatchAnswer,
    ColumnPlace,
    GroupAnswer,
    GroupState,
    Outcome,
    Position,
    RewardUpdate,
    RunStatus,
    ShardAnswer,
)

_MODELS: dict[int, Model] = {
    run_pb2.MODEL_UNSPECIFIED: "policy",
    run_pb2.MODEL_POLICY: "policy",
    run_pb2.MODEL_CRITIC: "critic",
}
_MODEL_NUMBERS: dict[Model, Any] = {"policy": run_pb2.MODEL_POLICY, "critic": run_pb2.MODEL_CRITIC}
_GROUP_STATES: dict[GroupState, Any] = {
    "open": run_pb2.GROUP_STATE_OPEN,
    "complete": run_pb2.GROUP_STATE_COMPLETE,
    "sealed": run_pb2.GROUP_STATE_SEALED,
    "dropped": run_pb2.GROUP_STATE_DROPPED,
}


def config_mapping(config_json: str) -> Any:
    try:
        # Not orjson, which makes floats of integers beyond 64 bits: the refusal names what was given.
        return json.loads(config_json)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"config_json is not JSON: {error}; give the run's settings as an object") from None


def model_of(number: int) -> Model:
    if number not in _MODELS:
        raise InvalidArgumentError(f"model is {number}; known are {', '.join(get_args(Model))}")
    return _MODELS[number]


def position_of(message: run_pb2.Position) -> Position:
    return Position(message.batch, message.epoch, message.mini_batch)


def optional_position(message: Any) -> Position | None:
    """The `position` field of a request, which may be unset."""
    return position_of(message.position) if message.HasField("position") else None


def dp_size_of(number: int) -> int:
    """0: not given."""
    if number < 0:
        raise InvalidArgumentError(
            f"dp_size is {number}; give the trainer's number of data-parallel ranks, or 0 to keep it as it was"
        )
    return number


def key_of(message: rollout_pb2.TrajectoryKey) -> TrajectoryKey:
    return TrajectoryKey(message.round, message.uid, message.sample)


def reward_of(message: rollout_pb2.Reward) -> RewardUpdate:
    key = key_of(message.trajectory)
    values = message.token_values
    if message.HasField("value") == bool(values):
        raise InvalidArgumentError(f"{key}: a reward needs exactly one of value and token_values")
    return RewardUpdate(
        trajectory=key,
        step=message.step if message.HasField("step") else None,
        value=message.value if message.HasField("value") else None,
        token_values=_token_values(values, key) if values else None,
    )


def _token_values(values: bytes, key: TrajectoryKey) -> Array:
    if len(values) % 8:
        raise InvalidArgumentError(f"{key}: token_values has {len(values)} bytes; send float64, one a response token")
    return np.frombuffer(values, np.float64)


def outcomes_to(outcomes: Sequence[Outcome]) -> list[Any]:
    # Nearly always all rows of a request have one outcome, and asking an enum for its value takes a while.
    if outcomes and outcomes.count(outcomes[0]) == len(outcomes):
        return [outcomes[0].value] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def position_to(position: Position) -> run_pb2.Position:
    return run_pb2.Position(batch=position.batch, epoch=position.epoch, mini_batch=position.mini_batch)


def admissions_to(view: Admissions) -> rollout_pb2.BeginGroupsResponse:
    numbers: list[Any] = [admission.value for admission in view.admissions]
    return rollout_pb2.BeginGroupsResponse(
        admissions=numbers,
        retry_after_s=view.retry_after_s,
        reason=view.reason,
    )


def batch_to(view: BatchAnswer) -> trainer_pb2.GetBatchResponse:
    return trainer_pb2.GetBatchResponse(
        state=view.state.value,  # type: ignore[arg-type]
        plan_json=view.plan.decode(),
        awaits=awaits_to(view.awaits),
    )


def awaits_to(places: Iterable[ColumnPlace]) -> list[trainer_pb2.AwaitedColumn]:
    return [trainer_pb2.AwaitedColumn(**place._asdict()) for place in places]


def shard_to(view: ShardAnswer) -> trainer_pb2.GetShardResponse:
    location = view.location
    return trainer_pb2.GetShardResponse(
        state=view.state.value,  # type: ignore[arg-type]
        position=None if view.position is None else position_to(view.position),
        size_bytes=0 if location is None else location.size,
        shared_memory_path="" if location is None else location.shared_memory_path or "",
        incarnation=view.incarnation,
    )


def groups_to(views: Iterable[GroupAnswer]) -> run_pb2.ListGroupsResponse:
    return run_pb2.ListGroupsResponse(
        groups=[
            run_pb2.GroupStatus(
                uid=view.uid,
                round=view.round,
                state=_GROUP_STATES[view.state],
                batch=0 if view.batch is None else view.batch,
                reason=view.reason,
                tag=view.tag,
            )
            for view in views
        ]
    )


def status_to(status: RunStatus, assessment: Assessment) -> run_pb2.RunStatus:
    same = ("run", "config_json", "resolved_config_json", "policy_version", "finished")
    groups = ("groups_open", "groups_complete", "groups_room")
    counts = ("batches_sealed", "batches_published", "batches_freed", "row_bytes", "shard_bytes")
    rows = ("rows_accepted", "rows_duplicate", "groups_dropped", "failed_batches", "run_id", "generation")
    return run_pb2.RunStatus(
        **{name: getattr(status, name) for name in (*same, *groups, *counts, *rows)},
        ranks=[
            run_pb2.RankProgress(model=_MODEL_NUMBERS[progress.model], rank=rank, next=position_to(position))
            for progress in status.models
            for rank, position in enumerate(progress.next)
        ],
        models=[
            run_pb2.ModelProgress(
                model=_MODEL_NUMBERS[progress.model],
                committed=position_to(progress.committed),
                incarnation=progress.incarnation,
            )
            for progress in status.models
        ],
        tags={tag: run_pb2.TagGroups(**asdict(groups)) for tag, groups in status.tags.items()},
        health=_health_to(assessment),
    )


def _health_to(assessment: Assessment) -> run_pb2.RunHealth:
    history = assessment.facts.history
    return run_pb2.RunHealth(
        state=assessment.state,
        summary=assessment.summary,
        findings=[
            run_pb2.Finding(
                level=finding.level,
                text=finding.text,
                for_s=None if finding.since is None else max(0.0, history.now - finding.since),
            )
            for finding in assessment.findings
        ],
        still_s=max(0.0, history.now - history.last_event),
    )
