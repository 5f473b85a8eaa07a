"""A second implementation of the specification, row by row in plain Python, to compare the pipeline with.

Slow and obvious on purpose. Shares no code with the pipeline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from gristmill_service.pipeline.layout.iovec import join

Row = dict[str, Any]


@dataclass
class Merged:
    """A training row.

    steps: the steps on its path, in order. sources: for each response token its step and its index in that step's
        response; None for an observation. trained: whether each is trained in this row. rewarded: the response tokens
        with a step's scalar reward, and the step. lost: the response tokens to which rewards of tokens moved that no
        row keeps, and those tokens. holders: for each token, also of the prompt, the first step that has it.
        first_here: for each step, whether no earlier row has it.
    """

    steps: list[Row]
    sources: list[tuple[int, int] | None]
    trained: list[bool]
    rewarded: dict[int, int]
    lost: dict[int, list[tuple[int, int]]]
    holders: list[int]
    first_here: list[bool]

    def standing(self, values: Callable[[Row], list[Any]], only_trained: bool = False) -> list[Any]:
        """Returns a response-level column: the steps' values on their tokens, 0 elsewhere."""
        by_number = {step["step"]: values(step) for step in self.steps}
        return [
            0 if source is None or (only_trained and not trained) else by_number[source[0]][source[1]]
            for source, trained in zip(self.sources, self.trained, strict=True)
        ]

    def rewards(self) -> list[float]:
        if any(isinstance(step["reward"], list) for step in self.steps):
            rewards = self.standing(lambda step: step["reward"], only_trained=True)
            of_step = {step["step"]: step["reward"] for step in self.steps}
            for at, tokens in self.lost.items():
                rewards[at] = math.fsum([rewards[at], *(of_step[number][index] for number, index in tokens)])
            return rewards
        by_number = {step["step"]: step["reward"] for step in self.steps}
        return [by_number[self.rewarded[at]] if at in self.rewarded else 0.0 for at in range(len(self.sources))]


def merged(rows: list[Row], merge: str, tail: int = 0) -> list[Merged]:
    """The training rows that these rows become."""
    keys = dict.fromkeys((row["uid"], row["sample"]) for row in rows)
    return [
        one
        for key in keys
        for one in _merged_trajectory([row for row in rows if (row["uid"], row["sample"]) == key], merge, tail)
    ]


def _merged_trajectory(steps: list[Row], merge: str, tail: int) -> list[Merged]:
    paths: list[list[int]] = []
    path_to: dict[int, list[int]] = {}
    # What each token of the sequence of a step is, on the path to it.
    sources: dict[int, list[tuple[int, int] | None]] = {}
    holders: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        prompt, response = step["prompt_token_ids"], [(number, index) for index in range(len(step["response_ids"]))]
        parent, common = joined(steps, number, path_to, merge, tail)
        path_to[number] = [*([] if parent is None else path_to[parent]), number]
        observed = [None] * (len(prompt) - common)
        sources[number] = [*([] if parent is None else sources[parent][:common]), *observed, *response]
        kept_holders = [] if parent is None else holders[parent][:common]
        holders[number] = kept_holders + [number] * (len(sources[number]) - common)
        grown = [index for index, path in enumerate(paths) if path[-1] == parent]
        if grown:
            paths[grown[0]] = path_to[number]
        else:
            paths.append(path_to[number])
    rows: list[Merged] = []
    trained: set[tuple[int, int] | None] = set()
    visited: set[int] = set()
    for path in paths:
        prompt = steps[path[0]]["prompt_token_ids"]
        own_sources = sources[path[-1]][len(prompt) :]
        rows.append(
            Merged(
                steps=[steps[number] for number in path],
                sources=own_sources,
                trained=[source is not None and source not in trained for source in own_sources],
                rewarded={},
                lost={},
                holders=holders[path[-1]],
                first_here=[number not in visited for number in path],
            )
        )
        trained |= set(own_sources)
        visited |= set(path)
    for number, step in enumerate(steps):
        _place_rewards(rows, number, len(step["response_ids"]))
    return rows


def _place_rewards(rows: list[Merged], number: int, length: int) -> None:
    """A reward is on its own token, or, where no row keeps that, on the last of its step that the first row keeps."""
    tokens = [(number, index) for index in range(length)]
    kept = {source for row in rows for source in row.sources}
    holding = [row for row in rows if not set(row.sources).isdisjoint(tokens)]
    if not holding:
        return
    first = holding[0]
    place = max(at for at, source in enumerate(first.sources) if source in tokens)
    if lost := [token for token in tokens if token not in kept]:
        first.lost[place] = lost
    whole = [row for row in holding if tokens[-1] in row.sources]
    if whole:
        whole[0].rewarded[whole[0].sources.index(tokens[-1])] = number
    else:
        first.rewarded[place] = number


def joined(
    steps: list[Row], number: int, path_to: dict[int, list[int]], merge: str, tail: int
) -> tuple[int | None, int]:
    """The step that this one joins, and how many tokens of it its prompt begins with."""
    prompt, best = steps[number]["prompt_token_ids"], (0, 0, -1)
    earlier = {"none": range(0), "prefix": range(max(0, number - 1), number), "tree": range(number)}[merge]
    for other in earlier:
        sequence = steps[other]["prompt_token_ids"] + steps[other]["response_ids"]
        common = 0
        while common < min(len(sequence), len(prompt)) and sequence[common] == prompt[common]:
            common += 1
        rows_prompt = len(steps[path_to[other][0]]["prompt_token_ids"])
        if common >= len(sequence) - tail and common >= rows_prompt:
            best = max(best, (common, -len(sequence), other))
    return (best[2], best[0]) if best[2] >= 0 else (None, 0)


