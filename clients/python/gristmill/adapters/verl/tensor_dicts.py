"""A mini-batch's shards as verl's workers take them: TensorDicts without padding, cut as the service has cut it.

verl cuts what a worker gets into micro-batches of equally many rows. So micro-batches are filled up with rows of two
tokens that train nothing, as verl's own padding rows are, until each has as many as the longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from tensordict import TensorDict
from verl.protocol import DataProtoFuture
from verl.utils import tensordict_utils

from gristmill._torch.jagged import Jagged, Places, offsets_of, response_lengths, stretches
from gristmill.torch import Shard

# By verl's names ours, what of each row, and verl's dtype.
_FIELDS = {
    "input_ids": ("sequences", "row", torch.int64),
    "position_ids": ("position_ids", "row", torch.int64),
    "prompts": ("sequences", "prompt", torch.int64),
    "responses": ("sequences", "response", torch.int64),
    # verl's response mask has 0 on observations, as our loss mask has.
    "response_mask": ("loss_mask", "response", torch.int64),
    "advantages": ("advantages", "response", torch.float32),
    "returns": ("returns", "response", torch.float32),
    "rewards": ("rewards", "response", torch.float32),
    "rollout_log_probs": ("rollout_logprobs", "response", torch.float32),
    "old_log_probs": ("old_logprobs", "response", torch.float32),
    "ref_log_prob": ("ref_logprobs", "response", torch.float32),
    "values": ("values", "response", torch.float32),
}
_FILLING_TOKENS = 2


class MiniBatchData:
    """The rows of all ranks, rank after rank. By verl's names what shards have of them, each made when it is asked for
    first: a pass over the batch reads a few of them.

    lengths: (rows,) tokens. is_real: (rows,) False for padding and what fills up. rows_per_micro_batch: in each.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._micro_batches = [micro for shard in shards for micro in shard.micro_batches()]
        self.rows_per_micro_batch = max(map(len, self._micro_batches))
        self._missing = [self.rows_per_micro_batch - len(micro) for micro in self._micro_batches]
        self._ranks = len(shards)
        self._fields: dict[str, Jagged] = {}
        self.lengths = self._filled(
            [micro["cu_seqlens"].diff() for micro in self._micro_batches], _FILLING_TOKENS
        ).long()
        self.is_real = self._filled([micro["is_padding"] == 0 for micro in self._micro_batches], False)
        self._offsets = offsets_of(self.lengths)

    def _filled(self, parts: Sequence[torch.Tensor], *row: float) -> torch.Tensor:
        """What micro-batches have, one after another, with the rows that fill up behind each."""
        filling = torch.tensor(row, dtype=parts[0].dtype)
        counted = zip(parts, self._missing, strict=True)
        return torch.cat(
            [piece for part, count in counted for piece in ((part, filling.repeat(count)) if count else (part,))]
        )

    def _joined(self, own: str) -> torch.Tensor:
        """A tensor of shards. Positions in a filling row count from 0; of everything else there is nothing."""
        row = range(_FILLING_TOKENS) if own == "position_ids" else [0] * _FILLING_TOKENS
        return self._filled([micro[own] for micro in self._micro_batches], *row)

    @cached_property
    def _response_lengths(self) -> torch.Tensor:
        return response_lengths(self._joined("response_mask"), self._offsets)

    @cached_property
    def _responses(self) -> Places:
        return stretches(self._offsets[1:] - self._response_lengths, self._response_lengths)

    def __contains__(self, name: str) -> bool:
        return name in self._fields or (name in _FIELDS and _FIELDS[name][0] in self._micro_batches[0])

    def __getitem__(self, name: str) -> Jagged:
        if name not in self._fields:
            own, part, dtype = _FIELDS[name]
            rows = Jagged(self._joined(own), self._offsets)
            if part == "response":
                rows = rows.at(self._responses)
            elif part == "prompt":
                rows = rows.at(stretches(self._offsets[:-1], self.lengths - self._response_lengths))
            self._fields[name] = rows._replace(values=rows.values.to(dtype))
        return self._fields[name]

    def add(self, fields: Mapping[str, Jagged]) -> None:
        """What was computed of the rows, by verl's names."""
        self._fields |= fields

    def of_ranks(self, names: Iterable[str], settings: Mapping[str, Any]) -> RankParts:
        """What each rank's worker gets: these fields, those that there are, and settings of verl's. `loss_mask` is
        `response_mask` again."""
        rows = len(self.lengths) // self._ranks
        bounds = [rank * rows for rank in range(self._ranks + 1)]
        return RankParts([self._part(begin, end, names, settings) for begin, end in pairwise(bounds)])

    def _part(self, begin: int, end: int, names: Iterable[str], settings: Mapping[str, Any]) -> TensorDict:
        found = {}
        for name in names:
            own = "response_mask" if name == "loss_mask" else name
            if own in self:
                field = self[own]
                first, last = field.offsets[[begin, end]].tolist()
                offsets = field.offsets[begin : end + 1] - first
                found[name] = Jagged(field.values[first:last], offsets).nested()
        data = tensordict_utils.get_tensordict(found, {})
        return tensordict_utils.assign_non_tensor(data, **settings).consolidate()

    def of_responses(self, output: Any) -> Jagged:
        """What a model gave for the response tokens.

        output: nested, a number for each token of each row: at a token, of the one behind it, as verl's workers
            return it.
        """
        return Jagged(output.values(), output.offsets()).at(self._responses._replace(tokens=self._responses.tokens - 1))

    def to_shards(self, values: Jagged, shards: Sequence[Shard]) -> list[list[torch.Tensor]]:
        """Numbers of response tokens as `TrainerClient.write` takes them: for each shard a tensor for each micro-batch,
        in the shape of its `response_mask`."""
        kept = values.values[torch.repeat_interleave(self.is_real, values.lengths)]
        masks = [[micro["response_mask"] != 0 for micro in shard.micro_batches()] for shard in shards]
        ends = accumulate(int(mask.sum()) for of_shard in masks for mask in of_shard)
        begin, found = 0, list[list[torch.Tensor]]()
        for of_shard in masks:
            found.append([])
            for mask, end in zip(of_shard, ends, strict=False):
                laid_out = torch.zeros(mask.shape, dtype=kept.dtype)
                laid_out[mask] = kept[begin:end]
                found[-1].append(laid_out)
                begin = end
        return found


class RankParts(DataProtoFuture):  # type: ignore[misc]
    """Data that is cut already: verl asks what it hands to workers for a part for each rank."""

    def __init__(self, parts: Sequence[TensorDict]) -> None:
        self.parts = list(parts)

    def chunk(self, chunks: int) -> list[TensorDict]:
        if chunks != len(self.parts):
            raise ValueError(f"a mini-batch of {len(self.parts)} ranks was handed to {chunks}")
        return self.parts
