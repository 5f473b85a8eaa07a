"""A batch of a trainer: its plan, its metrics, and the order of its mini-batches over all epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Protocol

from gristmill._torch.rows import Shard
from gristmill._wire.addresses import Position
from gristmill._wire.columns import Array

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    S = TypeVar("S", default=Shard)
    S_co = TypeVar("S_co", covariant=True)
else:
    from typing import TypeVar

    S = TypeVar("S")
    S_co = TypeVar("S_co", covariant=True)

METRICS_PREFIX = "gristmill/"


class Plan(dict[str, Any]):
    """A batch's plan, as `gristmill plan` prints it. Its repr is one line."""

    def __repr__(self) -> str:
        sizes = f"{_some(self['prompts'], 'prompt')}, {_some(self['rows'], 'row')}"
        steps = f"{_some(self['optimizer_steps'], 'optimizer step')} on {_some(self['dp_size'], 'rank')}"
        padding = self["metrics"].get("padding_share", 0.0)
        return f"<Plan of batch {self['batch']}: {sizes}, {steps}, {padding:.1%} padding; keys {', '.join(self)}>"


def _some(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def batch_metrics(plan: Mapping[str, Any], waited_s: float, prefix: str) -> dict[str, float]:
    """Return a batch's metrics in one flat dictionary, for experiment trackers. waited_s: how long the trainer waited
    for the batch."""
    whole = {name: plan[name] for name in ("batch", "prompts", "rows_received", "rows", "optimizer_steps")}
    counts = {f"counts/{name}": count for name, count in plan["counts"].items()}
    tags = {
        f"tags/{tag or 'none'}/{name}": figure
        for tag, figures in plan["tag_metrics"].items()
        for name, figure in figures.items()
    }
    figures = {**whole, "waited_s": waited_s, **plan["metrics"], **counts, **tags}
    return {f"{prefix}{name}": value for name, value in figures.items()}


class Source(Protocol[S_co]):
    """The part of a trainer's client that a batch uses."""

    @property
    def position(self) -> Position: ...

    def ack(self, position: Position, following: Position) -> None: ...

    def table(self, batch: int) -> dict[str, Array]: ...

    def _open(self, position: Position, *, forward: bool = ..., ack: Callable[[], None] | None = ...) -> S_co: ...

    def _expect(self, positions: Iterable[Position], *, forward: bool = ...) -> None: ...


class Batch(Generic[S]):
    """A batch that is published, or that waits for columns. Iterating a `TrainerClient` yields batches.

    The methods yield a `Shard` for each mini-batch if the client has one rank, else a `MiniBatch` with the shards of
    all ranks of the client.

    number: from 0. plan: which rows are trained when and by which rank, as `gristmill plan` prints it.
    awaits: names of the columns that were still missing when the client received the batch. Write them for each shard
        of `forward()` with `TrainerClient.write`. `mini_batches()` waits for them.
    """

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
        size = f"{_some(self.plan['prompts'], 'prompt')}, {_some(self.plan['rows'], 'row')}"
        return f"<Batch {self.number}: {size}, {parts}{awaits}>"

    def __len__(self) -> int:
        """Return the number of optimizer steps: mini-batches times epochs."""
        return self._count * self._epochs

    def __iter__(self) -> Iterator[S]:
        """Yield the mini-batches, like `mini_batches()`."""
        return self.mini_batches()

    def mini_batches(self) -> Iterator[S]:
        """Yield the mini-batches in training order, epoch after epoch, starting at the trainer's position. After a
        resume, this omits mini-batches that are trained already. Acknowledge each with its `ack`."""
        order = self._order()
        with self._ahead():
            for index, position in enumerate(order[:-1]):
                if position >= self._source.position:
                    mini_batch = self._source._open(position, ack=self._ack_of(position, order[index + 1]))
                    self._source._expect(order[index + 1 :])
                    yield mini_batch
                    del mini_batch

    def forward(self) -> Iterator[S]:
        """Yield each mini-batch of the batch once, in plan order, to compute values before the first optimizer step.
        These mini-batches cannot be acknowledged. They may be read again later.

            old = {shard.position.mini_batch: [old_logprobs(micro) for micro in shard.micro_batches()]
                   for shard in batch.forward()}

        While the batch waits for columns, this yields forward shards: without these columns, and without advantages,
        returns and rewards that depend on them.
        """
        # Training follows. It reads other shards if columns must be written first.
        return self._once(forward=bool(self.awaits), then=[] if self.awaits else [self._source.position])

    def epoch(self) -> Iterator[S]:
        """Yield each mini-batch of the batch once, in plan order, for a trainer that repeats epochs itself and then
        calls the batch's `ack`. Waits until awaited columns are written."""
        return self._once(forward=False, then=[])

    def ack(self) -> None:
        """Acknowledge every mini-batch of every epoch, so that the trainer continues with the next batch. Idempotent.
        Raises the errors of `Shard.ack`."""
        for position, following in pairwise(self._order()):
            if position >= self._source.position:
                self._source.ack(position, following)

    def table(self) -> dict[str, Array]:
        """Return the numbers of the batch's training rows without their tokens: a NumPy array by name, with one entry
        per row in the order of the plan. `pandas.DataFrame`, `polars.DataFrame` and `pyarrow.table` each take it.

            table = batch.table()
            long = table["tokens"] > 4096
            print(table["advantage"][long].mean(), table["advantage"][~long].mean())

        Names are those of plans and shards, such as `uid`, `sample`, `step_first`, `rank`, `tokens`, `loss_tokens`,
        `score` and `advantage` (NaN while the batch waits for columns that advantages depend on).
        """
        return self._source.table(self.number)

    def _once(self, *, forward: bool, then: list[Position]) -> Iterator[S]:
        order = self._epoch(0)
        with self._ahead():
            for index, position in enumerate(order):
                mini_batch = self._source._open(position, forward=forward)
                self._source._expect([*order[index + 1 :], *then], forward=forward)
                yield mini_batch
                del mini_batch

    def _epoch(self, epoch: int) -> list[Position]:
        return [Position(self.number, epoch, index) for index in range(self._count)]

    def _order(self) -> list[Position]:
        """Return the positions of the batch, followed by the position after the batch."""
        positions = [position for epoch in range(self._epochs) for position in self._epoch(epoch)]
        return [*positions, Position(self.number + 1)]

    @contextmanager
    def _ahead(self) -> Iterator[None]:
        """Release shards that were opened ahead if the caller stops iterating, because the caller may continue at
        another position or as another incarnation of the trainer."""
        try:
            yield
        except GeneratorExit:
            self._source._expect(())
            raise

    def _ack_of(self, position: Position, following: Position) -> Callable[[], None]:
        return lambda: self._source.ack(position, following)
