"""Shards of context-parallel ranks: each has a part of the tokens, and together they have what the whole shard has."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from gristmill import FailedPreconditionError, InvalidArgumentError, RolloutClient, TrainerClient
from gristmill._torch.context_parallel import NO_LABEL, cut_shard
from gristmill._torch.conversion import Conversion
from gristmill._torch.shard_files import parse_shard
from gristmill._wire.addresses import Position
from gristmill._wire.context_parallel import BLOCK, deal, load_ratio
from gristmill._wire.rows import from_rows
from gristmill.torch import MicroBatch, Shard, load_shard, tree_attention
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from gristmill_service.pipeline.layout.iovec import join
from tests.on_loop import Service
from tests.pipeline import trees
from tests.rows import make_config, make_row
from tests.serving import StartService
from tests.strategies import LAW, Row

COLUMNS = [
    {"name": "route", "dtype": "int16", "scope": "token", "shape": [2], "fill": -1, "partial": True},
    {"name": "teacher", "dtype": "bfloat16", "scope": "response"},
    {"name": "grade", "dtype": "int8", "scope": "response", "fill": -1, "partial": True},
    {"name": "choices", "dtype": "int32", "scope": "token", "shape": [None]},
    {"name": "kept", "dtype": "int32", "scope": "response", "shape": [None]},
    {"name": "verdict", "dtype": "bool", "scope": "row"},
]
KINDS = {"zigzag": "packed", "contiguous": "packed", "blocks": "prefix_tree"}


def settings(kind: str, cp_size: int = 2, **changes: Any) -> dict[str, Any]:
    multiple = {"zigzag": 2 * cp_size, "contiguous": cp_size}.get(kind, 1)
    return {
        "layout": KINDS[kind],
        "cp_size": cp_size,
        "cp_shards": kind,
        "pad_rows_to_multiple_of": multiple,
        "pad_token_id": 99,
    } | changes


def built(rows: list[Row], config: dict[str, Any]) -> BuiltBatch:
    checked = parse_config(config)
    return build_batch(from_rows(rows, step_wise=checked.step_wise, columns=checked.columns), checked, run="r", batch=0)


def one_batch(rows: list[Row], kind: str, **changes: Any) -> BuiltBatch:
    config = make_config(train_batch_size=len(rows), policy_mini_batch_size=len(rows), dp_size=1, step_wise=False)
    return built(rows, config | {"micro_batch": {"max_tokens": 1000}} | settings(kind, **changes))


def shard_of(data: bytes, cp_rank: int | None = None) -> Shard:
    tensors, metadata = parse_shard(np.frombuffer(bytearray(data), np.uint8), "here")
    if cp_rank is not None:
        tensors, metadata = cut_shard(tensors, metadata, cp_rank)
    return Shard(tensors, metadata, Conversion(), Position(0, 0, metadata["mini_batch"]), is_mapped=False)


def micro_of(batch: BuiltBatch, cp_rank: int | None) -> MicroBatch:
    (micro,) = shard_of(join(batch.shards[0].iovec()), cp_rank).micro_batches()
    return micro


ROWS = [make_row(uid="a", prompt=[1, 2, 3], response=[4, 5]), make_row(uid="b", prompt=[6], response=[7, 8])]


def test_zigzag_deals_each_row_in_pieces_from_both_ends() -> None:
    batch = one_batch(ROWS, "zigzag")
    first, second = micro_of(batch, 0), micro_of(batch, 1)
    assert first["sequences"].tolist() == [1, 2, 99, 99, 6, 99]
    assert second["sequences"].tolist() == [3, 4, 5, 99, 7, 8]
    assert first["position_ids"].tolist() == [0, 1, 6, 7, 0, 3]
    assert first["query_positions"].tolist() == [0, 1, 6, 7, 8, 11]
    assert first["labels"].tolist() == [2, 3, NO_LABEL, NO_LABEL, 7, NO_LABEL]
    assert second["labels"].tolist() == [4, 5, NO_LABEL, NO_LABEL, 8, NO_LABEL]
    assert first["loss_mask"].tolist() == [0, 0, 0, 0, 1, 0]
    assert second["loss_mask"].tolist() == [1, 1, 0, 0, 1, 0]
    assert (first["cu_seqlens"].tolist(), first["cu_seqlens_padded"].tolist()) == ([0, 5, 8], [0, 8, 12])


def test_contiguous_deals_each_row_in_halves() -> None:
    batch = one_batch(ROWS, "contiguous")
    first, second = micro_of(batch, 0), micro_of(batch, 1)
    assert (first["sequences"].tolist(), second["sequences"].tolist()) == ([1, 2, 3, 6, 7], [4, 5, 99, 8, 99])
    assert (first["labels"].tolist(), second["labels"].tolist()) == (
        [2, 3, 4, 7, 8],
        [5, NO_LABEL, NO_LABEL, NO_LABEL, NO_LABEL],
    )
    assert (first["loss_mask"].tolist(), second["loss_mask"].tolist()) == ([0, 0, 1, 1, 1], [1, 0, 0, 0, 0])


def _with_columns(rows: list[Row], random: Random) -> list[Row]:
    def lists(count: int) -> list[list[int]]:
        return [[random.randrange(9) for _ in range(random.randrange(3))] for _ in range(count)]

    extended = []
    for row in rows:
        count = len(row["response_ids"])
        total = len(row["prompt_token_ids"]) + count
        columns: Row = {"choices": lists(total), "kept": lists(count)}
        columns |= {"route": [[token, token] for token in range(total - random.randrange(2))]}
        columns |= {"grade": [index % 9 for index in range(random.randrange(count + 1))]}
        extended.append(row | columns | {"teacher": [0.5] * count, "verdict": True})
    return extended


@LAW
@given(st.integers(0, 2**32).map(Random), st.sampled_from(sorted(KINDS)), st.integers(2, 4))
def test_the_ranks_together_have_each_token_once_and_each_value_where_its_token_is_predicted(
    random: Random, kind: str, cp_size: int
) -> None:
    rows = _with_columns(trees.rollouts(random, has_logprobs=True), random)
    config = trees.settings(random, rows, columns=COLUMNS) | settings(kind, cp_size)
    for shard in built(rows, config).shards:
        data = join(shard.iovec())
        whole, parts = shard_of(data), [shard_of(data, cp_rank) for cp_rank in range(cp_size)]
        for own, *cut in zip(whole.micro_batches(), *(part.micro_batches() for part in parts), strict=True):
            positions = torch.cat([part["query_positions"] for part in cut])
            assert sorted(positions.tolist()) == list(range(len(own["sequences"])))
            for cp_rank, part in enumerate(cut):
                _check_part(part, own)
                if kind != "blocks":
                    assert part["query_positions"].tolist() == _pieces(own, kind, cp_size, cp_rank)
            places = torch.cat([part["label_positions"] for part in cut]).tolist()
            trained = own["loss_mask"].nonzero().squeeze(1).tolist()
            assert [places.count(place) for place in trained] == [1] * len(trained)


def _pieces(own: MicroBatch, kind: str, cp_size: int, cp_rank: int) -> list[int]:
    """The positions of a rank's pieces of each row."""
    pieces, count = ([cp_rank, 2 * cp_size - 1 - cp_rank], 2 * cp_size) if kind == "zigzag" else ([cp_rank], cp_size)
    return [
        begin + piece * (end - begin) // count + place
        for begin, end in pairwise(own["cu_seqlens_padded"].tolist())
        for piece in pieces
        for place in range((end - begin) // count)
    ]


def _check_part(part: MicroBatch, own: MicroBatch) -> None:
    queries, predicted = part["query_positions"].long(), part["label_positions"].long()
    for name in ("sequences", "position_ids", "route"):
        assert torch.equal(part[name], own[name][queries])
    for name in ("loss_mask", "response_mask", "rollout_logprobs", "advantages", "rewards", "teacher"):
        assert torch.equal(part[name], own[name][predicted])
    for name, at in (("choices", queries), ("kept", predicted)):
        assert _lists(part, name) == [_lists(own, name)[place] for place in at.tolist()]
    for name, at in (("route", queries), ("grade", predicted)):
        assert torch.equal(own.given(name), own[name].view(len(own[name]), -1)[:, 0] != -1)
        assert torch.equal(part.given(name), own.given(name)[at])
    for name in ("row", "verdict", "is_padding"):
        assert torch.equal(part[name], own[name])
    following = own.at_responses(torch.arange(len(own["sequences"])))[predicted]
    has_label = part["labels"] != NO_LABEL
    assert torch.equal(part["labels"][has_label], own["sequences"][predicted][has_label])
    assert torch.equal(part.at_responses(queries)[has_label], following[has_label])
    assert has_label[part["response_mask"] != 0].all()
    logits = torch.randn(len(own["sequences"]), 100, dtype=torch.float64)
    mask = part["loss_mask"] != 0
    assert torch.equal(part.logprobs(logits[queries])[mask], own.logprobs(logits)[predicted][mask])
    assert not part.logprobs(logits[queries])[~has_label].any()
    if part.is_tree:
        assert torch.equal(part.tree.mask, own.tree.mask[queries])
        is_padding = own["sequences"][predicted] == 99
        assert own["is_padding"].any() or not has_label[is_padding].any()


def _lists(micro: MicroBatch, name: str) -> list[list[int]]:
    offsets = micro[f"{name}_offsets"].tolist()
    return [micro[name][a:b].tolist() for a, b in pairwise(offsets)]


def test_a_rank_may_have_no_block_of_a_short_tree() -> None:
    batch = one_batch(ROWS, "blocks")
    assert len(micro_of(batch, 0)["sequences"]) == 8
    assert len(micro_of(batch, 1)["sequences"]) == len(micro_of(batch, 1)["labels"]) == 0


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_blocks_of_16_samples_of_a_long_prompt_are_dealt_evenly(cp_size: int) -> None:
    prompt = list(range(4096))
    random = Random(cp_size)
    lengths = [random.randint(200, 900) for _ in range(16)]
    rows = [make_row(sample=sample, prompt=prompt, response=[sample] * count) for sample, count in enumerate(lengths)]
    config = make_config(n_samples_per_prompt=16, dp_size=1, step_wise=False, micro_batch={"max_tokens": 65536})
    batch = built(rows, config | settings("blocks", cp_size))
    micros = [micro_of(batch, cp_rank) for cp_rank in range(cp_size)]
    loads = [int((micro["position_ids"].long() + 1).sum()) for micro in micros]
    ratio = max(loads) * cp_size / sum(loads)
    assert batch.plan.metrics["cp_barrier_ratio"] == pytest.approx(ratio)
    assert ratio < 1.05
    blocks = [len(micro["query_positions"]) / BLOCK for micro in micros]
    assert max(blocks) - min(blocks) < 2


def test_ranks_that_wait_in_every_micro_batch_have_the_sum_of_their_waits() -> None:
    assert load_ratio([np.zeros(2 * BLOCK, np.int64), np.zeros(BLOCK, np.int64)], 2) == pytest.approx(4 / 3)
    assert deal(np.zeros(4 * BLOCK, np.int64), 2)[1].tolist() == [2 * BLOCK] * 2


def test_masks_of_blocks_are_those_of_the_whole_tree() -> None:
    rows = [make_row(sample=sample, prompt=[1] * 300, response=[sample] * 90) for sample in range(3)]
    config = make_config(n_samples_per_prompt=3, dp_size=1, step_wise=False, micro_batch={"max_tokens": 65536})
    batch = built(rows, config | settings("blocks"))
    whole = micro_of(batch, None).tree
    dense = torch.zeros(5 * BLOCK, 5 * BLOCK, dtype=torch.bool)
    dense[: len(whole), : len(whole)] = whole.mask
    for cp_rank in range(2):
        micro = micro_of(batch, cp_rank)
        queries, mask = micro["query_positions"].long(), micro.tree.block_mask()
        assert mask.seq_lengths == (len(queries), len(whole))
        lines = dense[(queries[::BLOCK, None] + torch.arange(BLOCK)).flatten()]
        expected = lines.view(-1, BLOCK, 5, BLOCK).any(3).any(1)
        assert torch.equal(mask.to_dense()[0, 0].bool(), expected)
        local = torch.arange(len(queries))[:, None]
        attends = mask.mask_mod(torch.tensor(0), torch.tensor(0), local, torch.arange(len(whole))[None])
        assert torch.equal(attends, whole.mask[queries])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_rank_s_queries_attend_to_gathered_keys_as_in_the_whole_tree() -> None:
    rows = [make_row(sample=sample, prompt=[1] * 300, response=[sample] * 90) for sample in range(3)]
    config = make_config(n_samples_per_prompt=3, dp_size=1, step_wise=False, micro_batch={"max_tokens": 65536})
    batch = built(rows, config | settings("blocks"))
    whole = micro_of(batch, None).tree
    query, key, value = torch.randn(3, 1, 2, len(whole), 16, dtype=torch.float64)
    module = torch.nn.Module()
    expected, _ = tree_attention(module, query, key, value, None, tree=whole)
    for cp_rank in range(2):
        micro = micro_of(batch, cp_rank)
        queries = micro["query_positions"].long()
        output, _ = tree_attention(module, query[:, :, queries], key, value, None, tree=micro.tree)
        torch.testing.assert_close(output, expected[:, queries])
        by_blocks = flex_attention(query[:, :, queries], key, value, block_mask=micro.tree.block_mask())
        torch.testing.assert_close(by_blocks.transpose(1, 2), expected[:, queries])


def test_rows_are_not_taken_apart_where_a_rank_has_a_part_of_them() -> None:
    micro = micro_of(one_batch(ROWS, "zigzag"), 1)
    calls = (lambda: micro.unpad(micro["sequences"]), lambda: micro.jagged("sequences"), lambda: micro.row_edges)
    for call in calls:
        with pytest.raises(FailedPreconditionError, match=r"cp_rank 1 has only a part .* or open the whole shard"):
            call()


def test_a_file_is_cut_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "rank-000.safetensors"
    batch, whole = one_batch(ROWS, "zigzag"), one_batch(ROWS, "zigzag", cp_shards="none")
    path.write_bytes(join(batch.shards[0].iovec()))
    shard = load_shard(path, cp_rank=1)
    assert "rank 0 cp_rank 1" in repr(shard)
    assert next(shard.micro_batches())["sequences"].tolist() == [3, 4, 5, 99, 7, 8]
    # An environment variable is a string.
    for wrong in (2, -1, "0", 0.5, 0.0):
        with pytest.raises(InvalidArgumentError, match=rf"cp_rank is {wrong!r} and cp_size is 2; expected 0..1"):
            load_shard(path, cp_rank=wrong)  # type: ignore[arg-type]
    path = tmp_path / "rank-001.safetensors"
    path.write_bytes(join(whole.shards[0].iovec()))
    with pytest.raises(FailedPreconditionError, match="cp_rank is 0, but the run has cp_shards: none; create it with"):
        load_shard(path, cp_rank=0)


def test_a_client_of_several_ranks_has_no_context_parallel_rank() -> None:
    with pytest.raises(InvalidArgumentError, match="cp_rank is 1 and ranks is all; set rank instead"):
        TrainerClient("127.0.0.1:1", "r", ranks="all", cp_rank=1)


@pytest.fixture(params=["memory", "shared memory"])
def address(request: pytest.FixtureRequest, start_service: StartService, service: Service, tmp_path: Path) -> str:
    if request.param == "memory":
        return service.grpc_address
    return start_service("--shared-memory-dir", str(tmp_path)).grpc_address


def test_the_processes_of_a_rank_get_their_parts_and_one_acknowledges(address: str, run_name: str) -> None:
    config = make_config(train_batch_size=2, policy_mini_batch_size=1, dp_size=1, step_wise=False)
    with RolloutClient(address, run_name) as client:
        client.create_run(config | settings("zigzag") | {"micro_batch": {"max_tokens": 1000}})
        client.submit(ROWS)
        client.finish()
    parts = []
    with ExitStack() as opened:
        client = opened.enter_context(RolloutClient(address, run_name))
        processes = [
            opened.enter_context(TrainerClient(address, run_name, 0, cp_rank=cp_rank, timeout_s=20))
            for cp_rank in (0, 1)
        ]
        for first, second in zip(*processes, strict=True):
            for one, other in zip(first.mini_batches(), second.mini_batches(), strict=True):
                pair = [next(shard.micro_batches()) for shard in (one, other)]
                parts.append([micro["sequences"].tolist() for micro in pair])
                other.ack()
                assert client.status().models["policy"].next[0] == one.position
                one.ack()
        assert processes[0].position == processes[1].position == Position(1)
    assert parts == [[[1, 2, 99, 99], [3, 4, 5, 99]], [[6, 99], [7, 8]]]


def test_columns_are_written_for_whole_shards(service: Service, run_name: str) -> None:
    columns = [{"name": "old_logprobs", "dtype": "float32", "scope": "response", "source": "trainer"}]
    config = make_config(train_batch_size=2, policy_mini_batch_size=2, dp_size=1, step_wise=False, columns=columns)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(config | settings("zigzag") | {"micro_batch": {"max_tokens": 1000}})
        client.submit(ROWS)
    with TrainerClient(service.grpc_address, run_name, 0, cp_rank=0, timeout_s=20) as trainer:
        for shard in next(iter(trainer)).forward():
            with pytest.raises(InvalidArgumentError, match=r"cp_rank 0 alone; gather the values .* whole"):
                trainer.write(shard, {"old_logprobs": [torch.zeros(6)]})
