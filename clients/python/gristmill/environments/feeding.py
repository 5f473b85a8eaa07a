"""Tasks into a run, group by group: what every family of environments has in common.

Owns the order of admission, rollouts and submission, and what becomes of those that fail. Knows rows, no environment.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from gristmill._client.rollout.delivery import RowOutcome
from gristmill.aio import AsyncRolloutClient
from gristmill.errors import AlreadyExistsError, GristmillError, InvalidArgumentError, NotFoundError, UnavailableError

_log = logging.getLogger("gristmill")

FAILED_GROUPS = 3
"""After so many groups in a row of which no sample could be rolled out, feeding ends: an engine that is away would use
up the whole data set."""

T = TypeVar("T")


class Prompt(NamedTuple, Generic[T]):
    """What one group is sampled from. uid: names it; tag: its environment; task: what is rolled out."""

    uid: str
    tag: str
    task: T


class Rollout(NamedTuple):
    """One sample: its steps as rows without uid, sample, round, step and attempt, or why there are none.

    failure: the kind of problem, which the run counts by that name; detail: what happened.
    """

    steps: Sequence[Mapping[str, Any]]
    failure: str = ""
    detail: str = ""

    @classmethod
    def failed(cls, error: BaseException) -> Rollout:
        return cls((), type(error).__name__, f"{type(error).__name__}: {error}".removesuffix(": "))


RollOut = Callable[[T, int], Awaitable[Sequence[Rollout]]]
"""Rolls a task out so many times."""


@dataclass(slots=True)
class Progress:
    """What has been fed so far.

    groups: whose rollouts have all ended. consumed: that were sealed or dropped before, and not rolled out again.
    trajectories: that the run took. failures: that could not be rolled out; their groups go on without them.
    late: that came when the run had no use for them any more. reward: the sum over `trajectories`.
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
    """What a run's configuration says about its groups."""

    samples: int
    surplus: int
    gives_advantages: bool
    """Whether rows bring their advantages (`advantage_estimator: none`)."""

    @classmethod
    async def of(cls, client: AsyncRolloutClient) -> RunShape:
        config = json.loads((await client.status()).config_json)
        return cls(
            config["n_samples_per_prompt"], config.get("surplus", 0), config.get("advantage_estimator") == "none"
        )


@dataclass
class Feeder(Generic[T]):
    """Rolls prompts out into the run of `client`, `concurrent_groups` at a time.

    together: `roll_out` is called once a group, for all of its samples; else once a sample.
    on_group: is called whenever a group has ended.
    """

    client: AsyncRolloutClient
    shape: RunShape
    roll_out: RollOut[T]
    together: bool = False
    concurrent_groups: int = 16
    on_group: Callable[[Progress], None] | None = None
    progress: Progress = field(default_factory=Progress)
    _open: set[str] = field(default_factory=set)
    _failed_in_a_row: int = 0

    def __post_init__(self) -> None:
        if self.concurrent_groups < 1:
            raise InvalidArgumentError(
                f"concurrent_groups is {self.concurrent_groups}; roll out at least one at a time"
            )

    async def feed(self, prompts: Iterable[Prompt[T]], round: int) -> Progress:
        """Feeds each prompt once. Waits for room where the run has none, and ends when the last rollout has ended.

        A prompt that the run has consumed in this round is left out, and one whose group is open, of a worker that was
        killed, is rolled out anew. Cancelled, or where it raises, it ends its rollouts and aborts their groups.
        Raises UnavailableError after `FAILED_GROUPS` in a row that failed, and what the client raises.
        """
        places = asyncio.Semaphore(self.concurrent_groups)
        try:
            async with asyncio.TaskGroup() as running:
                for prompt in prompts:
                    await places.acquire()
                    # Before it is asked for: its admission may be on its way when the asking ends.
                    self._open.add(prompt.uid)
                    if await self.client.begin_groups([prompt.uid], round, tag=prompt.tag):
                        group = running.create_task(self._group(prompt, round))
                        group.add_done_callback(lambda _: places.release())
                    else:
                        self._open.remove(prompt.uid)
                        self.progress.consumed += 1
                        places.release()
        except BaseExceptionGroup as failed:
            error = failed.exceptions[0]
            await self._give_up(round, error)
            raise error from None
        except BaseException as error:
            await self._give_up(round, error)
            raise
        return self.progress

    async def _give_up(self, round: int, error: BaseException) -> None:
        """Aborts what is open. A task that is cancelled before it began does nothing, so that groups cannot do it."""
        reason = type(error).__name__
        aborted = (self.client.abort_group(uid, round=round, reason=reason) for uid in self._open)
        for failed in await asyncio.gather(*aborted, return_exceptions=True):
            if isinstance(failed, BaseException) and not isinstance(failed, NotFoundError):
                error.add_note(f"a group could not be aborted: {failed}")
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
        """How many trajectories of the group the run took."""
        # Weights may change while it is sampled: of the versions that do, this is the oldest.
        version = await self.client.policy_version()
        count = self.shape.samples + self.shape.surplus
        calls, size = (1, count) if self.together else (count, 1)
        rollouts = [asyncio.ensure_future(self._rolled_out(prompt, size)) for _ in range(calls)]
        kept, sample, failure = 0, 0, ""
        try:
            for finished in asyncio.as_completed(rollouts):
                for rollout in await finished:
                    if rollout.failure:
                        failure = rollout.detail or rollout.failure
                        await self._failed(prompt.uid, sample, round, rollout)
                    else:
                        kept += await self._submitted(prompt.uid, sample, round, rollout.steps, version)
                    sample += 1
                if kept >= self.shape.samples:
                    # The others are surplus.
                    break
        finally:
            for rollout_ in rollouts:
                rollout_.cancel()
            await asyncio.gather(*rollouts, return_exceptions=True)
        self._judge(prompt, kept, failure)
        return kept

    async def _rolled_out(self, prompt: Prompt[T], size: int) -> Sequence[Rollout]:
        try:
            return await self.roll_out(prompt.task, size)
        except GristmillError:
            raise
        except Exception as error:  # noqa: BLE001 - an environment may raise anything for one task of many
            _log.warning("run %r: %r could not be rolled out", self.client.run, prompt.uid, exc_info=True)
            return [Rollout.failed(error)] * size

    async def _failed(self, uid: str, sample: int, round: int, rollout: Rollout) -> None:
        self.progress.failures += 1
        _log.warning("run %r: %r sample %d failed: %s", self.client.run, uid, sample, rollout.detail or rollout.failure)
        await self.client.abort_trajectory(uid, sample, round=round, reason=rollout.failure)

    async def _submitted(
        self, uid: str, sample: int, round: int, steps: Sequence[Mapping[str, Any]], version: int
    ) -> bool:
        """Submits a trajectory and returns whether the run keeps it. What a worker that was killed had submitted of
        the same sample is superseded."""
        last = len(steps) - 1
        for attempt in itertools.count():
            key = {"uid": uid, "sample": sample, "round": round, "attempt": attempt, "policy_version": version}
            rows = [{**key, "step": step, "is_last_step": step == last, **row} for step, row in enumerate(steps)]
            try:
                outcomes = await self.client.submit_rows(rows)
            except AlreadyExistsError:
                continue
            if RowOutcome.SUPERSEDED not in outcomes:
                break
        kept = all(outcome.is_kept for outcome in outcomes)
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
                f"run {self.client.run!r}: none of the last {FAILED_GROUPS} groups could be rolled out, the last "
                f"{prompt.uid!r}: {failure}; see whether the engine answers and the environment works, and start again"
            )
