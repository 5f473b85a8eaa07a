"""Micro-batches of `layout: prefix_tree` in gristmill.torch: what a token attends to, and which output predicts it."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill import FailedPreconditionError, InvalidArgumentError
from gristmill._torch.token_tree import TokenTree
from gristmill._torch.tree_attention import _by_blocks
from gristmill._wire.rows import from_rows
from gristmill.torch import MicroBatch, tree_attention
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from tests import naive
from tests.client.test_shards import as_shard
from tests.pipeline import trees
from tests.strategies import LAW, Row

RANDOM = st.integers(0, 2**32).map(Random)


def micro_batches(rows: list[Row], config: dict[str, Any]) -> list[MicroBatch]:
    shards = build_batch(from_rows(rows), parse_config(config), run="run", batch=0).shards
    return [micro for shard in shards for micro in as_shard(naive.shard_bytes(shard)).micro_batches()]


def drawn(random: Random) -> list[MicroBatch]:
    rows = trees.rollouts(random)
    return micro_batches(rows, trees.settings(random, rows))


def attended(parents: list[int]) -> torch.Tensor:
    result = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            result[token] |= result[parent]
    return result


def of_blocks(tree: TokenTree, size: int) -> torch.Tensor:
    """The dense mask that FlexAttention makes of a block mask."""
    mask = tree.block_mask(size)
    result = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    places = torch.arange(len(tree))
    every = tree.mask_mod(places, places, places[:, None], places[None, :])
    for counts, indices, is_full in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        assert counts is not None
        assert indices is not None
        for line, count in enumerate(counts[0, 0].tolist()):
            for block in indices[0, 0, line, :count].tolist():
                lines, columns = slice(line * size, (line + 1) * size), slice(block * size, (block + 1) * size)
                result[lines, columns] |= torch.ones_like(every[lines, columns]) if is_full else every[lines, columns]
    return result


@LAW
@given(RANDOM, st.integers(1, 9))
def test_tokens_attend_to_themselves_and_their_ancestors(random: Random, block_size: int) -> None:
    for micro in drawn(random):
        expected = attended(micro["parents"].tolist())
        assert torch.equal(micro.tree.mask, expected)
        assert torch.equal(of_blocks(micro.tree, block_size), expected)


@LAW
@given(RANDOM)
def test_paths_are_the_rows_and_unpad_gives_their_responses(random: Random) -> None:
    rows = trees.rollouts(random)
    config = trees.settings(random, rows)
    expected = naive.merged(rows, config["merge"], config.get("retokenized_tail", 0))
    for micro in micro_batches(rows, config):
        responses = micro.unpad(micro["sequences"])
        for index, number in enumerate(micro["row"].tolist()):
            path = micro.tree.path(index)
            assert micro.position_ids()[path].tolist() == list(range(len(path)))
            if number < 0:
                assert not len(responses[index])
                continue
            tokens = naive.tokens_of(expected[number])
            assert micro["sequences"][path].tolist() == tokens
            assert responses[index].tolist() == tokens[len(expected[number].steps[0]["prompt_token_ids"]) :]


def next_logprobs(logits: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, as the token before it predicts it."""
    following = sequences[..., 1:].long().unsqueeze(-1)
    return logits[..., :-1, :].log_softmax(-1).gather(-1, following).squeeze(-1)


@LAW
@given(RANDOM)
def test_log_probabilities_are_those_of_each_token_after_the_one_before_it_in_its_row(random: Random) -> None:
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    for micro in drawn(random):
        count = len(micro["sequences"])
        logits = torch.randn(count, 100, generator=generator, dtype=torch.float64, requires_grad=True)
        result, moved = micro.logprobs(logits), micro.at_responses(logits)
        expected = torch.zeros(count, dtype=torch.float64)
        for row in range(len(micro)):
            path = micro.tree.path(row)
            assert torch.equal(moved[path[1:]], logits[path[:-1]])
            assert not moved[path[0]].any()
            expected[path[1:]] = next_logprobs(logits[path], micro["sequences"][path])
        torch.testing.assert_close(result, expected)
        (gradient,) = torch.autograd.grad(result.sum(), logits)
        assert torch.isfinite(gradient).all()


