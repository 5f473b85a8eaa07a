"""Shards as torch tensors: mapped without a copy and cut into micro-batches. Also converts a model's output to rows.

Needs PyTorch: `pip install '.[torch]'` in gristmill's checkout. `TrainerClient` opens shards of a run, `load_shard`
opens a file.
"""

from __future__ import annotations

from gristmill._torch.jagged import Jagged
from gristmill._torch.ratios import segment_log_ratio, sequence_log_ratio
from gristmill._torch.rows import MicroBatch, MiniBatch, Rows, Shard, load_shard
from gristmill._torch.token_tree import TokenTree
from gristmill._torch.tree_attention import register_tree_attention, tree_attention

__all__ = [
    "Jagged",
    "MicroBatch",
    "MiniBatch",
    "Rows",
    "Shard",
    "TokenTree",
    "load_shard",
    "register_tree_attention",
    "segment_log_ratio",
    "sequence_log_ratio",
    "tree_attention",
]
