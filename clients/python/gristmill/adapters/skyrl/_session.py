"""A trainer's connection to its run: rollouts in, batches out, its place in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from gristmill import AllRanksClient, RolloutClient, WholeBatch
from gristmill.adapters.skyrl._options import Gristmill
from gristmill.converters import from_skyrl
from gristmill.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError

Rows = list[dict[str, Any]]


class Part(NamedTuple):
    """Groups of a batch: a generator's output, the uid of each of its rows, and the version of the weights that sampled
    it."""

    output: Mapping[str, Any]
    uids: Sequence[str]
    version: int


class Session:
    """Creates the run, or finds it. `resume` comes before everything else.

    settings: of `run_settings`. auto_commit: whether no checkpoints are made, so that what is trained is let go.
    """

    def __init__(self, gristmill: Gristmill, settings: Mapping[str, Any], *, auto_commit: bool) -> None:
        self._run, self._timeout_s = gristmill.run, gristmill.timeout_s
        self._columns = [column["name"] for column in settings.get("columns", ())]
        self._rollouts = RolloutClient(gristmill.address, gristmill.run, timeout_s=gristmill.timeout_s)
        models = ("policy", "critic") if "critic_mini_batch_size" in settings else ("policy",)
        self._trainers = {
            model: AllRanksClient(
                gristmill.address,
                gristmill.run,
                dp_size=settings["dp_size"],
                model=model,
                auto_commit=auto_commit,
                timeout_s=gristmill.timeout_s,
            )
            for model in models
        }
        self._batches = {model: iter(trainer) for model, trainer in self._trainers.items()}
        self._round = self._sealed = 0
        try:
            self._rollouts.create_run(self._as_created(settings))
        except BaseException:
            self.close()
            raise

    def _as_created(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A run that there is may have another dp_size: resuming cuts its batches anew."""
        try:
            return {**settings, "dp_size": self._rollouts.status().config["dp_size"]}
        except NotFoundError:
            return dict(settings)

    @property
    def policy(self) -> AllRanksClient:
        return self._trainers["policy"]

    # The place in training.

    def resume(self, states: Mapping[str, Any] | None) -> None:
        """Puts the run to a checkpoint, or to its beginning. Groups that were not sealed when the trainer before it
        ended are given up: they are sampled again.

        states: of `states`; None where training begins anew. Raises FailedPreconditionError where that run does not.
        """
        for model, trainer in self._trainers.items():
            trainer.load_state_dict({} if states is None else states[model])
            if states is None and trainer.position.batch:
                raise FailedPreconditionError(
                    f"run {self._run!r}: its trainer came as far as batch {trainer.position.batch}, and this training "
                    "begins anew; resume the training's last checkpoint, or give another run"
                )
            trainer.commit()
        for group in self._rollouts.groups():
            self._round = max(self._round, group.round + 1)
            if not group.is_consumed:
                self._rollouts.abort_group(group.uid, round=group.round, reason="trainer_restarted")
        self._sealed = self._rollouts.status().batches_sealed

    def states(self) -> dict[str, Any]:
        """The place in training, for the checkpoint."""
        return {model: trainer.state_dict() for model, trainer in self._trainers.items()}

    def commit(self, states: Mapping[str, Any]) -> None:
        """Frees what is before a checkpoint that is whole."""
        for model, trainer in self._trainers.items():
            trainer.commit(states[model])

    def announce(self, version: int) -> None:
        """Says that workers have these weights. A trainer that was put back makes versions again that were announced:
        versions never go back."""
        if version > self._rollouts.policy_version():
            self.policy.announce_policy_version(version)

    # Rollouts.

    @property
    def holds_next_batch(self) -> bool:
        """Whether the next batch was sampled before the trainer was restarted."""
        return self.policy.position.batch < self._sealed

    def held_batches(self) -> list[dict[str, Rows]]:
        """The rollouts of the batches that are held, each by uid in the batch's order."""
        numbers = range(self.policy.position.batch, self._sealed)
        return [
            {uid: list(rows) for uid, rows in groupby(self.policy.rows(number), key=lambda row: row["uid"])}
            for number in numbers
        ]

    def submit(self, parts: Sequence[Part]) -> None:
        """Submits the groups of the next batch, in its order. Raises ResourceExhaustedError where the run has no room
        for another batch."""
        self._begin(list(dict.fromkeys(uid for part in parts for uid in part.uids)))
        for output, uids, version in parts:
            if output.get("trajectory_ids") is None:
                output = {**output, "uids": list(uids)}
            columns = [name for name in self._columns if output.get(name) is not None]
            self._rollouts.submit(from_skyrl(output, round=self._round, policy_version=version, columns=columns))
        self._round += 1

    def _begin(self, uids: Sequence[str]) -> None:
        waiting = list(uids)
        while waiting:
            admitted = set(self._rollouts.begin_groups(waiting, round=self._round, wait_s=self._timeout_s))
            if not admitted:
                raise ResourceExhaustedError(
                    f"run {self._run!r}: it has no room for another batch, because it keeps all since the last "
                    "checkpoint; lower trainer.ckpt_interval, or raise max_buffered_batches and max_buffered_bytes in "
                    "settings"
                )
            waiting = [uid for uid in waiting if uid not in admitted]

    # Batches.

    def next_batch(self) -> dict[str, WholeBatch]:
        """The next batch of each model; waits until it is published, or forward where it waits for columns."""
        found: dict[str, WholeBatch] = {}
        for model, batches in self._batches.items():
            batch = next(batches, None)
            if batch is None:
                raise FailedPreconditionError(
                    f"run {self._run!r}: the run was finished before the training; give the training another run"
                )
            found[model] = batch
        return found

    def close(self) -> None:
        for trainer in self._trainers.values():
            trainer.close()
        self._rollouts.close()
