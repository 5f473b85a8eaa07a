"""A trajectory, to which steps are added one by one. The client owns the thread and the connection.

`Trajectory` is `AsyncTrajectory` with calls that block.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from gristmill._client.connection.drivers import block_on
from gristmill._client.rollout.declared_columns import Declared, DeclaredColumns, checked_names
from gristmill._client.rollout.delivery import Delivery
from gristmill._client.rollout.sender import Sender
from gristmill._client.rollout.step_writer import Step, StepWriter
from gristmill._wire.steps import TrajectoryKey
from gristmill.completions import Sampled, sampled
from gristmill.errors import FailedPreconditionError, GristmillError, InvalidArgumentError, NotFoundError

# The service counts aborts by reason, so a reason must be short.
_REASON_LENGTH = 200


class StepFields(TypedDict, total=False):
    """The optional fields of a step; `Trajectory.step` describes them."""

    loss_mask: Any
    rollout_logprobs: Any
    reward: Any
    stop_reason: str
    is_last_step: bool
    policy_version: int | None
    policy_versions: Any
    advantage: Any
    reward_components: Mapping[str, float] | None
    step_key: str
    partition: str
    columns: Mapping[str, Any] | None


class AsyncTrajectory:
    """The asyncio version of `Trajectory`, created by `AsyncRolloutClient.trajectory`. An asynchronous context manager.
    For one task."""

    def __init__(
        self,
        sender: Sender,
        abort: Callable[[TrajectoryKey, int, str], Awaitable[bool]],
        declared: DeclaredColumns,
        writer: StepWriter,
        is_sampled_again: bool,
    ) -> None:
        self._sender = sender
        self._abort = abort
        self._declared = declared
        self._writer = writer
        self._is_sampled_again = is_sampled_again
        self._delivery = Delivery()
        # The newest step that `gristmill.capture` recorded: whether it is the last one is not known yet.
        self._newest: Sampled | None = None
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        count = self._writer.next_step + (self._newest is not None)
        state = "ended" if self._writer.is_ended else "dropped" if self.is_dropped else "open"
        return f"<AsyncTrajectory {self.key}: {count} step{'s' * (count != 1)}, {state}>"

    @property
    def key(self) -> TrajectoryKey:
        return self._writer.key

    @property
    def is_dropped(self) -> bool:
        return not self._delivery.is_kept

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
        policy_versions: Any = None,
        advantage: Any = None,
        reward_components: Mapping[str, float] | None = None,
        step_key: str = "",
        partition: str = "",
        columns: Mapping[str, Any] | None = None,
    ) -> bool:
        await self._add_newest()
        self._raise_failure()
        if self.is_dropped:
            return False
        values = checked_names(columns, self.key)
        if policy_version is None and policy_versions is None:
            await self._writer.find_version()

        def step_of(declared: Declared) -> Step:
            return self._writer.step(
                response_ids,
                prompt_token_ids=prompt_token_ids,
                loss_mask=loss_mask,
                rollout_logprobs=rollout_logprobs,
                reward=reward,
                stop_reason=stop_reason,
                is_last_step=is_last_step,
                policy_version=policy_version,
                policy_versions=policy_versions,
                advantage=advantage,
                reward_components=reward_components,
                step_key=step_key,
                partition=partition,
                columns=values,
                declared=declared.columns,
                shared=declared.shared,
                covered=declared.covered,
            )

        step = await self._declared.used(values.keys(), step_of)
        await self._sender.put(step.table, self._delivery, step.prefix)
        self._writer.written(step)
        if self._is_sampled_again and self._writer.next_step == 1:
            await self._check_takes_part()
        return not self.is_dropped

    async def _check_takes_part(self) -> None:
        """Waits for the outcome of the first step, and raises FailedPreconditionError if the service did not store it.
        A trajectory that is sampled again may be too late, and may have no other step that would report it."""
        await self._sender.wait_for(lambda key: key == self.key)
        self._raise_failure()
        if self.is_dropped:
            outcome = self._delivery.outcomes[0]
            raise FailedPreconditionError(
                f"{self.key}: attempt {self._writer.attempt} is too late: its first step is "
                f"{outcome.name.lower() if outcome else 'dropped'}, because its group is in a batch, dropped or "
                "complete without it, or this attempt was aborted or superseded; continue with other prompts"
            )

    def _raise_failure(self) -> None:
        if error := self._sender.take_error(self._delivery):
            self._declared.forget_if_refused(error)
            raise error

    async def extend(self, observation_ids: Any, response_ids: Any, **fields: Unpack[StepFields]) -> bool:
        await self._add_newest()
        return await self.step(self._writer.extended(observation_ids), response_ids, **fields)

    async def record(
        self,
        completion: Any,
        *,
        reward: Any = None,
        is_last_step: bool = False,
        policy_version: int | None = None,
        sampling_mask: str | None = None,
    ) -> bool:
        choices = sampled(completion)
        if not choices:
            raise InvalidArgumentError(f"{self.key}: the completion has no sampled tokens; skip it")
        for number, choice in enumerate(choices, 1):
            ends = number == len(choices)
            await self._add(
                choice,
                reward=reward if ends else None,
                is_last_step=is_last_step and ends,
                policy_version=policy_version,
                columns={sampling_mask: choice.sampling_mask} if sampling_mask and choice.sampling_mask else None,
            )
        return not self.is_dropped

    async def _add(self, choice: Sampled, *, policy_version: int | None = None, **fields: Any) -> bool:
        return await self.step(
            choice.prompt_token_ids,
            choice.response_ids,
            rollout_logprobs=choice.rollout_logprobs,
            stop_reason=choice.stop_reason,
            policy_version=policy_version,
            policy_versions=choice.policy_versions if policy_version is None else None,
            **fields,
        )

    async def finish(self, reward: Any = None, *, reward_components: Mapping[str, float] | None = None) -> bool:
        async with self._lock:
            self._writer.check_goes_on()
            if self._newest is None:
                raise FailedPreconditionError(
                    f"{self.key}: no captured step to end with; pass is_last_step=True with the last step, or check "
                    "that the agent called its engine by httpx or aiohttp within gristmill.capture, at its base_url"
                )
            return await self._add_newest(reward=reward, reward_components=reward_components, is_last_step=True)

    async def _capture(self, choices: Sequence[Sampled]) -> None:
        async with self._lock:
            self._writer.check_goes_on()
            for choice in choices:
                await self._add_newest()
                self._newest = choice

    def _check_captures(self) -> None:
        self._writer.check_goes_on()
        if self.is_dropped:
            raise FailedPreconditionError(
                f"{self.key}: the service no longer needs this trajectory, because its group was dropped, or sealed "
                "without it, or a higher attempt supersedes it; stop this agent"
            )

    async def _add_newest(self, **fields: Any) -> bool:
        """Adds the newest captured step, if there is one. It stays the newest if it cannot be added."""
        newest, self._newest = self._newest, None
        if newest is None:
            return not self.is_dropped
        step = self._writer.next_step
        try:
            return await self._add(newest, **fields)
        except BaseException:
            if self._writer.next_step == step:
                self._newest = newest
            raise

    async def abort(self, reason: str) -> None:
        self._writer.is_ended, self._newest = True, None
        # Without its group, or its run, nothing waits for the trajectory.
        with suppress(NotFoundError):
            await self._abort(self.key, self._writer.attempt, reason)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer.is_ended or self.is_dropped:
            return
        if error is None:
            await self.abort("ended without a last step")
            raise FailedPreconditionError(
                f"{self.key}: the block ended without a last step, so the trajectory was aborted; pass "
                "is_last_step=True with the last step, call finish(reward) after gristmill.capture, or call "
                "abort(reason) to abort it on purpose"
            )
        try:
            with self._sender.interruptions.limiting(error):
                reason = f"{type(error).__name__}: {error}"[:_REASON_LENGTH].removesuffix(": ")
                await self._sender.clean_up(self.abort(reason))
        except GristmillError as failed:
            error.add_note(f"{self.key} could not be aborted: {failed}")


class Trajectory:
    """A trajectory that is being rolled out, created by `RolloutClient.trajectory`. For one thread at a time.

    As a context manager, it aborts the trajectory if the block raises, with the exception as the reason. If the block
    ends without a last step, it also aborts the trajectory, because its group would wait forever, and raises
    FailedPreconditionError. Call `abort` to abort on purpose.
    """

    def __init__(self, awaited: AsyncTrajectory) -> None:
        self._awaited = awaited
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return repr(self._awaited).replace("Async", "", 1)

    @property
    def key(self) -> TrajectoryKey:
        return self._awaited.key

    @property
    def is_dropped(self) -> bool:
        """Whether the service drops further steps, because the trajectory's group was dropped, aborted, or sealed
        without it, or a higher attempt supersedes it. Makes no call."""
        return self._awaited.is_dropped

    def step(
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
        policy_versions: Any = None,
        advantage: Any = None,
        reward_components: Mapping[str, float] | None = None,
        step_key: str = "",
        partition: str = "",
        columns: Mapping[str, Any] | None = None,
    ) -> bool:
        """Adds the next step. Returns False if the trajectory `is_dropped`; then stop sampling it.

        Arrays may be lists, NumPy arrays or CPU tensors. They are copied, so the caller may change them afterwards.
        loss_mask: 0 or 1 for each response token; by default all 1.
        reward: one number, or one per response token if the client has `token_rewards`. The default is 0 before the
            last step; on the last step the reward is pending until `RolloutClient.set_reward`.
        policy_version: the version that sampled the step, if it differs from the trajectory's, for example because the
            engine loaded new weights.
        policy_versions: a version for each response token, -1 if unknown, for weights that changed during the step.
        reward_components: on the last step, the components of the trajectory's reward by name, which the estimator
            `gdpo` reads. They do not change `reward`.
        step_key: a key of the step, such as a hash of the environment's state; `gigpo` compares steps with equal keys.
        partition: the partition of the step, such as a loss function or an adapter: a micro-batch has rows of one.
        columns: values of the run's declared columns, by name, in the shape of the declared scope. The first step with
            columns requests the declared columns from the service, unless this client created the run.

        Does not wait for the service: a thread sends rows within milliseconds, and `flush` waits for them. Blocks only
        while too many rows are pending, or the service has no capacity for the trajectory's group. Raises
        InvalidArgumentError that names the field; correct the step and add it again. Raises the error of an earlier
        step that the service refused; the trajectory is then lost. The first step of a trajectory that is sampled again
        waits for its outcome, and raises FailedPreconditionError if the attempt is too late.

            with client.trajectory("math/17", sample=0, policy_version=4) as trajectory:
                while not done:
                    prompt, response = sample(conversation)
                    done, score = environment.act(response)
                    if not trajectory.step(prompt, response, reward=score, is_last_step=done):
                        break
        """
        return block_on(
            self._awaited.step(
                prompt_token_ids,
                response_ids,
                loss_mask=loss_mask,
                rollout_logprobs=rollout_logprobs,
                reward=reward,
                stop_reason=stop_reason,
                is_last_step=is_last_step,
                policy_version=policy_version,
                policy_versions=policy_versions,
                advantage=advantage,
                reward_components=reward_components,
                step_key=step_key,
                partition=partition,
                columns=columns,
            )
        )

    def extend(self, observation_ids: Any, response_ids: Any, **fields: Unpack[StepFields]) -> bool:
        """Adds the next step. Its prompt is all tokens so far, followed by `observation_ids`.

        observation_ids: the tokens that the environment, a tool or the user added; may be empty. fields: as in `step`.
            Raises FailedPreconditionError before the first step, and the errors of `step`.
        """
        return block_on(self._awaited.extend(observation_ids, response_ids, **fields))

    def record(
        self,
        completion: Any,
        *,
        reward: Any = None,
        is_last_step: bool = False,
        policy_version: int | None = None,
        sampling_mask: str | None = None,
    ) -> bool:
        """Adds an engine's answer, with one step per choice. Returns False if the trajectory `is_dropped`.

        completion: a chat completion, completion or response with its token ids, as an object of the `openai` package,
            a mapping, or the list of a stream's chunks; `gristmill.completions` says how to request token ids. Its
            sampled tokens are trained. Its prompt is context: messages of tools and users, and answers of other calls.
        reward, is_last_step: of the last choice; otherwise as for `step`.
        policy_version: by default the version of each token if the engine reports it, else as for `step`.
        sampling_mask: the column that stores from which tokens the engine sampled each token, if the answer has them.
            Declare it with scope `response` and shape `[null]`.

        Record calls in the order of their answers. With `merge: tree`, parallel calls, several choices, sub-agents and
        shortened histories become a tree. Raises the errors of `step`, and InvalidArgumentError for a completion
        without token ids.

            completion = engine.chat.completions.create(
                model=model, messages=messages, logprobs=True, extra_body={"return_token_ids": True}
            )
            trajectory.record(completion)
        """
        return block_on(
            self._awaited.record(
                completion,
                reward=reward,
                is_last_step=is_last_step,
                policy_version=policy_version,
                sampling_mask=sampling_mask,
            )
        )

    def finish(self, reward: Any = None, *, reward_components: Mapping[str, float] | None = None) -> bool:
        """Ends a trajectory that `gristmill.capture` recorded: its newest step is the last one. Returns False if the
        trajectory `is_dropped`.

        reward, reward_components: of the last step, as in `step`; without a reward it is pending until
            `RolloutClient.set_reward`.

        Call it after the agent has its last answer. Raises FailedPreconditionError if no step was captured, and the
        errors of `step`.
        """
        with self._lock:
            return block_on(self._awaited.finish(reward, reward_components=reward_components))

    def _capture(self, choices: Sequence[Sampled]) -> None:
        """Adds the choices of an answer as steps. `gristmill.capture` calls it. Thread-safe.

        Stores the newest step until another one follows, or `finish` ends the trajectory with it.
        """
        with self._lock:
            block_on(self._awaited._capture(choices))

    def _check_captures(self) -> None:
        """Raises FailedPreconditionError if the trajectory takes no more steps. Makes no call."""
        self._awaited._check_captures()

    def abort(self, reason: str) -> None:
        """Aborts the trajectory: its rows are dropped, and its group continues without it. Idempotent."""
        block_on(self._awaited.abort(reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        block_on(self._awaited.__aexit__(kind, error, traceback))
