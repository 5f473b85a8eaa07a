"""SubmitRowsRequest by hand: any protobuf library reads what we write, and we read what any of them writes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.codecs.row_codec import Prefixes
from gristmill._wire.codecs.row_codec import encode as encode_message
from gristmill._wire.codecs.submit_codec import Submission, compressed, encode
from gristmill._wire.rows import columns_of, from_rows, to_rows
from gristmill._wire.steps import Steps, concat
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import rollout_pb2, rows_pb2
from tests.strategies import LAW, Row, rollouts


def rows_of(table: Steps) -> list[str]:
    return [repr(row) for row in to_rows(table)]


@LAW
@given(rollouts(), st.data())
def test_what_is_written_by_hand_is_what_protobuf_reads(batch: list[Row], data: st.DataObject) -> None:
    table = from_rows(batch)
    cut = data.draw(st.integers(0, len(table)))
    parts = [table.take(np.arange(*edges)) for edges in ((0, cut), (cut, len(table))) if edges[0] < edges[1]]
    written = encode("a run", parts)
    read = rollout_pb2.SubmitRowsRequest.FromString(written)
    read.rows.ClearField("padding")
    assert read == rollout_pb2.SubmitRowsRequest(run="a run", rows=encode_message(table))
    ours = Submission(written)
    assert ours.run == "a run"
    assert rows_of(ours.rows().steps) == rows_of(table)
    assert ours.SerializeToString() is written


@LAW
@given(rollouts())
def test_what_protobuf_writes_is_read_by_hand(batch: list[Row]) -> None:
    table = from_rows(batch)
    theirs = rollout_pb2.SubmitRowsRequest(run="r", rows=encode_message(table)).SerializeToString()
    assert rows_of(Submission(theirs).rows().steps) == rows_of(table)


@LAW
@given(rollouts())
def test_buffers_are_viewed_where_they_are_and_aligned(batch: list[Row]) -> None:
    written = encode("r", [from_rows(batch)])
    steps = Submission(written).rows().steps
    begin = np.frombuffer(written, np.uint8).ctypes.data
    for column in (steps.tokens, steps.logprobs, steps.token_rewards):
        if column is not None:
            assert column.values.flags.aligned
            assert begin <= column.values.ctypes.data < begin + len(written), "a view, no copy"


@LAW
@given(rollouts())
def test_messages_that_come_twice_are_merged_as_protobuf_merges_them(batch: list[Row]) -> None:
    table = from_rows(batch)
    twice = encode("r", [table]) * 2
    expected = rollout_pb2.SubmitRowsRequest.FromString(twice)
    assert len(expected.rows.uids) == 2 * len(table)
    with pytest.raises(InvalidArgumentError, match="tokens has"):
        Submission(twice).rows()


@LAW
@given(rollouts(), st.data())
def test_a_request_that_is_cut_or_damaged_is_refused_or_another_request(batch: list[Row], data: st.DataObject) -> None:
    written = encode("r", [from_rows(batch)])
    cut = written[: data.draw(st.integers(0, len(written) - 1))]
    at = data.draw(st.integers(0, len(written) - 1))
    damaged = written[:at] + bytes([data.draw(st.integers(0, 255))]) + written[at + 1 :]
    for request in (cut, damaged):
        try:
            ours = Submission(request)
        except InvalidArgumentError:
            try:
                # What protobuf can read was refused for its compressed part alone.
                assert rollout_pb2.SubmitRowsRequest.FromString(request).zstd
            except DecodeError:
                pass
            continue
        assert ours.run == rollout_pb2.SubmitRowsRequest.FromString(request).run


def test_what_is_left_out_is_not_sent() -> None:
    table = from_rows([{"uid": "a", "sample": 0, "step": 1, "is_last_step": True, "reward": 1.0, "loss_mask": [1],
                        "prompt_token_ids": [*range(1000)], "response_ids": [7]}])  # fmt: skip
    prefixes = Prefixes(np.array([990]), np.array([0xFFFFFFFF], np.uint32))
    written = encode("r", [table], prefixes)
    assert len(written) < len(encode("r", [table])) - 4 * 980
    steps, left_out = Submission(written).rows()
    assert left_out is not None
    assert (left_out.lengths.tolist(), left_out.checksums.tolist()) == ([990], [0xFFFFFFFF])
    assert steps.tokens[0].tolist() == [*range(990, 1000), 7]


@pytest.mark.parametrize("length", [-1, 4])
def test_a_prefix_lies_within_its_prompt(length: int) -> None:
    rows = encode_message(from_rows([{"uid": "a", "sample": 0, "prompt_token_ids": [1, 2, 3], "response_ids": [4],
                                      "loss_mask": [1], "reward": 0.0}], step_wise=False))  # fmt: skip
    rows.prefix_lengths.append(length)
    rows.prefix_checksums.append(0)
    with pytest.raises(InvalidArgumentError, match=rf"prefix_lengths\[0\] is {length}, but the prompt has 3 tokens"):
        Submission(rollout_pb2.SubmitRowsRequest(rows=rows).SerializeToString()).rows()


@LAW
@given(rollouts(), st.integers(1, 4), st.integers(1, 400))
def test_rows_cut_into_tables_are_the_same_rows(batch: list[Row], most_rows: int, most_bytes: int) -> None:
    tables: list[Steps] = list(columns_of(batch, step_wise=True).tables(most_rows, most_bytes))
    assert rows_of(concat(tables)) == rows_of(from_rows(batch))
    assert all(len(table) <= most_rows for table in tables)
    for table in tables:
        size = 5 * table.response_lengths.sum() + 4 * table.prompt_lengths.sum()
        assert len(table) == 1 or size <= most_bytes


@LAW
@given(rollouts())
def test_a_compressed_request_says_the_same(batch: list[Row]) -> None:
    table = from_rows(batch)
    request = compressed(encode("a run", [table]))
    ours = Submission(request)
    assert ours.run == "a run"
    assert rows_of(ours.rows().steps) == rows_of(table)
    assert ours.SerializeToString() is request


def test_compression_saves_what_tokens_do_not_use() -> None:
    rows = [
        {"uid": "a", "sample": 0, "prompt_token_ids": np.random.default_rng(1).integers(0, 150_000, 50_000),
         "response_ids": [1], "loss_mask": [1], "reward": 0.0}
    ]  # fmt: skip
    request = encode("r", [from_rows(rows, step_wise=False)])
    assert len(compressed(request)) < 0.75 * len(request)


def frame_of(size: int, *, has_size: bool = True) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=has_size)
    return rollout_pb2.SubmitRowsRequest(zstd=compressor.compress(bytes(size))).SerializeToString()


def test_a_frame_that_would_fill_the_memory_is_refused_before_it_does() -> None:
    bomb = frame_of(100 << 20)
    assert len(bomb) < 20_000
    with pytest.raises(InvalidArgumentError, match=r"104857600 bytes, and max_message_bytes is 1048576"):
        Submission(bomb, most_bytes=1 << 20)
    with pytest.raises(InvalidArgumentError, match="does not contain its content size"):
        Submission(frame_of(100, has_size=False))


@pytest.mark.parametrize("frame", [b"no frame", frame_of(1000)[6:-5]])
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="bytes are not a zstd frame"):
        Submission(rollout_pb2.SubmitRowsRequest(zstd=frame).SerializeToString())


def test_lengths_that_no_tokens_bear_out_take_no_memory() -> None:
    rows = rows_pb2.Rows(uids=["a"], samples=[0], prompt_lengths=[1], response_lengths=[2**31 - 1], rewards=[0.0])
    request = rollout_pb2.SubmitRowsRequest(run="r", rows=rows).SerializeToString()
    tracemalloc.start()
    with pytest.raises(InvalidArgumentError, match="tokens is empty"):
        Submission(request).rows()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
