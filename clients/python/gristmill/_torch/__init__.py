"""Shards as torch tensors. `gristmill.torch` exports the public names."""

from __future__ import annotations

try:
    import torch as torch
except ImportError as missing:
    raise ImportError(f"reading shards needs PyTorch ({missing}); pip install torch") from missing