def one_tree() -> MicroBatch:
    random = Random(3)
    rows = trees.rollouts(random)
    micros = micro_batches(rows, trees.settings(random, rows, micro_batch={"size": 100}, dp_size=1, merge="none"))
    return max(micros, key=lambda micro: len(micro["sequences"]))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attend", [tree_attention, "blocks"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_is_that_of_each_row_alone(attend: Any, key_heads: int) -> None:
    micro = one_tree()
    count = len(micro["sequences"])
    query = torch.randn(1, 4, count, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, key_heads, count, 8, dtype=torch.float64)
    if attend == "blocks":
        # FlexAttention's gradients need a GPU; its forward pass is the same here.
        with torch.no_grad():
            result = _by_blocks(query, key, value, micro.tree, 0.3, 0.0).transpose(1, 2)
    else:
        result, weights = attend(torch.nn.Module(), query, key, value, None, tree=micro.tree, scaling=0.3)
        assert weights is None
    for row in range(len(micro)):
        path = micro.tree.path(row)
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, path],
            key[:, :, path].repeat_interleave(4 // key_heads, dim=1),
            value[:, :, path].repeat_interleave(4 // key_heads, dim=1),
            is_causal=True,
            scale=0.3,
        )
        torch.testing.assert_close(result[:, path], alone.transpose(1, 2))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tree": None}, r"call the model with tree=micro\.tree"),
        ({"sliding_window": 4}, "does not support sliding_window"),
        ({"softcap": 30.0}, "does not support softcap"),
        ({"query": torch.zeros(2, 1, 5, 4)}, "call the model with one micro-batch"),
        ({"key": torch.zeros(1, 1, 7, 4)}, "and no cache"),
    ],
)
def test_attention_refuses_what_it_would_get_wrong(changes: dict[str, Any], problem: str) -> None:
    whole = torch.zeros(1, 1, 5, 4)
    tree = TokenTree(torch.arange(-1, 4), torch.zeros(1), torch.tensor([-1]), torch.tensor([4]))
    given_values: dict[str, Any] = {"query": whole, "key": whole, "value": whole, "tree": tree} | changes
    with pytest.raises(InvalidArgumentError, match=problem):
        tree_attention(torch.nn.Module(), attention_mask=None, **given_values)


def test_what_a_shared_token_has_no_single_answer_for_is_refused() -> None:
    micro = one_tree()
    with pytest.raises(InvalidArgumentError, match="a shared token occurs once"):
        micro.jagged("advantages")
    with pytest.raises(InvalidArgumentError, match=r"expected .* and optionally further axes"):
        micro.logprobs(torch.zeros(3, 100))


def test_rows_of_other_layouts_have_no_tree_and_log_probabilities_of_the_same_form() -> None:
    random = Random(5)
    rows = trees.rollouts(random)
    for layout in ("packed", "left_padded"):
        for micro in micro_batches(rows, trees.settings(random, rows, layout=layout)):
            logits = torch.randn(*micro["sequences"].shape, 100)
            before = torch.nn.functional.pad(next_logprobs(logits, micro["sequences"]), (0, 1))
            torch.testing.assert_close(micro.logprobs(logits), micro.at_responses(before))
            with pytest.raises(FailedPreconditionError, match="no tree"):
                _ = micro.tree


def test_metadata_of_a_micro_batch_has_its_own_rows_response_lengths() -> None:
    micros = drawn(Random(7))
    for micro in micros:
        assert len(micro.metadata["response_lengths"]) == len(micro)
    assert np.sum([len(micro) for micro in micros]) > 1
