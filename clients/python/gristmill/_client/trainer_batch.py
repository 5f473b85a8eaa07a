"""One batch as a rank trains it: the order of its mini-batches, over all epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from gristmill._wire.addresses import Position
from gristmill.torch import Shard


class Source(Protocol):
    """The part of TrainerClient that a batch uses."""

    @property
    def position(self) -> Position: ...

    def open_shard(
        self, position: Position, acknowledge: Callable[[], None] | None = None, *, forward: bool = False
    ) -> Shard: ...

    def expect(self, positions: Iterable[Position], *, forward: bool = False) -> None: ...

    def acknowledge(self, position: Position, following: Position) -> None: ...


class Batch:
    """A published batch, or one that waits for columns; made by iterating a TrainerClient.

    number: from 0. plan: which rows train when and where, as `gristmill plan` prints it.
    awaits: names of the columns that trainers had to write yet when it was given: their values for each shard of
        `forward()`, with `TrainerClient.write`. `mini_batches()` waits until they are there.
    """

    def __init__(
        self,
        source: Source,
        number: int,
        plan: dict[str, Any],
        model: str,
        epochs: int,
        awaits: frozenset[str] = frozenset(),
    ) -> None:
        self.number = number
        self.plan = plan
        self.awaits = awaits
        self._source = source
        self._count: int = sum(mini_batch["model"] == model for mini_batch in plan["mini_batches"])
        self._epochs = epochs

    def __len__(self) -> int:
        """Optimizer steps that the batch is: its mini-batches, once an epoch."""
        return self._count * self._epochs

    def forward(self) -> Iterator[Shard]:
        """This rank's shards of the whole batch, each once in plan order, for what must be known before the first
        optimizer step. They cannot be acknowledged, and may be read again afterwards.

            old = {shard.position.mini_batch: [old_log_probs(micro) for micro in shard.micro_batches()]
                   for shard in batch.forward()}

        While the batch waits for columns they are its forward shards: without these, and without advantages, returns
        and rewards that depend on them.
        """
        order = [Position(self.number, 0, index) for index in range(self._count)]
        with self._ahead():
            for index, position in enumerate(order):
                shard = self._source.open_shard(position, forward=bool(self.awaits))
                # After the forward pass comes the training, of other shards where columns have to be written before.
                training = [] if self.awaits else [self._source.position]
                self._source.expect([*order[index + 1 :], *training], forward=bool(self.awaits))
                yield shard
                del shard

    def mini_batches(self) -> Iterator[Shard]:
        """This rank's shards in training order, epoch after epoch, from the rank's place on: after a resume in the
        middle of a batch these are the mini-batches not trained yet. Acknowledge each with its `ack`."""
        order = [Position(self.number, epoch, index) for epoch in range(self._epochs) for index in range(self._count)]
        order.append(Position(self.number + 1))
        with self._ahead():
            for index, position in enumerate(order[:-1]):
                if position >= self._source.position:
                    shard = self._source.open_shard(position, self._acknowledging(position, order[index + 1]))
                    self._source.expect(order[index + 1 :])
                    yield shard
                    del shard

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Within it shards are opened ahead of their use, while the order is followed: who leaves it half-way may go
        anywhere, even to another incarnation of the trainer."""
        try:
            yield
        except GeneratorExit:
            self._source.expect(())
            raise

    def _acknowledging(self, position: Position, following: Position) -> Callable[[], None]:
        return lambda: self._source.acknowledge(position, following)
