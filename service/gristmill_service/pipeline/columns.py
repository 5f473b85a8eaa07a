"""The tensors of a shard, declared: what each is per token, where it stands, and what fills the rest.

A column turns one row into runs of bytes, taken from the batch's own buffers or from shared constants, so that laying
out copies nothing. Adding a column is adding a declaration here; no stage knows their names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gristmill.columns import Int64s, Ragged
from gristmill_service.pipeline.merge import Rows
from gristmill_service.pipeline.plan import PADDING

Scope = Literal["sequence", "response"]


class Geometry:
    """Where rows and their steps stand, as Python ints for loops over rows.

    Lists are indexed by row, with the padding row at -1.
    """

    def __init__(self, rows: Rows, step_prompts: Int64s, step_responses: Int64s, padding_tokens: int) -> None:
        self.lengths = np.append(rows.lengths, padding_tokens)
        self.responses = np.append(rows.response_lengths, 1)
        self.length_of: list[int] = self.lengths.tolist()
        self.response_of: list[int] = self.responses.tolist()
        self.last: list[int] = rows.last.tolist()
        first = rows.first.tolist()
        prompts, responses = step_prompts.tolist(), step_responses.tolist()
        # Per row its steps as (step, start in the row's response, end).
        self.segments: list[list[tuple[int, int, int]]] = [
            [
                (step, prompts[step] - prompts[begin], prompts[step] - prompts[begin] + responses[step])
                for step in range(begin, end + 1)
            ]
            for begin, end in zip(first, self.last, strict=True)
        ]


class Constants:
    """Shared read-only buffers that runs are cut from; one element is `itemsize` bytes."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.zeros = np.zeros(4 * longest, np.uint8).data
        steps = np.zeros(2 * longest, np.uint8)
        steps[longest:] = 1
        self.step_up = steps.data
        """Zeros, then ones, as uint8: any "absent, then present" mask is one slice of it."""

    def mask(self, absent: int, present: int) -> memoryview:
        return self.step_up[self.longest - absent : self.longest + present]


class Column(ABC):
    """One tensor of a shard.

    name, dtype: as in the shard. scope: over the whole sequence, or over the response only.
    """

    name: str
    dtype: Any
    scope: Scope

    @abstractmethod
    def runs(self, row: int, lead: int, out: list[memoryview]) -> None:
        """Appends the row's bytes: `lead` elements of fill, then its values.

        row: a row index, or -1 for a padding row.
        """


class Tokens(Column):
    """`sequences`: prompt and response, filled with `pad_token_id`."""

    name, dtype, scope = "sequences", np.int32, "sequence"

    def __init__(self, tokens: Ragged, geometry: Geometry, longest: int, pad_token_id: int) -> None:
        self._fill = bytes_of(np.full(longest, pad_token_id, np.int32))
        self._values = bytes_of(tokens.values)
        starts = tokens.starts.tolist()
        lengths = geometry.length_of
        self._spans = [
            (4 * starts[last], 4 * (starts[last] + length))
            for last, length in zip(geometry.last, lengths, strict=False)
        ]
        self._padding = 4 * lengths[PADDING]

    def runs(self, row: int, lead: int, out: list[memoryview]) -> None:
        if row == PADDING:
            out.append(self._fill[: 4 * lead + self._padding])
            return
        if lead:
            out.append(self._fill[: 4 * lead])
        start, end = self._spans[row]
        out.append(self._values[start:end])


class Presence(Column):
    """`attention_mask` and `response_mask`: 1 where the row has a token; a padding row has a sequence, no response."""

    dtype = np.uint8

    def __init__(self, name: str, scope: Scope, geometry: Geometry, constants: Constants) -> None:
        self.name, self.scope = name, scope
        self._constants = constants
        self._lengths = geometry.length_of if scope == "sequence" else geometry.response_of

    def runs(self, row: int, lead: int, out: list[memoryview]) -> None:
        length = self._lengths[row]
        if row == PADDING and self.scope == "response":
            out.append(self._constants.mask(lead + length, 0))
        else:
            out.append(self._constants.mask(lead, length))


