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

from gristmill.columns import Int64s, Ragged, bytes_of
from gristmill_service.pipeline.merge import Rows
from gristmill_service.pipeline.plan import PADDING

Scope = Literal["sequence", "response"]


class Geometry:
    """Where rows and their steps stand, as Python ints for loops over rows.

    Lists of rows have the padding row at -1, which covers no step (`steps_of`). Within its row's response, step k
    stands at `start_of[k]:end_of[k]`.
    """

    def __init__(self, rows: Rows, step_prompts: Int64s, step_responses: Int64s, padding_tokens: int) -> None:
        self.lengths = np.append(rows.lengths, padding_tokens)
        self.responses = np.append(rows.response_lengths, 1)
        self.length_of: list[int] = self.lengths.tolist()
        self.response_of: list[int] = self.responses.tolist()
        self.first: list[int] = rows.first.tolist()
        self.last: list[int] = rows.last.tolist()
        starts = step_prompts - np.repeat(rows.prompt_lengths, rows.last - rows.first + 1)
        self.start_of: list[int] = starts.tolist()
        self.end_of: list[int] = (starts + step_responses).tolist()
        self.steps_of = [*map(range, self.first, (rows.last + 1).tolist()), range(0)]
        self.gaps = np.append(0, starts[1:] - (starts + step_responses)[:-1]).clip(0)
        """Of each step, the observation tokens before it within its row's response, int64; 0 for a row's first."""


class Constants:
    """Shared read-only buffers that runs are cut from; one element is `itemsize` bytes."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.zeros = np.zeros(4 * longest, np.uint8).data
        steps = np.zeros(2 * longest, np.uint8)
        steps[longest:] = 1
        self.step_up = steps.data
        """Zeros, then ones, as uint8: any "absent, then present" mask is one slice of it."""


class Column(ABC):
    """One tensor of a shard.

    name, dtype: as in the shard. scope: over the whole sequence, or over the response only.
    """

    name: str
    dtype: Any
    scope: Scope

    @abstractmethod
    def runs(self, rows: Sequence[int], leads: Sequence[int]) -> list[memoryview]:
        """The rows' bytes in order: of each row `lead` elements of fill, then its values.

        rows: row indices, -1 for a padding row. Loops over rows stay inside: a call a row would cost more than its
        bytes.
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

    def runs(self, rows: Sequence[int], leads: Sequence[int]) -> list[memoryview]:
        fill, values, spans, out = self._fill, self._values, self._spans, []
        for row, lead in zip(rows, leads, strict=True):
            if row == PADDING:
                out.append(fill[: 4 * lead + self._padding])
                continue
            if lead:
                out.append(fill[: 4 * lead])
            start, end = spans[row]
            out.append(values[start:end])
        return out


class Presence(Column):
    """`attention_mask` and `response_mask`: 1 where the row has a token; a padding row has a sequence, no response."""

    dtype = np.uint8

    def __init__(self, name: str, scope: Scope, geometry: Geometry, constants: Constants) -> None:
        self.name, self.scope = name, scope
        self._steps, self._middle = constants.step_up, constants.longest
        self._absent = [0] * len(geometry.length_of)
        self._present = list(geometry.length_of if scope == "sequence" else geometry.response_of)
        if scope == "response":
            self._absent[PADDING], self._present[PADDING] = self._present[PADDING], 0

    def runs(self, rows: Sequence[int], leads: Sequence[int]) -> list[memoryview]:
        steps, middle, absent, present = self._steps, self._middle, self._absent, self._present
        return [
            steps[middle - lead - absent[row] : middle + present[row]] for row, lead in zip(rows, leads, strict=True)
        ]


class StepTokens(Column):
    """A value per response token of each step, 0 on observations between steps and in padding rows.

    present: per step whether its values count; others are 0 (how filters mask).
    """

    scope = "response"

    def __init__(
        self,
        name: str,
        values: Ragged,
        geometry: Geometry,
        constants: Constants,
        present: NDArray[np.bool_] | None = None,
    ) -> None:
        self.name, self.dtype = name, values.values.dtype
        self._item = item = values.values.dtype.itemsize
        self._zeros, self._first, self._last = constants.zeros, geometry.first, geometry.last
        starts = values.starts * item
        views = slices(bytes_of(values.values), starts, starts + values.lengths * item)
        for step in [] if present is None else np.flatnonzero(~present).tolist():
            views[step] = self._zeros[: len(views[step])]
        # Of every step the zeros before it within its row, and its values: a row is a slice of this.
        self._runs: list[memoryview] = [self._zeros[:0]] * (2 * len(views))
        self._runs[1::2] = views
        if geometry.gaps.any():
            self._runs[::2] = slices(self._zeros, np.zeros_like(starts), item * geometry.gaps)

    def runs(self, rows: Sequence[int], leads: Sequence[int]) -> list[memoryview]:
        item, zeros, runs, first, last = self._item, self._zeros, self._runs, self._first, self._last
        out: list[memoryview] = []
        for row, lead in zip(rows, leads, strict=True):
            if row == PADDING:
                out.append(zeros[: item * (lead + 1)])
                continue
            if lead:
                out.append(zeros[: item * lead])
            out += runs[2 * first[row] + 1 : 2 * last[row] + 2]
        return out


