"""The asyncio twin of the rollout client: the same calls, awaited, for workers that run many rollouts in one loop.

Owns no rule: outbox, steps and requests are those of the blocking client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from gristmill._client import requests
from gristmill._client.aio_sender import AsyncSender, AsyncTransport
from gristmill._client.delivery import Delivery, RowOutcome
from gristmill._client.groups import Group, groups_of
from gristmill._client.rollout_client import late_policy_version
from gristmill._client.skyrl_output import columns_of_output
from gristmill._client.trajectory import StepWriter, abort_reason, unfinished
from gristmill._client.transport import TIMEOUT_S
from gristmill._wire.rows import columns_of
from gristmill._wire.steps import UNKNOWN, TrajectoryKey
from gristmill._wire.tables import ValueColumns
from gristmill.errors import GristmillError, NotFoundError
from gristmill.v1 import rollout_pb2, run_pb2


class AsyncTrajectory:
    """As Trajectory; made by `AsyncRolloutClient.trajectory`. An asynchronous context manager, for one task."""

    def __init__(self, sender: AsyncSender, abort: Callable[..., Awaitable[bool]], writer: StepWriter) -> None:
        self._sender = sender
        self._abort = abort
        self._writer = writer
        self._delivery = Delivery()

    @property
    def key(self) -> TrajectoryKey:
        return self._writer.key

    @property
    def is_kept(self) -> bool:
        """As `Trajectory.is_kept`."""
        return self._delivery.is_kept

    async def step(
        self,
        prompt_token_ids: Any,
        response_ids: Any,
        *,
        loss_mask: Any = None,
        rollout_logprobs: Any = None,
        reward: Any = None,
        stop_reason: str = "",
        is_last_step: bool = False,
        policy_version: int | None = None,
        advantage: Any = None,
    ) -> bool:
        """As `Trajectory.step`; awaits only while too much is under way or the group has no room."""
        if error := self._sender.told(self._delivery):
            raise error
        if not self.is_kept:
            return False
        table = self._writer.table(
            prompt_token_ids,
            response_ids,
            loss_mask=loss_mask,
            rollout_logprobs=rollout_logprobs,
            reward=reward,
            stop_reason=stop_reason,
            is_last_step=is_last_step,
            policy_version=policy_version,
            advantage=advantage,
        )
        await self._sender.put(table, self._delivery)
        self._writer.written(is_last_step)
        return self.is_kept

    async def abort(self, reason: str) -> None:
        """As `Trajectory.abort`."""
        self._writer.is_ended = True
        with suppress(NotFoundError):
            await self._abort(self.key.uid, self.key.sample, round=self.key.round, reason=reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer.is_ended or not self.is_kept:
            return
        reason = abort_reason(error)
        if error is None:
            await self.abort(reason)
            raise unfinished(self._writer)
        try:
            await self.abort(reason)
        except GristmillError as failed:
            error.add_note(f"{self.key} could not be aborted: {failed}")


class AsyncRolloutClient:
    """Submits rollouts to one run from one event loop. What each argument and method means, `RolloutClient` says, also
    of an `address` that names several replicas.

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
    ) -> None:
        self.run = requests.check_run(run)
        self._token_rewards = token_rewards
        self._limits = requests.limits(max_batch_rows, max_batch_bytes)
        self._transport = AsyncTransport(address, timeout_s)
        self._sender = AsyncSender(self._transport, requests.packing(run, compression), self._limits)

    async def create_run(self, config: Mapping[str, Any]) -> list[str]:
        request = requests.create_run(self.run, config)
        return list((await self._transport.call(self._transport.runs.CreateRun, request)).warnings)

    async def status(self) -> run_pb2.RunStatus:
        request = run_pb2.GetRunRequest(run=self.run)
        status: run_pb2.RunStatus = (await self._transport.call(self._transport.runs.GetRun, request)).status
        return status

    async def finish(self) -> int:
        await self.flush()
        request = run_pb2.FinishRunRequest(run=self.run)
        return int((await self._transport.call(self._transport.runs.FinishRun, request)).batches)

    async def policy_version(self) -> int:
        return await self._ask_policy_version(0, 0.0)

    async def wait_policy_version(self, at_least: int, timeout_s: float) -> int:
        version = await self._transport.wait(
            lambda wait_s: self._ask_policy_version(at_least, wait_s), lambda version: version >= at_least, timeout_s
        )
        if version < at_least:
            raise late_policy_version(self.run, version, at_least, timeout_s)
        return version

    async def _ask_policy_version(self, at_least: int, wait_s: float) -> int:
        request = run_pb2.WaitPolicyVersionRequest(run=self.run, at_least=at_least, wait_s=wait_s)
        response = await self._transport.call(self._transport.runs.WaitPolicyVersion, request, wait_s=wait_s)
        return int(response.version)

    async def begin_groups(self, uids: Sequence[str], round: int = 0, wait_s: float | None = None) -> list[str]:
        uids, wait_s = requests.uids_of(uids), requests.wait_of(wait_s)
        answer = await self._ask_groups(uids, round, 0.0)
        if requests.waits_for_room(answer) and wait_s:
            answer = await self._transport.wait(
                lambda part_s: self._ask_groups(uids, round, part_s),
                requests.RoomWait(self.run).is_over,
                wait_s,
            )
        return requests.admitted(uids, answer)

    async def _ask_groups(self, uids: Sequence[str], round_: int, wait_s: float) -> rollout_pb2.BeginGroupsResponse:
        request = rollout_pb2.BeginGroupsRequest(run=self.run, round=round_, uids=uids, wait_s=wait_s)
        response: rollout_pb2.BeginGroupsResponse = await self._transport.call(
            self._transport.rollouts.BeginGroups, request, wait_s=wait_s
        )
        return response

    async def groups(self) -> list[Group]:
        async def ask(request: run_pb2.ListGroupsRequest, timeout: float) -> list[run_pb2.ListGroupsResponse]:
            return [page async for page in self._transport.runs.ListGroups(request, timeout=timeout)]

        return groups_of(await self._transport.call(ask, run_pb2.ListGroupsRequest(run=self.run)))

    async def abort_group(self, uid: str, *, round: int = 0, reason: str = "") -> bool:
        self._sender.withdraw(lambda key: key[:2] == (round, uid))
        await self._sender.wait_for(lambda key: key[:2] == (round, uid))
        request = rollout_pb2.AbortGroupsRequest(run=self.run, round=round, uids=[uid], reason=reason)
        return bool((await self._transport.call(self._transport.rollouts.AbortGroups, request)).changed)

    async def seal(self, batch: int | None = None) -> tuple[int, int]:
        await self.flush()
        request = rollout_pb2.SealBatchRequest(run=self.run, batch=batch)
        timeout_s = 0.0 if batch is None else self._transport.timeout_s
        response = await self._transport.call(self._transport.rollouts.SealBatch, request, timeout_s=timeout_s)
        return int(response.batch), int(response.prompts)

    def trajectory(
        self, uid: str, sample: int, round: int = 0, attempt: int = 0, policy_version: int = UNKNOWN
    ) -> AsyncTrajectory:
        writer = StepWriter(TrajectoryKey(round, uid, sample), attempt, policy_version, self._token_rewards)
        return AsyncTrajectory(self._sender, self.abort_trajectory, writer)

    async def submit(
        self,
        generator_output: Mapping[str, Any],
        *,
        round: int = 0,
        attempt: int = 0,
        policy_version: int = UNKNOWN,
    ) -> list[RowOutcome]:
        columns = columns_of_output(generator_output, round=round, attempt=attempt, policy_version=policy_version)
        return await self._submit(columns)

    async def submit_rows(self, rows: Iterable[Mapping[str, Any]]) -> list[RowOutcome]:
        return await self._submit(columns_of(list(rows), step_wise=False))

    async def _submit(self, columns: ValueColumns) -> list[RowOutcome]:
        delivery = Delivery()
        try:
            for table in requests.tables(columns, self._limits):
                await self._sender.put(table, delivery)
        finally:
            await self._sender.wait(delivery)
        if error := self._sender.told(delivery):
            raise error
        return [outcome for outcome in delivery.outcomes if outcome is not None]

    async def set_reward(self, uid: str, sample: int, reward: Any, *, round: int = 0, step: int | None = None) -> bool:
        key = TrajectoryKey(round, uid, sample)
        request = requests.set_reward(self.run, key, step, reward)
        await self._sender.wait_for(lambda found: found == key)
        return bool((await self._transport.call(self._transport.rollouts.SetRewards, request)).changed)

    async def abort_trajectory(self, uid: str, sample: int, *, round: int = 0, reason: str = "") -> bool:
        key = TrajectoryKey(round, uid, sample)
        self._sender.withdraw(lambda found: found == key)
        # Also the rest of its group, which may be what makes the group known.
        await self._sender.wait_for(lambda found: found[:2] == key[:2])
        request = requests.abort_trajectory(self.run, key, reason)
        return bool((await self._transport.call(self._transport.rollouts.AbortTrajectories, request)).changed)

    async def flush(self) -> None:
        self._transport.process.check()
        await self._sender.flush()

    async def close(self) -> None:
        if not self._transport.process.is_here():
            return
        try:
            await self._sender.flush()
        finally:
            await self._sender.close()
            await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except GristmillError as failed:
            if error is None:
                raise
            error.add_note(f"closing the AsyncRolloutClient: {failed}")
