"""TRL's session: each rank has a session, and all ranks share a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather

from gristmill.adapters._core.checkpoint import States
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.session import RunSession
from gristmill.errors import FailedPreconditionError

_log = logging.getLogger("gristmill")


class _Ranks:
    """The accelerator's processes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def is_main(self) -> bool:
        return bool(self._accelerator.is_main_process)

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()


class Session(RunSession):
    """One rank's session. All ranks call every method, in the same order.

    auto_commit: whether to commit batches at once, because TRL writes no checkpoints.
    """

    def __init__(
        self, gristmill: Gristmill, settings: Mapping[str, Any], accelerator: Accelerator, *, auto_commit: bool
    ) -> None:
        self._accelerator, self._auto_commit = accelerator, auto_commit
        super().__init__(
            gristmill,
            settings,
            dp_size=accelerator.num_processes,
            auto_commit=auto_commit,
            rank=accelerator.process_index,
            processes=_Ranks(accelerator),
            device=accelerator.device,
            # TRL uses only the width of other masks, and their product with this mask.
            dtypes={"tokens": torch.int64, "attention_mask": torch.int64},
        )

    @cached_property
    def incarnation(self) -> int:
        """The number of starts of the run's trainer, including this session."""
        return max(model.incarnation for model in self.rollouts.status().models.values())

    def save_checkpoint(self, directory: Path) -> States:
        """Write the states to a checkpoint, and return them for `commit`. Raises FailedPreconditionError if ranks are
        at different positions."""
        position = torch.tensor([*self.position], device=self._accelerator.device)
        positions = gather(position).view(-1, len(position))
        if (positions != position).any():
            places = ", ".join(str(type(self.position)(*place)) for place in positions.tolist())
            raise FailedPreconditionError(
                f"run {self.run!r}: a checkpoint has one position, but the ranks are at {places}; make the same "
                "optimizer steps on all ranks"
            )
        directory.mkdir(parents=True, exist_ok=True)
        return self.save(directory)

    def needs_commit(self, train_batch_size: int) -> bool:
        """Return whether the run has no capacity for the next batch until a batch is committed, so that training would
        wait forever."""
        is_full = torch.zeros(1, dtype=torch.uint8, device=self._accelerator.device)
        if self._accelerator.is_main_process and not self._auto_commit and self._is_full(train_batch_size):
            _log.warning(
                "run %r: saving a checkpoint early, because the run has no capacity for another batch; raise "
                "max_buffered_batches and max_buffered_bytes in its settings, or save more often",
                self.run,
            )
            is_full += 1
        return bool(broadcast(is_full))

    def _is_full(self, train_batch_size: int) -> bool:
        status = self.rollouts.status()
        if status.batches_sealed > self.position.batch or status.finished:
            return False
        takes_none = status.batches_sealed - status.batches_freed >= status.config["max_buffered_batches"]
        return takes_none or status.groups_open + status.groups_complete + status.groups_room < train_batch_size
