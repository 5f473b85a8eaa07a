"""Converts a batch's shards to slime's train data, like `RolloutManager._split_train_data_by_dp` for each rank, but
with the service's partition and micro-batches (slime/ray/rollout.py of slime 0.3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from gristmill.adapters._core.routes import fill_routes, routes_given
from gristmill.adapters.slime._settings import ROUTED_EXPERTS, TEACHER_LOGPROBS, TOP_P_TOKENS
from gristmill.torch import Shard

ADVANTAGES, RETURNS = "gristmill_advantages", "gristmill_returns"
"""Advantages per token, which `gristmill.adapters.slime.advantages` reads from the train data."""

# Maps slime's names of response tensors to the shards' names and dtypes. Tensors that a shard lacks are omitted.
_OF_RESPONSES = {
    "loss_masks": ("loss_mask", torch.int32),
    "rollout_log_probs": ("rollout_logprobs", torch.float32),
    TEACHER_LOGPROBS: (TEACHER_LOGPROBS, torch.float32),
    ADVANTAGES: ("advantages", torch.float32),
    RETURNS: ("returns", torch.float32),
}
_PER_RANK = ("partition", "rollout_ids", "micro_batch_indices", "num_microbatches", "global_batch_sizes")

MiniBatches = Sequence[Sequence[Shard]]
"""The shards of a batch by mini-batch and rank."""
Data = dict[str, Any]


def rank_data(mini_batches: MiniBatches, *, images: Sequence[str] = (), per_token: bool = False) -> list[Data]:
    """Return the train data of each rank, in the order of ranks.

    Lists have one element per row, over all mini-batches, each of which is a training step: `tokens` int64 (tokens,),
    `loss_masks` int32 (response,), `rollout_log_probs` float32 (response,), `rewards` the advantage on the row's last
    token, and so on. `partition` is each row's index in `total_lengths` and `raw_reward`. These are of the whole batch:
    first trained rows in the plan's order, then padding rows. The response of a padding row is one token that is not
    trained.

    images: columns of scope `items`, which become `multimodal_train_inputs`. per_token: whether to include advantages
    and returns per token.
    """
    order = _Order(mini_batches)
    ranks = [_of_rank([shards[rank] for shards in mini_batches], order, images) for rank in range(len(mini_batches[0]))]
    lengths, rewards = [0] * order.count, [0.0] * order.count
    for rank in ranks:
        for place, tokens, reward in zip(rank["partition"], rank["tokens"], rank.pop("raw_reward"), strict=True):
            lengths[place], rewards[place] = len(tokens), reward
    left_out = () if per_token else (ADVANTAGES, RETURNS)
    whole = {"total_lengths": lengths, "raw_reward": rewards}
    return [{name: values for name, values in rank.items() if name not in left_out} | whole for rank in ranks]


class _Order:
    """The places of a whole batch's rows, and their trajectory numbers. Each padding row has its own number."""

    def __init__(self, mini_batches: MiniBatches) -> None:
        keys = [key for shards in mini_batches for shard in shards for key in _keys(shard)]
        real = sorted(key for key in keys if key[0] >= 0)
        self._places = {row: place for place, (row, _) in enumerate(real)}
        self._trajectories: dict[Any, int] = {}
        for _, trajectory in real:
            self._trajectories.setdefault(trajectory, len(self._trajectories))
        self.count = len(keys)
        self._padding = iter(range(len(real), self.count))

    def places(self, shard: Shard) -> list[int]:
        return [self._places[row] if row >= 0 else next(self._padding) for row, _ in _keys(shard)]

    def trajectories(self, shard: Shard, places: list[int]) -> list[int]:
        """Return the trajectory number of each row. places: the places of the shard's rows."""
        return [
            # The place is larger than all numbers of real trajectories, which are at most as many as real rows.
            self._trajectories[trajectory] if row >= 0 else place
            for (row, trajectory), place in zip(_keys(shard), places, strict=True)
        ]


def _keys(shard: Shard) -> list[tuple[int, tuple[str, int, int]]]:
    """Return each row's number and trajectory."""
    trajectories = zip(shard.metadata["uids"], shard.metadata["rounds"], shard["sample"].tolist(), strict=True)
    return list(zip(shard["row"].tolist(), trajectories, strict=True))


