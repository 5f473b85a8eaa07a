"""Where each row's tokens stand in a batch's tensors: padded ones, or one a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill._wire.columns import Array, Int64s
from gristmill.errors import InvalidArgumentError


class Padded:
    """Prompts are padded on the left, responses on the right: a row's tokens are one block around the seam."""

    def __init__(self, prompt_mask: Array, response_mask: Array, name: str, where: str) -> None:
        """The masks, called `name`, are not 0 on tokens: (rows, prompt width) and (rows, response width).

        Raises InvalidArgumentError where they have other rows, and naming the row whose tokens are not one block.
        """
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
        found: Array = values[row][self._first[row] :]
        return found

    def response(self, values: Array, row: int) -> Array:
        found: Array = values[row][: self._end[row]]
        return found

    def outside(self, values: Array, row: int) -> Array:
        """What a response's tensor has on padding."""
        found: Array = values[row][self._end[row] :]
        return found

    def column(self, values: Array, row: int) -> Array:
        """A tensor's values of one row: of its tokens or its response where it is as wide as those, else as it is."""
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
    """Without padding: a value a row."""

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
