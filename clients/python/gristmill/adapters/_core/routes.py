"""Completes the routed experts of rows for trainers that replay them."""

from __future__ import annotations

import torch

from gristmill.torch import Rows


def fill_routes(routes: torch.Tensor, given: torch.Tensor) -> None:
    """Set the first top_k experts for tokens without reported experts. A replayed router needs distinct experts for
    every token, including padding.

    routes: (..., layers, top_k), changed in place. given: bool (...), which tokens have reported experts.
    """
    routes[~given] = torch.arange(routes.shape[-1], dtype=routes.dtype)


def routes_given(rows: Rows, name: str) -> torch.Tensor:
    """Return which tokens have reported experts; bool, in the shape of the column without layers and top_k. Without
    `partial: true` these are the tokens whose experts are not -1, which the column may declare as `fill`."""
    return rows.given(name) if f"{name}_pieces" in rows else rows[name][..., 0, 0] >= 0
