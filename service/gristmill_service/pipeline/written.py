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
from gristmill_service.pipeline.written_rows import StepPlaces, WrittenRows, copy_runs, written_rows

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
        """The rows' own values of a column as it was written; (n, *shape), a view where they stand so.

        tensors: by the names that a shard's have. Raises InvalidArgumentError naming the tensor, what it is and what it
        has to be.
        """
        if column.scope == "row":
            found = _tensor(tensors, column.name, (len(self.is_real),), column, where)[self.is_real]
        else:
            own = [self._of_block(block, column, tensors, where) for block in self.blocks]
            found = own[0] if len(own) == 1 else np.concatenate(own)
        return found

    def names(self, column: ColumnSpec) -> list[str]:
        """The tensors that hold a column."""
        return [column.name] if column.scope == "row" else [block.prefix + column.name for block in self.blocks]

    def _of_block(self, block: FormBlock, column: ColumnSpec, tensors: Mapping[str, Array], where: str) -> Array:
        values = _tensor(tensors, block.prefix + column.name, block.shape, column, where)
        rows = slice(block.begin, block.end)
        leads, lengths, is_real = self.leads[rows], self.lengths[rows], self.is_real[rows]
        starts, counts = starts_of(leads + lengths) + leads, np.where(is_real, lengths, 0)
        sizes = np.where(is_real, self.elsewhere[rows], 0) + counts
        flat = values.reshape(-1, *column.shape)
        if len(flat) == sizes.sum() == counts.sum():
            return flat
        found = np.zeros((int(sizes.sum()), *column.shape), flat.dtype)
        copy_runs(found, starts_of(sizes) + sizes - counts, flat, starts, counts)
        return found


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
    own = StepPlaces.of(
        np.concatenate([np.empty(0, np.int64), *placed.values()]), rows, received.steps.response_lengths
    )
    found = {}
    for column in config.written_columns:
        parts = [written[address][column.name] for address in placed]
        if column.scope == "row":
            found[column.name] = _of_rows(column, parts, list(placed.values()), rows, len(received.steps))
        else:
            found[column.name] = _of_responses(column, parts, own, received.steps.response_lengths)
    return found


def _of_rows(column: ColumnSpec, parts: Sequence[Array], placed: Sequence[Int64s], rows: Rows, steps: int) -> Extra:
    """A row's number stands with its path's last step, and zeros with the others. parts: of each shard, whose rows are
    `placed`."""
    of_steps = np.zeros((steps, *column.shape), column.storage)
    for values, order in zip(parts, placed, strict=True):
        of_steps[rows.last[order]] = values
    return Extra(Ragged.from_lengths(of_steps, np.ones(steps, np.int64)), np.ones(steps, np.bool_))


def _of_responses(column: ColumnSpec, parts: Sequence[Array], own: StepPlaces, responses: Int64s) -> Extra:
    """Each token has the value of the row that trains it. parts: of each shard, one after another as `own` has rows.
    responses: int64 (steps,), tokens of each step's response."""
    of_steps = np.zeros((int(responses.sum()), *column.shape), column.storage)
    begin = 0
    for values in parts:
        runs = slice(*np.searchsorted(own.in_rows, [begin, begin + len(values)]).tolist())
        copy_runs(of_steps, own.in_steps[runs], values, own.in_rows[runs] - begin, own.counts[runs])
        begin += len(values)
    return Extra(Ragged.from_lengths(of_steps, responses), np.ones(len(responses), np.bool_))


def _tensor(tensors: Mapping[str, Array], name: str, shape: tuple[int, ...], column: ColumnSpec, where: str) -> Array:
    found = tensors.get(name)
    if found is None:
        raise InvalidArgumentError(f"{where}: {name} is missing; write all tensors of a column together")
    expected = (*shape, *column.shape)
    if found.shape != expected or found.dtype != column.storage:
        raise InvalidArgumentError(
            f"{where}: {name} is {safetensors_name(found.dtype)} {list(found.shape)} and the shard needs "
            f"{safetensors_name(column.storage)} {list(expected)}; write it with that dtype and shape"
        )
    return found
