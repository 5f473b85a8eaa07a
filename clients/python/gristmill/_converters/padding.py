"""Extracts each row's values from a batch, which has padded tensors or one entry per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill._wire.columns import Array, Int64s
from gristmill.errors import InvalidArgumentError


class Padded:
    """Reads rows of padded tensors. Prompts are padded on the left and responses on the right, so a row's tokens are
    adjacent: the prompt's last columns and the response's first columns.

    prompt_mask, response_mask: not 0 for tokens, (rows, prompt width) and (rows, response width). name: the name of the
    masks in errors. Raises InvalidArgumentError if the numbers of rows differ, or a row's tokens are not adjacent.
    """

    def __init__(self, prompt_mask: Array, response_mask: Array, name: str, where: str) -> None:
        if len(prompt_mask) != len(response_mask):
            raise InvalidArgumentError(
                f"{where}: {name} has {len(prompt_mask)} rows of prompts and {len(response_mask)} of responses; pass "
                "both for each row"
            )
        prompt_on, response_on = prompt_mask != 0, response_mask != 0
        self.rows, self._prompt_width = prompt_on.shape
        self._response_width = response_on.shape[1]
        gaps = (prompt_on[:, :-1] > prompt_on[:, 1:]).any(1) | (response_on[:, :-1] < response_on[:, 1:]).any(1)
        if gaps.any():
            raise InvalidArgumentError(
                f"{where}: row {int(gaps.argmax())}: {name} has zeros between tokens; pad prompts on the left and "
                "responses on the right"
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
        """Return the values of a response's tensor that are on padding."""
        padding: Array = values[row][self._end[row] :]
        return padding

    def column(self, values: Array, row: int) -> Array:
        """Return one row's values, without padding if the tensor is as wide as the tokens or the response."""
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
        raise InvalidArgumentError(f"{where}: {name} has shape {values.shape}; expected {shape}")
