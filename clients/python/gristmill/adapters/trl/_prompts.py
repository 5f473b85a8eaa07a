"""Reads the prompts of TRL's data set in TRL's order, from a given batch on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import skip_first_batches

from gristmill.errors import InvalidArgumentError


class Prompts:
    """Reads prompts batch by batch.

    loader: TRL's data loader, which returns a rank's rows of one generation (a batch of the run) at a time. sampler:
    the loader's sampler, which draws a new order for every epoch.

    Omits prompts at the end of an epoch that do not fill a batch. Raises InvalidArgumentError if no batch is filled.
    """

    def __init__(self, loader: Any, sampler: Any) -> None:
        self._loader, self._sampler = loader, sampler
        self._drawn = 0
        if not len(self):
            raise InvalidArgumentError(
                f"train_dataset: {sampler.num_samples} prompts do not fill a batch of {sampler.batch_size}; add "
                "prompts, or lower per_device_train_batch_size or gradient_accumulation_steps"
            )

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return len(self._loader)

    def batches(self, number: int) -> Iterator[Any]:
        """Yield this rank's rows of each batch, from batch `number` of the whole training to the end of its epoch."""
        epoch, first = divmod(number, len(self))
        while self._drawn < epoch:
            next(iter(self._sampler), None)
            self._drawn += 1
        self._drawn += 1
        yield from skip_first_batches(self._loader, first) if first else self._loader
