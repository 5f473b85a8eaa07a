"""Columns that trainers write back (specification, section 11): from a shard's tensors to values of steps.

A column is written for a shard's rows, whole, as a tensor of the shard would be. What is kept of it are the rows' own
values, in the shard's order: padding counts for nothing. Once every shard is written, the batch's steps get them as if
rollout workers had sent them: each response token that of the row that trains it, each row its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Array, Int64s, Ragged, starts_of
from gristmill._wire.steps import Extra
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.layout.columns import safetensors_name
from gristmill_service.pipeline.layout.shard import Shard
from gristmill_service.pipeline.layout.shard_address import ShardAddress
from gristmill_service.pipeline.rows.merge import Rows
from gristmill_service.pipeline.rows.validate import Received
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan
from gristmill_service.pipeline.scored_batch import ScoredBatch
from gristmill_service.pipeline.written_rows import StepPlaces, WrittenRows, places, written_rows

Written = Mapping[ShardAddress, Mapping[str, Array]]
"""Of each of the policy's shards, by column, its rows' own values one after another; (n, *shape)."""


class FormBlock(NamedTuple):
    """A tensor of a shard's responses. prefix: of its name. begin, end: its rows. shape: what stands before a value's
    own: rows and width, or tokens."""

    prefix: str
    begin: int
    end: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShardForm:
    """Where the responses of a shard's rows stand in its tensors.

    blocks: in the order of the rows. leads, lengths: int64 (rows,) elements before each row's own, and how many its own
    are. elsewhere: int64 (rows,), tokens of each response before these, which stand with the row before it, where no
    value of this row is read: zeros take their place. is_real: bool (rows,), False of padding rows. rows: what
    is known of the others.
    """

    blocks: Sequence[FormBlock]
    leads: Int64s
    lengths: Int64s
    elsewhere: Int64s
    is_real: NDArray[np.bool_]
    rows: WrittenRows

    def own_values(self, column: ColumnSpec, tensors: Mapping[str, Array], where: str) -> Array:
        """The rows' own values of a column as it was written; (n, *shape), a copy.

        tensors: by the names that a shard's have. Raises InvalidArgumentError naming the tensor, what it is and what it
        has to be.
        """
        if column.scope == "row":
            found = _tensor(tensors, column.name, (len(self.is_real),), column, where)[self.is_real]
        else:
            found = np.concatenate([self._of_block(block, column, tensors, where) for block in self.blocks])
        return found

    def names(self, column: ColumnSpec) -> list[str]:
        """The tensors that hold a column."""
        return [column.name] if column.scope == "row" else [block.prefix + column.name for block in self.blocks]

    def _of_block(self, block: FormBlock, column: ColumnSpec, tensors: Mapping[str, Array], where: str) -> Array:
        values = _tensor(tensors, block.prefix + column.name, block.shape, column, where)
        rows = slice(block.begin, block.end)
        leads, lengths, is_real = self.leads[rows], self.lengths[rows], self.is_real[rows]
        starts, counts = starts_of(leads + lengths) + leads, np.where(is_real, lengths, 0)
        own: Array = values.reshape(-1, *column.shape)[places(starts, counts)]
        if not (elsewhere := np.where(is_real, self.elsewhere[rows], 0)).any():
            return own
        whole = np.zeros((int((elsewhere + counts).sum()), *column.shape), own.dtype)
        whole[places(starts_of(elsewhere + counts) + elsewhere, counts)] = own
        return whole


def form_of(shard: Shard, scored: ScoredBatch, config: RunConfig) -> ShardForm:
    begin, end = shard.blocks[0].begin, shard.blocks[-1].end
    placement = shard.placed.placement
    lengths = placement.own["response"][begin:end].copy()
    elsewhere = placement.lengths["response"][begin:end] - lengths
    leads = placement.leads["response"][begin:end].copy()
    if placement.shared is not None:
        leads = placement.own["sequence"][begin:end] - lengths
    totals = np.append(0, np.cumsum(leads + lengths))
    blocks = [
        FormBlock(
            block.prefix,
            block.begin - begin,
            block.end - begin,
            (int(totals[block.end - begin] - totals[block.begin - begin]),)
            if block.widths is None
            else (block.end - block.begin, block.widths["response"]),
        )
        for block in shard.blocks
    ]
    rows = placement.rows[begin:end]
    is_real = rows >= 0
    return ShardForm(blocks, leads, lengths, elsewhere, is_real, written_rows(rows[is_real], scored, config))


def values_of_steps(
    written: Written, rows: Rows, received: Received, mini_batches: Sequence[MiniBatchPlan], config: RunConfig
) -> dict[str, Extra]:
    """The columns as steps have them: the inverse of what `standing` does. Steps of rows that are in no shard, because
    alignment dropped their groups, get zeros."""
    placed = {
        ShardAddress("policy", part.index, rank): plan.rows[plan.rows >= 0]
        for part in mini_batches
        if part.model == "policy"
        for rank, plan in enumerate(part.ranks)
    }
    order = np.concatenate([np.empty(0, np.int64), *placed.values()])
    found = {}
    for column in config.written_columns:
        parts = [column.empty(), *(written[address][column.name] for address in placed)]
        values = np.concatenate(parts)
        of_steps = _of_rows if column.scope == "row" else _of_responses
        found[column.name] = of_steps(column, values, order, rows, received.steps.response_lengths)
    return found


def _of_rows(column: ColumnSpec, values: Array, order: Int64s, rows: Rows, responses: Int64s) -> Extra:
    """A row's number stands with its path's last step, and zeros with the others."""
    count = len(responses)
    of_steps = np.zeros((count, *column.shape), column.storage)
    of_steps[rows.last[order]] = values
    return Extra(Ragged.from_lengths(of_steps, np.ones(count, np.int64)), np.ones(count, np.bool_))


def _of_responses(column: ColumnSpec, values: Array, order: Int64s, rows: Rows, responses: Int64s) -> Extra:
    """Each token has the value of the row that trains it. responses: int64 (steps,), tokens of each step's response."""
    own = StepPlaces.of(order, rows, responses)
    of_steps = np.zeros((int(responses.sum()), *column.shape), column.storage)
    of_steps[own.in_steps] = values[own.in_rows]
    return Extra(Ragged.from_lengths(of_steps, responses), np.ones(len(responses), np.bool_))


def _tensor(tensors: Mapping[str, Array], name: str, shape: tuple[int, ...], column: ColumnSpec, where: str) -> Array:
    found = tensors.get(name)
    if found is None:
        raise InvalidArgumentError(f"{where}: {name} is missing; a column is written whole")
    expected = (*shape, *column.shape)
    if found.shape != expected or found.dtype != column.storage:
        raise InvalidArgumentError(
            f"{where}: {name} is {safetensors_name(found.dtype)} {list(found.shape)} and has to be "
            f"{safetensors_name(column.storage)} {list(expected)}: write it in the shard's own shape"
        )
    return found
