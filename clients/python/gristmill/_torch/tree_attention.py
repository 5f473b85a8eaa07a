"""An attention function for training models of the transformers library on `layout: prefix_tree`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from gristmill._torch.token_tree import TokenTree
from gristmill.errors import InvalidArgumentError

NAME = "gristmill_tree"


def register_tree_attention() -> str:
    """Register `tree_attention` with the transformers library, and return the name under which models can use it:

        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register_tree_attention())
        tokens, positions = micro["sequences"].long(), micro.position_ids()
        logits = model(tokens[None], position_ids=positions[None], tree=micro.tree).logits[0]

    Works for models that pass keyword arguments of their call to their attention, such as Llama and Qwen. Raises
    ImportError if the library is not installed, or older than 4.48.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
    return NAME


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: TokenTree | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention in which each token attends only to its row: by FlexAttention on a GPU, else by a dense mask.

    query: (1, heads, tokens, size); key, value: (1, heads or fewer, tokens, size). tree: the micro-batch's tree. For a
    context-parallel rank, `query` has the rank's tokens, and `key` and `value` those of all ranks, at their positions.
    Returns the output (1, tokens, heads, size), and None instead of weights. Raises InvalidArgumentError without a
    tree, for other shapes, and for unsupported kinds of attention (sliding window, soft caps, sinks).
    """
    if tree is None:
        raise InvalidArgumentError(
            f"attention {NAME!r} needs the micro-batch's tree; call the model with tree=micro.tree"
        )
    if query.shape[0] != 1 or query.shape[2] != tree.query_count or key.shape[2] != len(tree):
        raise InvalidArgumentError(
            f"attention {NAME!r} got queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)} for a "
            f"tree of {len(tree)} tokens; call the model with one micro-batch, sequences[None], and no cache"
        )
    if changed := [name for name in ("sliding_window", "softcap", "s_aux") if others.get(name) is not None]:
        raise InvalidArgumentError(
            f"attention {NAME!r} does not support {changed[0]}, which this model uses; use layout: packed"
        )
    attend = _by_blocks if query.is_cuda and not dropout else _by_mask
    output = attend(query, key, value, tree, scaling, dropout)
    return output.transpose(1, 2).contiguous(), None


def _by_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: TokenTree, scaling: float | None, dropout: float
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=tree.mask, dropout_p=dropout, scale=scaling
    )


def _by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: TokenTree, scaling: float | None, dropout: float
) -> torch.Tensor:
    has_groups = query.shape[1] != key.shape[1]
    output: torch.Tensor = _flex_attention(query.is_cuda)(
        query, key, value, block_mask=tree.blocks, scale=scaling, enable_gqa=has_groups
    )
    return output


@lru_cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention
