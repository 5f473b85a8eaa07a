"""Models of the transformers library train on prefix trees: loss and gradients are those of padded rows, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from gristmill import InvalidArgumentError
from gristmill._wire.rows import from_rows
from gristmill.torch import MicroBatch, register_tree_attention
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from tests import naive
from tests.client.test_shards import as_shard
from tests.pipeline import trees
from tests.strategies import Row

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
KINDS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def model_of(kind: str, attention: str, **more: Any) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(KINDS[kind](**SIZES, **more), attn_implementation=attention).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            # As it comes it rounds to float32, and what differs by 1e-16 may round apart.
            module.forward = partial(_normalized, module)
    return model


def _normalized(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    scaled: torch.Tensor = module.weight * hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return scaled


def micro_batches(rows: list[Row], config: dict[str, Any]) -> list[MicroBatch]:
    shards = build_batch(from_rows(rows), parse_config(config), run="run", batch=0).shards
    policy = [naive.shard_bytes(shard) for shard in shards if shard.address.model == "policy"]
    return [micro for data in policy for micro in as_shard(data).micro_batches()]


def logits_of(model: Any, micro: MicroBatch) -> torch.Tensor:
    sequences, positions = micro["sequences"].long(), micro.position_ids()
    if micro.is_tree:
        logits: torch.Tensor = model(
            sequences[None], position_ids=positions[None], tree=micro.tree, use_cache=False
        ).logits[0]
        return logits
    padded: torch.Tensor = model(
        sequences, attention_mask=micro["attention_mask"].long(), position_ids=positions, use_cache=False
    ).logits
    return padded


def loss_and_gradients(
    model: Any, micros: list[MicroBatch], logits_of: Callable[[Any, MicroBatch], torch.Tensor] = logits_of
) -> tuple[float, list[torch.Tensor]]:
    """Of the importance-weighted policy gradient's loss, summed over all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for micro in micros:
        logprobs = micro.logprobs(logits_of(model, micro))
        ratio = torch.exp(logprobs - micro["rollout_logprobs"].double() / 100)
        gain = ratio * micro["advantages"].double()
        total = total - torch.where(micro["loss_mask"] == 1, gain, torch.zeros_like(gain)).sum()
    return total.item(), list(torch.autograd.grad(total, list(model.parameters())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(9))
def test_loss_and_gradients_are_those_of_padded_rows(kind: str, seed: int) -> None:
    """Of groups that share prompts, turns merged or not, forks, samples that begin alike, and padding rows."""
    random = Random(seed)
    rows = trees.rollouts(random, has_logprobs=True)
    of_sample = [random.uniform(-2, 2) for _ in range(trees.SAMPLES)]
    for row in rows:
        row["advantage"] = of_sample[row["sample"]]
    config = trees.settings(random, rows, merge=["none", "prefix", "tree"][seed % 3], advantage_estimator="none")
    tree = micro_batches(rows, config)
    padded = micro_batches(rows, config | {"layout": "left_padded"})
    assert all(micro.is_tree for micro in tree)
    loss, tree_gradients = loss_and_gradients(model_of(kind, register_tree_attention()), tree)
    expected, gradients = loss_and_gradients(model_of(kind, "sdpa"), padded)
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-11)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-6
    for mine, other in zip(tree_gradients, gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


def test_a_model_that_is_called_without_a_tree_or_has_a_sliding_window_is_refused() -> None:
    (micro, *_) = micro_batches(*(lambda rows: (rows, trees.settings(Random(1), rows)))(trees.rollouts(Random(0))))
    tokens = micro["sequences"].long()[None]
    with pytest.raises(InvalidArgumentError, match=r"call the model with tree=micro\.tree"):
        model_of("llama", register_tree_attention())(tokens, use_cache=False)
    windowed = model_of(
        "qwen2", register_tree_attention(), use_sliding_window=True, sliding_window=4, max_window_layers=0
    )
    with pytest.raises(InvalidArgumentError, match="does not support sliding_window"):
        windowed(tokens, tree=micro.tree, use_cache=False)
