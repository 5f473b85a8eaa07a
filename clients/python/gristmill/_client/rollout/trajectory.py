"""One trajectory as its worker sees it: steps are handed over, and a failed one is given up.

Owns no thread and no connection: those are the client's. `Trajectory` is `AsyncTrajectory` whose calls block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from gristmill._client.connection.drivers import block_on
from gristmill._client.rollout.declared_columns import Declared, DeclaredColumns, checked_names
from gristmill._client.rollout.delivery import Delivery
from gristmill._client.rollout.sender import Sender
from gristmill._client.rollout.step_writer import Step, StepWriter
from gristmill._wire.steps import TrajectoryKey
from gristmill.completions import sampled
from gristmill.errors import FailedPreconditionError, GristmillError, InvalidArgumentError, NotFoundError

# A reason travels with an abort and is counted by; a traceback has no place in it.
_REASON_LENGTH = 200


class StepFields(TypedDict, total=False):
    """What a step may have in addition to its tokens; `Trajectory.step` says what each is."""

    loss_mask: Any
    rollout_logprobs: Any
    reward: Any
    stop_reason: str
    is_last_step: bool
    policy_version: int | None
    policy_versions: Any
    advantage: Any
    columns: Mapping[str, Any] | None


class AsyncTrajectory:
    """As Trajectory; made by `AsyncRolloutClient.trajectory`. An asynchronous context manager, for one task."""

    def __init__(
        self,
        sender: Sender,
        abort: Callable[..., Awaitable[bool]],
        declared: DeclaredColumns,
        writer: StepWriter,
    ) -> None:
        self._sender = sender
        self._abort = abort
        self._declared = declared
        self._writer = writer
        self._delivery = Delivery()

    def __repr__(self) -> str:
        count = self._writer.next_step
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
        columns: Mapping[str, Any] | None = None,
    ) -> bool:
        if error := self._sender.take_error(self._delivery):
            self._declared.forget_if_refused(error)
            raise error
        if self.is_dropped:
            return False
        values = checked_names(columns, self.key)

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
                columns=values,
                declared=declared.columns,
                shared=declared.shared,
            )

        step = await self._declared.used(values.keys(), step_of)
        await self._sender.put(step.table, self._delivery, step.prefix)
        self._writer.written(step)
        return not self.is_dropped

    async def extend(self, observation_ids: Any, response_ids: Any, **fields: Unpack[StepFields]) -> bool:
        return await self.step(self._writer.extended(observation_ids), response_ids, **fields)

    async def record(
        self, completion: Any, *, reward: Any = None, is_last_step: bool = False, policy_version: int | None = None
    ) -> bool:
        choices = sampled(completion)
        if not choices:
            raise InvalidArgumentError(f"{self.key}: nothing was sampled in this completion; leave it out")
        for number, choice in enumerate(choices, 1):
            ends = number == len(choices)
            await self.step(
                choice.prompt_token_ids,
                choice.response_ids,
                rollout_logprobs=choice.rollout_logprobs,
                stop_reason=choice.stop_reason,
                reward=reward if ends else None,
                is_last_step=is_last_step and ends,
                policy_version=policy_version,
            )
        return not self.is_dropped

    async def abort(self, reason: str) -> None:
        self._writer.is_ended = True
        # Where no row has arrived, the service may never have heard of the group.
        with suppress(NotFoundError):
            await self._abort(self.key.uid, self.key.sample, round=self.key.round, reason=reason)

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
                f"{self.key}: the block ended after {self._writer.next_step} steps without a last one, so that the "
                "trajectory was aborted; give is_last_step=True with the last step, or call abort(reason) to give up "
                "on purpose"
            )
        try:
            await self.abort(f"{type(error).__name__}: {error}"[:_REASON_LENGTH].removesuffix(": "))
        except GristmillError as failed:
            error.add_note(f"{self.key} could not be aborted: {failed}")


class Trajectory:
    """One trajectory being rolled out; made by `RolloutClient.trajectory`. For one thread at a time.

    As a context manager it is aborted, with the exception as the reason, when the block raises. A block that ends
    without a last step aborts it too and raises FailedPreconditionError, as its group would wait for it forever;
    `abort` is the way to give up on purpose.
    """

    def __init__(self, awaited: AsyncTrajectory) -> None:
        self._awaited = awaited

    def __repr__(self) -> str:
        return repr(self._awaited).replace("Async", "", 1)

    @property
    def key(self) -> TrajectoryKey:
        return self._awaited.key

    @property
    def is_dropped(self) -> bool:
        """Whether the service is known to drop further steps: the trajectory's group was dropped, aborted, or sealed
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
        columns: Mapping[str, Any] | None = None,
    ) -> bool:
        """Hands over the next step; returns False where the trajectory `is_dropped`: then stop working on it.

        The arrays may be lists, NumPy arrays, or CPU tensors; they are copied, so the caller may go on changing them.
        loss_mask: one 0 or 1 a response token; all 1 when not given.
        reward: one number, or one per response token where the client was made with `token_rewards`. Not given, it is
            0 before the last step; on the last step it is pending until `RolloutClient.set_reward`.
        policy_version: when it differs from the trajectory's.
        policy_versions: one a response token, -1 unknown, where weights changed while it was sampled.
        columns: values of the columns that the run declares, by name: of each one a row, response token, or prompt and
            response token, or items, as declared. The first step that has any asks the service what is declared, unless
            this client created the run.

        Does not wait for the service: rows are sent by a thread a few milliseconds later, and `flush` waits for them.
        Blocks only while too much is under way, or while the service has no room for the trajectory's group.
        Raises InvalidArgumentError naming the field, after which the same step may be given again, corrected; and the
        error of an earlier step that the service did not take, after which the trajectory is lost.

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
                columns=columns,
            )
        )

    def extend(self, observation_ids: Any, response_ids: Any, **fields: Unpack[StepFields]) -> bool:
        """As `step`, given only what is new: the prompt is all tokens so far and then the observation's.

        observation_ids: what the environment, a tool or the user said since; it may be empty. fields: as of `step`.
        Raises FailedPreconditionError where there is no step yet; otherwise as `step`.
        """
        return block_on(self._awaited.extend(observation_ids, response_ids, **fields))

    def record(
        self, completion: Any, *, reward: Any = None, is_last_step: bool = False, policy_version: int | None = None
    ) -> bool:
        """Hands over an engine's answer, as a step for each choice; returns False where the trajectory `is_dropped`.

        completion: a chat completion, completion or response with its token ids, as an object of the `openai` package,
            a mapping, or the list of a stream's chunks; `gristmill.completions` says what to ask the engine for. What
            it sampled is trained, what it read is context: messages of tools and users, and answers of other calls.
        reward, is_last_step: of the last choice; otherwise as of `step`.

        Give calls in the order in which they were answered. A run with `merge: tree` makes a tree of parallel calls,
        several choices, sub-agents and shortened histories. Raises as `step`, and InvalidArgumentError for a completion
        without its token ids.

            completion = engine.chat.completions.create(
                model=model, messages=messages, logprobs=True, extra_body={"return_token_ids": True}
            )
            trajectory.record(completion)
        """
        return block_on(
            self._awaited.record(completion, reward=reward, is_last_step=is_last_step, policy_version=policy_version)
        )

    def abort(self, reason: str) -> None:
        """Gives the trajectory up: its rows are dropped and its group goes on without it. Idempotent."""
        block_on(self._awaited.abort(reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        block_on(self._awaited.__aexit__(kind, error, traceback))
