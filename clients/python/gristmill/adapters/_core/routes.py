"""Completes the routed experts of rows for trainers that replay them."""

from __future__ import annotations

import torch


def fill_routes(routes: torch.Tensor) -> torch.Tensor:
    """Set the first top_k experts for tokens without reported experts (-1), and return which tokens had a route; bool
    (...). A replayed router needs distinct experts for every token, including padding.

    routes: (..., layers, top_k), changed in place.
    """
    has_route = routes[..., 0, 0] >= 0
    routes[~has_route] = torch.arange(routes.shape[-1], dtype=routes.dtype)
    return has_route
