"""A trainer's connection to its run, from creating the run to the last commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from gristmill import Position, RolloutClient, Shard, TrainerClient
from gristmill.adapters._core.checkpoint import OpenFile, States, write_states
from gristmill.adapters._core.options import Gristmill
from gristmill.errors import AlreadyExistsError, BatchFailedError, FailedPreconditionError

RESTARTED = "trainer_restarted"
"""The reason for dropping groups that a restarted trainer samples again."""


class Processes(Protocol):
    """The processes of a trainer with a session on every rank. All processes call its methods in the same order."""

    @property
    def is_main(self) -> bool: ...

    def wait(self) -> None:
        """Return after every process has called this method."""


class _OneProcess:
    is_main = True

    def wait(self) -> None:
        pass


class RunSession:
    """Creates a run, or uses an existing one, and connects to it. Call `resume` before other methods.

    settings: the settings of the run to create; None if other programs create it.
    dp_size: the trainer's number of data-parallel ranks. If an existing run has another number, `resume` makes the
        service plan its untrained batches again.
    auto_commit: whether trained batches are freed immediately, because the trainer writes no checkpoints.
    rank, processes: for a trainer with a session on every rank; None for one session of all ranks.
    reading: further arguments of `TrainerClient`, such as `device` and `columns`.
    """

    def __init__(
        self,
        gristmill: Gristmill,
        settings: Mapping[str, Any] | None,
        *,
        dp_size: int,
        auto_commit: bool,
        rank: int | None = None,
        processes: Processes | None = None,
        **reading: Any,
    ) -> None:
        self.run = gristmill.run
        self._processes = processes or _OneProcess()
        self.rollouts = RolloutClient(gristmill.address, gristmill.run, timeout_s=gristmill.timeout_s)
        models = ("policy", "critic") if "critic_mini_batch_size" in (settings or ()) else ("policy",)
        options = {"dp_size": dp_size, "auto_commit": auto_commit, "timeout_s": gristmill.timeout_s} | reading
        ranks: dict[str, Any] = {"ranks": "all"} if rank is None else {"rank": rank}
        self.trainers: dict[str, Any] = {}
        try:
            for model in models:
                self.trainers[model] = TrainerClient(gristmill.address, gristmill.run, model=model, **ranks, **options)
            self._batches = {model: iter(trainer) for model, trainer in self.trainers.items()}
            if settings is not None and self._processes.is_main:
                self._create(settings)
            self._processes.wait()
        except BaseException:
            self.close()
            raise

    def _create(self, settings: Mapping[str, Any]) -> None:
        try:
            self.rollouts.create_run(settings)
        except AlreadyExistsError:
            self.rollouts.create_run({**settings, "dp_size": self.config["dp_size"]})

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration."""
        return self.rollouts.status().config

    @property
    def policy(self) -> Any:
        """The client of the policy's ranks."""
        return self.trainers["policy"]

    @property
    def position(self) -> Position:
        position: Position = self.policy.position
        return position

    # Checkpoints.

    def resume(self, states: States | None, *, only_new_run: bool = False) -> None:
        """Resume every model at a checkpoint's position, and free the batches before it.

        states: the checkpoint's states; None: the committed position. only_new_run: whether to raise
            FailedPreconditionError if training starts without a checkpoint on a run that was already trained.
        """
        for model, trainer in self.trainers.items():
            trainer.load_state_dict({} if states is None else states.get(model, {}))
            if only_new_run and states is None and trainer.position != Position(0):
                raise FailedPreconditionError(
                    f"run {self.run!r} was trained up to {trainer.position}, and this training starts from the "
                    "beginning; resume from the last checkpoint, or use another run"
                )
        self.commit()

    def give_up_unsealed(self) -> None:
        """Drop the groups that are in no batch, because the trainer samples them again."""
        for group in self.rollouts.groups():
            if not group.is_consumed:
                self.rollouts.abort_group(group.uid, round=group.round, reason=RESTARTED)

    def states(self) -> States:
        """Return the state of every model, for a checkpoint."""
        return {model: trainer.state_dict() for model, trainer in self.trainers.items()}

    def save(self, folder: str | Path, open_file: OpenFile = open) -> States:
        """Write the states to a checkpoint's folder, and return them for `commit`. Call it before the trainer marks the
        checkpoint as complete."""
        states = self.states()
        if self._processes.is_main:
            write_states(folder, states, open_file)
        return states

    def commit(self, states: States | None = None) -> None:
        """Free the batches before a complete checkpoint. states: of the checkpoint; None: the current position."""
        self._processes.wait()
        # Every process commits, because a token that is bound to a rank commits only for this rank.
        for model, trainer in self.trainers.items():
            trainer.commit(None if states is None else states[model])

    # Training.

    def announce(self, version: int) -> None:
        """Announce a policy version, unless a later one was announced before the trainer was restarted."""
        if self._processes.is_main:
            self.policy.announce_policy_version(version, keep_later=True)

    def next_batch(self) -> dict[str, Any] | None:
        """Wait for the next batch of every model. Return None at the end of the run.

        Raises BatchFailedError for a batch that could not be built. The next call continues after it.
        """
        batches = {model: self._next_of(model) for model in self.trainers}
        return None if None in batches.values() else batches

    def _next_of(self, model: str) -> Any:
        try:
            return next(self._batches[model], None)
        except BatchFailedError:
            # A generator that has raised an error is exhausted.
            self._batches[model] = iter(self.trainers[model])
            raise

    def batches(self) -> Iterator[dict[str, Any]]:
        """Iterate over the batches up to the end of the run."""
        while (batch := self.next_batch()) is not None:
            yield batch

    def write_back(
        self, awaits: Iterable[str], names: Mapping[str, str], computed: Iterable[tuple[Shard, Mapping[str, Any]]]
    ) -> None:
        """Write the columns for which a batch waits.

        awaits: `batch.awaits`. names: the trainer's name of each column. computed: the values of each shard, by the
            trainer's names.
        """
        for shard, values in computed:
            self.policy.write(shard, {column: values[names[column]] for column in awaits})

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last batch, named `gristmill/...`."""
        figures: dict[str, float] = self.policy.metrics()
        return figures

    def close(self) -> None:
        for trainer in self.trainers.values():
            trainer.close()
        self.rollouts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
