"""The specification written down a second time, row by row in plain Python, to hold the pipeline against.

Slow and obvious on purpose. Shares no code with the pipeline.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from gristmill_service.pipeline.iovec import join

Row = dict[str, Any]


def merged(rows: list[Row], merge: str) -> list[list[Row]]:
    """Merge groups: the steps that each training row covers."""
    groups: list[list[Row]] = []
    for row in rows:
        if merge == "prefix" and row["step"] > 0:
            before = groups[-1][-1]
            sequence = before["prompt_token_ids"] + before["response_ids"]
            if row["prompt_token_ids"][: len(sequence)] == sequence:
                groups[-1].append(row)
                continue
        groups.append([row])
    return groups


def response_column(steps: list[Row], values: Any) -> list[float]:
    """A response-level column of a merged row: each step's values, zeros on observations."""
    column: list[float] = []
    for index, step in enumerate(steps):
        if index:
            before = steps[index - 1]
            delta = len(step["prompt_token_ids"]) - len(before["prompt_token_ids"]) - len(before["response_ids"])
            column += [0] * delta
        column += values(step)
    return column


def rewards_of(step: Row) -> list[float]:
    reward = step["reward"]
    return reward if isinstance(reward, list) else [0.0] * (len(step["response_ids"]) - 1) + [reward]


def scores(rows: list[Row], mode: str) -> dict[tuple[str, int], float]:
    by_trajectory: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        reward = row["reward"] if isinstance(row["reward"], list) else [row["reward"]]
        by_trajectory.setdefault((row["uid"], row["sample"]), []).append(math.fsum(reward))
    return {key: steps[-1] if mode == "last_step" else math.fsum(steps) for key, steps in by_trajectory.items()}


def advantages(rows: list[Row], config: dict[str, Any]) -> dict[tuple[str, int], float]:
    by_key = scores(rows, config["trajectory_score"])
    result = {}
    for key, score in by_key.items():
        group = [value for (uid, _), value in by_key.items() if uid == key[0]]
        result[key] = _advantage(score, group, config)
    return result


def _advantage(score: float, group: list[float], config: dict[str, Any]) -> float:
    estimator, lone = config["advantage_estimator"], config["n_samples_per_prompt"] == 1
    epsilon = config.get("grpo_epsilon", 1e-6)
    if len(group) == 1:
        if not lone or estimator == "rloo":
            return 0.0
        return score / (1 + epsilon) if estimator == "grpo" and config["grpo_norm_by_std"] else score
    if len(set(group)) == 1:
        return 0.0
    mean = sum(group) / len(group)
    match estimator:
        case "grpo":
            std = (sum((value - mean) ** 2 for value in group) / (len(group) - 1)) ** 0.5
            return (score - mean) / (std + epsilon) if config["grpo_norm_by_std"] else score - mean
        case "rloo":
            return score - (sum(group) - score) / (len(group) - 1)
        case _:
            return (score - mean) / (mean + 1e-6)


def shard_bytes(shard: Any) -> bytes:
    """A pipeline shard's file."""
    return join(shard.iovec())


def read_shard(shard: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A pipeline shard's tensors and metadata, read by the safetensors library."""
    data = shard_bytes(shard)
    assert len(data) == shard.size
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {name: _array(tensor) for name, tensor in load(data).items()}
    return tensors, {name: json.loads(value) for name, value in header["__metadata__"].items()}


def _array(tensor: torch.Tensor) -> np.ndarray:
    """NumPy has no bfloat16: its bits, as uint16."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def shard_rows(shard: Any) -> list[dict[str, Any]]:
    """Each row of a shard with its own tokens of every column, whatever the layout."""
    tensors, metadata = read_shard(shard)
    rows: list[dict[str, Any]] = [{} for _ in metadata["uids"]]
    for name, tensor in tensors.items():
        prefix, _, column = name.rpartition("/")
        if "cu_seqlens" in f"{prefix}{column}":
            continue
        positions = metadata["micro_batches"][int(prefix[-3:])] if prefix else range(len(rows))
        if tensor.ndim == 1 and prefix:
            edges = tensors[f"{prefix}/cu_seqlens"]
            for index, position in enumerate(positions):
                rows[position][column] = tensor[edges[index] : edges[index + 1]]
        else:
            for index, position in enumerate(positions):
                rows[position][column] = tensor[index]
    return [_own_tokens(row) for row in rows]


def _own_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """Cuts padding (or, packed, the prompt) off every column, by masks alone."""
    own = dict(row)
    if "attention_mask" in row:
        length = int(row["attention_mask"].sum())
        own["sequences"] = row["sequences"][-length:]
        assert not row["attention_mask"][: len(row["attention_mask"]) - length].any()
    response = int(row["response_mask"].sum())
    for column in ("response_mask", "loss_mask", "rewards", "advantages", "rollout_logprobs"):
        if column in row:
            outside = row[column][: len(row[column]) - response]
            assert not outside.any(), f"{column} has values outside the row's response"
            own[column] = row[column][len(row[column]) - response :]
    return own
