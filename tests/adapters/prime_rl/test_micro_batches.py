"""Shards become prime-rl's micro-batches, byte for byte what its own packer and sender make of the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gristmill import FailedPreconditionError, InvalidArgumentError
from gristmill._torch.conversion import Conversion
from gristmill._torch.shard_files import parse_shard
from gristmill._wire.addresses import Position
from gristmill._wire.rows import from_rows
from gristmill.adapters.prime_rl import Encoding
from gristmill.adapters.prime_rl._micro_batches import MicroBatch, check_columns
from gristmill.torch import Shard
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import join
from tests.adapters.prime_rl.make_golden import DATA, PAD_TO_MULTIPLE_OF
from tests.adapters.prime_rl.rollouts import COLUMNS, CONFIG, rows


def shards(given: list[dict[str, Any]], **changes: Any) -> list[Shard]:
    """Of the policy, by rank."""
    config = parse_config(CONFIG | changes)
    batch = build_batch(
        from_rows(given, step_wise=config.step_wise, columns=config.columns), config, run="run", batch=0
    )
    mapped = []
    for laid_out in batch.shards:
        data = np.frombuffer(bytearray(join(laid_out.iovec())), np.uint8)
        tensors, metadata = parse_shard(data, "here")
        mapped.append(Shard(tensors, metadata, Conversion(), Position(0, 0, 0), is_mapped=False))
    return mapped


def decoded(encoding: Encoding, shard: Shard) -> list[MicroBatch]:
    return msgspec.msgpack.decode(encoding.encode(shard), type=list[MicroBatch])


def test_a_rank_s_step_is_what_prime_rl_makes_of_the_same_rollouts() -> None:
    for rank, shard in enumerate(shards(rows(with_columns=False))):
        assert Encoding().encode(shard) == (DATA / f"plain-rank-{rank}.bin").read_bytes()


def test_columns_and_tags_become_prime_rl_s_streams() -> None:
    encoding = Encoding(pad_to_multiple_of=PAD_TO_MULTIPLE_OF)
    for rank, shard in enumerate(shards(rows(with_columns=True), columns=COLUMNS)):
        assert encoding.encode(shard) == (DATA / f"columns-rank-{rank}.bin").read_bytes()


@pytest.mark.parametrize("form", [{"dtype": "uint8"}, {"dtype": "int16", "fill": -1}])
def test_tokens_of_which_the_engine_gave_no_experts_have_distinct_ones(form: dict[str, Any]) -> None:
    column = {"name": "routed_experts", "scope": "token", "shape": [2, 3], "partial": True} | form
    sent = [
        row
        | {"routed_experts": np.zeros((len(row["prompt_token_ids"]) + len(row["response_ids"]) - 1, 2, 3), np.int16)}
        for row in rows(with_columns=False)
    ]
    (micro,) = msgspec.msgpack.decode(Encoding().encode(shards(sent, columns=[column])[0]))
    data, shape, dtype = micro[10]
    assert dtype == form["dtype"]
    experts = np.frombuffer(data, dtype).reshape(shape)
    ends = np.cumsum(micro[5]) - 1
    assert experts[ends].tolist() == [[[0, 1, 2]] * 2] * len(ends)
    assert not np.delete(experts, ends, axis=0).any()


def test_padding_rows_train_nothing_and_are_of_no_environment() -> None:
    of_padding = shards(rows(with_columns=False), dp_size=8)[-1]
    (micro,) = decoded(Encoding(), of_padding)
    assert (micro.loss_mask, micro.advantages, micro.env_names) == ([False] * 2, [0.0] * 2, [""] * 2)
    assert micro.seq_lens == micro.sequence_lengths == [2]


def test_a_temperature_stands_before_the_token_that_was_sampled_at_it() -> None:
    """As prime-rl divides the logits at a token by that token's temperature."""
    column = {"name": "temperatures", "dtype": "float32", "scope": "response"}
    sent = rows(with_columns=False)
    for row in sent:
        count = len(row["response_ids"])
        row["loss_mask"] = [1, 1, 0] + [1] * (count - 3)
        row["temperatures"] = [0.5, 0.5, 0.0] + [2.0] * (count - 3)
    first = decoded(Encoding(), shards(sent, columns=[column])[0])[0].temperatures[:10]
    assert first == [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0]