class StepTokens(Column):
    """A value per response token of each step, 0 on observations between steps and in padding rows.

    present: per step whether its values count; others are 0 (how filters mask).
    """

    scope = "response"

    def __init__(
        self, name: str, values: Ragged, geometry: Geometry, constants: Constants, present: Sequence[bool] | None = None
    ) -> None:
        self.name, self.dtype = name, values.values.dtype
        self._item = values.values.dtype.itemsize
        self._values = bytes_of(values.values)
        self._starts = [start * self._item for start in values.starts.tolist()]
        self._segments, self._responses = geometry.segments, geometry.response_of
        self._zeros, self._present = constants.zeros, present

    def runs(self, row: int, lead: int, out: list[memoryview]) -> None:
        item, zeros, present = self._item, self._zeros, self._present
        if row == PADDING:
            out.append(zeros[: item * (lead + self._responses[PADDING])])
            return
        # `done` counts elements written, `lead` of them before the response.
        done = 0
        for step, start, end in self._segments[row]:
            if present is not None and not present[step]:
                continue
            if lead + start > done:
                out.append(zeros[: item * (lead + start - done)])
            begin = self._starts[step]
            out.append(self._values[begin : begin + item * (end - start)])
            done = lead + end
        rest = lead + self._responses[row] - done
        if rest:
            out.append(zeros[: item * rest])


class StepScalars(Column):
    """A number per step on its last response token, 0 elsewhere: rewards given one a step."""

    dtype, scope = np.float32, "response"

    def __init__(self, name: str, values: NDArray[np.float64], geometry: Geometry, constants: Constants) -> None:
        self.name = name
        floats = values.astype(np.float32)
        self._values = bytes_of(floats)
        self._nonzero: list[bool] = (floats != 0).tolist()
        self._segments, self._responses, self._zeros = geometry.segments, geometry.response_of, constants.zeros

    def runs(self, row: int, lead: int, out: list[memoryview]) -> None:
        if row == PADDING:
            out.append(self._zeros[: 4 * (lead + self._responses[PADDING])])
            return
        done = 0
        for step, _, end in self._segments[row]:
            if self._nonzero[step]:
                if lead + end - 1 > done:
                    out.append(self._zeros[: 4 * (lead + end - 1 - done)])
                out.append(self._values[4 * step : 4 * step + 4])
                done = lead + end
        rest = lead + self._responses[row] - done
        if rest:
            out.append(self._zeros[: 4 * rest])


class RowScalars(Column):
    """A number per row on each of its response positions: advantages of trajectories."""

    dtype, scope = np.float32, "response"

    def __init__(self, name: str, values: NDArray[np.float64], geometry: Geometry, constants: Constants) -> None:
        self.name = name
        self._values: list[float] = values.astype(np.float32).tolist()
        self._responses, self._zeros = geometry.response_of, constants.zeros

    def runs(self, row: int, lead: int, out: list[memoryview]) -> None:
        length = self._responses[row]
        value = 0.0 if row == PADDING else self._values[row]
        if value == 0.0:
            out.append(self._zeros[: 4 * (lead + length)])
            return
        if lead:
            out.append(self._zeros[: 4 * lead])
        constant = np.empty(length, np.float32)
        constant.fill(value)
        out.append(bytes_of(constant))


class ScaledStepTokens(Column):
    """A value per response token times a number per row: per-token advantages under a loss reduction."""

    dtype, scope = np.float32, "response"

    def __init__(
        self,
        name: str,
        values: Ragged,
        scale: NDArray[np.float64],
        geometry: Geometry,
        constants: Constants,
    ) -> None:
        self.name = name
        self._values, self._scale = values, scale
        self._segments, self._responses, self._zeros = geometry.segments, geometry.response_of, constants.zeros

    def runs(self, row: int, lead: int, out: list[memoryview]) -> None:
        response = np.zeros(self._responses[row], np.float32)
        if row != PADDING:
            for step, start, end in self._segments[row]:
                response[start:end] = self._values[step] * self._scale[row]
        if lead:
            out.append(self._zeros[: 4 * lead])
        out.append(bytes_of(response))


class Positions(Column):
    """`position_ids` of the packed layout: 0, 1, ... in every row."""

    name, dtype, scope = "position_ids", np.int32, "sequence"

    def __init__(self, geometry: Geometry, longest: int) -> None:
        self._positions = bytes_of(np.arange(longest, dtype=np.int32))
        self._lengths = geometry.length_of

    def runs(self, row: int, lead: int, out: list[memoryview]) -> None:
        out.append(self._positions[: 4 * self._lengths[row]])


def bytes_of(values: NDArray[Any]) -> memoryview:
    """The array's memory as bytes, not copied where it is contiguous."""
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")
