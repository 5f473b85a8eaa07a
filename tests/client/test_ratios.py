"""Log-ratios of sequences and steps: the means of a plain loop, in every layout, merged and unmerged."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill import InvalidArgumentError
from gristmill._wire.rows import from_rows
from gristmill.torch import MicroBatch, segment_log_ratio, sequence_log_ratio
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from tests import naive
from tests.client.test_shards import as_shard
from tests.pipeline import trees
from tests.strategies import LAW, Row

LAYOUTS = ("left_padded", "packed", "prefix_tree")
RANDOM = st.integers(0, 2**32).map(Random)


def micro_batches(rows: list[Row], **changes: Any) -> list[MicroBatch]:
    config = {
        "train_batch_size": len({row["uid"] for row in rows}),
        "n_samples_per_prompt": trees.SAMPLES,
        "policy_mini_batch_size": 1,
        "micro_batch": {"max_tokens": 40},
        "dp_size": 2,
        "step_wise": True,
        "token_step": True,
    } | changes
    shards = build_batch(from_rows(rows), parse_config(config), run="run", batch=0).shards
    every = [micro for shard in shards for micro in as_shard(naive.shard_bytes(shard)).micro_batches()]
    return [micro for micro in every if not bool(micro["is_padding"].all())]


def log_ratio(micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Random log-probabilities; NaN where nothing is trained, as a model may leave them."""
    old = micro["rollout_logprobs"].double()
    new = old + torch.sin(old * 12.9898) * micro["loss_mask"]
    return new.masked_fill(micro["loss_mask"] == 0, float("nan")), old


def rows_of(micro: MicroBatch) -> list[list[tuple[int, ...]]]:
    """Each row's own tokens, as indices of the tensors."""
    if micro.is_tree:
        ends = [0, *(micro["row_ends"] + 1).tolist()]
        return [[(place,) for place in range(begin, end)] for begin, end in pairwise(ends)]
    if micro.is_packed:
        begins = micro["cu_seqlens_padded" if "cu_seqlens_padded" in micro else "cu_seqlens"].tolist()
        lengths = micro["cu_seqlens"].diff().tolist()
        return [[(begin + place,) for place in range(length)] for begin, length in zip(begins, lengths, strict=False)]
    lines, width = micro["loss_mask"].shape
    return [[(line, place) for place in range(width)] for line in range(lines)]


def by_loop(micro: MicroBatch, values: torch.Tensor, *, per_step: bool) -> torch.Tensor:
    means = torch.zeros_like(values)
    for places in rows_of(micro):
        keys = [int(micro["token_step"][place]) if per_step else 0 for place in places]
        for key in set(keys):
            members = [place for place, other in zip(places, keys, strict=True) if other == key]
            trained = [float(values[place]) for place in members if micro["loss_mask"][place]]
            for place in members:
                means[place] = sum(trained) / len(trained) if trained else 0.0
    return means


@LAW
@given(RANDOM, st.sampled_from(LAYOUTS), st.sampled_from(["none", "prefix", "tree"]))
def test_they_are_the_means_of_a_plain_loop_in_every_layout(random: Random, layout: str, merge: str) -> None:
    multiple = 1 if layout == "left_padded" else random.choice([1, 4])
    settings = {"layout": layout, "merge": merge, "pad_rows_to_multiple_of": multiple}
    for micro in micro_batches(trees.rollouts(random, has_logprobs=True), **settings):
        (new, old), mask, edges = log_ratio(micro), micro["loss_mask"], micro.row_edges
        of_rows = sequence_log_ratio(new, old, mask, edges)
        of_steps = segment_log_ratio(new, old, mask, micro["token_step"], edges)
        assert of_rows.dtype == of_steps.dtype == torch.float64
        own = torch.zeros_like(mask, dtype=torch.bool)
        for place in (place for row in rows_of(micro) for place in row):
            own[place] = True
        for means, per_step in ((of_rows, False), (of_steps, True)):
            expected = by_loop(micro, new - old, per_step=per_step)
            torch.testing.assert_close(means[own], expected[own], rtol=1e-12, atol=1e-12)


def ratios(rows: list[Row], **changes: Any) -> dict[float, float]:
    """The log-ratio of the step of each trained token, by its log-probability, which no other token has."""
    of_tokens: dict[float, float] = {}
    for micro in micro_batches(rows, **changes):
        new, old = log_ratio(micro)
        means = segment_log_ratio(new, old, micro["loss_mask"], micro["token_step"], micro.row_edges)
        trained = micro["loss_mask"] != 0
        of_tokens |= dict(zip(old[trained].tolist(), means[trained].tolist(), strict=True))
    return of_tokens


@LAW
@given(RANDOM)
def test_those_of_steps_are_the_same_whatever_rows_the_steps_became(random: Random) -> None:
    rows = trees.rollouts(random, has_logprobs=True)
    for index, row in enumerate(rows):
        row["rollout_logprobs"] = [-(1.0 + index + at / 8) for at in range(len(row["response_ids"]))]
    apart = ratios(rows, merge="none")
    for merge in ("prefix", "tree"):
        for layout in LAYOUTS:
            assert ratios(rows, merge=merge, layout=layout) == pytest.approx(apart, rel=1e-12)


def test_gradients_reach_the_trained_tokens_alone() -> None:
    new = torch.tensor([[0.5, 1.0, -1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    mask, steps = torch.tensor([[1, 1, 0, 1]]), torch.tensor([[0, 0, -1, 1]])
    means = segment_log_ratio(new, torch.zeros_like(new), mask, steps)
    assert means.tolist() == [[0.75, 0.75, 0.0, 2.0]]
    (gradient,) = torch.autograd.grad((means * torch.tensor([[1.0, 2.0, 4.0, 8.0]])).sum(), new)
    assert gradient.tolist() == [[1.5, 1.5, 0.0, 8.0]]
    assert torch.autograd.gradcheck(lambda one: segment_log_ratio(one, torch.zeros_like(one), mask, steps), new)


def test_log_probabilities_of_bfloat16_are_averaged_in_float32() -> None:
    new = torch.full((1, 512), 1.0, dtype=torch.bfloat16)
    means = sequence_log_ratio(new, torch.zeros_like(new), torch.ones_like(new))
    assert means.dtype == torch.float32
    assert set(means[0].tolist()) == {1.0}


def test_tensors_of_other_tokens_are_refused_with_both_shapes() -> None:
    line, lines = torch.zeros(4), torch.zeros(2, 4)
    with pytest.raises(InvalidArgumentError, match=r"\(4,\), and row_edges is absent; pass micro.row_edges"):
        sequence_log_ratio(line, line, line)
    with pytest.raises(InvalidArgumentError, match=r"\(2, 4\), and row_edges is given"):
        sequence_log_ratio(lines, lines, lines, torch.tensor([0, 4]))
    with pytest.raises(InvalidArgumentError, match=r"token_step has shape \(2, 3\), but logprobs has \(2, 4\)"):
        segment_log_ratio(lines, lines, lines, lines[:, 1:])
    with pytest.raises(InvalidArgumentError, match=r"old_logprobs has shape \(4,\)"):
        sequence_log_ratio(lines, line, lines)