def _of_rank(shards: Sequence[Shard], order: _Order, images: Sequence[str]) -> Data:
    data: Data = {name: [] for name in _PER_RANK}
    for shard in shards:
        begin, micro_batches = len(data["partition"]), shard.metadata["micro_batches"]
        places = order.places(shard)
        data["partition"] += places
        data["micro_batch_indices"] += [[begin + row for row in rows] for rows in micro_batches]
        data["num_microbatches"].append(len(micro_batches))
        data["global_batch_sizes"].append(shard.metadata["loss_denominators"]["trajectories"])
        data["rollout_ids"] += order.trajectories(shard, places)
        for name, values in _of_rows(shard, images).items():
            data.setdefault(name, []).extend(values)
    data["rollout_mask_sums"] = torch.tensor(data["rollout_mask_sums"], dtype=torch.float32)
    return data


def _of_rows(shard: Shard, images: Sequence[str]) -> dict[str, list[Any]]:
    """Return the lists with one element per row."""
    data: dict[str, list[Any]] = {
        "tokens": _rows(shard, "sequences", "row", torch.int64),
        "source_names": [tag or "unknown" for tag in shard.metadata.get("tags", [""] * len(shard))],
        "truncated": [int(reason == "length") for reason in shard.metadata["stop_reasons"]],
        "sample_indices": shard["row"].tolist(),
        "rollout_mask_sums": shard.metadata["loss_denominators"]["trajectory_tokens"],
        "raw_reward": _last(_rows(shard, "rewards", "response", torch.float32)),
    }
    for name, (ours, dtype) in _OF_RESPONSES.items():
        if _has(shard, ours):
            data[name] = _rows(shard, ours, "response", dtype)
    data["response_lengths"] = [len(mask) for mask in data["loss_masks"]]
    data["rewards"] = _last(data[ADVANTAGES])
    if _has(shard, ROUTED_EXPERTS):
        data[ROUTED_EXPERTS] = _routed_experts(shard)
    if _has(shard, TOP_P_TOKENS):
        data |= _top_p_tokens(shard)
    if images:
        data["multimodal_train_inputs"] = _images(shard, images)
    return data


def _has(shard: Shard, name: str) -> bool:
    return name in shard or f"micro_batch_000/{name}" in shard


def _rows(
    shard: Shard, name: str, part: Literal["row", "response"], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return this part of each row as a copy, because it is sent to another process."""
    values, offsets = shard.jagged(name, part)
    rows = torch.split(values.to(dtype=dtype), offsets.diff().tolist())
    return [row.clone() for row in rows]


def _last(rows: Sequence[torch.Tensor]) -> list[float]:
    return [float(row[-1]) for row in rows]


def _routed_experts(shard: Shard) -> list[torch.Tensor]:
    """Return the experts of each token except the last, which predicts no token; int32, like SGLang's."""
    rows = []
    for micro in shard.micro_batches():
        lengths = micro["cu_seqlens"].diff().tolist()
        tensors = micro[ROUTED_EXPERTS], routes_given(micro, ROUTED_EXPERTS)
        for routes, given in zip(*(torch.split(tensor, lengths) for tensor in tensors), strict=True):
            rows.append(routes[:-1].to(torch.int32, copy=True))
            fill_routes(rows[-1], given[:-1])
    return rows


def _top_p_tokens(shard: Shard) -> dict[str, list[torch.Tensor]]:
    """Return the tokens that top-p kept for all response tokens of each row, and their offsets by token."""
    ids, offsets = list[torch.Tensor](), list[torch.Tensor]()
    for micro in shard.micro_batches():
        kept, begins = micro[TOP_P_TOKENS], micro[f"{TOP_P_TOKENS}_offsets"]
        lengths = micro.jagged("loss_mask", "response").lengths.tolist()
        for end, length in zip(micro["cu_seqlens"].tolist()[1:], lengths, strict=True):
            of_row = begins[end - length : end + 1]
            ids.append(kept[of_row[0] : of_row[-1]].clone())
            offsets.append((of_row - of_row[0]).int())
    return {TOP_P_TOKENS: ids, "rollout_top_p_token_offsets": offsets}


def _images(shard: Shard, names: Sequence[str]) -> list[dict[str, torch.Tensor] | None]:
    """Return each row's images; None for a row without images."""
    edges = {name: shard[f"{name}_offsets"].tolist() for name in names}
    rows = [
        {name: shard[name][edges[name][row] : edges[name][row + 1]].clone() for name in names}
        for row in range(len(shard))
    ]
    return [row if any(map(len, row.values())) else None for row in rows]