class StepScalars(Column):
    """A number per step on its last response token, 0 elsewhere: rewards given one a step."""

    dtype, scope = np.float32, "response"

    def __init__(self, name: str, values: NDArray[np.float64], geometry: Geometry, constants: Constants) -> None:
        self.name = name
        floats = values.astype(np.float32)
        self._values = bytes_of(floats)
        self._nonzero: list[bool] = (floats != 0).tolist()
        self._geometry, self._zeros = geometry, constants.zeros

    def runs(self, rows: Sequence[int], leads: Sequence[int]) -> list[memoryview]:
        zeros, values, nonzero = self._zeros, self._values, self._nonzero
        steps_of, end_of, responses = self._geometry.steps_of, self._geometry.end_of, self._geometry.response_of
        out: list[memoryview] = []
        for row, lead in zip(rows, leads, strict=True):
            done = 0
            for step in steps_of[row]:
                if nonzero[step]:
                    end = lead + end_of[step]
                    if end - 1 > done:
                        out.append(zeros[: 4 * (end - 1 - done)])
                    out.append(values[4 * step : 4 * step + 4])
                    done = end
            rest = lead + responses[row] - done
            if rest:
                out.append(zeros[: 4 * rest])
        return out


class RowScalars(Column):
    """A number per row on each of its response positions: advantages of trajectories."""

    dtype, scope = np.float32, "response"

    def __init__(self, name: str, values: NDArray[np.float64], geometry: Geometry, constants: Constants) -> None:
        self.name = name
        self._values = np.append(values, 0.0).astype(np.float32)
        self._geometry, self._zeros = geometry, constants.zeros

    def runs(self, rows: Sequence[int], leads: Sequence[int]) -> list[memoryview]:
        responses, zeros = self._geometry.response_of, self._zeros
        constants = bytes_of(np.repeat(self._values[rows], self._geometry.responses[rows]))
        out: list[memoryview] = []
        done = 0
        for row, lead in zip(rows, leads, strict=True):
            if lead:
                out.append(zeros[: 4 * lead])
            end = done + 4 * responses[row]
            out.append(constants[done:end])
            done = end
        return out


class ScaledStepTokens(Column):
    """A value per response token times a number per row: per-token advantages under a loss reduction."""

    dtype, scope = np.float32, "response"

    def __init__(
        self, name: str, values: Ragged, scale: NDArray[np.float64], geometry: Geometry, constants: Constants
    ) -> None:
        self.name = name
        self._values, self._scale = values, scale
        self._geometry, self._zeros = geometry, constants.zeros

    def runs(self, rows: Sequence[int], leads: Sequence[int]) -> list[memoryview]:
        geometry = self._geometry
        out: list[memoryview] = []
        for row, lead in zip(rows, leads, strict=True):
            response = np.zeros(geometry.response_of[row], np.float32)
            for step in geometry.steps_of[row]:
                response[geometry.start_of[step] : geometry.end_of[step]] = self._values[step] * self._scale[row]
            if lead:
                out.append(self._zeros[: 4 * lead])
            out.append(bytes_of(response))
        return out


class Positions(Column):
    """`position_ids` of the packed layout: 0, 1, ... in every row."""

    name, dtype, scope = "position_ids", np.int32, "sequence"

    def __init__(self, geometry: Geometry, longest: int) -> None:
        self._positions = bytes_of(np.arange(longest, dtype=np.int32))
        self._lengths = geometry.length_of

    def runs(self, rows: Sequence[int], leads: Sequence[int]) -> list[memoryview]:
        return [self._positions[: 4 * self._lengths[row]] for row in rows]


def slices(data: memoryview, starts: Int64s, ends: Int64s) -> list[memoryview]:
    return list(map(data.__getitem__, map(slice, starts.tolist(), ends.tolist())))
