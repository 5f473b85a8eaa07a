"""The blocking client of rollout workers. `RolloutCore` implements the calls."""

from __future__ import annotations

import logging
import sys
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
from gristmill.errors import GristmillError

_log = logging.getLogger("gristmill")


class RolloutClient:
    """Submits rollouts to one run. Thread-safe. Create a client after a fork, not before it.

    A thread collects rows and sends them within milliseconds, so that many small steps share a message. Calls that fail
    for a transient reason are retried with growing pauses until `timeout_s` is over. That is safe, because the service
    stores the same row only once. The error of a row that could not be delivered is raised by the trajectory's next
    step, by `flush`, or by `close`: no row is lost silently.

    address: `HOST:PORT` or `unix:/PATH`, or a comma-separated list of replicas of one service. The client uses a random
        replica, and fails over to the next one if that cannot serve; it leaves a replica that hangs within 10 s. If a
        host name has several addresses, the first that answers is used.
    run: the run's name.
    timeout_s: how long calls and rows are retried while the service is unreachable or has no capacity.
    max_batch_rows, max_batch_bytes: the limits of one message.
    token_rewards: whether the run has one reward per response token. Steps without a reward then get zeros.
    compression: "zstd" for a slow network (`pip install zstandard`): at most two thirds of the bytes are sent.
    credentials: the token and certificates (`gristmill.Credentials`). None: from the environment variables, if set.

    Worked example, a worker with its share of an epoch's prompts:

        with RolloutClient("127.0.0.1:50051", run="my-run") as client:
            while admitted := client.begin_groups(uids):            # waits for capacity, which paces the worker
                uids = [uid for uid in uids if uid not in admitted]
                for uid in admitted:
                    for sample in range(8):
                        with client.trajectory(uid, sample) as trajectory:
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
        # A client that was not closed sends its rows when its core is garbage-collected (its trajectories keep the core
        # alive), or when the process ends.
        self._forgotten = weakref.finalize(self._core, _close_forgotten, self._transport, self._core.sender)

    def __repr__(self) -> str:
        return repr(self._core)

    # The run.

    def create_run(self, config: Mapping[str, Any]) -> list[str]:
        """Creates the run with these settings (docs/settings.md). Logs and returns the service's warnings about them.

        Idempotent for the same settings. Raises InvalidArgumentError that names the invalid setting, and
        AlreadyExistsError if the run has other settings.
        """
        return block_on(self._core.create_run(config))

    def status(self) -> RunStatus:
        """Returns the run's state and settings. Raises NotFoundError if the run does not exist."""
        return block_on(self._core.status())

    def finish(self) -> int:
        """Sends all pending rows, then ends the rollouts of the run. Returns the total number of the run's batches.

        The service seals all complete groups, even if the last batch is smaller, and drops open groups. Idempotent.
        Raises the errors of `flush`.
        """
        return block_on(self._core.finish())

    def delete_run(self) -> bool:
        """Deletes the run immediately, with its rows, plans, shards and state. Returns whether it existed. Idempotent.

        Rows that this client has not sent yet are also dropped. Calls of other workers and of the trainer then raise
        NotFoundError. A run that is created later under this name does not accept checkpoints of the deleted run.
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
        """Requests to begin prompt groups, and returns the admitted uids. Roll these out, then call it for the rest.

        Waits at most `wait_s` until at least one group is admitted (None: no limit, 0: no wait). It does not wait for
        all groups, because workers that wait for the rest of their groups would block each other. While it waits for
        capacity, it logs the reason every 30 s. Finished groups (sealed or dropped) are not returned. Without a limit,
        an empty list means that all groups are finished: end the loop, as in the worked example above. The first such
        answer is logged as a warning, and a client that requests the same finished groups again waits longer for each
        answer, at most 1 s. Idempotent: a group that is already open is admitted again.

        n_samples: the number of samples per group, for all groups or by uid. Default: `n_samples_per_prompt` of the
            run. With `surplus: k`, roll out k more samples; the first complete samples form the group.
        tag: the environment or task, for all groups or by uid. Metrics are reported by tag, and `tag_shares` sets its
            share of each batch. A run has at most 64 tags.
        """
        return block_on(self._core.begin_groups(uids, round, wait_s, n_samples=n_samples, tag=tag))

    def groups(self, uids: Iterable[str] | None = None, round: int = 0) -> list[Group]:
        """Returns the states of these prompt groups, in their order. A restarted data loader can skip consumed groups:

            done = {group.uid for group in client.groups(uids, round) if group.is_consumed}

        uids: any number of uids; a group that was never begun has the state `unknown`. None: the run's groups that are
            not in a freed batch. The service remembers the others without their names, so it cannot list them;
            `status().groups_archived` is their number.
        """
        return block_on(self._core.groups(uids, round))

    def abort_group(self, uid: str, *, round: int = 0, reason: str = "") -> bool:
        """Drops a whole prompt group, and frees its capacity. Returns whether the group was open. Idempotent."""
        return block_on(self._core.abort_group(uid, round=round, reason=reason))

    def seal(self, batch: int | None = None) -> tuple[int, int]:
        """Seals complete groups into a batch now, even if it is smaller than usual: at most `train_batch_size`, or all
        of them with `seal_by: call`. Returns the batch's number and its number of groups.

        batch: the number of the next batch. If set, the call is idempotent and retried; if not, it is made once,
            because a repetition might seal another batch.

        Calls `flush` first, and raises its errors. Raises FailedPreconditionError if no group is complete.
        """
        return block_on(self._core.seal(batch))

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
    ) -> Trajectory:
        """Returns a trajectory, to which steps are then added one by one. Does not wait for the service.

        attempt: the number of this attempt; increase it by one if the trajectory is sampled again. It supersedes
            earlier attempts. None: 0, or the next attempt of a trajectory that is among the last 10,000 that this
            client aborted.
        policy_version: the version that samples the steps; -1 if unknown, which a run with `stale: drop` or `mask`
            refuses. None: the version that is announced when the trajectory begins, 0 before any. The client learns it
            from `begin_groups`, or asks for it in the background.
        agent: the role that the trajectory plays, such as "solver". Estimators compare the trajectories of one agent.
        episode: names a joint rollout of several trajectories of the group; `episode_agents` lists the agents that are
            compared within it.
        """
        sampled = self._core.trajectory(uid, sample, round, attempt, policy_version, agent=agent, episode=episode)
        return Trajectory(sampled)

    def submit(self, rows: Iterable[Mapping[str, Any]]) -> list[RowOutcome]:
        """Submits rows, waits for their outcomes, and returns the outcomes.

        A row is a mapping with the field names of a rollouts file. The reward of a row without `reward` is pending
        until `set_reward`. `gristmill.converters` converts rollouts of other frameworks to rows:

            client.submit(from_skyrl(generator_output))

        A row with `aborted`, the reason as a text, has nothing else than its names: its trajectory is aborted as by
        `abort_trajectory`, and its outcome is DROPPED. `from_slime` makes such rows.

        Idempotent: the outcome of a row that was accepted before is DUPLICATE. Raises InvalidArgumentError for an
        invalid row, although earlier rows may have been accepted. Raises the error of the first row that the service
        refused, with the names of the trajectories.
        """
        return block_on(self._core.submit(rows))

    def set_reward(self, uid: str, sample: int, reward: Any, *, round: int = 0, step: int | None = None) -> bool:
        """Sets a pending reward: one number, or one per response token. Returns whether this call changed it.

        step: the step of the trajectory; by default the last. Waits until the trajectory's steps were delivered.
            Idempotent for the same reward. Raises AlreadyExistsError for a different reward, and NotFoundError if the
            step does not exist.
        """
        return block_on(self._core.set_reward(uid, sample, reward, round=round, step=step))

    def abort_trajectory(
        self, uid: str, sample: int, *, round: int = 0, reason: str = "", attempt: int | None = None
    ) -> bool:
        """Aborts a trajectory: its rows are dropped, and its group completes without it. Returns whether it was open.

        attempt: abort only this and lower attempts; None: any attempt. Idempotent.
        """
        return block_on(self._core.abort_trajectory(uid, sample, round=round, reason=reason, attempt=attempt))

    # The end.

    def flush(self) -> None:
        """Waits until every row added so far was delivered or has failed.

        Raises one error for all failures since the last flush, with the class of the first. It names the trajectories.
        """
        block_on(self._core.flush())

    def close(self) -> None:
        """Flushes, stops the thread and closes the connection, even if flushing raises an error. Idempotent."""
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
        # Ctrl-C may have ended the program.
        block_on(sender.close(getattr(sys, "last_value", None)))
    except GristmillError as error:
        # No caller can catch the error.
        _log.error("a RolloutClient was not closed: %s", error)
