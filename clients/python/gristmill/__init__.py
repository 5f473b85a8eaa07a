"""gristmill: rollouts in, train-ready shards out. The clients of the service.

`RolloutClient` and `AsyncRolloutClient` need only grpcio, protobuf and numpy. `TrainerClient` reads torch tensors:
`pip install '.[torch]'` in the checkout. Names are imported at their first use, so that importing gristmill is fast.

The public modules are this one, `gristmill.adapters`, `gristmill.aio`, `gristmill.completions`, `gristmill.converters`,
`gristmill.environments`, `gristmill.errors` and `gristmill.torch`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gristmill._capture.capture import capture
    from gristmill._client.connection.credentials import Credentials
    from gristmill._client.rollout.delivery import RowOutcome
    from gristmill._client.rollout.groups import Group, GroupState
    from gristmill._client.rollout.rollout_client import RolloutClient
    from gristmill._client.rollout.trajectory import Trajectory
    from gristmill._client.run_status import Finding, ModelProgress, RunHealth, RunStatus, TagGroups
    from gristmill._client.trainer.batch import Batch
    from gristmill._client.trainer.trainer_client import TrainerClient
    from gristmill._wire.addresses import Position
    from gristmill._wire.steps import TrajectoryKey
    from gristmill.aio import AsyncRolloutClient, AsyncTrajectory
    from gristmill.errors import (
        AlreadyExistsError,
        BatchFailedError,
        DeadlineExceededError,
        FailedPreconditionError,
        GristmillError,
        InvalidArgumentError,
        NotFoundError,
        PermissionDeniedError,
        ResourceExhaustedError,
        StaleIncarnationError,
        UnauthenticatedError,
        UnavailableError,
        UnsupportedError,
    )
    from gristmill.torch import MicroBatch, Shard

__all__ = [
    "AlreadyExistsError",
    "AsyncRolloutClient",
    "AsyncTrajectory",
    "Batch",
    "BatchFailedError",
    "Credentials",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "Finding",
    "GristmillError",
    "Group",
    "GroupState",
    "InvalidArgumentError",
    "MicroBatch",
    "ModelProgress",
    "NotFoundError",
    "PermissionDeniedError",
    "Position",
    "ResourceExhaustedError",
    "RolloutClient",
    "RowOutcome",
    "RunHealth",
    "RunStatus",
    "Shard",
    "StaleIncarnationError",
    "TagGroups",
    "TrainerClient",
    "Trajectory",
    "TrajectoryKey",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedError",
    "capture",
]

_MODULES = {
    "AsyncRolloutClient": "aio",
    "AsyncTrajectory": "aio",
    "Batch": "_client.trainer.batch",
    "Credentials": "_client.connection.credentials",
    "Group": "_client.rollout.groups",
    "GroupState": "_client.rollout.groups",
    "MicroBatch": "torch",
    "Position": "_wire.addresses",
    "RolloutClient": "_client.rollout.rollout_client",
    "RowOutcome": "_client.rollout.delivery",
    "Finding": "_client.run_status",
    "ModelProgress": "_client.run_status",
    "RunHealth": "_client.run_status",
    "RunStatus": "_client.run_status",
    "TagGroups": "_client.run_status",
    "Shard": "torch",
    "TrainerClient": "_client.trainer.trainer_client",
    "Trajectory": "_client.rollout.trajectory",
    "TrajectoryKey": "_wire.steps",
    "capture": "_capture.capture",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gristmill' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"gristmill.{_MODULES.get(name, 'errors')}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
