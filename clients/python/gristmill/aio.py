"""The asyncio version of the rollout client: the same calls, awaited, for workers with many rollouts in one loop."""

from __future__ import annotations

import inspect

from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.drivers import Awaited
from gristmill._client.connection.transport import TIMEOUT_S, Connection
from gristmill._client.rollout import requests
from gristmill._client.rollout.rollout_client import RolloutClient
from gristmill._client.rollout.rollout_core import RolloutCore
from gristmill._client.rollout.trajectory import AsyncTrajectory, Trajectory

__all__ = ["AsyncRolloutClient", "AsyncTrajectory"]


class AsyncRolloutClient(RolloutCore):
    """Submits rollouts to one run from one event loop. It has the same arguments, methods and errors as
    `RolloutClient`. A background task sends the rows, so that cancelling the calling task loses no row.

    async with AsyncRolloutClient("127.0.0.1:50051", run="my-run") as client:
        async with client.trajectory("math/17", sample=0) as trajectory:
            await trajectory.step([1, 2, 3], [4, 5], reward=1.0, is_last_step=True)
    """

    def __init__(
        self,
        address: str,
        run: str,
        *,
        timeout_s: float = TIMEOUT_S,
        max_batch_rows: int = 1024,
        max_batch_bytes: int = 4 << 20,
        token_rewards: bool = False,
        compression: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        limits, encoder = requests.limits(max_batch_rows, max_batch_bytes), requests.encoder(run, compression)
        connection = Connection(Awaited(), address, timeout_s, "AsyncRolloutClient", credentials)
        super().__init__(connection, encoder, limits, token_rewards)


def _share_docstrings(blocking: type, awaited: type) -> None:
    for name, member in inspect.getmembers(awaited, inspect.isfunction):
        if not name.startswith("_"):
            member.__doc__ = getattr(blocking, name).__doc__


_share_docstrings(RolloutClient, AsyncRolloutClient)
_share_docstrings(Trajectory, AsyncTrajectory)
