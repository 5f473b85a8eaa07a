"""Converts a batch's shards to SkyRL's `TrainingInputBatch`, with rows in the order of mini-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

from gristmill import Shard
from gristmill.adapters._core.routes import fill_routes, routes_given
from gristmill.torch import MiniBatch

try:
    from skyrl.backends.skyrl_train.utils.packed_tensor import PackedTensor
except ImportError:  # SkyRL 0.3
    PackedTensor = None

# SkyRL's dtypes. SkyRL's names are equal to the names in shards.
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
_ROUTES, _SUPPORT = "rollout_expert_indices", "rollout_sample_support"
_ALWAYS = ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs")


def _packed(values: torch.Tensor, mask: torch.Tensor) -> Any:
    """Return the values at which the mask is 1, row by row. values: (rows, width, ...); mask: (rows, width)."""
    return PackedTensor.from_segments([row[is_real] for row, is_real in zip(values, mask.bool(), strict=True)])


class BatchRows:
    """The rows of a batch and their places in a `TrainingInputBatch`.

    SkyRL splits a mini-batch into equal chunks, which must be the ranks' shards. If micro-batches are planned by
    tokens, ranks with fewer rows therefore get more padding rows.

    mini_batches: the batch's mini-batches, each with a shard for every rank. All shards have the same width.
    """

    def __init__(self, mini_batches: Sequence[MiniBatch]) -> None:
        self.mini_batches = mini_batches
        self.boundaries: list[tuple[int, int]] = []
        self._places: list[tuple[Shard, int]] = []
        begin = 0
        for mini_batch in mini_batches:
            per_rank = max(map(len, mini_batch.shards.values()))
            self._places += [(shard, begin + rank * per_rank) for rank, shard in mini_batch.shards.items()]
            end = begin + per_rank * len(mini_batch.shards)
            self.boundaries.append((begin, end))
            begin = end

        self._has_added = begin > sum(len(shard) for shard, _ in self._places)

    def __len__(self) -> int:
        return self.boundaries[-1][1] if self.boundaries else 0

    def __contains__(self, name: str) -> bool:
        return all(name in shard for shard, _ in self._places)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of all rows in SkyRL's dtype; 0 for padding rows that this class added."""
        first = self._places[0][0][name]
        # Without added rows, every element is written below.
        make = torch.zeros if self._has_added else torch.empty
        rows = make((len(self), *first.shape[1:]), dtype=_DTYPES.get(name, first.dtype))
        for shard, begin in self._places:
            rows[begin : begin + len(shard)] = shard[name]
        return rows

    def uids(self) -> list[str]:
        uids = ["padding"] * len(self)
        for shard, begin in self._places:
            uids[begin : begin + len(shard)] = shard.metadata["uids"]
        return uids

    def by_shard(self, columns: Mapping[str, torch.Tensor]) -> Iterator[tuple[Shard, dict[str, torch.Tensor]]]:
        """Split values of all rows by shard. columns: by name, (rows, ...)."""
        for shard, begin in self._places:
            yield shard, {name: values[begin : begin + len(shard)] for name, values in columns.items()}

    def training_input(self, columns: Sequence[str] = ()) -> TrainingInputBatch:
        """Return the input of SkyRL's forward passes. columns: the run's columns to pass to workers."""
        tensors: dict[str, Any] = {name: self.tensor(name) if name in self else None for name in (*_ALWAYS, *columns)}
        # SkyRL's loop requires rewards, but only steps that the service replaces read them.
        tensors["rewards"] = torch.zeros(1, 1).expand_as(tensors["loss_mask"])
        if self._has_added:
            # A row that attends to nothing results in NaN, so added rows have two tokens, like the service's padding.
            tensors["attention_mask"][tensors["attention_mask"].sum(-1) == 0, -2:] = 1
        if PackedTensor is not None:
            self._pack(tensors)
        batch = TrainingInputBatch(tensors)
        batch.metadata = self.metadata() | {"uids": self.uids()}
        return batch

    def _pack(self, tensors: dict[str, Any]) -> None:
        """Replace routed experts and sample support with tensors without padding, for SkyRL 0.4."""
        if (support := tensors.get(_SUPPORT)) is not None:
            tensors[_SUPPORT] = _packed(support, tensors["response_mask"])
        if (routes := tensors.get(_ROUTES)) is not None:
            given = torch.zeros(routes.shape[:2], dtype=torch.bool)
            for shard, begin in self._places:
                given[begin : begin + len(shard)] = routes_given(shard, _ROUTES)
            fill_routes(routes, given)
            tensors[_ROUTES] = _packed(routes, tensors["attention_mask"])
            tensors["router_padding_mask"] = ~given | (tensors["attention_mask"] == 0)

    def metadata(self) -> dict[str, Any]:
        """Return metadata that SkyRL's steps read. The critic's pass uses the policy's rows."""
        return {
            "response_length": self._places[0][0]["response_mask"].shape[1],
            "policy_mini_batch_boundaries": self.boundaries,
            "critic_mini_batch_boundaries": self.boundaries,
        }
