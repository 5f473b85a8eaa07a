"""Feeds samples of tasks into a run, group by group, for any family of environments.

`Feeder` begins groups, rolls out their samples, submits them, and handles failures. It does not depend on environments.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from gristmill._client.rollout.delivery import RowOutcome
from gristmill.aio import AsyncRolloutClient
from gristmill.errors import AlreadyExistsError, GristmillError, InvalidArgumentError, NotFoundError, UnavailableError

_log = logging.getLogger("gristmill")

FAILED_GROUPS = 3
"""The number of consecutive groups without a sample after which feeding stops, so that an engine that is down does not
use up the data set."""

T = TypeVar("T")


class Prompt(NamedTuple, Generic[T]):
    """A task from which one group is sampled. uid: the name of the group. tag: the name of the environment."""

    uid: str
    tag: str
    task: T


class Rollout(NamedTuple):
    """One sample: its steps, or the reason why it has none.

    steps: rows without uid, sample, round, step and attempt. failure: the kind of failure, by which the run counts
    failures. detail: a description of this failure.
    """

    steps: Sequence[Mapping[str, Any]]
    failure: str = ""
    detail: str = ""

    @classmethod
    def failed(cls, error: BaseException) -> Rollout:
        return cls((), type(error).__name__, f"{type(error).__name__}: {error}".removesuffix(": "))


RollOut = Callable[[T], Awaitable[Rollout]]
"""Rolls out one sample of a task."""


@dataclass(slots=True)
class Progress:
    """The counts of a feed so far.

    groups: groups with all rollouts finished. consumed: skipped groups, which were sealed or dropped earlier.
    trajectories: samples that the run accepted. failures: samples that failed; their groups continue without them.
    late: samples that arrived after their group was complete. reward: the sum of the rewards of `trajectories`.
    """

    groups: int = 0
    consumed: int = 0
    trajectories: int = 0
    failures: int = 0
    late: int = 0
    reward: float = 0.0

    @property
    def mean_reward(self) -> float:
        return self.reward / self.trajectories if self.trajectories else 0.0


@dataclass(slots=True)
class RunShape:
    """The settings of a run that a feed needs."""

    samples: int
    surplus: int
    gives_advantages: bool
    """True if the run expects advantages in its rows (`advantage_estimator: none`)."""
    columns: frozenset[str] = frozenset()
    """The names of the declared columns."""

    @classmethod
    async def of(cls, client: AsyncRolloutClient) -> RunShape:
        config = (await client.status()).config
        columns = frozenset(column["name"] for column in config["columns"])
        return cls(config["n_samples_per_prompt"], config["surplus"], config["advantage_estimator"] == "none", columns)


@dataclass
class Feeder(Generic[T]):
    """Rolls out prompts into the run of `client`, `concurrent_groups` at a time, one `roll_out` per sample.

    on_group: called with the progress after each group.
    """

    client: AsyncRolloutClient
    shape: RunShape
    roll_out: RollOut[T]
    concurrent_groups: int = 16
    on_group: Callable[[Progress], None] | None = None
    progress: Progress = field(default_factory=Progress)
    _open: set[str] = field(default_factory=set)
    _failed_in_a_row: int = 0

    def __post_init__(self) -> None:
        if self.concurrent_groups < 1:
            raise InvalidArgumentError(f"concurrent_groups is {self.concurrent_groups}; set at least 1")

    async def feed(self, prompts: Iterable[Prompt[T]], round: int) -> Progress:
        """Feeds each prompt once and returns after the last rollout. Waits while the run has no capacity for groups.

        Skips prompts that the run has consumed in this round. Restarts groups that a killed worker left open. If it
        fails or is cancelled, it cancels its rollouts and aborts their groups. Raises UnavailableError after
        `FAILED_GROUPS` consecutive failed groups, and the errors of the client.
        """
        slots = asyncio.Semaphore(self.concurrent_groups)
        try:
            async with asyncio.TaskGroup() as running:
                for prompt in prompts:
                    await slots.acquire()
                    # Record the group before the call, because the service may admit it even if the call is cancelled.
                    self._open.add(prompt.uid)
                    if await self.client.begin_groups([prompt.uid], round, tag=prompt.tag):
                        group = running.create_task(self._group(prompt, round))
                        group.add_done_callback(lambda _: slots.release())
                    else:
                        self._open.remove(prompt.uid)
                        self.progress.consumed += 1
                        slots.release()
        except BaseExceptionGroup as failed:
            error = failed.exceptions[0]
            await self._give_up(round, error)
            raise error from None
        except BaseException as error:
            await self._give_up(round, error)
            raise
        return self.progress

    async def _give_up(self, round: int, error: BaseException) -> None:
        """Aborts the open groups. Their tasks cannot do it, because a task that is cancelled early runs no code."""
        reason = type(error).__name__
        sender = self.client.sender
        with sender.interruptions.limiting(error):
            aborts = (self.client.abort_group(uid, round=round, reason=reason) for uid in self._open)
            outcomes = await asyncio.gather(*map(sender.clean_up, aborts), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, NotFoundError):
                error.add_note(f"a group could not be aborted: {outcome}")
        self._open.clear()

    async def _group(self, prompt: Prompt[T], round: int) -> None:
        kept = await self._samples(prompt, round)
        self._open.remove(prompt.uid)
        self.progress.groups += 1
        _log.info(
            "run %r: group %r: %d trajectories; %d groups, mean reward %.4g",
            *(self.client.run, prompt.uid, kept, self.progress.groups, self.progress.mean_reward),
        )
        if self.on_group is not None:
            self.on_group(self.progress)

    async def _samples(self, prompt: Prompt[T], round: int) -> int:
        """Rolls out and submits the samples of a group, and returns the number of samples that the run accepted."""
        # Weights may change while the group is sampled. This is the oldest version.
        version = await self.client.policy_version()
        count = self.shape.samples + self.shape.surplus
        tasks = [asyncio.ensure_future(self._rolled_out(prompt)) for _ in range(count)]
        kept, failure = 0, ""
        try:
            for sample, finished in enumerate(asyncio.as_completed(tasks)):
                rollout = await finished
                if rollout.failure:
                    failure = rollout.detail or rollout.failure
                    await self._failed(prompt.uid, sample, round, rollout)
                else:
                    kept += await self._submitted(prompt.uid, sample, round, rollout.steps, version)
                if kept >= self.shape.samples:
                    # The remaining rollouts are surplus.
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._judge(prompt, kept, failure)
        return kept

    async def _rolled_out(self, prompt: Prompt[T]) -> Rollout:
        try:
            return await self.roll_out(prompt.task)
        except GristmillError:
            raise
        except Exception as error:  # noqa: BLE001 - an environment may raise any error for a single task
            _log.warning("run %r: %r could not be rolled out", self.client.run, prompt.uid, exc_info=True)
            return Rollout.failed(error)

    async def _failed(self, uid: str, sample: int, round: int, rollout: Rollout) -> None:
        self.progress.failures += 1
        _log.warning("run %r: %r sample %d failed: %s", self.client.run, uid, sample, rollout.detail or rollout.failure)
        await self.client.abort_trajectory(uid, sample, round=round, reason=rollout.failure)

    async def _submitted(
        self, uid: str, sample: int, round: int, steps: Sequence[Mapping[str, Any]], version: int
    ) -> bool:
        """Submits a trajectory and returns whether the run accepted it. Supersedes rows of the same sample that a
        killed worker had submitted. version: of steps without versions of their own."""
        last = len(steps) - 1
        for attempt in itertools.count():
            key = {"uid": uid, "sample": sample, "round": round, "attempt": attempt}
            rows = [{**key, "step": step, "is_last_step": step == last, **row} for step, row in enumerate(steps)]
            rows = [row if "policy_versions" in row else {**row, "policy_version": version} for row in rows]
            try:
                outcomes = await self.client.submit(rows)
            except AlreadyExistsError:
                continue
            if RowOutcome.SUPERSEDED not in outcomes:
                break
        kept = all(outcome.is_stored for outcome in outcomes)
        if kept:
            self.progress.trajectories += 1
            self.progress.reward += steps[-1]["reward"]
        else:
            self.progress.late += 1
        return kept

    def _judge(self, prompt: Prompt[T], kept: int, failure: str) -> None:
        if kept or not failure:
            self._failed_in_a_row = 0
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= FAILED_GROUPS:
            raise UnavailableError(
                f"run {self.client.run!r}: the last {FAILED_GROUPS} groups could not be rolled out; the last error, of "
                f"{prompt.uid!r}, is: {failure}; check the engine and the environment, then start again"
            )
