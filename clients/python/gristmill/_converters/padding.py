"""Takes each row's values out of a batch's tensors: padded ones, or one per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill._wire.columns import Array, Int64s
from gristmill.errors import InvalidArgumentError


class Padded:
    """Reads rows of padded tensors: prompts are padded on the left and responses on the right, so that a row's tokens
    are one block around the end of the prompt.

    prompt_mask, response_mask: not 0 on tokens, (rows, prompt width) and (rows, response width). name: of the masks in
    errors. Raises InvalidArgumentError if the masks differ in rows, or naming the row whose tokens are not one block.
    """

    def __init__(self, prompt_mask: Array, response_mask: Array, name: str, where: str) -> None:
        if len(prompt_mask) != len(response_mask):
            raise InvalidArgumentError(
                f"{where}: {name} has {len(prompt_mask)} rows of prompts and {len(response_mask)} of responses; each "
                "row has both"
            )
        prompt_on, response_on = prompt_mask != 0, response_mask != 0
        self.rows, self._prompt_width = prompt_on.shape
        self._response_width = response_on.shape[1]
        gaps = (prompt_on[:, :-1] > prompt_on[:, 1:]).any(1) | (response_on[:, :-1] < response_on[:, 1:]).any(1)
        if gaps.any():
            raise InvalidArgumentError(
                f"{where}: row {int(gaps.argmax())}: {name} is not one run of ones across the end of the prompt and "
                "the beginning of the response; prompts are padded on the left and responses on the right"
            )
        self.prompt_lengths: Int64s = np.count_nonzero(prompt_on, axis=1).astype(np.int64)
        self.response_lengths: Int64s = np.count_nonzero(response_on, axis=1).astype(np.int64)
        self._first = (self._prompt_width - self.prompt_lengths).tolist()
        self._end = self.response_lengths.tolist()

    def prompt(self, values: Array, row: int) -> Array:
        prompt: Array = values[row][self._first[row] :]
        return prompt

    def response(self, values: Array, row: int) -> Array:
        response: Array = values[row][: self._end[row]]
        return response

    def outside(self, values: Array, row: int) -> Array:
        """Return the values that a response's tensor has on padding."""
        padding: Array = values[row][self._end[row] :]
        return padding

    def column(self, values: Array, row: int) -> Array:
        """Return one row's values: those of its tokens or its response if the tensor is as wide, else all."""
        width = self._prompt_width + self._response_width
        if values.ndim == 3 and values.shape[2] == width != values.shape[1]:
            values = np.moveaxis(values, 2, 1)
        if values.ndim > 1 and values.shape[1] == width:
            return values[row][self._first[row] : self._prompt_width + self._end[row]]  # type: ignore[no-any-return]
        if values.ndim > 1 and values.shape[1] == self._response_width:
            return self.response(values, row)
        return np.asarray(values[row])


@dataclass(frozen=True)
class Ragged:
    """Reads rows of data without padding: lists with one entry per row."""

    rows: int

    def prompt(self, values: Sequence[Any], row: int) -> Any:
        return values[row]

    def response(self, values: Sequence[Any], row: int) -> Any:
        return values[row]

    def outside(self, values: Sequence[Any], row: int) -> Any:
        return ()

    def column(self, values: Sequence[Any], row: int) -> Any:
        return values[row]


def check_shape(name: str, values: Array, shape: tuple[int, int], where: str) -> None:
    if values.shape != shape:
        raise InvalidArgumentError(f"{where}: {name} has the shape {values.shape}; expected {shape}")
