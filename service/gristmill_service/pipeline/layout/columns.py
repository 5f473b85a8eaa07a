"""Columns declare the tensors of a shard: each one's values per token, its scope and its fill.

A column converts rows to byte ranges of the batch's buffers or of shared constants, so that laying out copies nothing
and creates no Python object per row. A new column is a new declaration here; no stage uses their names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.codecs import tensor_file
from gristmill._wire.columns import Int64s, Ragged
from gristmill_service.pipeline.layout.iovec import Iovec, Region
from gristmill_service.pipeline.rows.merge import Rows

Scope = Literal["sequence", "response"]
SCOPES: tuple[Scope, Scope] = ("sequence", "response")

# A value that a row repeats is stored this number of times, and longer rows use the block repeatedly. Larger blocks
# cause more page faults, and smaller blocks more ranges.
CONSTANTS = 256


class Geometry:
    """The lengths of rows and of the visits on their paths. All int64.

    The last entry of arrays of rows is the padding row's, and that of arrays of visits its only visit's, so that it is
    no special case.
    lengths, responses: (rows + 1,) tokens of the row and of its response.
    last: (rows + 1,) the step that has the row's tokens, -1 for the padding row.
    begins, counts: (rows + 1,) the row's first visit, and the number of its visits.
    advances: (visits + 1,) response tokens from the end of the row's visit before, or from the response's begin, to the
        end of this one: observation, and the kept tokens of its step.
    """

    def __init__(self, rows: Rows, padding_tokens: int) -> None:
        self.lengths = np.append(rows.lengths, padding_tokens)
        self.responses = np.append(rows.response_lengths, 1)
        self.last = np.append(rows.last, -1)
        self.begins = rows.edges
        self.counts = np.append(np.diff(rows.edges), 1)
        ends = np.append(rows.ends, 1)
        self.advances = np.diff(ends, prepend=0)
        self.advances[self.begins] = ends[self.begins]

    def of(self, scope: Scope) -> Int64s:
        return self.lengths if scope == "sequence" else self.responses


@dataclass(slots=True, weakref_slot=True)
class ByteRanges:
    """The byte ranges of rows: those of row i are `iovec[edges[i]:edges[i + 1]]`. Keeps their memory alive."""

    iovec: Iovec
    edges: Int64s
    memory: tuple[Region, ...]

    def of(self, begin: int, end: int) -> Iovec:
        """Returns the ranges of the rows `begin:end`."""
        return self.iovec[self.edges[begin] : self.edges[end]]

    def without(self, nbytes: Int64s) -> ByteRanges:
        """Returns the ranges without the first `nbytes` of each row. nbytes: (rows,), at most the row's bytes."""
        lengths = self.iovec[:, 1]
        ends = np.cumsum(lengths)
        cuts = np.append(0, ends)[self.edges[:-1]] + nbytes
        left_out = np.clip(np.repeat(cuts, np.diff(self.edges)) - (ends - lengths), 0, lengths)
        iovec = np.stack([self.iovec[:, 0] + left_out, lengths - left_out], axis=1)
        return ByteRanges(iovec, self.edges, self.memory)

    def followed_by(self, fill: Region, nbytes: Int64s) -> ByteRanges:
        """Returns the ranges with the first `nbytes` of `fill` after each row. nbytes: (rows,)."""
        iovec = np.insert(self.iovec, self.edges[1:], fill.ranges(0, nbytes), axis=0)
        return ByteRanges(iovec, self.edges + np.arange(len(self.edges)), (*self.memory, fill))


@dataclass(frozen=True, slots=True)
class Block:
    """The rows whose tensors are laid out together: a shard's, or those of a micro-batch.

    prefix: the prefix of tensor names. begin, end: the range of rows in the placement. widths: the width of the padded
    tensors per scope; None: packed, one row after another.
    """

    prefix: str
    begin: int
    end: int
    widths: dict[Scope, int] | None


