"""One `train()`'s connection to its run: batches, positions in checkpoints, versions."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather

from gristmill import Batch, RolloutClient, Shard, TrainerClient
from gristmill._wire.addresses import Position
from gristmill.adapters.trl._options import Gristmill
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

_log = logging.getLogger("gristmill")

STATE_FILE = "gristmill.json"
_BUFFERED_BATCHES = 4
"""The service's own default."""


class Session:
    """A rank's clients. Every method is called by all ranks, in the same order.

    Creates the run, or finds it, and puts the ranks where the checkpoint is; without one, where the run was committed.

    checkpoint: its directory, None where training begins anew. auto_commit: whether no checkpoints are made.
    """

    def __init__(
        self,
        options: Gristmill,
        settings: Mapping[str, Any],
        accelerator: Accelerator,
        *,
        checkpoint: str | None,
        auto_commit: bool,
    ) -> None:
        self._options, self._accelerator, self._auto_commit = options, accelerator, auto_commit
        state = {} if checkpoint is None else _read_state(checkpoint)
        self.rollouts = RolloutClient(options.address, options.run, timeout_s=options.timeout_s)
        self._trainer = TrainerClient(
            options.address,
            options.run,
            accelerator.process_index,
            dp_size=accelerator.num_processes,
            device=accelerator.device,
            # Of the other masks TRL reads a width, and their product with this one.
            dtypes={"tokens": torch.int64, "attention_mask": torch.int64},
            auto_commit=auto_commit,
            timeout_s=options.timeout_s,
        )
        try:
            if accelerator.is_main_process:
                self.rollouts.create_run(settings if checkpoint is None else self._as_created(settings))
            accelerator.wait_for_everyone()
            self._trainer.load_state_dict(state)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                self._trainer.commit()
        except BaseException:
            self.close()
            raise

    def _as_created(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with the number of ranks that the run has: it is cut anew for others when they load their state,
        but for nothing else."""
        return dict(settings) | {"dp_size": self.rollouts.status().config["dp_size"]}

    @property
    def position(self) -> Position:
        return self._trainer.position

    @cached_property
    def incarnation(self) -> int:
        """How often the run's trainer was started, up to this session."""
        return max(model.incarnation for model in self.rollouts.status().models.values())

    def batches(self) -> Iterator[Batch]:
        return iter(self._trainer)

    def write(self, shard: Shard, columns: Mapping[str, Any]) -> None:
        self._trainer.write(shard, columns)

    def save(self, directory: Path) -> dict[str, Any]:
        """Puts the position into a checkpoint, and returns it as `commit` takes it. Raises FailedPreconditionError
        where ranks are at different positions."""
        state = self._trainer.state_dict()
        own = torch.tensor([*self.position], device=self._accelerator.device)
        positions = gather(own).view(-1, len(own))
        if (positions != own).any():
            places = ", ".join(str(Position(*place)) for place in positions.tolist())
            raise FailedPreconditionError(
                f"run {self._options.run!r}: a checkpoint has one position, and the ranks are at {places}; let "
                "all make the same optimizer steps"
            )
        if self._accelerator.is_main_process:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")
        return state

    def commit(self, state: Mapping[str, Any]) -> None:
        """Frees what is before a checkpoint, once all ranks have written theirs."""
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            self._trainer.commit(state)

    def needs_commit(self, train_batch_size: int) -> bool:
        """Whether the run could not take the next batch in until one is committed: training would wait for ever."""
        is_full = torch.zeros(1, dtype=torch.uint8, device=self._accelerator.device)
        if self._accelerator.is_main_process and not self._auto_commit and self._is_full(train_batch_size):
            _log.warning(
                "run %r: a checkpoint is made now, as the run holds all that it may until one is; raise "
                "max_buffered_batches and max_buffered_bytes in its settings, or save more often",
                self._options.run,
            )
            is_full += 1
        return bool(broadcast(is_full))

    def _is_full(self, train_batch_size: int) -> bool:
        found = self.rollouts.status()
        if found.batches_sealed > self.position.batch or found.finished:
            return False
        limit = found.config["max_buffered_batches"]
        takes_none = found.batches_sealed - found.batches_freed >= limit
        return takes_none or found.groups_open + found.groups_complete + found.groups_room < train_batch_size

    def announce(self, version: int) -> None:
        """Announces a version, unless a later one was before the trainer was killed: versions never go back."""
        if self._accelerator.is_main_process and version > self.rollouts.policy_version():
            self._trainer.announce_policy_version(version)

    def close(self) -> None:
        self._trainer.close()
        self.rollouts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read_state(checkpoint: str) -> dict[str, Any]:
    path = Path(checkpoint) / STATE_FILE
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"{path}: cannot read where training was: {error}; take a checkpoint that this trainer wrote whole"
        ) from None
    return found
