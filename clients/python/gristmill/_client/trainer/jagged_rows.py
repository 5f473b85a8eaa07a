"""Rows of different lengths without padding between them, whatever the layout: values on one axis, and offsets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from gristmill.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gristmill.torch import Rows

Part = Literal["row", "prompt", "response"]
_PARTS = ("row", "prompt", "response")


class Jagged(NamedTuple):
    """Row i is `values[offsets[i]:offsets[i + 1]]`. values: (tokens, ...). offsets: int64 (rows + 1,), from 0."""

    values: torch.Tensor
    offsets: torch.Tensor

    def nested(self) -> torch.Tensor:
        """The same as a nested tensor of layout `torch.jagged`, over the same memory."""
        lengths = self.offsets.diff()
        # Without them `to_padded_tensor` would make every row as long as all together.
        shortest, longest = int(lengths.min()), int(lengths.max())
        return torch.nested.nested_tensor_from_jagged(
            self.values, self.offsets, min_seqlen=shortest, max_seqlen=longest
        )


def jagged(rows: Rows, name: str, part: Part) -> Jagged:
    """That part of each row of a tensor with a value a token; see `gristmill.torch.Rows.jagged`."""
    if part not in _PARTS:
        raise InvalidArgumentError(f"part is {part!r}; known are {', '.join(_PARTS)}")
    if rows.is_tree:
        raise InvalidArgumentError(
            f"{name}: with layout: prefix_tree a token stands once for several rows, with the values of the one that "
            "trains it, so that it has no rows of its own; use layout: packed"
        )
    values = rows.position_ids() if name == "position_ids" else rows[name]
    if rows.is_packed:
        return _of_axis(rows, values, name, part)
    return _of_lines(rows, values, name, part)


def join(parts: Iterable[Jagged]) -> Jagged:
    """The rows of one after those of another; at least one is given."""
    values, offsets = zip(*parts, strict=True)
    lengths = torch.cat([each.diff() for each in offsets])
    return Jagged(torch.cat(values), _offsets(lengths))


def _of_axis(rows: Rows, values: torch.Tensor, name: str, part: Part) -> Jagged:
    """Of the packed layout."""
    edges = rows["cu_seqlens"].long()
    if len(values) != len(rows["sequences"]):
        raise InvalidArgumentError(f"{name} has shape {tuple(values.shape)} and no value a token, so it has no rows")
    if part == "row":
        return Jagged(values, edges)
    response = rows["response_mask"] != 0
    response[edges[1:][rows["is_padding"] != 0] - 1] = True
    chosen = response if part == "response" else ~response
    return Jagged(values[chosen], _offsets(torch.diff(_offsets(chosen)[edges])))


def _of_lines(rows: Rows, values: torch.Tensor, name: str, part: Part) -> Jagged:
    """Of the padded layout, where everything is right-aligned."""
    response, row = rows["response_mask"] != 0, rows["attention_mask"] != 0
    response[rows["is_padding"] != 0, -1] = True
    width = values.shape[1] if values.ndim > 1 else 0
    if width not in (response.shape[1], row.shape[1]):
        raise InvalidArgumentError(f"{name} has shape {tuple(values.shape)} and no value a token, so it has no rows")
    if part != "response" and width != row.shape[1]:
        raise InvalidArgumentError(
            f"{name} is as wide as the responses, {tuple(values.shape)}, and has no {part}; ask for part='response'"
        )
    chosen = torch.nn.functional.pad(response, (width - response.shape[1], 0))
    if part != "response":
        chosen = row if part == "row" else row & ~chosen
    return Jagged(values[chosen], _offsets(chosen.sum(-1)))


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