class Placement:
    """The order in which rows are laid out, and the fill before and after each.

    rows: (n,) row indices, -1 for padding rows. leads: per scope (n,) elements before the row's own. shared: (n,) the
    number of first tokens that a row shares with the row before it, which are laid out there only; None: all of every
    row are laid out. tails: (n,) elements of fill after each row, in every scope; None: no row has any.
    """

    tails: Int64s | None = None

    def __init__(
        self, rows: Int64s, leads: dict[Scope, Int64s], geometry: Geometry, shared: Int64s | None = None
    ) -> None:
        self.rows, self.leads, self.geometry, self.shared = rows, leads, geometry, shared

    @cached_property
    def lengths(self) -> dict[Scope, Int64s]:
        """The number of each row's elements, (n,) per scope."""
        return {scope: self.geometry.of(scope)[self.rows] for scope in SCOPES}

    @cached_property
    def own(self) -> dict[Scope, Int64s]:
        """The number of each row's elements that are laid out, which are always the last ones; (n,) per scope."""
        if self.shared is None:
            return self.lengths
        return {
            scope: np.minimum(lengths, self.lengths["sequence"] - self.shared)
            for scope, lengths in self.lengths.items()
        }

    def left_out(self, scope: Scope) -> Int64s | None:
        """How many elements at the beginning of each row, including its lead, are not laid out; (n,). None if rows
        share no tokens."""
        if self.shared is None:
            return None
        # A row's lead, its prompt, may be laid out in part, unless rows have none.
        laid_out = np.minimum(self.lengths["sequence"] - self.shared, self.leads[scope] + self.lengths[scope])
        left_out: Int64s = self.leads[scope] + self.lengths[scope] - laid_out
        return left_out

    @property
    def on_axis(self) -> Int64s:
        """The number of tokens that each row takes on a token axis: its own, and the fill after it; (n,)."""
        return self.own["sequence"] if self.tails is None else self.own["sequence"] + self.tails

    @cached_property
    def visit_counts(self) -> Int64s:
        """The visits of each row, (n,)."""
        return self.geometry.counts[self.rows]

    @cached_property
    def visit_edges(self) -> Int64s:
        """Where each row's visits begin in `visits`, and the end of the last row's, (n + 1,)."""
        return np.append(0, np.cumsum(self.visit_counts))

    @cached_property
    def visits(self) -> Int64s:
        """The visits of all rows, in order."""
        starts = self.geometry.begins[self.rows] - self.visit_edges[:-1]
        visits: Int64s = np.arange(self.visit_edges[-1]) + np.repeat(starts, self.visit_counts)
        return visits


def safetensors_name(dtype: np.dtype[Any]) -> str:
    """Returns the name of a type in a shard's header. uint16 has the bits of bfloat16."""
    return tensor_file.NAMES[dtype]


class Column(ABC):
    """A tensor with an element per token.

    name, dtype: those in the shard, with safetensors' name of the dtype. scope: the whole sequence, or only the
    response. shape: the shape of one element. itemsize: the bytes of one number. fill: memory that begins with as many
    elements of fill as a row may need. partial_values: of a partial column, the memory of its values, whose places in
    shards are told; else None.
    """

    partial_values: Region | None = None
    name: str
    dtype: str
    itemsize: int
    scope: Scope
    shape: tuple[int, ...] = ()
    fill: Region

    @abstractmethod
    def ranges(self, placement: Placement) -> ByteRanges:
        """Returns each row's `lead` elements of fill, followed by its values."""

    def laid_out(self, placement: Placement) -> ByteRanges:
        """Returns the ranges without the elements that the previous row contains, and with the fill after each row."""
        ranges, elements = self.ranges(placement), placement.left_out(self.scope)
        unit = self.itemsize * math.prod(self.shape)
        if elements is not None:
            ranges = ranges.without(unit * elements)
        return ranges if placement.tails is None else ranges.followed_by(self.fill, unit * placement.tails)


