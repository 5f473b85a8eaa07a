"""The tokens of a micro-batch whose rows share prefixes (`layout: prefix_tree`).

The token axis is the tree in depth-first order, so a token's descendants are a range that starts at the token itself.
Token i attends to token j if and only if i is in j's range. This needs only the end of the range per token.
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

    parents: int32 (tokens,), the previous token of each token, -1 for a root. segment_starts, segment_parents: int32
    (segments,), the first token of each segment (tokens without a branch between them), and the segment that it
    follows, -1 for none. row_ends: int32 (rows,), each row's last token. queries: int32 (n,), the tokens of one
    context-parallel rank, whole blocks of 128; masks then have one line per query instead of one per token. None: all.
    Results are on the device of `parents`.
    """

    def __init__(
        self,
        parents: torch.Tensor,
        segment_starts: torch.Tensor,
        segment_parents: torch.Tensor,
        row_ends: torch.Tensor,
        queries: torch.Tensor | None = None,
    ) -> None:
        self.parents, self.row_ends = parents.long(), row_ends.tolist()
        self._edges = [*segment_starts.tolist(), len(parents)]
        self._segment_parents = segment_parents.tolist()
        self._queries = None if queries is None else queries.long()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.parents)

    @property
    def query_count(self) -> int:
        """Return the number of tokens that attend: all, or those of one context-parallel rank."""
        return len(self) if self._queries is None else len(self._queries)

    @cached_property
    def descendant_ends(self) -> torch.Tensor:
        """Return the end of each token's range of descendants, which starts at the token itself; int64 (tokens,)."""
        ends = self._edges[1:]
        for segment in range(len(ends) - 1, 0, -1):
            if (parent := self._segment_parents[segment]) >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        counts = torch.tensor([end - begin for begin, end in pairwise(self._edges)])
        # A segment has no branch, so all of its tokens have the same last descendant.
        return torch.tensor(ends).repeat_interleave(counts).to(self.parents.device)

    @cached_property
    def mask(self) -> torch.Tensor:
        """Return the dense mask, where each token attends to itself and its ancestors; bool (tokens, tokens), or
        (queries, tokens) for a context-parallel rank."""
        places = torch.arange(len(self), device=self.parents.device)
        queries = places if self._queries is None else self._queries
        return (places[None, :] <= queries[:, None]) & (queries[:, None] < self.descendant_ends[None, :])

    @cached_property
    def mask_mod(self) -> MaskMod:
        """Return the mask as a function of batch, head, query and key, for FlexAttention."""
        # Pad, because FlexAttention rounds indices up to blocks of a multiple of 128 tokens. torch.compile supports a
        # closure over a tensor.
        ends = torch.nn.functional.pad(self.descendant_ends, (0, -len(self) % 4096))
        if self._queries is not None:
            queries = torch.nn.functional.pad(self._queries, (0, -len(self._queries) % 4096))

            def attends_from(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                return (key <= queries[query]) & (queries[query] < ends[key])

            return attends_from

        def attends(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (query < ends[key])

        return attends

    def block_mask(self, block_size: int = 128) -> BlockMask:
        """Return the mask for `torch.nn.attention.flex_attention`, computed from one number per token, not per pair.

        block_size: tokens per block, 128 for a context-parallel rank. Raises ImportError if PyTorch is older than 2.5,
            without FlexAttention.
        """
        from torch.nn.attention.flex_attention import BlockMask

        blocks = -(-len(self) // block_size)
        ends = torch.nn.functional.pad(self.descendant_ends, (0, blocks * block_size - len(self)))
        begins = torch.arange(blocks, device=ends.device) * block_size
        most, least = ends.view(blocks, block_size).amax(1), ends.view(blocks, block_size).amin(1)
        below = begins[None, :] < begins[:, None]
        # Consider a block with its keys before its queries. It is full if the ranges of all keys end after the last
        # query, and empty if no range ends after the first query.
        full = below & (least[None, :] >= begins[:, None] + block_size)
        partial = (below & (most[None, :] > begins[:, None]) & ~full) | (begins[None, :] == begins[:, None])
        if self._queries is not None:
            of_rank = self._queries[::block_size] // block_size
            full, partial = full[of_rank], partial[of_rank]
        return BlockMask.from_kv_blocks(
            *_listed(partial),
            *_listed(full),
            BLOCK_SIZE=block_size,
            mask_mod=self.mask_mod,
            seq_lengths=(self.query_count, len(self)),
        )

    @cached_property
    def blocks(self) -> BlockMask:
        """Return `block_mask()`, computed once for all layers."""
        return self.block_mask()

    def logprobs(self, logits: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
        """Compute the log-probability of each token given the previous tokens of its row; (tokens,), 0 at roots.

        logits: (tokens, vocabulary) of a model that attends by `mask`. sequences: (tokens,) of any integer dtype.
        Differentiable. Reads a token's logits once per token that follows it. Does not store the log-softmax.
        """
        before = self.parents.clamp(min=0)
        known = logits[before, sequences.long()] - logits.logsumexp(-1)[before]
        return torch.where(self.parents >= 0, known, torch.zeros_like(known))

    def at_parents(self, output: torch.Tensor) -> torch.Tensor:
        """Return for each token the per-token output (tokens, ...) of its parent; 0 for roots."""
        moved = output[self.parents.clamp(min=0)]
        is_root = (self.parents < 0).view(-1, *[1] * (output.ndim - 1))
        return moved.masked_fill(is_root, 0)

    def path(self, row: int) -> torch.Tensor:
        """Return the positions of a row's tokens in order; int64 (tokens of the row,)."""
        end = self.row_ends[row]
        segment = int(torch.searchsorted(torch.tensor(self._edges), end, right=True)) - 1
        pieces = [torch.arange(self._edges[segment], end + 1)]
        while (segment := self._segment_parents[segment]) >= 0:
            pieces.append(torch.arange(self._edges[segment], self._edges[segment + 1]))
        return torch.cat(pieces[::-1]).to(self.parents.device)


def _listed(blocks: torch.Tensor) -> tuple[Any, Any]:
    """Return the number of true blocks per line, and all block indices, true blocks first; (1, 1, ...)."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]
