"""docs/guides/own-trainer.md on models of the transformers library: packed rows train as padded ones do, in float64."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from tests.pipeline import trees
from tests.trainers.transformers.test_prefix_tree import KINDS, loss_and_gradients, micro_batches, model_of

GUIDE = Path(__file__).parents[3] / "docs/guides/own-trainer.md"


def of_the_guide() -> dict[str, Any]:
    """The functions as a reader copies them."""
    [block] = re.findall(r"^```python\n(def logits_of.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(block, str(GUIDE), "exec"), names)
    return names


def varlen_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """What FlashAttention computes of the arguments that transformers hands it, one row at a time."""
    assert attention_mask is None
    edges = given["cu_seq_lens_q"].tolist()
    assert edges == given["cu_seq_lens_k"].tolist()
    assert given["max_length_q"] == given["max_length_k"] == max(b - a for a, b in pairwise(edges))
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, row], key[:, :, row], value[:, :, row], is_causal=True, enable_gqa=True
        )
        for row in (slice(begin, end) for begin, end in pairwise(edges))
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


AttentionInterface.register("varlen", varlen_attention)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("function", "attention"), [("logits_of", "sdpa"), ("flash_logits_of", "varlen")])
@pytest.mark.parametrize("more", [{}, {"pad_rows_to_multiple_of": 4}], ids=["whole", "with padding"])
def test_loss_and_gradients_are_those_of_padded_rows(
    kind: str, function: str, attention: str, more: dict[str, int]
) -> None:
    random = Random(len(more))
    rows = trees.rollouts(random, has_logprobs=True)
    of_sample = [random.uniform(-2, 2) for _ in range(trees.SAMPLES)]
    for row in rows:
        row["advantage"] = of_sample[row["sample"]]
    config = trees.settings(random, rows, merge="prefix", advantage_estimator="none") | {"layout": "packed", **more}
    plain = {name: value for name, value in config.items() if not name.startswith("pad_")}
    packed, padded = micro_batches(rows, config), micro_batches(rows, plain | {"layout": "left_padded"})
    assert any(len(micro) > 1 for micro in packed)
    mine = loss_and_gradients(model_of(kind, attention), packed, of_the_guide()[function])
    loss, gradients = loss_and_gradients(model_of(kind, "sdpa"), padded)
    assert mine[0] == pytest.approx(loss, rel=1e-9, abs=1e-11)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-6
    for one, other in zip(mine[1], gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
