"""One batch as it is trained: the order of its mini-batches, over all epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from gristmill._torch.rows import Shard
from gristmill._wire.addresses import Position

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class Source(Protocol[S_co]):
    """The part of a trainer's client that a batch uses."""

    @property
    def position(self) -> Position: ...

    def open_shard(
        self, position: Position, ack: Callable[[], None] | None = None, *, forward: bool = False
    ) -> S_co: ...

    def expect(self, positions: Iterable[Position], *, forward: bool = False) -> None: ...

    def ack(self, position: Position, following: Position) -> None: ...


class BatchCore(Generic[S]):
    """S: what of a mini-batch a client gives, a rank's shard or those of all ranks."""

    def __init__(
        self,
        source: Source[S],
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

    def __repr__(self) -> str:
        epochs = f" in each of {self._epochs} epochs" if self._epochs > 1 else ""
        awaits = f", awaits {', '.join(sorted(self.awaits))}" if self.awaits else ""
        parts = f"{self._count} mini-batch{'es' * (self._count != 1)}{epochs}"
        prompts, rows = self.plan["prompts"], self.plan["rows"]
        size = f"{prompts} prompt{'s' * (prompts != 1)}, {rows} row{'s' * (rows != 1)}"
        return f"<{type(self).__name__} {self.number}: {size}, {parts}{awaits}>"

    def __len__(self) -> int:
        """Optimizer steps that the batch is: its mini-batches, once an epoch."""
        return self._count * self._epochs

    def forward(self) -> Iterator[S]:
        """The shards of the whole batch, each once in plan order, for what must be known before the first optimizer
        step. They cannot be acknowledged, and may be read again afterwards.

            old = {shard.position.mini_batch: [old_logprobs(micro) for micro in shard.micro_batches()]
                   for shard in batch.forward()}

        While the batch waits for columns they are its forward shards: without these, and without advantages, returns
        and rewards that depend on them.
        """
        # After the forward pass comes the training, of other shards where columns have to be written before.
        return self._once(forward=bool(self.awaits), then=[] if self.awaits else [self._source.position])

    def epoch(self) -> Iterator[S]:
        """The shards of the whole batch, each once in plan order and as they are trained, for a trainer that goes
        through the epochs itself and then calls `ack` of the batch. Waits until columns that lack are written."""
        return self._once(forward=False, then=[])

    def _once(self, *, forward: bool, then: list[Position]) -> Iterator[S]:
        order = self._epoch(0)
        with self._ahead():
            for index, position in enumerate(order):
                shard = self._source.open_shard(position, forward=forward)
                self._source.expect([*order[index + 1 :], *then], forward=forward)
                yield shard
                del shard

    def mini_batches(self) -> Iterator[S]:
        """The shards in training order, epoch after epoch, from the trainer's place on: after a resume in the middle of
        a batch these are the mini-batches not trained yet. Acknowledge each with its `ack`."""
        order = self._order()
        with self._ahead():
            for index, position in enumerate(order[:-1]):
                if position >= self._source.position:
                    shard = self._source.open_shard(position, self._acking(position, order[index + 1]))
                    self._source.expect(order[index + 1 :])
                    yield shard
                    del shard

    def ack(self) -> None:
        """Says that all of the batch is trained, every mini-batch in every epoch: what `ack` of each would say. The
        trainer moves on to the next batch. Idempotent, and safe to repeat; errors are those of `Shard.ack`."""
        for position, following in pairwise(self._order()):
            if position >= self._source.position:
                self._source.ack(position, following)

    def _epoch(self, epoch: int) -> list[Position]:
        return [Position(self.number, epoch, index) for index in range(self._count)]

    def _order(self) -> list[Position]:
        """The positions of the batch, and the one after it."""
        return [*(place for epoch in range(self._epochs) for place in self._epoch(epoch)), Position(self.number + 1)]

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Within it shards are opened ahead of their use, while the order is followed: who leaves it half-way may go
        anywhere, even to another incarnation of the trainer."""
        try:
            yield
        except GeneratorExit:
            self._source.expect(())
            raise

    def _acking(self, position: Position, following: Position) -> Callable[[], None]:
        return lambda: self._source.ack(position, following)


class Batch(BatchCore[Shard]):
    """A published batch, or one that waits for columns; made by iterating a TrainerClient.

    number: from 0. plan: which rows train when and where, as `gristmill plan` prints it.
    awaits: names of the columns that trainers had to write yet when it was given: their values for each shard of
        `forward()`, with `TrainerClient.write`. `mini_batches()` waits until they are there.
    """
