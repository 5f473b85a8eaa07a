"""The calls of rollout workers, written once as coroutines. Callers of `AsyncRolloutClient` await them; `RolloutClient`
runs them.

This module orders calls and waits; `outbox` batches rows. `RolloutClient` documents each call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from gristmill._client.connection.transport import Connection
from gristmill._client.rollout import requests
from gristmill._client.rollout.begun_groups import BegunGroups
from gristmill._client.rollout.declared_columns import Declared, DeclaredColumns
from gristmill._client.rollout.delivery import RowOutcome
from gristmill._client.rollout.finished_groups import FinishedGroups
from gristmill._client.rollout.groups import Group, groups_of
from gristmill._client.rollout.outbox import Limits
from gristmill._client.rollout.policy_versions import PolicyVersions
from gristmill._client.rollout.prefix_dedup import RequestEncoder
from gristmill._client.rollout.sender import Sender
from gristmill._client.rollout.step_writer import StepWriter
from gristmill._client.rollout.trajectory import AsyncTrajectory
from gristmill._client.run_status import RunStatus, status_of
from gristmill._wire.row_fields import UNKNOWN
from gristmill._wire.rows import aborted, columns_of, extra_names
from gristmill._wire.steps import TrajectoryKey
from gristmill._wire.tables import ValueColumns
from gristmill.errors import DeadlineExceededError, GristmillError, NotFoundError
from gristmill.v1 import rollout_pb2, run_pb2

_log = logging.getLogger("gristmill")

_ABORTS = 10_000
"""The most aborted trajectories that a client remembers, about 2 MB: most are never sampled again."""


class RolloutCore:
    def __init__(self, connection: Connection, encoder: RequestEncoder, limits: Limits, token_rewards: bool) -> None:
        self.run = encoder.run
        self._limits = limits
        self._token_rewards = token_rewards
        self._connection = connection
        self._encoder = encoder
        self._declared = DeclaredColumns(self.status, encoder.share)
        self.sender = Sender(connection, encoder, limits)
        # The next attempt of each trajectory that this client aborted last.
        self._next_attempts: dict[TrajectoryKey, int] = {}
        self._begun = BegunGroups(self.run)
        self._finished = FinishedGroups(self.run)
        self._versions = PolicyVersions(connection, self.run)

    def __repr__(self) -> str:
        return f"<{self._connection.owner} of run {self.run!r} {self._connection.state}>"

    # The run.

    async def create_run(self, config: Mapping[str, Any]) -> list[str]:
        request = requests.create_run(self.run, config)
        answer = await self._connection.ask(self._connection.runs.CreateRun, request)
        self._declared.created(config)
        for warning in answer.warnings:
            _log.warning("run %r: %s", self.run, warning)
        return list(answer.warnings)

    async def status(self) -> RunStatus:
        request = run_pb2.GetRunRequest(run=self.run)
        return status_of((await self._connection.ask(self._connection.runs.GetRun, request)).status)

    async def finish(self) -> int:
        await self.flush()
        request = run_pb2.FinishRunRequest(run=self.run)
        return int((await self._connection.ask(self._connection.runs.FinishRun, request)).batches)

    async def delete_run(self) -> bool:
        self.sender.withdraw(lambda row: True)
        await self.sender.wait_for(lambda key: True)
        try:
            await self._connection.ask(self._connection.runs.DeleteRun, run_pb2.DeleteRunRequest(run=self.run))
        except NotFoundError:
            return False
        finally:
            self._declared.deleted()
            self._next_attempts.clear()
            self._begun.clear()
            self._finished.clear()
            self._versions.forget()
        return True

    async def policy_version(self) -> int:
        return await self._ask_policy_version(0, 0.0)

    async def wait_policy_version(self, at_least: int, timeout_s: float) -> int:
        version = await self._connection.ask_until(
            lambda wait_s: self._ask_policy_version(at_least, wait_s), lambda version: version >= at_least, timeout_s
        )
        if version < at_least:
            raise DeadlineExceededError(
                f"run {self.run!r}: the policy version is {version} after {timeout_s:g} s, not {at_least}; raise "
                "timeout_s, or check that the trainer announces its versions"
            )
        return version

    async def _ask_policy_version(self, at_least: int, wait_s: float) -> int:
        request = run_pb2.WaitPolicyVersionRequest(run=self.run, at_least=at_least, wait_s=wait_s)
        response = await self._connection.ask(self._connection.runs.WaitPolicyVersion, request, wait_s=wait_s)
        return int(response.version)

    # Prompt groups.

    async def begin_groups(
        self,
        uids: Sequence[str],
        round: int = 0,
        wait_s: float | None = None,
        *,
        n_samples: int | Mapping[str, int] | None = None,
        tag: str | Mapping[str, str] | None = None,
    ) -> list[str]:
        request, wait_s = requests.begin_groups(self.run, uids, round, n_samples, tag), requests.wait_of(wait_s)
        answer = rollout_pb2.BeginGroupsResponse()
        for part in requests.parts(request):
            # Those before were admitted or are finished.
            begun = await self._begin_part(part, 0.0 if requests.admitted(request, answer) else wait_s)
            answer.MergeFrom(begun)
            if rollout_pb2.GROUP_ADMISSION_NO_ROOM in begun.admissions:
                break
        self._versions.learned(answer.policy_version)
        if pause_s := self._finished.pause_s(request, answer):
            await self._connection.sleep(pause_s)
        admitted = requests.admitted(request, answer)
        self._begun.add(round, admitted)
        return admitted

    async def _begin_part(
        self, request: rollout_pb2.BeginGroupsRequest, wait_s: float
    ) -> rollout_pb2.BeginGroupsResponse:
        answer = await self._ask_groups(request, 0.0)
        if requests.waits_for_room(answer) and wait_s:
            answer = await self._connection.ask_until(
                lambda part_s: self._ask_groups(request, part_s), requests.RoomWait(self.run).is_over, wait_s
            )
        return answer

    async def _ask_groups(
        self, request: rollout_pb2.BeginGroupsRequest, wait_s: float
    ) -> rollout_pb2.BeginGroupsResponse:
        request.wait_s = wait_s
        response: rollout_pb2.BeginGroupsResponse = await self._connection.ask(
            self._connection.rollouts.BeginGroups, request, wait_s=wait_s
        )
        return response

    async def groups(self, uids: Iterable[str] | None = None, round: int = 0) -> list[Group]:
        ask = self._connection.driver.collecting(self._connection.runs.ListGroups)
        asked = requests.list_groups(self.run, uids, round)
        return [group for request in asked for group in groups_of(await self._connection.ask(ask, request))]

    async def abort_group(self, uid: str, *, round: int = 0, reason: str = "") -> bool:
        self.sender.withdraw(lambda row: row.group == (round, uid))
        await self.sender.wait_for(lambda key: key[:2] == (round, uid))
        request = rollout_pb2.AbortGroupsRequest(run=self.run, round=round, uids=[uid], reason=reason)
        return bool((await self._connection.ask(self._connection.rollouts.AbortGroups, request)).changed)

    async def seal(self, batch: int | None = None) -> tuple[int, int]:
        await self.flush()
        request = rollout_pb2.SealBatchRequest(run=self.run, batch=batch)
        timeout_s = 0.0 if batch is None else self._connection.timeout_s
        response = await self._connection.ask(self._connection.rollouts.SealBatch, request, timeout_s=timeout_s)
        return int(response.batch), int(response.prompts)

    # Trajectories and rows.

    def trajectory(
        self,
        uid: str,
        sample: int,
        round: int = 0,
        attempt: int | None = None,
        policy_version: int | None = None,
        *,
        agent: str = "",
        episode: str = "",
    ) -> AsyncTrajectory:
        key = TrajectoryKey(round, uid, sample)
        self._begun.check(round, uid)
        following = self._next_attempts.get(key, 0)
        attempt = following if attempt is None else attempt
        is_sampled_again = attempt > 0 or following > 0
        version = self._versions.at_begin() if policy_version is None else policy_version
        writer = StepWriter(key, attempt, version, self._token_rewards, agent, episode)
        return AsyncTrajectory(self.sender, self._abort_sampled, self._declared, writer, is_sampled_again)

    async def submit(self, rows: Iterable[Mapping[str, Any]]) -> list[RowOutcome]:
        rows = requests.listed(rows)
        outcomes = iter(await self._submit([row for row in rows if aborted(row) is None]))
        return [next(outcomes) if aborted(row) is None else await self._abort_row(row) for row in rows]

    async def _submit(self, rows: Sequence[Mapping[str, Any]]) -> list[RowOutcome]:
        def columns(declared: Declared) -> ValueColumns:
            return columns_of(rows, step_wise=False, columns=declared.columns)

        tables = requests.tables(await self._declared.used(extra_names(rows), columns), self._limits)
        delivery = await self.sender.submit(tables)
        if error := self.sender.take_error(delivery):
            self._declared.forget_if_refused(error)
            raise error
        return [outcome for outcome in delivery.outcomes if outcome is not None]

    async def _abort_row(self, row: Mapping[str, Any]) -> RowOutcome:
        """Aborts the trajectory of a row that says why, and begins its group if no other row did."""
        key = TrajectoryKey(row.get("round", 0), row.get("uid", ""), row.get("sample", UNKNOWN))
        attempt, reason = row.get("attempt", 0), row["aborted"]
        try:
            await self._abort(key, attempt, reason)
        except NotFoundError:
            if await self.begin_groups([key.uid], key.round, tag=row.get("tag")):
                await self._abort(key, attempt, reason)
        return RowOutcome.DROPPED

    async def set_reward(self, uid: str, sample: int, reward: Any, *, round: int = 0, step: int | None = None) -> bool:
        key = TrajectoryKey(round, uid, sample)
        request = requests.set_reward(self.run, key, step, reward)
        await self.sender.wait_for(lambda other: other == key)
        return bool((await self._connection.ask(self._connection.rollouts.SetRewards, request)).changed)

    async def abort_trajectory(
        self, uid: str, sample: int, *, round: int = 0, reason: str = "", attempt: int | None = None
    ) -> bool:
        return await self._abort(TrajectoryKey(round, uid, sample), attempt, reason)

    async def _abort(self, key: TrajectoryKey, attempt: int | None, reason: str) -> bool:
        """Aborts this and lower attempts of a trajectory; None: any attempt. The next sampling is the next attempt."""
        request = requests.abort_trajectory(self.run, key, reason, attempt)
        following = self._next_attempts.pop(key, 0)
        self._next_attempts[key] = following + 1 if attempt is None else max(following, attempt + 1)
        if len(self._next_attempts) > _ABORTS:
            self._next_attempts.pop(next(iter(self._next_attempts)), None)
        self.sender.withdraw(lambda row: row.key == key and (attempt is None or row.attempt <= attempt))
        # Wait for all rows of the group, because the service may not know the group until they arrive.
        await self.sender.wait_for(lambda other: other[:2] == key[:2])
        return bool((await self._connection.ask(self._connection.rollouts.AbortTrajectories, request)).changed)

    async def _abort_sampled(self, key: TrajectoryKey, attempt: int, reason: str) -> bool:
        """Aborts an attempt whose rows may not have reached the service. Begins its group if the service does not know
        it: otherwise the abort would be lost, and the group would wait for this trajectory forever.

        Raises NotFoundError if there is no capacity for the group, or no run.
        """
        try:
            return await self._abort(key, attempt, reason)
        except NotFoundError:
            await self._ask_groups(requests.begin_groups(self.run, [key.uid], key.round, None, None), 0.0)
            return await self._abort(key, attempt, reason)

    # The end.

    async def flush(self) -> None:
        self._connection.fork_guard.check()
        try:
            await self.sender.flush()
        except GristmillError as error:
            self._declared.forget_if_refused(error)
            raise

    async def close(self) -> None:
        await self._close(None)

    async def _close(self, error: BaseException | None) -> None:
        if self._connection.fork_guard.is_here():
            await self.sender.close(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._close(error)
        except GristmillError as failed:
            if error is None:
                raise
            error.add_note(f"closing the {self._connection.owner}: {failed}")