def without_realigned(rows: list[Row], merge: str, tail: int) -> list[Row]:
    """The rows with loss_mask 0 on the tokens that are in no training row."""
    stands = {
        (row.steps[0]["uid"], row.steps[0]["sample"], source)
        for row in merged(rows, merge, tail)
        for source in row.sources
    }
    return [
        row
        | {
            "loss_mask": [
                mask * ((row["uid"], row["sample"], (row["step"], token)) in stands)
                for token, mask in enumerate(row["loss_mask"])
            ]
        }
        for row in rows
    ]


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
    tokens = dict.fromkeys(by_key, 0)
    for row in rows:
        tokens[row["uid"], row["sample"]] += sum(row["loss_mask"])
    result = {}
    for key, score in by_key.items():
        members = [member for member in by_key if member[0] == key[0]]
        group = [by_key[member] for member in members]
        batch = list(by_key.values()) if config.get("grpo_std_over") == "batch" else group
        result[key] = _advantage(score, group, [tokens[member] for member in members], batch, config)
    return result


def _std(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _advantage(
    score: float, group: list[float], tokens: list[int], batch: list[float], config: dict[str, Any]
) -> float:
    """batch: the scores over which `grpo` takes the standard deviation."""
    estimator, lone = config["advantage_estimator"], config["n_samples_per_prompt"] == 1
    epsilon = config.get("grpo_epsilon", 1e-6)
    if len(group) == 1:
        if not lone or estimator in ("rloo", "opo", "passk"):
            return 0.0
        return score / (1 + epsilon) if estimator == "grpo" and config["grpo_norm_by_std"] else score
    if len(set(group)) == 1:
        return 0.0
    mean = sum(group) / len(group)
    match estimator:
        case "grpo":
            return (score - mean) / (_std(batch) + epsilon) if config["grpo_norm_by_std"] else score - mean
        case "opo":
            weights = tokens if any(tokens) else [1] * len(group)
            weighted = sum(weight * value for weight, value in zip(weights, group, strict=True))
            return score - weighted / sum(weights)
        case "passk":
            first, second = sorted(group, reverse=True)[:2]
            lead = first - second if score == first else 0.0
            return lead / (_std(group) + epsilon) if config["grpo_norm_by_std"] else lead
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
            lengths = np.diff(tensors[f"{prefix}/cu_seqlens"])
            begins = tensors.get(f"{prefix}/cu_seqlens_padded", tensors[f"{prefix}/cu_seqlens"])
            for index, position in enumerate(positions):
                rows[position][column] = tensor[begins[index] : begins[index] + lengths[index]]
        else:
            for index, position in enumerate(positions):
                rows[position][column] = tensor[index]
    return [_own_tokens(row) for row in rows]


def _own_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """Cuts padding (or, packed, the prompt) off every column, by masks alone."""
    masked = dict(row)
    if "attention_mask" in row:
        length = int(row["attention_mask"].sum())
        masked["sequences"] = row["sequences"][-length:]
        assert not row["attention_mask"][: len(row["attention_mask"]) - length].any()
    response = int(row["response_mask"].sum())
    for column in ("response_mask", "loss_mask", "rewards", "advantages", "rollout_logprobs"):
        if column in row:
            outside = row[column][: len(row[column]) - response]
            assert not outside.any(), f"{column} has values outside the row's response"
            masked[column] = row[column][len(row[column]) - response :]
    return masked


def may_share(row: Merged) -> int:
    """How many tokens of a row stand before the first that it trains, or would train if no mask were 0."""
    return len(row.steps[0]["prompt_token_ids"]) + row.trained.index(True)


def tokens_of(row: Merged) -> list[int]:
    tokens: list[int] = row.steps[-1]["prompt_token_ids"] + row.steps[-1]["response_ids"]
    return tokens


def in_common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def distinct_tokens(rows: list[Merged]) -> int:
    """The tokens of a prompt group's rows, each of which shares what it may with the one most like it, of the rows that
    may share less."""
    count = 0
    seen: list[list[int]] = []
    for row in sorted(rows, key=may_share):
        tokens = tokens_of(row)
        count += len(tokens) - max((in_common(tokens[: may_share(row)], other) for other in seen), default=0)
        seen.append(tokens)
    return count


@dataclass
class Axis:
    """A micro-batch of a prefix tree, token by token. paths: of each row the tokens that it is made of, found by going
    from its end to a root. tensors: of the micro-batch."""

    tensors: dict[str, np.ndarray]
    paths: list[list[int]]


def axes(shard: Any) -> list[tuple[list[int], Axis]]:
    """Of each micro-batch of a shard: its rows (-1 for padding rows), and its axis."""
    tensors, metadata = read_shard(shard)
    pairs = []
    for index, positions in enumerate(metadata["micro_batches"]):
        prefix = f"micro_batch_{index:03d}/"
        arrays = {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
        paths = []
        for end in arrays["row_ends"].tolist():
            path = [end]
            while (parent := int(arrays["parents"][path[-1]])) >= 0:
                path.append(parent)
            paths.append(path[::-1])
        pairs.append((tensors["row"][positions].tolist(), Axis(arrays, paths)))
    return pairs
