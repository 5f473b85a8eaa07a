"""A batch's shards as SkyRL's `TrainingInputBatch`: one row after another, by mini-batch and rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

from gristmill import MiniBatch, Shard

# Under SkyRL's names and dtypes, which are the shards' names.
_DTYPES = {
    "sequences": torch.int64,
    "attention_mask": torch.int64,
    "response_mask": torch.int64,
    "loss_mask": torch.float32,
    "rollout_logprobs": torch.float32,
    "advantages": torch.float32,
    "returns": torch.float32,
    "values": torch.float32,
}
_ALWAYS = ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs")


class BatchRows:
    """Where the rows of a batch stand in a `TrainingInputBatch`.

    Each rank has as many rows of a mini-batch as the others, so that SkyRL's equal chunks are the ranks' shards: where
    micro-batches are cut by tokens, ranks with fewer rows get further padding rows.

    mini_batches: the batch's, each with a shard a rank; all shards have one width.
    """

    def __init__(self, mini_batches: Sequence[MiniBatch]) -> None:
        self.mini_batches = mini_batches
        self.boundaries: list[tuple[int, int]] = []
        self._places: list[tuple[Shard, int]] = []
        begin = 0
        for mini_batch in mini_batches:
            per_rank = max(map(len, mini_batch))
            self._places += [(shard, begin + rank * per_rank) for rank, shard in enumerate(mini_batch)]
            end = begin + per_rank * len(mini_batch)
            self.boundaries.append((begin, end))
            begin = end

        self._has_added = begin > sum(len(shard) for shard, _ in self._places)

    def __len__(self) -> int:
        return self.boundaries[-1][1] if self.boundaries else 0

    def __contains__(self, name: str) -> bool:
        return all(name in shard for shard, _ in self._places)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the shards over all rows; 0 on padding rows that were added here. Converted as it is copied."""
        sample = self._places[0][0][name]
        # Memory that is written once, row by row, is not filled before.
        make = torch.zeros if self._has_added else torch.empty
        found = make((len(self), *sample.shape[1:]), dtype=_DTYPES.get(name, sample.dtype))
        for shard, begin in self._places:
            found[begin : begin + len(shard)] = shard[name]
        return found

    def uids(self) -> list[str]:
        found = ["padding"] * len(self)
        for shard, begin in self._places:
            found[begin : begin + len(shard)] = shard.metadata["uids"]
        return found

    def of_shards(self, values: torch.Tensor) -> Iterator[tuple[Shard, torch.Tensor]]:
        """What was computed for all rows, (rows, ...), cut into the shards."""
        for shard, begin in self._places:
            yield shard, values[begin : begin + len(shard)]

    def training_input(self, columns: Sequence[str] = ()) -> TrainingInputBatch:
        """What SkyRL's forward passes need. columns: the run's own, which workers find under their names."""
        tensors: dict[str, Any] = {name: self.tensor(name) if name in self else None for name in (*_ALWAYS, *columns)}
        # SkyRL's loop passes them on to steps whose work is the service's.
        tensors["rewards"] = torch.zeros(1, 1).expand_as(tensors["loss_mask"])
        if self._has_added:
            # A row that attends to nothing gives NaN: these are two tokens long, as the service's are.
            tensors["attention_mask"][tensors["attention_mask"].sum(-1) == 0, -2:] = 1
        batch = TrainingInputBatch(tensors)
        batch.metadata = self.metadata() | {"uids": self.uids()}
        return batch

    def metadata(self) -> dict[str, Any]:
        """What SkyRL's steps read beside the tensors. Its critic's forward pass is of the policy's rows."""
        return {
            "response_length": self._places[0][0]["response_mask"].shape[1],
            "policy_mini_batch_boundaries": self.boundaries,
            "critic_mini_batch_boundaries": self.boundaries,
        }
