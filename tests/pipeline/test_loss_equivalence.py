"""Training through gristmill is training without it: the same loss and the same gradients, to 1e-9.

A small causal transformer in float64 takes a clipped GRPO step over a batch, once row by row in one process, and once
from the shards of every rank, padded, packed or as a prefix tree, merged or not, with padding rows present.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from tests import naive
from tests.strategies import Row

VOCABULARY, WIDTH, LONGEST, CLIP = 17, 16, 64, 0.2
SAMPLES = 3
REDUCTIONS = ["none", "token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean", "trajectory_mean"]
UNCHANGED_BY_MERGING = ["none", "token_mean", "prompt_mean", "trajectory_mean"]


class Transformer(torch.nn.Module):
    """Two causal attention layers with learned positions, in float64. One token more than is sampled is known."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY + 1, WIDTH)
        self.positions = torch.nn.Embedding(LONGEST, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY + 1)
        self.double()

    def forward(self, sequences: torch.Tensor, position_ids: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Log probability of each token given those before it (that of the first is 0); (rows, tokens).

        allowed: bool (rows, tokens, tokens), which tokens may be attended besides causality.
        """
        logprobs = self.of_following(sequences, position_ids, allowed)
        picked = logprobs[:, :-1].gather(-1, sequences[:, 1:, None]).squeeze(-1)
        return torch.cat([torch.zeros_like(picked[:, :1]), picked], dim=1)

    def of_following(self, sequences: torch.Tensor, position_ids: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Log probabilities of what may follow each token; (rows, tokens, vocabulary)."""
        hidden = self.tokens(sequences) + self.positions(position_ids)
        size = sequences.shape[1]
        # Every token sees itself, so that no softmax is over nothing.
        mask = allowed & torch.ones(size, size, dtype=torch.bool).tril() | torch.eye(size, dtype=torch.bool)
        for layer in self.layers:
            query, key, value = layer(hidden).chunk(3, dim=-1)
            weights = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
            hidden = hidden + torch.tanh(weights @ value)
        logprobs: torch.Tensor = self.head(hidden).log_softmax(-1)
        return logprobs


def clipped_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor | float, mask: torch.Tensor
) -> torch.Tensor:
    ratio = torch.exp(logprobs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    # Not multiplied by the mask: a padded position may hold anything.
    return -torch.where(mask.bool(), gain, torch.zeros_like(gain)).sum()


def batch_rows(prefix_holds: bool = True, forks: bool = False, is_shared: bool = False) -> list[Row]:
    """prefix_holds: whether every prompt begins with the sequence before. forks: or with an earlier one. is_shared:
    whether the samples of a prompt have it in common, and begin with the same sampled token."""
    rng = random.Random(5)
    rows: list[Row] = []
    for prompt, sample in itertools.product(range(4), range(SAMPLES)):
        sequence = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
        if is_shared:
            sequence = [prompt, 1, 2, 3]
        turns = rng.randint(1, 4)
        for step in range(turns):
            response = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
            if is_shared:
                response[0] = 4
            rows.append(
                {
                    "uid": f"p{prompt}",
                    "sample": sample,
                    "step": step,
                    "is_last_step": step == turns - 1,
                    "prompt_token_ids": sequence,
                    "response_ids": response,
                    "loss_mask": [rng.randint(0, 1) for _ in response],
                    "rollout_logprobs": [-rng.uniform(2.0, 4.0) for _ in response],
                    "reward": rng.uniform(-1, 1),
                }
            )
            sequence = sequence + response + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))]
            if not prefix_holds and rng.random() < 0.4:
                sequence = sequence[1:]
            if forks and rng.random() < 0.5:
                source = rows[-1 - rng.randint(0, step)]
                sequence = source["prompt_token_ids"] + source["response_ids"] + [rng.randrange(VOCABULARY)]
    return rows


def settings(**overrides: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "n_samples_per_prompt": SAMPLES,
        "policy_mini_batch_size": 2,
        "step_wise": True,
        "micro_batch": {"size": 2},
        "trajectory_score": "sum",
        "max_seq_len": 48,
    } | overrides


