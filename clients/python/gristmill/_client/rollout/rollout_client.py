"""The blocking client of rollout workers. `RolloutCore` implements the calls."""

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
    """Submits rollouts to one run. Thread-safe. Make a client after a fork, not before it.

    A thread collects rows and sends them within milliseconds, so that many small steps share a message. Calls that fail
    for a transient reason are retried with growing pauses until `timeout_s` is over. That is safe, because the service
    stores the same row only once. A row that could not be delivered raises its error in the trajectory's next step, in
    `flush`, or in `close`: no row is lost silently.

    address: `HOST:PORT` or `unix:/PATH`, or several separated by commas, which are replicas of one service: the client
        uses one of them, chosen at random, and the next one when it cannot serve. A replica that hangs is given up
        within 10 s. Of a host name with several addresses, the first that answers is used.
    run: the run's name.
    timeout_s: how long calls and rows are retried while the service is unreachable or has no capacity.
    max_batch_rows, max_batch_bytes: the limits of one message.
    token_rewards: whether the run has one reward per response token: steps without a reward then get a zero for each.
    compression: "zstd" for a slow link (`pip install gristmill[zstd]`): two thirds of the bytes, or fewer.
    credentials: the token and certificates (`gristmill.Credentials`). None: those of the environment variables, if any
        is set.

    Worked example, a worker with its share of an epoch's prompts:

        with RolloutClient("127.0.0.1:50051", run="my-run") as client:
            while admitted := client.begin_groups(uids):            # waits for capacity, which paces the worker
                uids = [uid for uid in uids if uid not in admitted] for uid in admitted:
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
        # A client that was not closed sends its rows when it is garbage-collected, or when the process ends. Its
        # trajectories need only the core.
        self._forgotten = weakref.finalize(self._core, _close_forgotten, self._transport, self._core.sender)

    def __repr__(self) -> str:
        return repr(self._core)

    # The run.

    def create_run(self, config: Mapping[str, Any]) -> list[str]:
        """Creates the run with these settings (docs/settings.md) and returns the service's warnings.

        Repeating the call with the same settings changes nothing. Raises InvalidArgumentError naming the wrong setting,
        and AlreadyExistsError if the run has other settings.
        """
        return block_on(self._core.create_run(config))

    def status(self) -> RunStatus:
        """Returns the run's state and settings. Raises NotFoundError if there is no such run."""
        return block_on(self._core.status())

    def finish(self) -> int:
        """Ends the rollouts of the run, after sending all pending rows; returns the total number of its batches.

        The service seals complete groups, also as a smaller last batch, and drops open ones. Idempotent. Raises the
        errors of `flush`.
        """
        return block_on(self._core.finish())

    def delete_run(self) -> bool:
        """Deletes the run at once, with its rows, plans, shards and state; returns whether it existed. Idempotent.

        Rows that this client has not sent yet are dropped, too. Calls of other workers and of the trainer then raise
        NotFoundError. Checkpoints of the run do not fit another run that is created under the name later.
        """
        return block_on(self._core.delete_run())

    def policy_version(self) -> int:
        """Returns the policy version that the trainer announced last."""
        return block_on(self._core.policy_version())

    def wait_policy_version(self, at_least: int, timeout_s: float) -> int:
        """Waits until the announced policy version is `at_least`, and returns it.

        Raises DeadlineExceededError after `timeout_s`.
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
        """Asks to begin prompt groups; returns the admitted ones. Roll these out, then ask again for the rest.

        Waits until at least one is admitted, for `wait_s` at most (None: no limit, 0: no wait). It does not wait for
        all, since workers that each had a part and waited for the rest would wait for each other. While it waits for
        capacity, it logs the reason every 30 s. Finished groups (sealed or dropped) are not returned: without a limit,
        an empty list means that all of these groups are finished, which is logged as a warning. Idempotent: a group
        that is open already is admitted again.

        n_samples: the number of samples of these groups, one for all or by uid; by default the run's
            `n_samples_per_prompt`. With `surplus: k`, sample k more: the first ones that are complete make the group.
        tag: the environment or task of these groups, one for all or by uid. Metrics are reported by tag, and
            `tag_shares` sets its share of each batch. A run has at most 64 tags.
        """
        return block_on(self._core.begin_groups(uids, round, wait_s, n_samples=n_samples, tag=tag))

    def groups(self) -> list[Group]:
        """Returns every prompt group that was ever admitted, with its state. A data loader that restarts skips those
        that are consumed:

            done = {(group.uid, group.round) for group in client.groups() if group.is_consumed}
        """
        return block_on(self._core.groups())

    def abort_group(self, uid: str, *, round: int = 0, reason: str = "") -> bool:
        """Drops a whole prompt group, and frees its capacity; returns whether it was open. Idempotent."""
        return block_on(self._core.abort_group(uid, round=round, reason=reason))

    def seal(self, batch: int | None = None) -> tuple[int, int]:
        """Seals all complete groups into a batch now, even if it is smaller; returns its number and its number of
        groups.

        batch: the number that the batch is to have. With it, the call is idempotent and retried; without it, the call
            is made once, because a repetition might seal another batch.

        Calls `flush` first, and raises its errors. Raises FailedPreconditionError if no group is complete.
        """
        return block_on(self._core.seal(batch))

    # Trajectories and rows.

    def trajectory(
        self, uid: str, sample: int, round: int = 0, attempt: int | None = None, policy_version: int = UNKNOWN
    ) -> Trajectory:
        """Returns a trajectory, whose steps are then handed over one by one. Makes no call.

        attempt: increased by one when the trajectory is sampled again; supersedes earlier attempts. None: 0, or the
            next attempt of a trajectory that this client aborted.
        policy_version: the version that samples its steps, -1 if unknown.
        """
        return Trajectory(self._core.trajectory(uid, sample, round, attempt, policy_version))

    def submit(self, rows: Iterable[Mapping[str, Any]]) -> list[RowOutcome]:
        """Submits rows, mappings with the field names of a rollouts file, and waits for their outcomes, which it
        returns.

        A row without `reward` waits for `set_reward`. `gristmill.converters` makes rows of other frameworks' rollouts:

            client.submit(from_skyrl(generator_output))

        Safe to repeat: rows that were accepted before are DUPLICATE. Raises InvalidArgumentError for an invalid row,
        when earlier rows may have been accepted already; and the error of the first row that the service refused,
        naming the trajectories.
        """
        return block_on(self._core.submit(rows))

    def set_reward(self, uid: str, sample: int, reward: Any, *, round: int = 0, step: int | None = None) -> bool:
        """Sets a pending reward: one number, or one per response token; returns whether this call changed it.

        step: the step of the trajectory; by default its last. Waits until the trajectory's steps have arrived.
            Idempotent for the same reward. Raises AlreadyExistsError for another one, and NotFoundError if there is no
            such step.
        """
        return block_on(self._core.set_reward(uid, sample, reward, round=round, step=step))

    def abort_trajectory(self, uid: str, sample: int, *, round: int = 0, reason: str = "") -> bool:
        """Aborts a trajectory: its rows are dropped, and its group completes without it. Returns whether it was open.

        Idempotent.
        """
        return block_on(self._core.abort_trajectory(uid, sample, round=round, reason=reason))

    # The end.

    def flush(self) -> None:
        """Waits until every row that was handed over is delivered or has failed.

        Raises one error for all failures since the last flush: of the class of the first one, naming the trajectories.
        """
        block_on(self._core.flush())

    def close(self) -> None:
        """Flushes, stops the thread and closes the connection, also if flushing raises. Idempotent."""
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
        # No caller is left to catch it.
        _log.error("a RolloutClient was not closed: %s", error)
    finally:
        block_on(sender.close())
        transport.close()
