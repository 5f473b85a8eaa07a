"""SkyRL's session: submits rollouts one batch at a time, and returns stored rollouts after a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from gristmill.adapters._core.checkpoint import States
from gristmill.adapters._core.session import RunSession
from gristmill.converters import from_skyrl
from gristmill.errors import FailedPreconditionError, ResourceExhaustedError

Rows = list[dict[str, Any]]


class Part(NamedTuple):
    """Groups of a batch: a generator's output, the uid of each row, and the version of the weights that sampled it."""

    output: Mapping[str, Any]
    uids: Sequence[str]
    version: int


class Session(RunSession):
    """The session of all ranks. SkyRL samples the groups of a batch together."""

    _round = _sealed = 0

    def restart(self, states: States | None) -> None:
        """Resume the run at a checkpoint, or at its beginning. Drop groups that were not sealed when the previous
        trainer ended, because they are sampled again."""
        self.resume(states, only_new_run=True)
        self.give_up_unsealed()
        status = self.rollouts.status()
        self._round, self._sealed = status.next_round, status.batches_sealed

    @property
    def has_next_batch(self) -> bool:
        """Whether the next batch was sampled before the trainer was restarted."""
        return self.position.batch < self._sealed

    def stored_batches(self) -> list[dict[str, Rows]]:
        """Return the rollouts of batches that were sampled before the restart, by uid in the order of the batch."""
        numbers = range(self.position.batch, self._sealed)
        return [
            {uid: list(rows) for uid, rows in groupby(self.policy.rows(number), key=lambda row: row["uid"])}
            for number in numbers
        ]

    def submit(self, parts: Sequence[Part], *, columns: Sequence[str], wait_s: float) -> None:
        """Submit the groups of the next batch, in its order.

        columns: names of the run's columns that outputs may have. wait_s: the seconds to wait until the run has
            capacity for the groups. Raises ResourceExhaustedError afterwards.
        """
        self._begin(list(dict.fromkeys(uid for part in parts for uid in part.uids)), wait_s)
        for output, uids, version in parts:
            if output.get("trajectory_ids") is None:
                output = {**output, "uids": list(uids)}
            present = [name for name in columns if output.get(name) is not None]
            self.rollouts.submit(from_skyrl(output, round=self._round, policy_version=version, columns=present))
        self._round += 1

    def _begin(self, uids: Sequence[str], wait_s: float) -> None:
        waiting = list(uids)
        while waiting:
            admitted = set(self.rollouts.begin_groups(waiting, round=self._round, wait_s=wait_s))
            if not admitted:
                raise ResourceExhaustedError(
                    f"run {self.run!r} has no capacity for another batch, because it stores all batches since the last "
                    "checkpoint; lower trainer.ckpt_interval, or raise max_buffered_batches and max_buffered_bytes in "
                    "settings"
                )
            waiting = [uid for uid in waiting if uid not in admitted]

    def required_batch(self) -> dict[str, Any]:
        """Wait for the next batch of each model, until it is published or waits for columns."""
        batches = self.next_batch()
        if batches is None:
            raise FailedPreconditionError(f"run {self.run!r} was finished before the training; use another run")
        return batches