def without_gristmill(rows: list[Row], config: dict[str, Any]) -> list[torch.Tensor]:
    """Loss of each mini-batch, row by row, from the definition of the reduction."""
    by_trajectory = naive.advantages(rows, {"grpo_norm_by_std": True, "advantage_estimator": "grpo", **config})
    uids = list(dict.fromkeys(row["uid"] for row in rows))
    size = config["policy_mini_batch_size"]
    losses = []
    for first in range(0, len(uids), size):
        part = [row for row in rows if row["uid"] in uids[first : first + size]]
        weights = row_weights(part, config)
        loss = torch.zeros((), dtype=torch.float64)
        for row, weight in zip(part, weights, strict=True):
            # The same float32 that a shard carries.
            advantage = float(np.float32(by_trajectory[row["uid"], row["sample"]] * weight))
            sequence = torch.tensor([row["prompt_token_ids"] + row["response_ids"]])
            length, response = sequence.shape[1], len(row["response_ids"])
            logprobs = MODEL(sequence, torch.arange(length)[None], torch.ones(1, length, length, dtype=torch.bool))
            old = torch.tensor(np.array(row["rollout_logprobs"], np.float32)).double()
            loss = loss + clipped_loss(logprobs[0, -response:], old, advantage, torch.tensor(row["loss_mask"]))
        losses.append(loss)
    return losses


def row_weights(rows: list[Row], config: dict[str, Any]) -> list[float]:
    tokens = [sum(row["loss_mask"]) for row in rows]

    def of(owners: list[Any]) -> list[float]:
        sums = {number: sum(t for t, o in zip(tokens, owners, strict=True) if o == number) for number in owners}
        return [1 / (len(sums) * max(1, sums[owner])) for owner in owners]

    match config["loss_reduction"]:
        case "none":
            return [1.0 for _ in rows]
        case "token_mean":
            return [1 / sum(tokens) for _ in rows]
        case "sequence_mean":
            return of(list(range(len(rows))))
        case "seq_mean_token_sum_norm":
            return [1 / (len(rows) * config["max_seq_len"]) for _ in rows]
        case "prompt_mean":
            return of([row["uid"] for row in rows])
        case "trajectory_mean":
            return of([(row["uid"], row["sample"]) for row in rows])
        case unknown:
            raise ValueError(unknown)


