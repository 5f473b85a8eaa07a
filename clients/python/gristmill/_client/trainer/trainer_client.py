"""The client of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.transport import TIMEOUT_S
from gristmill._client.trainer.trainer_batch import Batch
from gristmill._client.trainer.trainer_core import TrainerCore
from gristmill._torch.rows import Shard
from gristmill._wire.addresses import Position
from gristmill.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


class TrainerClient(TrainerCore[Batch]):
    """One data-parallel rank's way through a run: batches, their shards as torch tensors, acknowledgements, resuming.

    address, run: as for RolloutClient, also several replicas with commas between. The run exists before the first call.
    rank: this data-parallel rank, from 0.
    dp_size: when given, checked against the run's, so that a trainer of another size does not start unknowingly:
        `load_state_dict` is how it comes back with other ranks.
    model: `policy`, or `critic` where the run has one; each has an order of its own.
    device, dtypes: what tensors become when they are used, such as `device="cuda"` and
        `dtypes={"tokens": torch.int64, "masks": torch.int64, "loss_mask": torch.float32}`: by kind (also `floats`), and
        by name for a tensor or a declared column; left alone, they are as the mapped file has them.
    auto_commit: whether an acknowledgement also commits. Without checkpoints this is what you want; with them, pass
        False and call `commit` after each.
    acks: False for all but one of the processes of a data-parallel rank (tensor, pipeline, context parallel):
        they read the same shards and call `ack` likewise, which then only moves themselves.
    prefetch: how many shards are opened in the background while one is trained, so that the next is there when it is
        asked for, also the next batch's first where that is published already. Each is held in memory, unless it is
        mapped. 0 opens each when it is asked for.
    columns: which of the columns that the run declares are wanted; None: all. No byte of the others is streamed, copied
        or converted.
    timeout_s: for how long a call is tried while the service is away. Waiting for a batch is not bounded.
    credentials: the token and certificates of calls (`gristmill.Credentials`). None: what the environment has, which is
        nothing where no variable is set.

    Worked example:

        trainer = TrainerClient("127.0.0.1:50051", run="my-run", rank=rank, dp_size=dp_size)
        for batch in trainer:                                    # waits; ends when the run is finished
            for shard in batch.mini_batches():                   # one optimizer step each
                for micro in shard.micro_batches():
                    logprobs = micro.logprobs(model(micro["sequences"], micro.position_ids()))
                    loss = -(logprobs * micro["advantages"] * micro["loss_mask"]).sum()
                    (loss * dp_size).backward()                  # DDP and FSDP average: see below
                optimizer.step()
                optimizer.zero_grad()
                shard.ack()

    **The loss.** With a `loss_reduction`, advantages are scaled over the whole mini-batch, so that
    `sum(loss of a token * advantage)`, summed over tokens, micro-batches *and ranks*, is the reduction. A trainer whose
    ranks *average* gradients (DDP, FSDP) divides by dp_size once too often: multiply its loss by `dp_size`. One that
    sums gradients does not. KL and entropy terms find the denominators in `shard.metadata["loss_denominators"]`.

    **Without checkpoints** an acknowledgement commits at once: after a crash the run goes on behind what was
    acknowledged, and what the lost optimizer steps had learned is not offered again.

    **With checkpoints**, save `state_dict()` beside the weights, `commit()` when they are safe, and after a restart
    `load_state_dict(state)` on all ranks before the first batch. Every mini-batch is then trained exactly once by the
    weights that go on living.
    """

    def __init__(
        self,
        address: str,
        run: str,
        rank: int,
        *,
        dp_size: int | None = None,
        model: str = "policy",
        device: torch.device | str | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        auto_commit: bool = True,
        acks: bool = True,
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
            acks=acks,
            prefetch=prefetch,
            columns=columns,
            timeout_s=timeout_s,
            credentials=credentials,
        )
        self.rank = rank

    def load_state_dict(
        self, state: Mapping[str, Any], launch: str | None = None, give_up_reason: str | None = None
    ) -> None:
        """Puts the rank back to the position that `state_dict` gave, as a new incarnation of the trainer; every rank
        calls it, with the state of the same checkpoint, before its first batch. Calls of processes that were started
        earlier are refused from then on, with StaleIncarnationError.

        With another `dp_size` than the run has (given to the constructor), mini-batches that not all ranks have
        acknowledged are planned and cut again for it, from the same rows.

        Call `commit` once all ranks have loaded: where the crash came between saving and `commit`, the batches before
        the state's position are still held, and may be all that there is room for.

        state: of `state_dict`; `{}`, where there is no checkpoint, stands for the committed position, which brings
            ranks together that a crash left at different mini-batches. A state of an earlier gristmill, which does not
            name the run's identity, is not checked against it.
        launch: names this start of the trainer, the same on all its ranks and never used before. Not given, it is
            rank 0's choice, broadcast by torch.distributed (then a collective call of every process); random when
            dp_size is 1; else refused.
        give_up_reason: goes on from a state that is ahead of what the run has acknowledged: the prompt groups that it
            steps over are dropped and counted under this reason. Give it once, after you read what would be lost.

        Raises InvalidArgumentError for a state of another run's name, model or version. Raises FailedPreconditionError
        when the state's position is freed already (committed by a later checkpoint); when the state is of an earlier
        run, which was deleted and created again under the name: load `{}` to begin the new one; and when it is ahead of
        what the run has acknowledged, so that accepted rows would be skipped. The message then says what would be lost
        and which position fits: load the checkpoint of that position, or give `give_up_reason`.
        """
        self._resume(state, launch, give_up_reason)

    def _make_launch_id(self) -> str:
        from gristmill._client.trainer.launch_id import make_launch_id

        return make_launch_id(self._dp_size)

    def _own_ranks(self, dp_size: int) -> range:
        if not 0 <= self.rank < dp_size:
            raise InvalidArgumentError(
                f"run {self.run!r}: rank is {self.rank}; with dp_size {dp_size} it is 0..{dp_size - 1}"
            )
        return range(self.rank, self.rank + 1)

    @property
    def _name(self) -> str:
        return f"run {self.run!r} rank {self.rank}"

    def _batch(self, number: int, plan: dict[str, Any], awaits: frozenset[str]) -> Batch:
        return Batch(self, number, plan, self.model, self._epochs, awaits)

    def open_shard(self, position: Position, ack: Callable[[], None] | None = None, *, forward: bool = False) -> Shard:
        """One shard of this rank, wherever it stands in the training order: mapped where the service's shared memory is
        this machine's, else streamed. May be repeated until its batch is freed.

        A batch up to the rank's own is waited for: a service that comes back makes what it had published again.
        ack: what the shard's `ack` does, if anything. forward: whether the forward shard is wanted, too, while
        the batch waits for columns. Raises NotFoundError for a batch that is freed, BatchFailedError for one that could
        not be made, and FailedPreconditionError for one ahead that is not published yet, or whose columns were lost.
        """
        (opened,) = self._open(position, forward)
        return self._shard(opened, position, ack)