class Tokens(Column):
    """`sequences`: prompt and response, filled with `pad_token_id`."""

    name, dtype, itemsize, scope = "sequences", "I32", 4, "sequence"

    def __init__(self, tokens: Ragged, longest: int, pad_token_id: int) -> None:
        self._values, self.fill = Region(tokens.values), Region(np.full(longest, pad_token_id, np.int32))
        self._starts = tokens.starts

    def ranges(self, placement: Placement) -> ByteRanges:
        rows, geometry = placement.rows, placement.geometry
        lengths = 4 * placement.lengths["sequence"]
        is_real = rows >= 0
        iovec = _pairs(len(rows))
        iovec[:, 0] = self.fill.ranges(0, 4 * placement.leads["sequence"])
        iovec[is_real, 1] = self._values.ranges(4 * self._starts[geometry.last[rows[is_real]]], lengths[is_real])
        iovec[~is_real, 1] = self.fill.ranges(0, lengths[~is_real])
        return _two_a_row(iovec, self.fill, self._values)


class Presence(Column):
    """`attention_mask` and `response_mask`: 1 for the row's tokens; a padding row has a sequence and no response."""

    dtype, itemsize = "U8", 1

    def __init__(self, name: str, scope: Scope, longest: int) -> None:
        self.name, self.scope = name, scope
        # Zeros, then ones: any fill followed by values is one range of it.
        self._longest, self.fill = longest, Region(np.append(np.zeros(longest, np.uint8), np.ones(longest, np.uint8)))

    def ranges(self, placement: Placement) -> ByteRanges:
        absent, present = placement.leads[self.scope], placement.lengths[self.scope]
        if self.scope == "response":
            is_padding = placement.rows < 0
            absent, present = absent + is_padding * present, present * ~is_padding
        iovec = self.fill.ranges(self._longest - absent, absent + present)
        return ByteRanges(iovec, np.arange(len(iovec) + 1), (self.fill,))


class StepTokens(Column):
    """An element per response token of each step, fill on observations between steps and in padding rows.

    values: (visits,), `Rows.standing` or `Rows.trained` of the steps' values, each with fill before it.
    zeros: the memory of the fill.
    present: bool (visits,), whether a visit's values count; others become fill, which is how filters mask.
    """

    scope = "response"

    def __init__(
        self, name: str, values: Ragged, geometry: Geometry, zeros: Region, present: NDArray[np.bool_] | None = None
    ) -> None:
        self.name, self.dtype = name, safetensors_name(values.values.dtype)
        self.itemsize, self.shape = values.values.itemsize, values.values.shape[1:]
        self._item = item = self.itemsize * math.prod(self.shape)
        self._values, self.fill = Region(values.values), zeros
        # Each visit has a range of fill and a range of values.
        lengths = np.append(values.lengths, 1)
        self._of_visit = _pairs(len(lengths))
        self._of_visit[:, 0] = zeros.ranges(0, item * (geometry.advances - lengths))
        absent = np.append(np.zeros(len(values), np.bool_) if present is None else ~present, True)
        some = values if present is None else values.take(present)
        self._of_visit[~absent, 1] = self._values.ranges(item * some.starts, item * some.lengths)
        self._of_visit[absent, 1] = zeros.ranges(0, item * lengths[absent])

    def ranges(self, placement: Placement) -> ByteRanges:
        iovec = self._of_visit.take(placement.visits, axis=0)
        iovec[placement.visit_edges[:-1], 0, 1] += self._item * placement.leads["response"]
        return _two_a_row(iovec, self._values, self.fill, edges=placement.visit_edges)


