"""Routed experts of rows for trainers that replay them."""

from __future__ import annotations

import torch


def fill_routes(routes: torch.Tensor) -> torch.Tensor:
    """Write the first top_k experts where no engine reported any (-1), and return which tokens had a route; bool
    (...). A replayed router needs distinct experts for every token, also for padding.

    routes: (..., layers, top_k), changed in place.
    """
    has_route = routes[..., 0, 0] >= 0
    routes[~has_route] = torch.arange(routes.shape[-1], dtype=routes.dtype)
    return has_route
