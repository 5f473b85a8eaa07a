"""A trainer's way through a run, whatever ranks one client stands for: batches and their shards, one after the other.

`TrainerClient` says what each call means; `AllRanksClient` makes the same ones for every rank.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from gristmill._client.connection.credentials import Credentials
from gristmill._client.connection.transport import Transport
from gristmill._client.rollout.requests import check_run
from gristmill._client.trainer.batch_metrics import PREFIX, batch_metrics
from gristmill._client.trainer.plan import Plan
from gristmill._client.trainer.shards.chosen_columns import ChosenColumns
from gristmill._client.trainer.shards.pull import Opened
from gristmill._client.trainer.shards.shard_reader import ShardReader, Wanted
from gristmill._client.trainer.training_place import TrainingPlace
from gristmill._torch.conversion import Conversion
from gristmill._torch.rows import Shard
from gristmill._wire.addresses import MODELS, Position
from gristmill._wire.codecs.row_codec import decode
from gristmill._wire.column_spec import ColumnSpec, tensor_names
from gristmill._wire.rows import to_rows
from gristmill.errors import BatchFailedError, FailedPreconditionError, InvalidArgumentError
from gristmill.v1 import run_pb2, trainer_pb2

if TYPE_CHECKING:
    import torch

    from gristmill._client.trainer.trainer_batch import BatchCore

B = TypeVar("B", bound="BatchCore[Any]")


class TrainerCore(TrainingPlace, Generic[B]):
    """B: what a batch is to this client."""

    def __init__(
        self,
        address: str,
        run: str,
        *,
        dp_size: int | None,
        model: str,
        device: torch.device | str | None,
        dtypes: Mapping[str, torch.dtype] | None,
        auto_commit: bool,
        acks: bool,
        prefetch: int,
        columns: Sequence[str] | None,
        timeout_s: float,
        credentials: Credentials | None,
    ) -> None:
        if model not in MODELS:
            raise InvalidArgumentError(f"model is {model!r}; known are {', '.join(MODELS)}")
        if prefetch < 0:
            raise InvalidArgumentError(f"prefetch is {prefetch}; give how many shards to open ahead, 0 for none")
        if isinstance(columns, str):
            raise InvalidArgumentError(f"columns is {columns!r}; give a list of names, as [{columns!r}]")
        check_run(run)
        super().__init__(
            Transport(address, timeout_s, type(self).__name__, credentials),
            run,
            model,
            dp_size,
            auto_commit=auto_commit,
            acks=acks,
        )
        self._convert = Conversion(device, dtypes)
        self._columns = ChosenColumns(run, columns)
        self._declared: Sequence[ColumnSpec] = ()
        self._reader = ShardReader(
            self._transport,
            run,
            model,
            convert=self._convert,
            columns=self._columns,
            ahead=prefetch,
            place=lambda: self.position,
        )
        # The plan of the batch that was given last, and the seconds that it was waited for.
        self._given: tuple[dict[str, Any], float] | None = None

    def __repr__(self) -> str:
        place = "not asked yet where it is" if self._position is None else f"next is {self._position}"
        return f"<{type(self).__name__} of {self._name} {self._transport.state}: {self.model}, {place}>"

    @abstractmethod
    def _batch(self, number: int, plan: dict[str, Any], awaits: frozenset[str]) -> B:
        """A batch as this client gives it."""

    def _declare(self, columns: Sequence[ColumnSpec]) -> None:
        self._declared = columns
        self._columns.declare(columns)
        self._convert.check(name for column in columns for name in tensor_names(column))

    def _forget_opened(self) -> None:
        self._reader.kept.forget()
        self.expect(())

    # Batches.

    def __iter__(self) -> Iterator[B]:
        """Batches from the ranks' place on, each waited for as long as it takes, until the run is finished.

        Raises BatchFailedError with the reason for a batch that could not be made; iterating again goes on behind it,
        and lets its rows go. One that could not be aligned may be for another `dp_size`: its rows are kept until then.
        (One that failed before this trainer started is stepped over; `load_state_dict` logs a warning.)
        Raises FailedPreconditionError when asked for the next batch before all of this one is acknowledged.
        """
        while (batch := self._next_batch()) is not None:
            yield batch
            if not len(batch):
                # Nothing of it is for this model.
                self._position = Position(batch.number + 1)
            elif self.position.batch == batch.number:
                raise FailedPreconditionError(
                    f"{self._name}: the loop left batch {batch.number} at {self.position}; train its mini_batches() to "
                    "the end and ack() each"
                )

    def metrics(self, prefix: str = PREFIX) -> dict[str, float]:
        """The figures of the batch that iterating gave last, for an experiment tracker: numbers by name.

        The names are `batch`, `prompts`, `rows_received`, `rows` (after merging), `optimizer_steps`, `waited_s` (from
        asking for the batch until it came), those of the plan's `metrics`, such as `score_mean`, `pass_at_n`,
        `padding_share` and `staleness_mean`, those of its `counts` as `counts/NAME`, and of each tag as
        `tags/TAG/NAME`; each after the prefix. All ranks have the same but for `waited_s`: one logs them.

            for batch in trainer:
                wandb.log(trainer.metrics(), step=batch.number)

        Raises FailedPreconditionError before the first batch.
        """
        if self._given is None:
            raise FailedPreconditionError(
                f"{self._name}: the trainer has given no batch yet; call metrics() inside `for batch in trainer`"
            )
        return batch_metrics(*self._given, prefix)

    def _next_batch(self) -> B | None:
        if self._failed == self.position.batch:
            self._go_past(self._failed)
        if self._went_past is not None:
            # The service keeps the rows of failed batches until all ranks go on without them.
            self._send_acknowledgements(self._went_past)
            self._went_past = None
        number, asked = self.position.batch, time.monotonic()
        try:
            answer: trainer_pb2.GetBatchResponse = self._transport.wait(
                lambda wait_s: self._ask_batch(number, wait_s),
                lambda answer: bool(answer.state != trainer_pb2.BATCH_STATE_PENDING),
                inf,
            )
        except BatchFailedError:
            self._failed = number
            raise
        if answer.state == trainer_pb2.BATCH_STATE_END:
            return None
        if answer.HasField("shard"):
            self._reader.found(self._wanted(self.position, forward=False), answer.shard)
        awaits = frozenset(awaited.column for awaited in answer.awaits)
        plan = Plan(json.loads(answer.plan_json))
        self._given = plan, time.monotonic() - asked
        return self._batch(number, plan, awaits)

    def _ask_batch(self, number: int, wait_s: float) -> trainer_pb2.GetBatchResponse:
        # A critic waits for what the policy's ranks are awaited for, all of them.
        ranks = self._ranks if self.model == "policy" else ()
        request = trainer_pb2.GetBatchRequest(
            run=self.run,
            batch=number,
            wait_s=wait_s,
            ranks=ranks,
            trains=MODELS[self.model] if self._acks else run_pb2.MODEL_UNSPECIFIED,
            shard=self._first_shard(),
        )
        response: trainer_pb2.GetBatchResponse = self._transport.call(
            self._transport.trainers.GetBatch, request, wait_s=wait_s
        )
        return response

    def _first_shard(self) -> trainer_pb2.GetShardRequest | None:
        """The shard that is opened first, to be found with its batch; None where each of many ranks has one."""
        wanted = self._wanted(self.position, forward=False)
        return self._reader.request(wanted, wanted.ranks[0]) if len(wanted.ranks) == 1 else None

    # Shards.

    def _open(self, position: Position, forward: bool) -> list[Opened]:
        """The tensors of each rank's shard."""
        return self._reader.open(self._wanted(position, forward))

    def _shard(self, opened: Opened, position: Position, ack: Callable[[], None] | None = None) -> Shard:
        return Shard(
            opened.tensors,
            opened.metadata,
            self._convert,
            position,
            is_mapped=opened.is_mapped,
            ack=ack,
            copies=opened.copies,
            is_forward=opened.is_forward,
        )

    def _wanted(self, position: Position, forward: bool) -> Wanted:
        # Asking for the place is what reads the run, and with it the ranks.
        _ = self.position
        return Wanted(position, self._ranks, forward, self._incarnation)

    def expect(self, positions: Iterable[Position], *, forward: bool = False) -> None:
        """Names the shards that will be opened next, in this order: as many as `prefetch` says are opened in the
        background meanwhile, and those that were and are not among them are thrown away. Iterating a batch calls it.

        An error that is met so is raised when the shard is opened, unless it may be over by then.
        """
        self._reader.expect(self._wanted(position, forward) for position in positions)

    def write(self, shard: Shard, columns: Mapping[str, Any]) -> None:
        """Writes columns of `source: trainer` for a shard of `batch.forward()`. Once every shard of every rank has
        every column, the batch is completed, and its `mini_batches()` are there.

        columns: by name a tensor in the shape of the shard's `response_mask` (scope `row`: a value a row), or a list
            with one for each micro-batch. What stands on padding, prompts and padding rows is ignored.

            for shard in batch.forward():
                trainer.write(shard, {"values": [critic(micro) for micro in shard.micro_batches()]})

        Idempotent; a shard that is no forward shard has its columns. Raises AlreadyExistsError for other values than
        this incarnation wrote before (after `load_state_dict` all is written anew), and StaleIncarnationError.
        """
        from gristmill._client.trainer.written_columns import requests

        self._transport.check_usable()
        written = self._columns.written
        for name, request, data in requests(shard, columns, written, self.run, self._incarnation, self._dp_size):
            self._transport.call(self._transport.write_columns, data)
            self._reader.kept.wrote(request, name)

    def rows(self, batch: int) -> list[dict[str, Any]]:
        """The rows of a sealed batch as they were submitted, in the batch's order, each as `submit` takes it: what
        a trainer that comes back need not sample again. Raises NotFoundError for a batch that is freed, and
        FailedPreconditionError for one that is not sealed yet.
        """
        request = trainer_pb2.ExportBatchRequest(run=self.run, batch=batch)
        pages = self._transport.call(
            lambda request, timeout: list(self._transport.trainers.ExportBatch(request, timeout=timeout)), request
        )
        return [row for page in pages for row in to_rows(decode(page.rows), self._declared)]

    # The end.

    def close(self) -> None:
        """Closes the connection, and ends what is opened ahead. Shards that are there stay valid. Idempotent."""
        self._transport.close()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