def test_a_trained_token_needs_a_temperature() -> None:
    column = {"name": "temperatures", "dtype": "float32", "scope": "row"}
    sent = [row | {"temperatures": 0.0} for row in rows(with_columns=False)]
    with pytest.raises(InvalidArgumentError, match=r"rank 0 micro-batch 0: temperatures is 0\.0 for a tr"):
        Encoding().encode(shards(sent, columns=[column])[0])


def test_what_prime_rl_cannot_train_is_refused_naming_the_remedy() -> None:
    with pytest.raises(FailedPreconditionError, match=r"rank 0: the shard is padded, .* layout: packed"):
        Encoding().encode(shards(rows(with_columns=False), layout="left_padded")[0])
    without = [
        {name: value for name, value in row.items() if name != "rollout_logprobs"} for row in rows(with_columns=False)
    ]
    with pytest.raises(FailedPreconditionError, match="rows have no rollout_logprobs"):
        Encoding().encode(shards(without)[0])
    with pytest.raises(InvalidArgumentError, match="an environment is named 'all'"):
        Encoding().encode(shards([row | {"tag": "all"} for row in rows(with_columns=False)])[0])
    with pytest.raises(InvalidArgumentError, match=r"temperature is 0\.0; set a temperature above 0"):
        Encoding(temperature=0.0)
    with pytest.raises(InvalidArgumentError, match="pad_to_multiple_of is 0"):
        Encoding(pad_to_multiple_of=0)


def test_sampling_masks_are_counts_per_token_and_ids() -> None:
    """At the position of its field in `MicroBatch`, which prime-rl 0.8.0 does not read."""
    column = {"name": "sampling_mask", "dtype": "int32", "scope": "response", "shape": [None]}
    sent = [
        row | {"sampling_mask": [[token, 7] if at % 2 else [] for at, token in enumerate(row["response_ids"])]}
        for row in rows(with_columns=False)
    ]
    shard = shards(sent, columns=[column])[0]
    encoded = Encoding(pad_to_multiple_of=16).encode(shard)
    micro, fields = decoded(Encoding(pad_to_multiple_of=16), shard)[0], msgspec.msgpack.decode(encoded)[0]
    ids, counts = (np.frombuffer(part, "<i4").tolist() for part in fields[16])
    assert len(counts) == len(micro.input_ids)
    assert len(counts) % 16 == 0
    lists, at = [], 0
    for count in counts:
        lists.append(ids[at : at + count])
        at += count
    assert at == len(ids)
    trained = [(token, kept) for token, mask, kept in zip(micro.input_ids, micro.loss_mask, lists, strict=True) if mask]
    given = [
        (token, kept)
        for row in sent
        for token, mask, kept in zip(row["response_ids"], row["loss_mask"], row["sampling_mask"], strict=True)
        if mask
    ]
    assert trained == given[: len(trained)]
    assert any(kept for _, kept in trained)
    assert not any(kept for mask, kept in zip(micro.loss_mask, lists, strict=True) if not mask)


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ({"name": "pixel_values", "scope": "items"}, "pixel_values has scope items, like images"),
        ({"name": "ref_logprobs", "scope": "token"}, r"declare scope response, and shape \[\]"),
        (
            {"name": "routed_experts", "scope": "token", "shape": [4]},
            r"declare scope token, and shape \[layers, top_k\]",
        ),
        ({"name": "sampling_mask", "scope": "response", "shape": [4]}, r"declare scope response, and shape \[null\]"),
        ({"name": "sampling_mask", "scope": "response", "shape": [None]}, "has dtype float32, .*; declare dtype int32"),
        ({"name": "ce_weights", "scope": "response", "fill": 1}, "with which prime-rl would train prompts"),
    ],
)
def test_a_column_that_prime_rl_would_read_as_something_else_is_refused(column: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        check_columns([{"dtype": "float32", **column}])


def test_columns_of_other_names_are_prime_rl_s_no_business() -> None:
    check_columns([{"name": "difficulty", "dtype": "float32", "scope": "row"}])


def test_the_golden_files_are_small() -> None:
    assert sum(path.stat().st_size for path in Path(DATA).iterdir()) < 10_000
