"""Rows of different lengths without padding, from every layout: values on one axis, and offsets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import torch

from gristmill.errors import InvalidArgumentError

Part = Literal["row", "prompt", "response"]
_PARTS = ("row", "prompt", "response")
_REMEDY = "pass the name of a per-token tensor, such as sequences or advantages"


class Rows(Protocol):
    """The part of `gristmill.torch.Rows` that this module uses."""

    @property
    def is_packed(self) -> bool: ...

    @property
    def is_tree(self) -> bool: ...

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def __contains__(self, name: object) -> bool: ...

    def position_ids(self) -> torch.Tensor: ...


class Jagged(NamedTuple):
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`.

    values: (tokens, ...). offsets: int64 (rows + 1,), beginning with 0.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """Return the rows' lengths, (rows,) int64."""
        return self.offsets.diff()

    def nested(self) -> torch.Tensor:
        """Return a nested tensor of layout `torch.jagged` over the same memory."""
        lengths = self.lengths
        # Without both, `to_padded_tensor` would pad every row to the total length of all rows.
        shortest, longest = int(lengths.min()), int(lengths.max())
        return torch.nested.nested_tensor_from_jagged(
            self.values, self.offsets, min_seqlen=shortest, max_seqlen=longest
        )

    def at(self, places: Places) -> Jagged:
        """Select parts of the rows."""
        return Jagged(self.values.index_select(0, places.tokens), places.offsets)


class Places(NamedTuple):
    """The positions of parts of rows: the values of part i have the indices `tokens[offsets[i]:offsets[i + 1]]` in a
    `Jagged`."""

    tokens: torch.Tensor
    offsets: torch.Tensor


def stretches(begins: torch.Tensor, lengths: torch.Tensor) -> Places:
    """Return the places of `lengths[i]` tokens, beginning at `begins[i]`, for each row i. Both (rows,) int64."""
    offsets = offsets_of(lengths)
    # Each token's index is its index among all parts plus a shift, which is the same for all tokens of a part.
    shifts = torch.repeat_interleave(begins - offsets[:-1], lengths)
    return Places(torch.arange(len(shifts), device=shifts.device) + shifts, offsets)


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def join(parts: Iterable[Jagged]) -> Jagged:
    """Concatenate the rows of at least one `Jagged`."""
    values, offsets = zip(*parts, strict=True)
    return Jagged(torch.cat(values), offsets_of(torch.cat([each.diff() for each in offsets])))


def jagged(rows: Rows, name: str, part: Part) -> Jagged:
    """Return a part of each row of a per-token tensor; see `gristmill.torch.Rows.jagged`."""
    if part not in _PARTS:
        raise InvalidArgumentError(f"part is {part!r}; expected one of {', '.join(_PARTS)}")
    if rows.is_tree:
        raise InvalidArgumentError(
            f"{name}: the layout is prefix_tree, where a shared token occurs once, with the values of the row that "
            "trains it, so other rows have no values for it; use layout: packed"
        )
    if f"{name}_offsets" in rows:
        raise InvalidArgumentError(
            f"{name} has a variable number of values per token or row, assigned by {name}_offsets; use both, or "
            f"{_REMEDY}"
        )
    values = rows.position_ids() if name == "position_ids" else rows[name]
    if rows.is_packed:
        return _of_axis(rows, values, name, part)
    return _of_lines(rows, values, name, part)


def _of_axis(rows: Rows, values: torch.Tensor, name: str, part: Part) -> Jagged:
    """Return parts of rows in the packed layout."""
    if len(values) != len(rows["sequences"]):
        raise InvalidArgumentError(f"{name} has shape {tuple(values.shape)}, not one value per token; {_REMEDY}")
    begins, lengths = row_spans(rows)
    if part == "row":
        if "cu_seqlens_padded" not in rows:
            return Jagged(values, rows["cu_seqlens"].long())
        return Jagged(values, begins).at(stretches(begins, lengths))
    responses = response_lengths(rows["response_mask"], torch.cat([begins, (begins + lengths)[-1:]]))
    prompts = lengths - responses
    chosen = stretches(begins, prompts) if part == "prompt" else stretches(begins + prompts, responses)
    return Jagged(values, begins).at(chosen)


def row_spans(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each packed row begins on the token axis, and its number of tokens; both (rows,) int64."""
    edges = rows["cu_seqlens"].long()
    begins = rows["cu_seqlens_padded"].long() if "cu_seqlens_padded" in rows else edges
    return begins[:-1], edges.diff()


def response_lengths(response_mask: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Count the response tokens of each packed row, (rows,) int64. The count of a padding row is 1.

    edges: int64 (rows + 1,), beginning with 0.
    """
    return offsets_of(response_mask != 0)[edges].diff().clamp(min=1)


def _of_lines(rows: Rows, values: torch.Tensor, name: str, part: Part) -> Jagged:
    """Return parts of rows in the padded layout, where all tensors are right-aligned."""
    response, row = rows["response_mask"] != 0, rows["attention_mask"] != 0
    response[rows["is_padding"] != 0, -1] = True
    width = values.shape[1] if values.ndim > 1 else 0
    if width not in (response.shape[1], row.shape[1]):
        raise InvalidArgumentError(f"{name} has shape {tuple(values.shape)}, not one value per token; {_REMEDY}")
    if part != "response" and width != row.shape[1]:
        raise InvalidArgumentError(
            f"{name} is as wide as the responses, {tuple(values.shape)}, and has no {part}; pass part='response'"
        )
    chosen = torch.nn.functional.pad(response, (width - response.shape[1], 0))
    if part != "response":
        chosen = row if part == "row" else row & ~chosen
    return Jagged(values[chosen], offsets_of(chosen.sum(-1)))
