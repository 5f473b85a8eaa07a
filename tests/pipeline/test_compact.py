"""Shards without their padding: restored, they are their file to the byte."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gristmill._wire.codecs import compact_shards
from gristmill._wire.codecs.compact_shards import PART, restore
from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import Region, coalesced, cut, join
from gristmill_service.pipeline.layout.shard import Shard
from tests import naive
from tests.strategies import Row, batches_and_settings

SLOW = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def in_pieces(data: bytes, cuts: Iterable[int]) -> list[memoryview]:
    edges = [0, *sorted(min(at, len(data)) for at in cuts), len(data)]
    return [memoryview(data)[a:b] for a, b in pairwise(edges)]


def with_advantages(rows: list[Row], kind: str) -> list[Row]:
    for row in rows:
        if kind == "token":
            row["advantage"] = [0.5 * index for index in range(len(row["response_ids"]))]
        elif kind == "trajectory":
            row["advantage"] = -1.25
    return rows


@pytest.mark.parametrize("short", [0, 10**9], ids=["row by row", "by masks"])
@SLOW
@given(
    batches_and_settings(),
    st.sampled_from(["estimated", "token", "trajectory"]),
    st.lists(st.integers(0, 3000), max_size=6),
)
def test_a_shard_restored_from_its_compact_form_in_any_pieces_is_its_file(
    short: int, drawn: tuple[list[Row], dict[str, Any]], advantages: str, cuts: list[int]
) -> None:
    rows, config = drawn
    if advantages != "estimated":
        rows, config = with_advantages(rows, advantages), config | {"advantage_estimator": "none"}
    batch = build_batch(from_rows(rows), parse_config(config), run="r", batch=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_shards, "_SHORT", short)
        for shard in batch.shards:
            restored = restore(in_pieces(join(shard.compact()), cuts))
            assert restored.tobytes() == naive.shard_bytes(shard)


@pytest.mark.parametrize("layout", ["left_padded", "packed"])
def test_the_table_does_not_grow_with_the_tokens(layout: str) -> None:
    def nbytes(length: int) -> int:
        shard = long_rows([length, 9], layout=layout)
        return len(join(shard.compact())) - len(naive.read_shard(shard)[1]["uids"])

    # Token, loss mask and logprob: 9 bytes a response token, whatever the padding.
    assert nbytes(2009) - nbytes(1009) <= 9 * 1000 + 16


def long_rows(responses: Iterable[int], **overrides: Any) -> Shard:
    rows = [
        {
            "uid": f"p{index}",
            "sample": 0,
            "prompt_token_ids": [7, 8],
            "response_ids": list(range(1, length + 1)),
            "loss_mask": [1] * length,
            "rollout_logprobs": [-0.5] * length,
            "reward": 1.0,
        }
        for index, length in enumerate(responses)
    ]
    config = {
        "train_batch_size": len(rows),
        "n_samples_per_prompt": 1,
        "policy_mini_batch_size": len(rows),
        "micro_batch": {"size": 2},
        "dp_size": 1,
    }
    batch = build_batch(from_rows(rows, step_wise=False), parse_config(config | overrides), run="r", batch=0)
    return batch.shards[0]


def compacted(responses: Iterable[int]) -> bytes:
    shard = long_rows(responses)
    return join(shard.compact())


def test_restored_memory_is_ones_own_and_may_be_written_to() -> None:
    restored = restore([compacted([3, 5])])
    assert restored.flags.writeable
    assert restored.flags.owndata


def test_a_newer_version_is_refused_by_name() -> None:
    data = bytearray(compacted([3]))
    data[7] = 3
    with pytest.raises(InvalidArgumentError, match=r"version 3 came, and this gristmill reads versions 1 and 2; upgra"):
        restore([bytes(data)])


@pytest.mark.parametrize("kept", [0, 1, 31, 32, 100, 500, -1])
def test_bytes_that_are_cut_short_are_refused(kept: int) -> None:
    data = compacted([3, 5])
    with pytest.raises(InvalidArgumentError, match="no whole compact shard: it has"):
        restore([data[:kept]])


def test_bytes_that_follow_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="bytes and describes"):
        restore([compacted([3, 5]), b"more"])


def test_a_file_as_it_is_is_no_compact_shard() -> None:
    with pytest.raises(InvalidArgumentError, match="no whole compact shard: it begins with"):
        restore([naive.shard_bytes(long_rows([3, 5]))])


@given(st.integers(8, 335), st.integers(1, 255))
def test_a_damaged_table_is_refused(at: int, flip: int) -> None:
    data = bytearray(compacted([3, 5]))
    data[at] ^= flip
    with pytest.raises(InvalidArgumentError, match="no whole compact shard"):
        restore([bytes(data)])


HEAD = struct.Struct("<7sBIIIIQ")


def sealed(data: bytes) -> bytes:
    """The bytes with the checksum that a writer of this table would have given them."""
    magic, version, parts, rows, _, reserved, size = HEAD.unpack_from(data)
    table = data[HEAD.size : HEAD.size + parts * PART.itemsize + 8 * rows]
    checksum = zlib.crc32(HEAD.pack(magic, version, parts, rows, 0, reserved, size) + table)
    return HEAD.pack(magic, version, parts, rows, checksum, reserved, size) + data[HEAD.size :]


@SLOW
@given(
    st.sampled_from(["left_padded", "packed"]),
    st.integers(32, 32 + 9 * PART.itemsize + 15),
    st.integers(0, 255),
    st.sampled_from([0, 10**9]),
)
def test_a_table_that_lies_is_refused_or_gives_a_file_of_its_size(layout: str, at: int, value: int, short: int) -> None:
    """Never a crash, a read outside of the bytes, or another error."""
    shard = long_rows([3, 5], layout=layout)
    data = bytearray(join(shard.compact()))
    data[at] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_shards, "_SHORT", short)
        try:
            assert len(restore([sealed(bytes(data))])) == shard.size
        except InvalidArgumentError:
            pass


def table_of(**changes: Any) -> bytes:
    """The compact form of a tensor of 1 row of 4 tokens, 2 of them response, in a row of 6 elements."""
    part = {"form": 1, "scope": 0, "itemsize": 4, "fill": 9, "begin": 0, "end": 1, "width": 6, "inner": 1, "nbytes": 16}
    part |= changes
    parts = np.zeros(1, PART)
    for name, value in part.items():
        parts[name] = value
    payload = np.arange(part["nbytes"], dtype=np.uint8).tobytes()
    return compact_shards.head(parts, np.array([4]), np.array([2]), 24) + payload


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": 9}, "unknown form 9"),
        ({"scope": 2}, "scope 2, elements of 1 numbers of 4 bytes"),
        ({"itemsize": 3}, "elements of 1 numbers of 3 bytes"),
        ({"inner": 0}, "elements of 0 numbers"),
        ({"itemsize": 1, "fill": 256}, "filled with 256, in 1 bytes"),
        ({"width": -2}, "width -2"),
        ({"width": 3}, "row 0 has 4 tokens where its tensor has room for 3"),
        ({"width": 7}, "its parts make 28 bytes, and its file has 24"),
        ({"end": 2}, "the rows 0 to 2 of 1"),
        ({"begin": 2}, "the rows 2 to 1 of 1"),
        ({"nbytes": 15}, "1 rows of 4 tokens has 15 bytes"),
        ({"form": 3, "itemsize": 1, "fill": 0}, "form 3 has elements of 1 bytes"),
        ({"form": 4, "nbytes": 15}, "has 15 bytes"),
        ({"form": 4, "nbytes": 12}, "its rows count 50462976 values, and 1 are there"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        restore([table_of(**changes)])


@pytest.mark.parametrize("before", [0, 5])
def test_a_value_outside_of_its_row_is_refused(before: int) -> None:
    data = table_of(form=4, nbytes=12)[:-12] + struct.pack("<III", 1, before, 7)
    with pytest.raises(InvalidArgumentError, match="a value stands outside of its row"):
        restore([data])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12), st.integers(1, 20))
@example([(0, 4), (4, 4)], 3)
def test_runs_cut_and_coalesced_are_the_same_bytes(runs: list[tuple[int, int]], nbytes: int) -> None:
    region = Region(bytes(range(50)))
    made = region.runs(np.array([at for at, _ in runs], np.int64), np.array([n for _, n in runs], np.int64))
    whole = join(made)
    groups = [join(group) for group in cut(coalesced(made), nbytes)]
    assert b"".join(groups) == whole
    assert [len(group) for group in groups[:-1]] == [nbytes] * (len(groups) - 1)
    if runs == [(0, 4), (4, 4)]:
        assert len(coalesced(made)) == 1
