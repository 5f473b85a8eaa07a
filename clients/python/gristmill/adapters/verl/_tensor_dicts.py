"""Converts a mini-batch's shards for verl's workers: TensorDicts without padding, in the service's micro-batches.

verl splits a worker's data into micro-batches with the same number of rows. The adapter therefore adds filling rows to
smaller micro-batches. They have two tokens that are not trained, like verl's padding rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from tensordict import TensorDict
from verl.protocol import DataProtoFuture
from verl.utils import tensordict_utils

from gristmill.torch import Jagged, Shard

Part = Literal["row", "prompt", "response"]

# Maps verl's name to the shards' name, the part of each row, and verl's dtype.
_FIELDS: dict[str, tuple[str, Part, torch.dtype]] = {
    "input_ids": ("sequences", "row", torch.int64),
    "position_ids": ("position_ids", "row", torch.int64),
    "prompts": ("sequences", "prompt", torch.int64),
    "responses": ("sequences", "response", torch.int64),
    # verl's response mask is 0 on observations, like the shards' loss mask.
    "response_mask": ("loss_mask", "response", torch.int64),
    "advantages": ("advantages", "response", torch.float32),
    "returns": ("returns", "response", torch.float32),
    "rewards": ("rewards", "response", torch.float32),
    "rollout_log_probs": ("rollout_logprobs", "response", torch.float32),
    "old_log_probs": ("old_logprobs", "response", torch.float32),
    "ref_log_prob": ("ref_logprobs", "response", torch.float32),
    "values": ("values", "response", torch.float32),
}
# The values of a filling row, which has a prompt of one token and a response of one token. Other values are 0.
_FILLING: dict[Part, list[int]] = {"row": [0, 0], "prompt": [0], "response": [0]}
_FILLING_POSITIONS = [0, 1]


class MiniBatchData:
    """The rows of all ranks, rank by rank, under verl's names. A field is built at its first use.

    lengths: (rows,) numbers of tokens. is_real: (rows,) False for padding and filling rows.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._micro_batches = [micro for shard in shards for micro in shard.micro_batches()]
        self.rows_per_micro_batch = max(map(len, self._micro_batches))
        self._missing = [self.rows_per_micro_batch - len(micro) for micro in self._micro_batches]
        self._ranks = len(shards)
        self._fields: dict[str, Jagged] = {}
        self.lengths = self["input_ids"].lengths
        self.is_real = self._filled([micro["is_padding"] == 0 for micro in self._micro_batches], [False])

    def _filled(self, parts: Sequence[torch.Tensor], row: Sequence[float]) -> torch.Tensor:
        """Concatenate values of all micro-batches, each followed by the values of its filling rows."""
        filling = torch.tensor(row, dtype=parts[0].dtype)
        counted = zip(parts, self._missing, strict=True)
        return torch.cat([piece for part, count in counted for piece in (part, filling.repeat(count))])

    def __contains__(self, name: str) -> bool:
        return name in self._fields or (name in _FIELDS and _FIELDS[name][0] in self._micro_batches[0])

    def __getitem__(self, name: str) -> Jagged:
        if name not in self._fields:
            ours, part, dtype = _FIELDS[name]
            rows = [micro.jagged(ours, part) for micro in self._micro_batches]
            filling = _FILLING_POSITIONS if ours == "position_ids" else _FILLING[part]
            values = self._filled([each.values for each in rows], filling)
            lengths = self._filled([each.lengths for each in rows], [len(filling)])
            self._fields[name] = _of_lengths(values.to(dtype), lengths)
        return self._fields[name]

    def add(self, fields: Mapping[str, Jagged]) -> None:
        """Add values that were computed for the rows. fields: by verl's names."""
        self._fields |= fields

    def of_ranks(self, names: Iterable[str], settings: Mapping[str, Any]) -> RankParts:
        """Return the data for each rank's worker: these fields, if they exist, and settings of verl. `loss_mask` is a
        copy of `response_mask`."""
        rows = len(self.lengths) // self._ranks
        bounds = [rank * rows for rank in range(self._ranks + 1)]
        return RankParts([self._part(begin, end, names, settings) for begin, end in pairwise(bounds)])

    def _part(self, begin: int, end: int, names: Iterable[str], settings: Mapping[str, Any]) -> TensorDict:
        fields = {}
        for name in names:
            ours = "response_mask" if name == "loss_mask" else name
            if ours in self:
                field = self[ours]
                first, last = field.offsets[[begin, end]].tolist()
                offsets = field.offsets[begin : end + 1] - first
                fields[name] = Jagged(field.values[first:last], offsets).nested()
        data = tensordict_utils.get_tensordict(fields, {})
        return tensordict_utils.assign_non_tensor(data, **settings).consolidate()

    def of_responses(self, output: Any) -> Jagged:
        """Select the response tokens from a model's output.

        output: nested, one number per token of each row. The number at a token is for the next token, as in the output
            of verl's workers.
        """
        responses = self["responses"]
        # The number for token j of a response is j places after the last token of the prompt.
        before = output.offsets()[1:] - responses.lengths - 1
        shifts = torch.repeat_interleave(before - responses.offsets[:-1], responses.lengths)
        places = torch.arange(len(shifts), device=shifts.device) + shifts
        return Jagged(output.values().index_select(0, places), responses.offsets)

    def to_shards(self, values: Jagged, shards: Sequence[Shard]) -> list[list[torch.Tensor]]:
        """Convert numbers of response tokens for `TrainerClient.write`: for each shard one tensor per micro-batch, in
        the shape of its `response_mask`."""
        real = values.values[torch.repeat_interleave(self.is_real, values.lengths)]
        masks = [[micro["response_mask"] != 0 for micro in shard.micro_batches()] for shard in shards]
        ends = accumulate(int(mask.sum()) for of_shard in masks for mask in of_shard)
        begin, written = 0, list[list[torch.Tensor]]()
        for of_shard in masks:
            written.append([])
            for mask, end in zip(of_shard, ends, strict=False):
                laid_out = torch.zeros(mask.shape, dtype=real.dtype)
                laid_out[mask] = real[begin:end]
                written[-1].append(laid_out)
                begin = end
        return written


class RankParts(DataProtoFuture):  # type: ignore[misc]
    """Data that is already split by rank, in the form in which verl requests a part per rank."""

    def __init__(self, parts: Sequence[TensorDict]) -> None:
        self.parts = list(parts)

    def chunk(self, chunks: int) -> list[TensorDict]:
        if chunks != len(self.parts):
            raise ValueError(f"a mini-batch of {len(self.parts)} ranks was passed to {chunks} ranks")
        return self.parts


def joined(parts: Iterable[Jagged]) -> Jagged:
    """Concatenate the rows of at least one part."""
    values, lengths = zip(*((part.values, part.lengths) for part in parts), strict=True)
    return _of_lengths(torch.cat(values), torch.cat(lengths))


def _of_lengths(values: torch.Tensor, lengths: torch.Tensor) -> Jagged:
    return Jagged(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
