"""Which values of a partial column's tensor steps sent, and which are fill: its pieces, as docs/shards.md has them."""

from __future__ import annotations

import torch


def given_of(pieces: torch.Tensor, values: torch.Tensor, axes: int) -> torch.Tensor:
    """Return which values are in the pieces; bool, of the first `axes` axes of `values`, on the device of the pieces.

    pieces: int64 (pieces, 4), in order. values: the column's tensor.
    """
    cells = values.shape[:axes]
    edges = torch.stack([pieces[:, 3], pieces[:, 3] + pieces[:, 2]], dim=1).flatten() // _unit(values, cells.numel())
    # Runs of fill and of values alternate.
    lengths = torch.cat([edges.new_zeros(1), edges, edges.new_tensor([cells.numel()])]).diff()
    is_value = torch.arange(len(lengths), device=lengths.device) % 2 == 1
    return is_value.repeat_interleave(lengths).view(cells)


def pieces_between(pieces: torch.Tensor, values: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return the pieces of `values[begin:end]`."""
    low, high = begin * values[0].nbytes, end * values[0].nbytes
    begins, ends = (edges.clamp(low, high) - low for edges in (pieces[:, 3], pieces[:, 3] + pieces[:, 2]))
    chosen = begins < ends
    return _pieces(begins[chosen], ends[chosen])


def pieces_of(given: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the pieces of a tensor; int64 (pieces, 4). given: bool, which values are in pieces."""
    changes = torch.nn.functional.pad(given.flatten().int(), (1, 1)).diff().nonzero().flatten()
    begins, ends = (_unit(values, given.numel()) * changes).view(-1, 2).T
    return _pieces(begins, ends)


def _pieces(begins: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.full_like(begins, -1), begins, ends - begins, begins], dim=1)


def _unit(values: torch.Tensor, count: int) -> int:
    """Return the bytes of one of the `count` values."""
    return max(1, values.nbytes // max(1, count))
