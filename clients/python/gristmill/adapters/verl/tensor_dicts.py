"""A mini-batch's shards as the TensorDict that verl's workers take, cut as the service has cut it.

verl cuts a TensorDict into one part of equally many rows for each data-parallel rank, and each part into micro-batches
of equally many. So micro-batches are filled up to the longest one's rows, with rows of two tokens that train nothing,
as verl's own padding rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils

from gristmill._client.trainer.jagged_rows import Jagged, Part
from gristmill._client.trainer.jagged_rows import join as join_rows
from gristmill.torch import Shard

# verl's name, ours, what of each row, verl's dtype, and what stands in a row that fills up.
_Field = tuple[str, str, Part, torch.dtype, tuple[float, ...]]
_FIELDS: tuple[_Field, ...] = (
    ("input_ids", "sequences", "row", torch.int64, (0, 0)),
    ("position_ids", "position_ids", "row", torch.int64, (0, 1)),
    ("prompts", "sequences", "prompt", torch.int64, (0,)),
    ("responses", "sequences", "response", torch.int64, (0,)),
    ("loss_mask", "loss_mask", "response", torch.int64, (0,)),
    ("advantages", "advantages", "response", torch.float32, (0,)),
    ("returns", "returns", "response", torch.float32, (0,)),
    ("rm_scores", "rewards", "response", torch.float32, (0,)),
    ("rollout_log_probs", "rollout_logprobs", "response", torch.float32, (0,)),
    ("old_log_probs", "old_logprobs", "response", torch.float32, (0,)),
    ("ref_log_prob", "ref_logprobs", "response", torch.float32, (0,)),
    ("values", "values", "response", torch.float32, (0,)),
)


class MiniBatchData(NamedTuple):
    """data: verl's TensorDict, of all ranks' rows, rank after rank. is_real: (rows,) False for padding and what fills
    up. lengths: (rows,) tokens of each row. rows_per_micro_batch: of every one."""

    data: TensorDict
    is_real: torch.Tensor
    lengths: torch.Tensor
    rows_per_micro_batch: int

    @property
    def responses(self) -> torch.Tensor:
        """(rows,) tokens of each response."""
        lengths: torch.Tensor = self.data["responses"].offsets().diff()
        return lengths


def mini_batch_data(shards: Sequence[Shard]) -> MiniBatchData:
    """The mini-batch of which these are the shards, one a rank, from rank 0."""
    micro_batches = [micro for shard in shards for micro in shard.micro_batches()]
    rows = max(map(len, micro_batches))
    missing = [rows - len(micro) for micro in micro_batches]
    fields = {
        name: _filled([micro.jagged(own, part) for micro in micro_batches], missing, filler, dtype)
        for name, own, part, dtype, filler in _FIELDS
        if own in micro_batches[0] or own == "position_ids"
    }
    data = tensordict_utils.get_tensordict({name: each.nested() for name, each in fields.items()})
    # verl's response mask has 0 on observations, as our loss mask has.
    data["response_mask"] = data["loss_mask"]
    is_real = [
        part
        for micro, count in zip(micro_batches, missing, strict=True)
        for part in (micro["is_padding"] == 0, torch.zeros(count, dtype=torch.bool))
    ]
    return MiniBatchData(data, torch.cat(is_real), fields["input_ids"].offsets.diff(), rows)


def _filled(parts: Sequence[Jagged], missing: Sequence[int], filler: tuple[float, ...], dtype: torch.dtype) -> Jagged:
    """The rows of all micro-batches, with as many that fill up behind each as it misses."""
    row = torch.tensor(filler, dtype=dtype)
    pieces = []
    for part, count in zip(parts, missing, strict=True):
        pieces.append(part._replace(values=part.values.to(dtype)))
        if count:
            pieces.append(Jagged(row.repeat(count), torch.arange(count + 1) * len(row)))
    return join_rows(pieces)


def of_responses(output: Any, mini_batch: MiniBatchData) -> torch.Tensor:
    """What a model gave for the response tokens of a mini-batch, nested as its `responses` are.

    output: nested, a number for each token of each row: at a token, of the one behind it, as verl's workers return it.
    """
    responses = mini_batch.responses
    ends = mini_batch.lengths.cumsum(0)
    offsets = torch.nn.functional.pad(responses.cumsum(0), (1, 0))
    # Each response's tokens, in one go: behind its row's end less its length, and one to the left.
    places = torch.arange(int(offsets[-1])) + torch.repeat_interleave(ends - offsets[1:], responses) - 1
    return torch.nested.nested_tensor_from_jagged(output.values()[places], offsets)


def to_shards(values: Any, mini_batch: MiniBatchData, shards: Sequence[Shard]) -> list[list[torch.Tensor]]:
    """Numbers of response tokens, nested as the mini-batch's `responses` are, as `TrainerClient.write` takes them: for
    each shard a tensor for each micro-batch, in the shape of its `response_mask`."""
    responses = values.offsets().diff()
    kept = values.values()[torch.repeat_interleave(mini_batch.is_real, responses)]
    micro_batches = [list(shard.micro_batches()) for shard in shards]
    masks = [[micro["response_mask"] != 0 for micro in of_shard] for of_shard in micro_batches]
    ends = iter(accumulate(int(mask.sum()) for of_shard in masks for mask in of_shard))
    begin, found = 0, list[list[torch.Tensor]]()
    for of_shard in masks:
        found.append([])
        for mask in of_shard:
            end = next(ends)
            laid_out = torch.zeros(mask.shape, dtype=kept.dtype)
            laid_out[mask] = kept[begin:end]
            found[-1].append(laid_out)
            begin = end
    return found
