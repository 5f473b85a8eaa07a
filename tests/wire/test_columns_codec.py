"""Requests that write columns: protobuf reads what is written by hand, and the other way round."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gristmill._wire.codecs import columns_codec, tensor_file
from gristmill._wire.codecs.columns_codec import PART_BYTES, ColumnsRequest
from gristmill._wire.columns import Array
from gristmill.v1 import trainer_pb2
from tests.wire.test_tensor_file import TENSORS, check_same

REQUESTS = st.builds(
    trainer_pb2.WriteColumnsRequest,
    run=st.text(max_size=20),
    batch=st.integers(0, 2**40),
    mini_batch=st.integers(0, 300),
    rank=st.integers(0, 300),
    incarnation=st.integers(-(2**40), 2**40),
)


def check_request(decoded_request: ColumnsRequest, expected: trainer_pb2.WriteColumnsRequest) -> None:
    for name in ("run", "batch", "mini_batch", "rank", "incarnation"):
        assert getattr(decoded_request, name) == getattr(expected, name)


@given(REQUESTS, TENSORS)
def test_protobuf_reads_what_is_written(request: trainer_pb2.WriteColumnsRequest, tensors: dict[str, Array]) -> None:
    [data] = columns_codec.messages(request, tensor_file.encode(tensors))
    parsed = trainer_pb2.WriteColumnsRequest.FromString(data)
    check_same(tensor_file.decode(parsed.tensors), tensors)
    parsed.ClearField("tensors")
    assert parsed == request


@pytest.mark.parametrize(("size", "parts"), [(PART_BYTES, 0), (PART_BYTES + 1, 2), (3 * PART_BYTES, 3)])
def test_a_large_file_is_cut_into_parts_after_a_message_with_its_size(size: int, parts: int) -> None:
    request = trainer_pb2.WriteColumnsRequest(run="run", batch=3, mini_batch=1, rank=2, incarnation=1)
    file = np.random.default_rng(size).bytes(size)
    first, *rest = [*columns_codec.messages(request, file)]
    decoded_request = ColumnsRequest(first)
    check_request(decoded_request, request)
    assert len(rest) == parts
    assert decoded_request.size_bytes == (size if parts else 0)
    decoded = [trainer_pb2.WriteColumnsRequest.FromString(data) for data in (first, *rest)]
    assert b"".join(message.tensors for message in decoded) == file
    assert all(message == trainer_pb2.WriteColumnsRequest(tensors=message.tensors) for message in decoded[1:])
    assert [bytes(columns_codec.part_of(data)) for data in rest] == [message.tensors for message in decoded[1:]]
    if parts:
        decoded_request.tensors = memoryview(file)
    assert [*decoded_request.messages()] == [first, *rest], "a replica forwards them as they came"


@given(REQUESTS, TENSORS)
def test_what_is_written_is_viewed(request: trainer_pb2.WriteColumnsRequest, tensors: dict[str, Array]) -> None:
    [data] = columns_codec.messages(request, tensor_file.encode(tensors))
    decoded_request = ColumnsRequest(data)
    check_request(decoded_request, request)
    assert [*decoded_request.messages()] == [data]
    decoded = tensor_file.decode(decoded_request.tensors)
    check_same(decoded, tensors)
    begin = len(data) - len(decoded_request.tensors) + tensor_file.begin_of_data(decoded_request.tensors)
    for values in decoded.values():
        assert not values.size or begin % 8 or np.shares_memory(values, np.frombuffer(data, np.uint8))


@given(REQUESTS, TENSORS)
def test_what_protobuf_wrote_is_read_with_its_tensors_aligned(
    request: trainer_pb2.WriteColumnsRequest, tensors: dict[str, Array]
) -> None:
    request.tensors = tensor_file.encode(tensors)
    decoded_request = ColumnsRequest(request.SerializeToString())
    check_request(decoded_request, request)
    check_same(tensor_file.decode(decoded_request.tensors), tensors)
    begin = np.frombuffer(decoded_request.tensors, np.uint8).ctypes.data + tensor_file.begin_of_data(
        decoded_request.tensors
    )
    assert begin % 8 == 0


def test_of_tensors_that_come_twice_the_last_ones_count_and_unknown_fields_are_passed_over() -> None:
    data = b"".join(
        (
            trainer_pb2.WriteColumnsRequest(run="one", tensors=b"first").SerializeToString(),
            b"\x7a\x03new",
            trainer_pb2.WriteColumnsRequest(tensors=b"second, and longer").SerializeToString(),
        )
    )
    decoded_request = ColumnsRequest(data)
    assert (decoded_request.run, bytes(decoded_request.tensors)) == ("one", b"second, and longer")
    assert not bytes(ColumnsRequest(b"").tensors)


@given(st.binary(max_size=60))
def test_what_protobuf_refuses_is_refused(data: bytes) -> None:
    try:
        expected = trainer_pb2.WriteColumnsRequest.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            ColumnsRequest(data)
    else:
        decoded_request = ColumnsRequest(data)
        check_request(decoded_request, expected)
        assert bytes(decoded_request.tensors) == expected.tensors