def through_gristmill(rows: list[Row], config: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Loss of each mini-batch, summed over ranks and micro-batches, and how many padding rows took part."""
    batch = build_batch(from_rows(rows), parse_config(config), run="r", batch=0)
    count = len(batch.plan.mini_batches)
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(count)]
    for shard in batch.shards:
        data = naive.shard_bytes(shard)
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        micro_batches = json.loads(header["__metadata__"]["micro_batches"])
        for index, positions in enumerate(micro_batches):
            prefix = f"micro_batch_{index:03d}/"
            if f"{prefix}sequences" in tensors:
                arrays = {
                    name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
                }
            else:
                arrays = {name: value[positions] for name, value in tensors.items()}
            loss = LOSSES[config["layout"]](arrays)
            losses[shard.address.mini_batch] = losses[shard.address.mini_batch] + loss
    return losses, sum(part.padding_rows for part in batch.plan.mini_batches)


def padded_loss(own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    mask = own["attention_mask"].bool()
    position_ids = (mask.long().cumsum(1) - 1).clamp(min=0)
    logprobs = MODEL(own["sequences"].long(), position_ids, mask[:, None, :] & mask[:, :, None])
    response = own["response_mask"].shape[1]
    return clipped_loss(
        logprobs[:, -response:], own["rollout_logprobs"].double(), own["advantages"].double(), own["loss_mask"]
    )


def packed_loss(own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    edges = own.get("cu_seqlens_padded", own["cu_seqlens"]).long()
    rows = torch.repeat_interleave(torch.arange(len(edges) - 1), edges.diff())
    logprobs = MODEL(
        own["sequences"].long()[None], own["position_ids"].long()[None], (rows[:, None] == rows[None, :])[None]
    )
    return clipped_loss(logprobs[0], own["rollout_logprobs"].double(), own["advantages"].double(), own["loss_mask"])


def tree_loss(own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    parents = own["parents"].tolist()
    allowed = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            allowed[token] |= allowed[parent]
    logprobs = MODEL.of_following(own["sequences"].long()[None], own["position_ids"].long()[None], allowed[None])[0]
    # Each token's, as the one before it on its path predicts it; what begins a path is trained in no row.
    picked = logprobs[own["parents"].long(), own["sequences"].long()]
    return clipped_loss(picked, own["rollout_logprobs"].double(), own["advantages"].double(), own["loss_mask"])


LOSSES = {"left_padded": padded_loss, "packed": packed_loss, "prefix_tree": tree_loss}


def gradients(losses: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return [torch.autograd.grad(loss, tuple(MODEL.parameters()), retain_graph=True) for loss in losses]


torch.manual_seed(0)
MODEL = Transformer()


@pytest.mark.parametrize(
    ("layout", "dp_size"),
    [*itertools.product(["left_padded", "packed"], [1, 2, 3, 5]), ("prefix_tree", 2), ("prefix_tree", 5)],
)
@pytest.mark.parametrize(
    ("merge", "loss_reduction"),
    [
        *itertools.product(["none"], REDUCTIONS),
        # Row-based reductions change with the number of rows, as the specification says.
        *itertools.product(["prefix", "prefix that breaks", "tree"], UNCHANGED_BY_MERGING),
    ],
)
def test_loss_and_gradients_are_those_of_training_without_gristmill(
    layout: str, dp_size: int, loss_reduction: str, merge: str
) -> None:
    is_tree = layout == "prefix_tree"
    rows = batch_rows(prefix_holds=merge != "prefix that breaks", forks=merge == "tree", is_shared=is_tree)
    config = settings(
        layout=layout, dp_size=dp_size, loss_reduction=loss_reduction, merge=merge.removesuffix(" that breaks")
    )
    expected = without_gristmill(rows, config)
    actual, padding_rows = through_gristmill(rows, config)
    assert len(actual) == len(expected) == 2
    for mine, reference in zip(actual, expected, strict=True):
        assert mine.item() == pytest.approx(reference.item(), rel=1e-9, abs=1e-12)
    for gradient, others in zip(gradients(actual), gradients(expected), strict=True):
        assert max(float(g.abs().max()) for g in others) > 1e-6
        for a, b in zip(gradient, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    if dp_size == 5:
        assert padding_rows > 0


def test_the_rows_of_a_tree_share_steps() -> None:
    rows = batch_rows(forks=True)
    plan = build_batch(from_rows(rows), parse_config(settings(merge="tree")), run="r", batch=0).plan
    assert plan.steps is not None
    assert plan.rows < len(rows) < sum(map(len, plan.steps))


@pytest.mark.parametrize("layout", ["left_padded", "packed", "prefix_tree"])
@pytest.mark.parametrize("merge", ["prefix", "tree"])
def test_tails_that_were_retokenized_leave_the_loss_of_all_other_tokens(merge: str, layout: str) -> None:
    rng, rows = random.Random(8), batch_rows(forks=merge == "tree")
    for row in rows:
        if row["step"] and len(row["prompt_token_ids"]) > 4:
            # One token beyond the vocabulary's last, so that it differs from whatever was sampled.
            row["prompt_token_ids"] = row["prompt_token_ids"].copy()
            row["prompt_token_ids"][-rng.randint(1, 4)] = VOCABULARY
    config = settings(layout=layout, loss_reduction="token_mean", merge=merge, retokenized_tail=4)
    plan = build_batch(from_rows(rows), parse_config(config), run="r", batch=0).plan
    assert plan.counts["realigned_loss_tokens"] > 0
    actual, _ = through_gristmill(rows, config)
    expected = without_gristmill(naive.without_realigned(rows, merge, 4), config)
    for mine, reference in zip(actual, expected, strict=True):
        assert mine.item() == pytest.approx(reference.item(), rel=1e-9, abs=1e-12)
    for gradient, others in zip(gradients(actual), gradients(expected), strict=True):
        for a, b in zip(gradient, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pad_width", ["batch", "mini_batch", "shard", "micro_batch"])
@pytest.mark.parametrize("micro_batch", [{"size": 3}, {"max_tokens": 40}])
def test_no_padding_width_and_no_micro_batching_changes_the_loss(pad_width: str, micro_batch: dict[str, Any]) -> None:
    rows = batch_rows(prefix_holds=True)
    config = settings(
        layout="left_padded",
        pad_width=pad_width,
        micro_batch=micro_batch,
        dp_size=2,
        loss_reduction="token_mean",
        pad_token_id=3,
    )
    actual, _ = through_gristmill(rows, config)
    for mine, reference in zip(actual, without_gristmill(rows, config), strict=True):
        assert mine.item() == pytest.approx(reference.item(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("layout", ["packed", "prefix_tree"])
@pytest.mark.parametrize("merge", ["none", "tree"])
def test_padding_after_rows_changes_neither_loss_nor_gradients(layout: str, merge: str) -> None:
    rows = batch_rows(forks=merge == "tree", is_shared=True)
    config = settings(layout=layout, dp_size=2, loss_reduction="trajectory_mean", merge=merge)
    plain, _ = through_gristmill(rows, config)
    padded, _ = through_gristmill(rows, config | {"pad_rows_to_multiple_of": 8})
    for loss, reference in zip(padded, plain, strict=True):
        assert loss.item() == pytest.approx(reference.item(), rel=1e-9, abs=1e-12)
    for gradient, others in zip(gradients(padded), gradients(plain), strict=True):
        for mine, other in zip(gradient, others, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
