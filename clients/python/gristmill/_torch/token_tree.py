"""The tokens of a micro-batch whose rows share their beginnings (`layout: prefix_tree`).

The axis is the tree in depth-first order, so that a token's descendants are a range: from the token itself to an end.
Token i attends to j exactly if i is in j's range, which takes one number per token and no list of ancestors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

MaskMod = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class TokenTree:
    """Computes masks, log-probabilities and paths of a micro-batch's tree; see `MicroBatch.tree`.

    parents: int32 (tokens,), the token before each, -1 at a root. segment_starts, segment_parents: int32 (segments,),
    the first token of each stretch without a branch, and the segment that it follows, -1 for none. row_ends: int32
    (rows,), each row's last token. Results are on the device of `parents`.
    """

    def __init__(
        self,
        parents: torch.Tensor,
        segment_starts: torch.Tensor,
        segment_parents: torch.Tensor,
        row_ends: torch.Tensor,
    ) -> None:
        self.parents, self.row_ends = parents.long(), row_ends.tolist()
        self._edges = [*segment_starts.tolist(), len(parents)]
        self._segment_parents = segment_parents.tolist()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.parents)

    @cached_property
    def descendant_ends(self) -> torch.Tensor:
        """Return the end of each token's range of descendants, which starts at the token itself; int64 (tokens,)."""
        ends = self._edges[1:]
        for segment in range(len(ends) - 1, 0, -1):
            if (parent := self._segment_parents[segment]) >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        counts = torch.tensor([end - begin for begin, end in pairwise(self._edges)])
        # A segment has no branch: all of its tokens have the same last descendant.
        return torch.tensor(ends).repeat_interleave(counts).to(self.parents.device)

    @cached_property
    def mask(self) -> torch.Tensor:
        """Return the dense mask: token i attends to itself and its ancestors j; bool (tokens, tokens)."""
        places = torch.arange(len(self), device=self.parents.device)
        return (places[None, :] <= places[:, None]) & (places[:, None] < self.descendant_ends[None, :])

    @cached_property
    def mask_mod(self) -> MaskMod:
        """Return the mask as a function of batch, head, query and key, as FlexAttention takes it."""
        # Padded, because FlexAttention rounds indices up to blocks of 128 tokens or a multiple. A closure over a
        # tensor, which torch.compile supports.
        ends = torch.nn.functional.pad(self.descendant_ends, (0, -len(self) % 4096))

        def attends(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (query < ends[key])

        return attends

    def block_mask(self, block_size: int = 128) -> BlockMask:
        """Return the mask for `torch.nn.attention.flex_attention`, computed from one number per token, not per pair.

        block_size: tokens of a block. Raises ImportError if this PyTorch has no FlexAttention (before 2.5).
        """
        from torch.nn.attention.flex_attention import BlockMask

        blocks = -(-len(self) // block_size)
        ends = torch.nn.functional.pad(self.descendant_ends, (0, blocks * block_size - len(self)))
        begins = torch.arange(blocks, device=ends.device) * block_size
        most, least = ends.view(blocks, block_size).amax(1), ends.view(blocks, block_size).amin(1)
        below = begins[None, :] < begins[:, None]
        # A block whose keys are before its queries is full if all keys' descendants end after the last query, and empty
        # if none end after the first.
        full = below & (least[None, :] >= begins[:, None] + block_size)
        partial = (below & (most[None, :] > begins[:, None]) & ~full) | (begins[None, :] == begins[:, None])
        return BlockMask.from_kv_blocks(
            *_listed(partial),
            *_listed(full),
            BLOCK_SIZE=block_size,
            mask_mod=self.mask_mod,
            seq_lengths=(len(self),) * 2,
        )

    @cached_property
    def blocks(self) -> BlockMask:
        """Return `block_mask()`, computed once for all layers."""
        return self.block_mask()

    def logprobs(self, logits: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
        """Compute the log-probability of each token given those before it in its row; (tokens,), 0 at roots.

        logits: (tokens, vocabulary) of a model that attends as `mask` says. sequences: (tokens,) of any integer dtype.
        Differentiable; a token's logits are read for each token that follows it, and the log-softmax is not stored.
        """
        before = self.parents.clamp(min=0)
        known = logits[before, sequences.long()] - logits.logsumexp(-1)[before]
        return torch.where(self.parents >= 0, known, torch.zeros_like(known))

    def at_parents(self, output: torch.Tensor) -> torch.Tensor:
        """Move per-token output (tokens, ...) to the tokens that follow: each gets its parent's, roots get 0."""
        moved = output[self.parents.clamp(min=0)]
        is_root = (self.parents < 0).view(-1, *[1] * (output.ndim - 1))
        return moved.masked_fill(is_root, 0)

    def path(self, row: int) -> torch.Tensor:
        """Return the positions of a row's tokens, from its first to its last; int64 (tokens of the row,)."""
        end = self.row_ends[row]
        segment = int(torch.searchsorted(torch.tensor(self._edges), end, right=True)) - 1
        pieces = [torch.arange(self._edges[segment], end + 1)]
        while (segment := self._segment_parents[segment]) >= 0:
            pieces.append(torch.arange(self._edges[segment], self._edges[segment + 1]))
        return torch.cat(pieces[::-1]).to(self.parents.device)


def _listed(blocks: torch.Tensor) -> tuple[Any, Any]:
    """Return the number of set blocks in each line, and their indices first; with dimensions for batch and head."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]
