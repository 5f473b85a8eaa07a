"""Columns that a trainer writes back: builds the requests, and checks whether the service still has the columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gristmill._torch.rows import Shard
from gristmill._wire.codecs import tensor_file
from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Array
from gristmill.errors import FailedPreconditionError, InvalidArgumentError
from gristmill.v1 import trainer_pb2


def write_requests(
    shard: Shard, values: Mapping[str, Any], written: Mapping[str, ColumnSpec], run: str, incarnation: int, dp_size: int
) -> Iterator[tuple[str, trainer_pb2.WriteColumnsRequest, bytes]]:
    """Yield a request for each column to write for a shard: the column's name, the request without its tensors, and the
    safetensors file with them. Yields nothing for a shard that already has its columns.

    written: the columns that trainers of the run write. dp_size: the trainer's current number of ranks. Raises
    InvalidArgumentError naming the column.
    """
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(
            f"run {run!r}: columns is a {type(values).__name__}; pass a mapping from column names to values"
        )
    metadata = shard.metadata
    if (metadata["run"], metadata["model"]) != (run, "policy"):
        raise InvalidArgumentError(
            f"run {run!r}: the shard is of model {metadata['model']} and run {metadata['run']!r}; write columns for "
            "policy shards of this run, which another TrainerClient (acks=False) can read"
        )
    if "cp_rank" in metadata:
        raise InvalidArgumentError(
            f"run {run!r}: the shard has the tokens of cp_rank {metadata['cp_rank']} alone; gather the values of all "
            "context-parallel ranks by label_positions, and write them for the whole shard"
        )
    if metadata["dp_size"] != dp_size:
        raise InvalidArgumentError(
            f"run {run!r}: the shard is for dp_size {metadata['dp_size']}, but the trainer resumed with {dp_size}; "
            "iterate the trainer again, and write columns for the new shards"
        )
    for name in values:
        if name not in written:
            known = ", ".join(written) or "none"
            raise InvalidArgumentError(
                f"run {run!r}: {name!r} is not a column that trainers write (there are: {known}); declare it with "
                "source: trainer"
            )
    for name, column_values in values.items() if shard.is_forward else ():
        request = trainer_pb2.WriteColumnsRequest(
            run=run,
            batch=metadata["batch"],
            mini_batch=metadata["mini_batch"],
            rank=metadata["rank"],
            incarnation=incarnation,
        )
        yield name, request, tensor_file.encode(_tensors(shard, written[name], column_values))


def _tensors(shard: Shard, column: ColumnSpec, values: Any) -> dict[str, Array]:
    """Return the column's tensors by their names in a shard.

    values: a tensor or array for the whole shard, or a sequence with one for each micro-batch.
    Raises InvalidArgumentError for other values. The service checks shapes.
    """
    count = len(shard.metadata["micro_batches"])
    pieces = list(values) if isinstance(values, Sequence) else [values]
    arrays = [_array(column, piece) for piece in pieces]
    if isinstance(values, Sequence) and len(pieces) != count:
        raise InvalidArgumentError(
            f"{shard.position}: {column.name} is a sequence of {len(pieces)} and the shard has {count} micro-batches; "
            "pass one tensor per micro-batch, or one for the whole shard"
        )
    if column.scope == "response" and shard.is_per_micro_batch:
        if len(arrays) != count:
            raise InvalidArgumentError(
                f"{shard.position}: {column.name} is one tensor, but each of the shard's {count} micro-batches has its "
                "own tensors; pass a list with one tensor per micro-batch"
            )
        return {f"micro_batch_{index:03d}/{column.name}": array for index, array in enumerate(arrays)}
    try:
        return {column.name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)}
    except ValueError as error:
        raise InvalidArgumentError(
            f"{shard.position}: {column.name} cannot be concatenated from its micro-batches: {error}"
        ) from None


def _array(column: ColumnSpec, values: Any) -> Array:
    """Convert a tensor or array to the column's stored dtype."""
    try:
        tensor = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"{column.name} is not a tensor or array: {error}; pass numbers as a tensor or an array"
        ) from None
    wanted: torch.dtype = getattr(torch, column.dtype)
    if tensor.dtype != wanted:
        if not (column.is_float and tensor.is_floating_point()) and not torch.can_cast(tensor.dtype, wanted):
            raise InvalidArgumentError(
                f"{column.name} has {tensor.dtype} values, but the column declares {column.dtype}; convert the values"
            )
        tensor = tensor.to(wanted)
    tensor = tensor.cpu().contiguous()
    if wanted is torch.bfloat16:
        return np.asarray(tensor.view(torch.int16)).view(np.uint16)
    return np.asarray(tensor)


class KeptColumns:
    """Records which columns of a batch are stored. If the store loses one, only the trainer can write it again."""

    def __init__(self) -> None:
        self._batch = -1
        self.forget()

    def wrote(self, request: trainer_pb2.WriteColumnsRequest, column: str) -> None:
        self._at(request.batch)
        self._written.add((request.mini_batch, request.rank, column))

    def completed(self, batch: int) -> None:
        """Record that the batch has all columns for which it waited."""
        self._at(batch)
        self._is_complete = True

    def forget(self) -> None:
        """Forget everything, because another incarnation writes all columns again."""
        self._written, self._is_complete = set[tuple[int, int, str]](), False

    def knows(self, batch: int) -> bool:
        return batch == self._batch

    def check(self, run: str, ranks: Collection[int], awaits: Iterable[trainer_pb2.AwaitedColumn]) -> None:
        """Raise FailedPreconditionError if the batch waits for columns that these ranks have already written."""
        for place in awaits:
            is_own = self._is_complete and place.rank in ranks
            if is_own or (place.mini_batch, place.rank, place.column) in self._written:
                self.forget()
                raise FailedPreconditionError(
                    f"run {run!r}: batch {self._batch} mini-batch {place.mini_batch} rank {place.rank}: {place.column} "
                    "was written, but the service's store has lost it; iterate the trainer again, and write the "
                    "columns in batch.awaits"
                )

    def _at(self, batch: int) -> None:
        if batch != self._batch:
            self._batch = batch
            self.forget()
