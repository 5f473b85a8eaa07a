"""The client of a trainer in which one process, the controller, hands all ranks their work."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.transport import TIMEOUT_S
from gristmill._client.trainer.trainer_batch import BatchCore
from gristmill._client.trainer.trainer_core import TrainerCore
from gristmill._torch.rows import Shard
from gristmill._wire.addresses import Position
from gristmill.errors import FailedPreconditionError

if TYPE_CHECKING:
    import torch

_LAUNCH_BYTES = 16


class MiniBatch(tuple[Shard, ...]):
    """The shards of one mini-batch in the order of ranks: `mini_batch[rank]`; made by a WholeBatch.

    position: which mini-batch, in training order.
    """

    position: Position
    _ack: Callable[[], None] | None

    def __new__(cls, shards: Iterable[Shard], position: Position, ack: Callable[[], None] | None = None) -> Self:
        made = super().__new__(cls, shards)
        made.position, made._ack = position, ack
        return made

    def __repr__(self) -> str:
        rows = sum(map(len, self))
        return f"<MiniBatch {self.position}: {rows} rows in the shards of {len(self)} ranks>"

    def ack(self) -> None:
        """Says that the optimizer step on this mini-batch is made: every rank moves on to the next. As `Shard.ack`."""
        if self._ack is None:
            raise FailedPreconditionError(
                f"{self.position}: these shards were read outside of the training order; acknowledge the shards of "
                "mini_batches(), or the batch"
            )
        self._ack()


class WholeBatch(BatchCore[MiniBatch]):
    """A batch with the shards of all ranks, as Batch is with one rank's; made by iterating an AllRanksClient.

    Where Batch gives a shard this gives a MiniBatch, so that `list(batch.epoch())` has shards by `[mini_batch][rank]`.
    """


class AllRanksClient(TrainerCore[WholeBatch]):
    """All data-parallel ranks of a trainer whose controller gives them their work: its calls are for every rank.

    Arguments and calls are those of TrainerClient without a rank. An acknowledgement is of all ranks; where a crash
    left them at different mini-batches, they go on from the first that not all of them had acknowledged.

    Worked example:

        trainer = AllRanksClient("127.0.0.1:50051", run="my-run", dp_size=workers.dp_size)
        for batch in trainer:                                    # waits; ends when the run is finished
            for mini_batch in batch.mini_batches():              # one optimizer step each
                workers.train([(shard["sequences"], shard["advantages"]) for shard in mini_batch])
                mini_batch.ack()

    A trainer that goes through its mini-batches and epochs itself takes the whole batch at once:

        for batch in trainer:
            workers.train_batch(list(batch.epoch()))             # [mini_batch][rank]
            batch.ack()
    """

    def __init__(
        self,
        address: str,
        run: str,
        *,
        dp_size: int | None = None,
        model: str = "policy",
        device: torch.device | str | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        auto_commit: bool = True,
        prefetch: int = 1,
        columns: Sequence[str] | None = None,
        timeout_s: float = TIMEOUT_S,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(
            address,
            run,
            dp_size=dp_size,
            model=model,
            device=device,
            dtypes=dtypes,
            auto_commit=auto_commit,
            acks=True,
            prefetch=prefetch,
            columns=columns,
            timeout_s=timeout_s,
            credentials=credentials,
        )

    def load_state_dict(self, state: Mapping[str, Any], give_up_reason: str | None = None) -> None:
        """Puts all ranks back to the position that `state_dict` gave, as a new incarnation of the trainer, before its
        first batch. All else, errors too, is as in `TrainerClient.load_state_dict`."""
        self._resume(state, None, give_up_reason)

    def _make_launch_id(self) -> str:
        return secrets.token_hex(_LAUNCH_BYTES)

    def _own_ranks(self, dp_size: int) -> range:
        return range(dp_size)

    @property
    def _name(self) -> str:
        return f"run {self.run!r}"

    def _batch(self, number: int, plan: dict[str, Any], awaits: frozenset[str]) -> WholeBatch:
        return WholeBatch(self, number, plan, self.model, self._epochs, awaits)

    def open_shard(
        self, position: Position, ack: Callable[[], None] | None = None, *, forward: bool = False
    ) -> MiniBatch:
        """The shards of all ranks, as `TrainerClient.open_shard` gives one. ack: what the MiniBatch's `ack`
        does, if anything."""
        shards = (self._shard(opened, position) for opened in self._open(position, forward))
        return MiniBatch(shards, position, ack)
