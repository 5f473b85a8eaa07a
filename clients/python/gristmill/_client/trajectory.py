"""One trajectory as its worker sees it: steps are numbered, rewards given their form, and a failed one is given up.

Owns no thread and no connection: those are the client's. `Trajectory` is `AsyncTrajectory` whose calls block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from gristmill._client.delivery import Delivery
from gristmill._client.drivers import block_on
from gristmill._client.sender import Sender
from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Ragged
from gristmill._wire.extras import check_extras
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import UNKNOWN, Extra, Steps, TrajectoryKey
from gristmill.completions import sampled
from gristmill.errors import FailedPreconditionError, GristmillError, InvalidArgumentError, NotFoundError

# A reason travels with an abort and is counted by; a traceback has no place in it.
_REASON_LENGTH = 200


class Declared(NamedTuple):
    """The columns that a run declares. shared: the names of those whose values a step has from the step before."""

    columns: Sequence[ColumnSpec] = ()
    shared: frozenset[str] = frozenset()


class StepWriter:
    """Makes the rows of one trajectory, in step order. Pure."""

    def __init__(self, key: TrajectoryKey, attempt: int, policy_version: int, token_rewards: bool) -> None:
        self.key = key
        self.attempt = attempt
        self.policy_version = policy_version
        self.next_step = 0
        self.is_ended = False
        self._token_rewards = token_rewards
        self._before: Steps | None = None
        self._made: Steps | None = None

    def table(
        self,
        response_ids: Any,
        *,
        loss_mask: Any,
        reward: Any,
        is_last_step: bool,
        policy_version: int | None,
        policy_versions: Any,
        columns: Mapping[str, Any],
        declared: Sequence[ColumnSpec],
        shared: frozenset[str],
        **fields: Any,
    ) -> Steps:
        """The next step as a table of one row. The number moves on by `written`, once the row is handed over.

        columns: values of the columns that the run declares. shared: those of which the step before has the values of
        the tokens that both begin with. fields: the others, by their names in a rollouts file.
        """
        if self.is_ended:
            raise FailedPreconditionError(
                f"{self.key}: the trajectory has ended with step {self.next_step - 1}; sample it again as another "
                "attempt, or start another trajectory"
            )
        where = f"{self.key} step {self.next_step}"
        response = plain(response_ids, "response_ids", where)
        length = np.size(response)
        row = {
            **self.key._asdict(),
            "step": self.next_step,
            "attempt": self.attempt,
            "is_last_step": is_last_step,
            "response_ids": response,
            "loss_mask": np.ones(length, np.uint8) if loss_mask is None else plain(loss_mask, "loss_mask", where),
            "reward": self._reward(plain(reward, "reward", where), length, is_last_step, where),
            "policy_version": self._version(policy_version, policy_versions),
            "policy_versions": plain(policy_versions, "policy_versions", where),
            **{name: plain(values, name, where) for name, values in fields.items()},
        }
        if clash := sorted(columns.keys() & row.keys()):
            raise InvalidArgumentError(
                f"{where}: columns has {clash[0]}, which is no declared column; give it by itself"
            )
        table = from_rows([row])
        if declared:
            table = self._with_columns(table, {**row, **columns}, declared, shared)
        self._made = table
        if self._token_rewards and table.token_rewards is None:
            # Pending: the zeros do not count, they say that the run's rewards are one per token.
            zeros = Ragged.from_lengths(np.zeros(length), table.response_lengths)
            return replace(table, token_rewards=zeros)
        return table

    def _with_columns(
        self, table: Steps, row: Mapping[str, Any], declared: Sequence[ColumnSpec], shared: frozenset[str]
    ) -> Steps:
        """The row with its declared columns. What the step before has of a shared one is not copied again: such columns
        may be hundreds of times the size of their tokens."""
        kept = self._kept(table, row, shared)
        count = 0 if self._before is None or not kept else self._before.tokens.total
        new = from_rows([{**row, **{name: row[name][count:] for name in kept}}], columns=declared)
        pieces = {name: (*one.before, one.values[0]) for name, one in kept.items()}
        extras = {name: replace(extra, before=pieces.get(name, ())) for name, extra in new.extras.items()}
        return check_extras(replace(new, extras=extras), declared, np.array([count]))

    def _kept(self, table: Steps, row: Mapping[str, Any], shared: frozenset[str]) -> dict[str, Extra]:
        """The shared columns of the step before, where this step begins with all of its tokens and has the columns."""
        before, tokens = self._before, table.tokens[0]
        if before is None:
            return {}
        prompt = tokens[: table.prompt_lengths[0]]
        if not np.array_equal(before.tokens[0], prompt[: before.tokens.total]):
            return {}
        return {
            name: before.extras[name]
            for name in shared & before.extras.keys() & row.keys()
            if _has_values(row[name], len(tokens))
        }

    def written(self, is_last_step: bool) -> None:
        self.next_step += 1
        self.is_ended = is_last_step
        self._before = None if is_last_step else self._made

    def _version(self, given: int | None, of_tokens: Any) -> int:
        """Of tokens that have their own it is the oldest, which is found where they are read."""
        if given is None:
            return self.policy_version if of_tokens is None else UNKNOWN
        return given

    def _reward(self, reward: Any, length: int, is_last_step: bool, where: str) -> Any:
        """None, which is pending, only for a last step: before it, no reward is a reward of 0."""
        if reward is None:
            return None if is_last_step else (np.zeros(length) if self._token_rewards else 0.0)
        if (np.ndim(reward) > 0) != self._token_rewards:
            has, needs = ("one per token", "one number") if np.ndim(reward) else ("one number", "one per token")
            raise InvalidArgumentError(
                f"{where}: reward is {has} and the client was made for {needs} "
                f"(token_rewards={self._token_rewards}); all rows of a run use the one or the other"
            )
        return reward


def _has_values(given: Any, count: int) -> bool:
    """Whether it is so many values, of which those of a few tokens can be taken. What is not is refused where all of
    it is read."""
    try:
        return len(given) == count and len(given[:0]) == 0
    except (TypeError, KeyError, RuntimeError):
        return False


class AsyncTrajectory:
    """As Trajectory; made by `AsyncRolloutClient.trajectory`. An asynchronous context manager, for one task."""

    def __init__(
        self,
        sender: Sender,
        abort: Callable[..., Awaitable[bool]],
        declared: Callable[[Collection[str]], Awaitable[Declared]],
        writer: StepWriter,
    ) -> None:
        """declared: gives the columns that the run declares, for the names of those that a step has."""
        self._sender = sender
        self._abort = abort
        self._declared = declared
        self._writer = writer
        self._delivery = Delivery()

    @property
    def key(self) -> TrajectoryKey:
        return self._writer.key

    @property
    def is_kept(self) -> bool:
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
        policy_versions: Any = None,
        advantage: Any = None,
        columns: Mapping[str, Any] | None = None,
    ) -> bool:
        if error := self._sender.take_error(self._delivery):
            raise error
        if not self.is_kept:
            return False
        declared = await self._declared(columns.keys()) if columns else Declared()
        table = self._writer.table(
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
            columns=columns or {},
            declared=declared.columns,
            shared=declared.shared,
        )
        await self._sender.put(table, self._delivery)
        self._writer.written(is_last_step)
        return self.is_kept

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
        return self.is_kept

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
        if self._writer.is_ended or not self.is_kept:
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

    @property
    def key(self) -> TrajectoryKey:
        return self._awaited.key

    @property
    def is_kept(self) -> bool:
        """False as soon as the service is known to have no use for further steps: the trajectory's group was dropped,
        aborted, or sealed without it, or a higher attempt supersedes it. Costs no call."""
        return self._awaited.is_kept

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
        """Hands over the next step and returns `is_kept`: on False, stop working on the trajectory.

        The arrays may be lists, NumPy arrays, or CPU tensors; they are copied, so the caller may go on changing them.
        loss_mask: one 0 or 1 a response token; all 1 when not given.
        reward: one number, or one per response token where the client was made with `token_rewards`. Not given, it is
            0 before the last step; on the last step it is pending until `RolloutClient.set_reward`.
        policy_version: when it differs from the trajectory's.
        policy_versions: one a response token, -1 unknown, where weights changed while it was sampled.
        columns: values of the columns that the run declares, by name: of each one a row, response token, or prompt and
            response token, or items, as declared. The first step that has any asks the service what is declared.

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

    def record(
        self, completion: Any, *, reward: Any = None, is_last_step: bool = False, policy_version: int | None = None
    ) -> bool:
        """Hands over what an engine answered, as a step for each choice, and returns `is_kept`.

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


def plain(values: Any, name: str, where: str) -> Any:
    """Anything that speaks NumPy's array protocol (tensors, for instance) as an array, all else as it is.

    Raises InvalidArgumentError for tensors that NumPy cannot read: of bfloat16, on a device, or part of a graph.
    """
    if isinstance(values, np.ndarray) or not hasattr(values, "__array__"):
        return values
    read: Callable[[Any], Any] = np.asarray
    try:
        return read(values)
    except (TypeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgumentError(
            f"{where}: {name} cannot be read as an array: {reason} Give .detach().cpu().float() or .tolist()"
        ) from None
