"""The client of rollout workers, whose calls block. The calls themselves are `RolloutCore`'s."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.drivers import block_on
from gristmill._client.connection.transport import TIMEOUT_S, Transport
from gristmill._client.rollout import requests
from gristmill._client.rollout.delivery import RowOutcome
from gristmill._client.rollout.groups import Group
from gristmill._client.rollout.rollout_core import RolloutCore
from gristmill._client.rollout.sender import Sender
from gristmill._client.rollout.trajectory import Trajectory
from gristmill._client.run_status import RunStatus
from gristmill._wire.steps import UNKNOWN
from gristmill.errors import GristmillError

_log = logging.getLogger("gristmill")


class RolloutClient:
    """Submits rollouts to one run. Thread-safe; for one process: make it after a fork.

    Rows are collected and sent by a thread within milliseconds, so that many small turns share a message. A call that
    fails for a passing reason is repeated with growing pauses until `timeout_s` is over; that is safe, as the service
    takes the same row once. What could not be delivered is raised by the trajectory's next step, by `flush`, or by
    `close`: no row is lost silently.

    address: `HOST:PORT` or `unix:/PATH`, or several with commas between: replicas of one service, of which the client
        uses one, starting anywhere, until that one cannot serve, and then the next. A replica that hangs is given up
        within 10 s. A host name with several addresses is connected to the first that answers.
    run: the run's name.
    timeout_s: for how long calls and rows are tried while the service is away or has no room.
    max_batch_rows, max_batch_bytes: what one message carries at most.
    token_rewards: whether the run's rewards are one per response token, so that `Trajectory.step` gives steps without a
        reward zeros of that form.
    compression: "zstd" for a slow link (`pip install gristmill[zstd]`): two thirds of the bytes, or fewer.
    credentials: the token and certificates of calls (`gristmill.Credentials`). None: what the environment has, which is
        nothing where no variable is set.

    Worked example, a worker with its share of an epoch's prompts:

        with RolloutClient("127.0.0.1:50051", run="my-run") as client:
            while admitted := client.begin_groups(uids):            # waits for room: this paces it
                uids = [uid for uid in uids if uid not in admitted]
                for uid in admitted:
                    for sample in range(8):
                        with client.trajectory(uid, sample, policy_version=version) as trajectory:
                            trajectory.step(prompt, response, reward=1.0, is_last_step=True)
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
        self.run = run
        self._transport = Transport(address, timeout_s, "RolloutClient", credentials)
        self._core = RolloutCore(self._transport, encoder, limits, token_rewards)
        # A client that is forgotten, or whose process ends, still sends what it took. A trajectory needs only the core.
        self._forgotten = weakref.finalize(self._core, _close_forgotten, self._transport, self._core.sender)

    def __repr__(self) -> str:
        return repr(self._core)

    # The run.

    def create_run(self, config: Mapping[str, Any]) -> list[str]:
        """Creates the run with these settings (README, 'Configuration') and returns the service's warnings.

        The same settings again change nothing. Raises InvalidArgumentError naming the setting, and AlreadyExistsError
        when the run has other settings.
        """
        return block_on(self._core.create_run(config))

    def status(self) -> RunStatus:
        """The run's state and settings. Raises NotFoundError when there is no such run."""
        return block_on(self._core.status())

    def finish(self) -> int:
        """Says that no more rollouts come, after sending what is left; returns how many batches the run has in all.

        Complete groups are sealed, also as a smaller last batch, and open ones dropped. Idempotent. Raises as `flush`.
        """
        return block_on(self._core.finish())

    def delete_run(self) -> bool:
        """Deletes the run at once, with all that it holds: rows, plans, shards and its state; returns whether there was
        one. Idempotent.

        Rows that this client has not sent yet are dropped with it. Other workers and the trainer's ranks get
        NotFoundError. A run that is created under the name later is another one to every checkpoint.
        """
        return block_on(self._core.delete_run())

    def policy_version(self) -> int:
        """The version that the trainer announced last."""
        return block_on(self._core.policy_version())

    def wait_policy_version(self, at_least: int, timeout_s: float) -> int:
        """Waits until the announced policy version is `at_least`, and returns it.

        Raises DeadlineExceededError when it is not so within `timeout_s`.
        """
        return block_on(self._core.wait_policy_version(at_least, timeout_s))

    # Prompt groups.

    def begin_groups(
        self,
        uids: Sequence[str],
        round: int = 0,
        wait_s: float | None = None,
        *,
        n_samples: int | Mapping[str, int] | None = None,
        tag: str | Mapping[str, str] | None = None,
    ) -> list[str]:
        """Asks for room for prompt groups, and returns those admitted: roll them out, and ask again for the rest.

        Waits until at least one is admitted, for `wait_s` at most (None: as long as it takes, 0: not at all). It does
        not wait for all: workers that each held a part and waited for the rest would wait for each other. Groups that
        are finished (sealed or dropped before) are never returned, so that without a limit an empty list says that
        nothing of these is left to do, which is logged as a warning. Idempotent: a group that is open already is
        admitted again. Why there is no room is logged as a warning while it waits, from 30 s on.

        n_samples: of how many samples these groups are made, one number or by uid; others as the run's
            `n_samples_per_prompt`. With `surplus: k` sample k more: those that are complete first make the group.
        tag: the environment or task of these groups, one name or by uid. Metrics are reported by tag, and `tag_shares`
            composes batches of them; at most 64 different ones per run.
        """
        return block_on(self._core.begin_groups(uids, round, wait_s, n_samples=n_samples, tag=tag))

    def groups(self) -> list[Group]:
        """Every prompt group that was ever admitted, and what became of it: a data loader that starts again leaves out
        those that are consumed.

            done = {(group.uid, group.round) for group in client.groups() if group.is_consumed}
        """
        return block_on(self._core.groups())

    def abort_group(self, uid: str, *, round: int = 0, reason: str = "") -> bool:
        """Drops a whole prompt group and frees its room; returns whether it was open. Idempotent."""
        return block_on(self._core.abort_group(uid, round=round, reason=reason))

    def seal(self, batch: int | None = None) -> tuple[int, int]:
        """Seals what is complete into a batch now, also a smaller one; returns its number and its prompt groups.

        With the number that the batch is to have, the call is idempotent and is retried; without, it is made once,
        as a second one might seal another batch. Raises FailedPreconditionError when no group is complete, and as
        `flush`, which it calls first.
        """
        return block_on(self._core.seal(batch))

    # Trajectories and rows.

    def trajectory(
        self, uid: str, sample: int, round: int = 0, attempt: int = 0, policy_version: int = UNKNOWN
    ) -> Trajectory:
        """A trajectory to hand over step by step. Makes no call.

        attempt: one more than before when it is sampled again, which supersedes the earlier one.
        policy_version: the version that samples its steps, -1 unknown.
        """
        return Trajectory(self._core.trajectory(uid, sample, round, attempt, policy_version))

    def submit(self, rows: Iterable[Mapping[str, Any]]) -> list[RowOutcome]:
        """Submits rows with the field names of a rollouts file, and waits; returns what became of each.

        A row without `reward` waits for `set_reward`. `gristmill.converters` makes rows of other frameworks' rollouts:

            client.submit(from_skyrl(generator_output))

        Safe to repeat: rows that were taken before are DUPLICATE. Raises InvalidArgumentError for a row that is wrong,
        when rows before it may have been taken, and the error of the first row that the service did not take, naming
        the trajectories.
        """
        return block_on(self._core.submit(rows))

    def set_reward(self, uid: str, sample: int, reward: Any, *, round: int = 0, step: int | None = None) -> bool:
        """Gives a reward that was pending: one number, or one per response token; returns whether this call set it.

        step: which; the last unless given. Waits until the trajectory's steps have arrived. Idempotent for the same
        reward; raises AlreadyExistsError for another one, NotFoundError when there is no such step.
        """
        return block_on(self._core.set_reward(uid, sample, reward, round=round, step=step))

    def abort_trajectory(self, uid: str, sample: int, *, round: int = 0, reason: str = "") -> bool:
        """Gives a trajectory up: its rows are dropped, and its group completes without it; returns whether it was open.

        Idempotent.
        """
        return block_on(self._core.abort_trajectory(uid, sample, round=round, reason=reason))

    # The end.

    def flush(self) -> None:
        """Waits until every row handed over before has arrived or failed.

        Raises what went wrong since the last flush: one error, of the class of the first, naming the trajectories.
        """
        block_on(self._core.flush())

    def close(self) -> None:
        """Flushes, ends the worker and closes the connection, in that order, also when flushing raises. Idempotent."""
        self._forgotten.detach()
        block_on(self._core.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._forgotten.detach()
        block_on(self._core.__aexit__(kind, error, traceback))


def _close_forgotten(transport: Transport, sender: Sender) -> None:
    if not transport.fork_guard.is_here():
        return
    try:
        block_on(sender.flush())
    except GristmillError as error:
        # Nobody is left to catch it.
        _log.error("a RolloutClient was not closed: %s", error)
    finally:
        block_on(sender.close())
        transport.close()
