"""Rows of different lengths without padding between them, whatever the layout: values on one axis, and offsets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import torch

from gristmill.errors import InvalidArgumentError

Part = Literal["row", "prompt", "response"]
_PARTS = ("row", "prompt", "response")


class Rows(Protocol):
    """What is asked of `gristmill.torch.Rows`."""

    @property
    def is_packed(self) -> bool: ...

    @property
    def is_tree(self) -> bool: ...

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def position_ids(self) -> torch.Tensor: ...


class Jagged(NamedTuple):
    """Row i is `values[offsets[i]:offsets[i + 1]]`. values: (tokens, ...). offsets: int64 (rows + 1,), from 0."""

    values: torch.Tensor
    offsets: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """(rows,) int64."""
        return self.offsets.diff()

    def nested(self) -> torch.Tensor:
        """The same as a nested tensor of layout `torch.jagged`, over the same memory."""
        lengths = self.lengths
        # Without them `to_padded_tensor` would make every row as long as all together.
        shortest, longest = int(lengths.min()), int(lengths.max())
        return torch.nested.nested_tensor_from_jagged(
            self.values, self.offsets, min_seqlen=shortest, max_seqlen=longest
        )

    def at(self, places: Places) -> Jagged:
        """Parts of the rows."""
        return Jagged(self.values.index_select(0, places.tokens), places.offsets)


class Places(NamedTuple):
    """Where parts of rows stand: of part i the tokens `tokens[offsets[i]:offsets[i + 1]]`, indices of a jagged's
    values."""

    tokens: torch.Tensor
    offsets: torch.Tensor


def stretches(begins: torch.Tensor, lengths: torch.Tensor) -> Places:
    """So many tokens of each row, from where each begins. Both (rows,) int64."""
    offsets = offsets_of(lengths)
    # Token j of all is that many behind its row's begin as j is behind the row's first.
    shifts = torch.repeat_interleave(begins - offsets[:-1], lengths)
    return Places(torch.arange(len(shifts), device=shifts.device) + shifts, offsets)


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def join(parts: Iterable[Jagged]) -> Jagged:
    """The rows of one after those of another; at least one is given."""
    values, offsets = zip(*parts, strict=True)
    return Jagged(torch.cat(values), offsets_of(torch.cat([each.diff() for each in offsets])))


def jagged(rows: Rows, name: str, part: Part) -> Jagged:
    """This part of each row of a tensor with a value a token; see `gristmill.torch.Rows.jagged`."""
    if part not in _PARTS:
        raise InvalidArgumentError(f"part is {part!r}; known are {', '.join(_PARTS)}")
    if rows.is_tree:
        raise InvalidArgumentError(
            f"{name}: with layout: prefix_tree a shared token stands once, with the values of the row that trains it, "
            "and the other rows have no values for it; use layout: packed"
        )
    values = rows.position_ids() if name == "position_ids" else rows[name]
    if rows.is_packed:
        return _of_axis(rows, values, name, part)
    return _of_lines(rows, values, name, part)


def _of_axis(rows: Rows, values: torch.Tensor, name: str, part: Part) -> Jagged:
    """The parts of rows in the packed layout."""
    edges = rows["cu_seqlens"].long()
    if len(values) != len(rows["sequences"]):
        raise InvalidArgumentError(f"{name} has shape {tuple(values.shape)} and no value a token, so it has no rows")
    whole = Jagged(values, edges)
    if part == "row":
        return whole
    responses = response_lengths(rows["response_mask"], edges)
    prompts = whole.lengths - responses
    return whole.at(stretches(edges[:-1], prompts) if part == "prompt" else stretches(edges[:-1] + prompts, responses))


def response_lengths(response_mask: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Response tokens of each packed row, (rows,) int64; 1 of a padding row. edges: int64 (rows + 1,), from 0."""
    return offsets_of(response_mask != 0)[edges].diff().clamp(min=1)


def _of_lines(rows: Rows, values: torch.Tensor, name: str, part: Part) -> Jagged:
    """The parts of rows in the padded layout, where everything is right-aligned."""
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
    return Jagged(values[chosen], offsets_of(chosen.sum(-1)))
