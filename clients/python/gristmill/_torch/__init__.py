"""Shards as torch tensors: `gristmill.torch` shows the public part."""

from __future__ import annotations

try:
    import torch as torch
except ImportError as missing:
    raise ImportError(f"shards are read by PyTorch ({missing}): pip install gristmill[torch]") from missing