class StepScalars(Column):
    """A number per step at its last kept response token, 0 elsewhere: rewards with one number per step.

    values: (visits,). present: bool (visits,), whether the visit has its step's number (`Rows.owns_reward`), as a row's
    last always has.
    """

    dtype, itemsize, scope = "F32", 4, "response"

    def __init__(
        self, name: str, values: NDArray[np.float64], geometry: Geometry, zeros: Region, present: NDArray[np.bool_]
    ) -> None:
        self.name = name
        self._values, self.fill = Region(np.append(values, 0).astype(np.float32)), zeros
        self._advances = geometry.advances
        # Bits are compared, because -0.0 is a value.
        self._is_set = (self._values.array.view(np.int32) != 0) & np.append(present, True)

    def ranges(self, placement: Placement) -> ByteRanges:
        visits, edges = placement.visits, placement.visit_edges
        # The ends of visits among the elements of all rows. Visits without a value are fill, except a row's last.
        leads = np.cumsum(placement.leads["response"])
        ends = np.cumsum(self._advances[visits]) + np.repeat(leads, placement.visit_counts)
        is_set = self._is_set[visits]
        is_set[edges[1:] - 1] = True
        chosen = np.flatnonzero(is_set)
        iovec = _pairs(len(chosen))
        iovec[:, 0] = self.fill.ranges(0, 4 * (np.diff(ends[chosen], prepend=0) - 1))
        iovec[:, 1] = self._of(visits[chosen])
        return _two_a_row(iovec, self._values, self.fill, edges=np.searchsorted(chosen, edges))

    def _of(self, visits: Int64s) -> Iovec:
        return self._values.ranges(4 * visits, np.full(len(visits), 4))


class RowScalars(Column):
    """A number per row on each of its response positions: advantages of trajectories."""

    dtype, itemsize, scope = "F32", 4, "response"

    def __init__(self, name: str, values: NDArray[np.float64], zeros: Region) -> None:
        self.name = name
        self._values, self.fill = np.append(values, 0).astype(np.float32), zeros

    def ranges(self, placement: Placement) -> ByteRanges:
        lengths = placement.lengths["response"]
        constants, starts = _constants(self._values[placement.rows], lengths)
        # A row's fill, then as many ranges of its value as it takes.
        counts = 1 - (-lengths // CONSTANTS)
        edges = np.append(0, np.cumsum(counts))
        nbytes = np.full(edges[-1], 4 * CONSTANTS)
        nbytes[edges[1:] - 1] = 4 * (lengths - (counts - 2) * CONSTANTS)
        nbytes[edges[:-1]] = 0
        iovec = constants.ranges(np.repeat(4 * starts, counts), nbytes)
        iovec[edges[:-1]] = self.fill.ranges(0, 4 * placement.leads["response"])
        return ByteRanges(iovec, edges, (constants, self.fill))


class Positions(Column):
    """`position_ids` of the packed layout: 0, 1, ... in every row, and on in the fill after it."""

    name, dtype, itemsize, scope = "position_ids", "I32", 4, "sequence"

    def __init__(self, longest: int) -> None:
        self._positions = Region(np.arange(longest, dtype=np.int32))

    def laid_out(self, placement: Placement) -> ByteRanges:
        return self.ranges(placement)

    def ranges(self, placement: Placement) -> ByteRanges:
        iovec = self._positions.ranges(0, 4 * placement.on_axis)
        return ByteRanges(iovec, np.arange(len(iovec) + 1), (self._positions,))


def _constants(values: NDArray[np.float32], lengths: Int64s) -> tuple[Region, Int64s]:
    """Returns memory that repeats each `values[i]` `lengths[i]` times, `CONSTANTS` times at most, and where each
    begins. Equal neighbors share a block."""
    # Bits are compared, because -0.0 differs from 0.0 here.
    bits = values.view(np.int32)
    first = np.append(True, bits[1:] != bits[:-1])[: len(bits)]
    begins = np.flatnonzero(first)
    longest = np.minimum(np.maximum.reduceat(lengths, begins), CONSTANTS) if len(begins) else lengths
    starts = (np.cumsum(longest) - longest)[np.cumsum(first) - 1]
    return Region(np.repeat(values[begins], longest)), starts


def _pairs(count: int) -> NDArray[np.int64]:
    """Returns an empty array of `count` pairs of ranges: fill, then values."""
    return np.empty((count, 2, 2), np.int64)


def _two_a_row(pairs: NDArray[np.int64], *memory: Region, edges: Int64s | None = None) -> ByteRanges:
    """Returns the ranges of rows from pairs. edges: of each row's pairs; None: one pair per row."""
    edges = np.arange(len(pairs) + 1) if edges is None else edges
    return ByteRanges(pairs.reshape(-1, 2), 2 * edges, memory)
