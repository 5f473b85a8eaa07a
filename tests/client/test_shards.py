"""Shards as tensors: mapped without a copy, cut into micro-batches, taken back to rows whatever the layout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from gristmill import FailedPreconditionError, InvalidArgumentError
from gristmill._torch.conversion import Conversion
from gristmill._torch.shard_files import map_shard, parse_shard
from gristmill._wire.addresses import Position, ShardAddress, is_mappable
from gristmill._wire.codecs.shard_messages import message_of, piece_of
from gristmill._wire.rows import from_rows
from gristmill.torch import Shard, load_shard
from gristmill.v1 import trainer_pb2
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import join
from tests import naive
from tests.strategies import LAW, Row, batches_and_settings, batches_with_columns

ROWS = [
    {
        "uid": f"p{prompt}",
        "sample": sample,
        "step": 0,
        "is_last_step": True,
        "prompt_token_ids": list(range(10, 10 + prompt + 2)),
        "response_ids": list(range(20, 21 + prompt + sample)),
        "loss_mask": [1] * (1 + prompt + sample),
        "rollout_logprobs": [-0.5] * (1 + prompt + sample),
        "reward": float(sample),
        "stop_reason": "stop",
    }
    for prompt in range(2)
    for sample in range(3)
]
CONFIG = {"train_batch_size": 2, "n_samples_per_prompt": 3, "policy_mini_batch_size": 2, "micro_batch": {"size": 4}}
LAYOUTS = [
    {"pad_width": "shard"},
    {"pad_width": "micro_batch"},
    {"pad_width": "batch", "pad_to_multiple_of": 8},
    {"layout": "packed"},
]


def shard_bytes(rows: list[Row], config: dict[str, Any]) -> list[bytes]:
    checked = parse_config(config)
    shards = build_batch(from_rows(rows, columns=checked.columns), checked, run="run", batch=0).shards
    return [join(shard.iovec()) for shard in shards]


def as_shard(data: bytes, **conversion: Any) -> Shard:
    tensors, metadata = parse_shard(np.frombuffer(bytearray(data), np.uint8), "here")
    return Shard(tensors, metadata, Conversion(**conversion), Position(0, 0, metadata["mini_batch"]), is_mapped=False)


def shard_of(rows: list[Row] = ROWS, **changes: Any) -> Shard:
    return as_shard(shard_bytes(rows, CONFIG | changes)[0])


def next_tokens(sequences: torch.Tensor) -> torch.Tensor:
    """What a causal model's output is of at each position: the next token."""
    return torch.cat([sequences[..., 1:], torch.full_like(sequences[..., :1], -9)], dim=-1)


@LAW
@given(batches_and_settings())
def test_unpad_inverts_every_layout(rows_and_settings: tuple[list[Row], dict[str, Any]]) -> None:
    rows, config = rows_and_settings
    responses = [
        (last["prompt_token_ids"] + last["response_ids"])[len(first["prompt_token_ids"]) :]
        for row in naive.merged(rows, config["merge"], config.get("retokenized_tail", 0))
        for first, last in [(row.steps[0], row.steps[-1])]
    ]
    for data in shard_bytes(rows, config):
        for micro in as_shard(data).micro_batches():
            expected = [responses[row] if row >= 0 else [] for row in micro["row"].tolist()]
            own, moved = micro["sequences"], micro.at_responses(next_tokens(micro["sequences"]))
            assert [row.tolist() for row in micro.unpad(own)] == expected
            assert moved.shape == micro["advantages"].shape
            assert [row.tolist() for row in micro.unpad(moved)] == expected
            assert [len(row) for row in micro.unpad(micro["advantages"])] == [len(row) for row in expected]
            lengths = [len(part) for part in (micro.metadata["uids"], micro.metadata["stop_reasons"], micro)]
            assert lengths == [len(expected)] * 3


@LAW
@given(batches_with_columns())
def test_values_of_a_partial_column_are_given_where_another_fill_changes_nothing(
    drawn: tuple[list[Row], dict[str, Any]],
) -> None:
    rows, config = drawn
    partial = [column for column in config["columns"] if column["partial"] and column["shape"] != [None]]
    filled = [
        shard_bytes(rows, config | {"columns": [one | {"fill": fill} if one in partial else one for one in columns]})
        for columns in [config["columns"]]
        for fill in (0, 1)
    ]
    for parts in zip(*filled, strict=True):
        zeros, ones = (as_shard(part) for part in parts)
        micros = list(zip(zeros.micro_batches(), ones.micro_batches(), strict=True))
        for micro, other in [*micros, *([] if zeros.is_per_micro_batch else [(zeros, ones)])]:
            for name in [column["name"] for column in partial]:
                is_same = micro[name] == other[name]
                values_given = micro.given(name)
                assert torch.equal(values_given, is_same.view(*values_given.shape, -1).all(-1))


def test_rows_that_have_an_optional_column_and_columns_that_all_have() -> None:
    columns = [
        {"name": "score", "dtype": "int32", "scope": "row", "required": False},
        {"name": "kept", "dtype": "int32", "scope": "response", "shape": [None], "partial": True},
    ]
    rows = [row | {"kept": []} | ({"score": 1} if row["sample"] else {}) for row in ROWS]
    shard = shard_of(rows, columns=columns)
    assert shard.given("score").tolist() == [False, True, True] * 2
    with pytest.raises(InvalidArgumentError, match=r"kept of shape .* partial: true or .* use its offsets"):
        shard.given("kept")
    with pytest.raises(KeyError, match="no tensor 'teacher'; expected one of"):
        shard.given("teacher")


@pytest.mark.parametrize("changes", LAYOUTS)
def test_position_ids_count_each_row_from_0(changes: dict[str, Any]) -> None:
    for micro in shard_of(**changes).micro_batches():
        position_ids, sequences = micro.position_ids(), micro["sequences"]
        assert position_ids.dtype == torch.int64
        assert position_ids.shape == sequences.shape
        if micro.is_packed:
            starts = micro["cu_seqlens"].tolist()
            expected = [place for a, b in pairwise(starts) for place in range(b - a)]
            assert position_ids.tolist() == expected
        else:
            for places, mask in zip(position_ids, micro["attention_mask"], strict=True):
                assert places[mask.bool()].tolist() == list(range(int(mask.sum())))
                assert not places[~mask.bool()].any()


@pytest.mark.parametrize("changes", LAYOUTS)
def test_padding_rows_have_no_response_to_unpad(changes: dict[str, Any]) -> None:
    padding = 0
    for data in shard_bytes(ROWS, CONFIG | changes | {"dp_size": 4}):
        for micro in as_shard(data).micro_batches():
            for is_padding, response in zip(micro["is_padding"], micro.unpad(micro["sequences"]), strict=True):
                assert (len(response) == 0) == bool(is_padding)
                padding += int(is_padding)
    assert padding == 2


def cut(values: torch.Tensor, offsets: torch.Tensor) -> list[list[float]]:
    assert offsets.dtype == torch.int64
    return [values[a:b].tolist() for a, b in pairwise(offsets.tolist())]


@LAW
@given(batches_and_settings())
def test_jagged_rows_are_every_rows_own_tokens_in_every_layout(
    rows_and_settings: tuple[list[Row], dict[str, Any]],
) -> None:
    rows, config = rows_and_settings
    shards = build_batch(from_rows(rows), parse_config(config), run="run", batch=0).shards
    for made in shards:
        shard, naively = as_shard(naive.shard_bytes(made)), naive.shard_rows(made)
        sequences = cut(*shard.jagged("sequences"))
        prompts, responses = cut(*shard.jagged("sequences", "prompt")), cut(*shard.jagged("sequences", "response"))
        advantages = cut(*shard.jagged("advantages", "response"))
        assert sequences == [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        assert sequences == [row["sequences"].tolist() for row in naively]
        assert cut(*shard.jagged("position_ids")) == [list(range(len(row))) for row in sequences]
        for row, response, advantage in zip(naively, responses, advantages, strict=True):
            own = int(row["response_mask"].sum())
            assert len(response) == len(advantage) == (1 if row["is_padding"] else own)
            assert advantage == ([0.0] if row["is_padding"] else row["advantages"][-own:].tolist())


@pytest.mark.parametrize("changes", LAYOUTS)
def test_jagged_rows_become_a_nested_tensor(changes: dict[str, Any]) -> None:
    rows = shard_of(**changes).jagged("sequences", "response").nested()
    assert rows.is_nested
    assert rows.layout == torch.jagged
    responses: list[Any] = [row["response_ids"] for row in ROWS]
    assert [row.tolist() for row in rows.unbind()] == responses
    assert rows.to_padded_tensor(0).shape == (len(ROWS), max(map(len, responses)))


@pytest.mark.parametrize("changes", LAYOUTS)
def test_jagged_rows_are_refused_where_there_are_no_tokens(changes: dict[str, Any]) -> None:
    shard = shard_of(**changes)
    with pytest.raises(InvalidArgumentError, match="part is 'answer'; expected one of row, prompt, response"):
        shard.jagged("sequences", "answer")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no tensor 'scores'; expected one of"):
        shard.jagged("scores")
    with pytest.raises(
        InvalidArgumentError, match=r"sample has shape .*, not one value per token; pass the name of a per-"
    ):
        shard.jagged("sample")


@pytest.mark.parametrize("changes", LAYOUTS[:2])
def test_what_stands_at_responses_alone_has_no_jagged_prompts(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"advantages is as wide as the responses.* part='response'"):
        shard_of(**changes).jagged("advantages", "prompt")


@pytest.mark.parametrize("changes", LAYOUTS)
def test_micro_batches_are_views_in_row_order(changes: dict[str, Any]) -> None:
    shard = shard_of(**changes)
    micros = list(shard.micro_batches())
    assert [len(micro) for micro in micros] == [4, 2]
    assert torch.cat([micro["row"] for micro in micros]).tolist() == shard["row"].tolist() == list(range(6))
    assert [uid for micro in micros for uid in micro.metadata["uids"]] == shard.metadata["uids"]
    tokens = [count for m in micros for count in m.metadata["loss_denominators"]["row_tokens"]]
    assert tokens == shard.metadata["loss_denominators"]["row_tokens"] == [1, 2, 3, 2, 3, 4]
    micros[1]["sample"][0] = 77
    assert shard["sample"][4] == 77


def test_tensors_of_micro_batches_are_not_the_shards() -> None:
    shard = shard_of(pad_width="micro_batch")
    assert shard.is_per_micro_batch
    with pytest.raises(KeyError, match="has a 'sequences' per micro-batch; read it from micro_batches"):
        shard["sequences"]
    with pytest.raises(KeyError, match="no tensor 'logits'; expected one of "):
        next(shard.micro_batches())["logits"]


def test_returns_of_scores_are_the_advantages() -> None:
    shard = shard_of()
    assert shard.returns is shard["advantages"]


@pytest.mark.parametrize("changes", LAYOUTS)
def test_returns_of_tokens_are_their_own_and_not_the_whitened_advantages(changes: dict[str, Any]) -> None:
    shard = shard_of(advantage_estimator="reinforce++", gamma=0.5, whiten="batch", **changes)
    for micro in shard.micro_batches():
        assert micro.returns is micro["returns"]
        assert not torch.equal(micro.returns, micro["advantages"])
        ends = [row[-1].item() for row in micro.unpad(micro.returns)]
        assert ends == [float(sample) for sample in micro["sample"].tolist()]


def test_returns_are_converted_with_the_other_floats() -> None:
    data = shard_bytes(ROWS, CONFIG | {"advantage_estimator": "reinforce++"})[0]
    assert as_shard(data, dtypes={"floats": torch.float64}).returns.dtype == torch.float64


def test_default_dtypes_are_those_of_the_file() -> None:
    dtypes = {name: str(tensor.dtype) for name, tensor in shard_of().tensors.items()}
    assert dtypes["sequences"] == "torch.int32"
    assert {dtypes[name] for name in ("attention_mask", "response_mask", "loss_mask")} == {"torch.uint8"}
    assert {dtypes[name] for name in ("rewards", "advantages", "rollout_logprobs")} == {"torch.float32"}


@pytest.mark.parametrize("changes", LAYOUTS)
def test_dtypes_are_converted_on_request(changes: dict[str, Any]) -> None:
    (data,) = shard_bytes(ROWS, CONFIG | changes)
    dtypes = {"tokens": torch.int64, "masks": torch.float32, "floats": torch.bfloat16}
    for micro in as_shard(data, device="cpu", dtypes=dtypes).micro_batches():
        assert micro["sequences"].dtype == torch.int64
        assert micro["loss_mask"].dtype == torch.float32
        assert micro["advantages"].dtype == torch.bfloat16
        assert micro["row"].dtype == torch.int32
        assert micro["sequences"] is micro["sequences"]


@pytest.mark.parametrize("changes", LAYOUTS)
def test_a_tensor_s_own_dtype_goes_before_that_of_its_kind(changes: dict[str, Any]) -> None:
    columns = [{"name": "verdict", "dtype": "int8", "scope": "row"}]
    (data,) = shard_bytes([row | {"verdict": 1} for row in ROWS], CONFIG | {"columns": columns} | changes)
    dtypes = {"masks": torch.int64, "loss_mask": torch.float32, "verdict": torch.float64, "is_padding": torch.bool}
    for micro in as_shard(data, dtypes=dtypes).micro_batches():
        assert micro["response_mask"].dtype == torch.int64
        assert micro["loss_mask"].dtype == torch.float32
        assert micro["verdict"].dtype == torch.float64
        assert micro["is_padding"].dtype == torch.bool
        assert micro["sequences"].dtype == torch.int32


def test_a_dtype_of_no_tensor_is_refused_naming_those_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(shard_bytes(ROWS, CONFIG)[0])
    with pytest.raises(
        InvalidArgumentError, match="dtypes contains 'mask'; expected one of the kinds tokens, masks, floats, "
    ):
        load_shard(path, dtypes={"mask": torch.int64})


def test_a_response_as_wide_as_the_sequence_gets_a_column_before_it() -> None:
    shard = shard_of(pad_to_multiple_of=8)
    width = shard["sequences"].shape[1]
    assert shard["response_mask"].shape[1] == width
    outputs = torch.arange(1.0, width + 1).repeat(6, 1)
    assert shard.at_responses(outputs)[0].tolist() == [0.0, *range(1, width)]


def test_further_dimensions_follow() -> None:
    shard = shard_of()
    rows, width = shard["sequences"].shape
    values = shard.at_responses(torch.zeros(rows, width, 3, 2))
    assert values.shape == (*shard["advantages"].shape, 3, 2)
    assert shard.unpad(values)[5].shape == (4, 3, 2)


@pytest.mark.parametrize("changes", LAYOUTS[1:])
def test_output_of_another_shape_is_refused_with_both(changes: dict[str, Any]) -> None:
    micro = next(shard_of(**changes).micro_batches())
    shape = tuple(micro["sequences"].shape)
    with pytest.raises(InvalidArgumentError, match=rf"output has shape .*expected \({shape[0]},"):
        micro.at_responses(torch.zeros(shape[0] + 1, *shape[1:]))
    with pytest.raises(InvalidArgumentError, match="output has shape"):
        micro.unpad(torch.zeros(shape[0] + 1, 9))
    if not micro.is_packed:
        with pytest.raises(InvalidArgumentError, match="the longest response has 3 tokens; pass the whole width"):
            micro.unpad(torch.zeros(4, 2))


# Files.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "rank-000.safetensors"
    written.write_bytes(shard_bytes(ROWS, CONFIG)[0])
    return written


def test_a_shard_file_is_opened_by_its_path(path: Path) -> None:
    shard = load_shard(path)
    assert shard.is_mapped
    assert shard["sequences"].equal(shard_of()["sequences"])
    assert shard.metadata == shard_of().metadata
    with pytest.raises(
        FailedPreconditionError, match="batch 0 epoch 0 mini-batch 0: this shard was not read in training order"
    ):
        shard.ack()


def test_writing_to_a_mapped_tensor_changes_no_file(path: Path) -> None:
    before = path.read_bytes()
    shard = load_shard(path)
    shard["sequences"].zero_()
    next(shard.micro_batches())["advantages"].fill_(3.0)
    assert shard["advantages"].sum() > 0
    assert path.read_bytes() == before
    assert load_shard(path)["sequences"].any()


def test_a_mapped_shard_outlives_its_file(path: Path) -> None:
    shard, expected = load_shard(path), shard_of()
    path.unlink()
    assert shard["sequences"].equal(expected["sequences"])


def anonymous_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def test_mapping_copies_nothing_and_takes_under_a_millisecond_at_any_size(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    tensors = {
        "row": torch.zeros(1 << 10, dtype=torch.int32),
        "sequences": torch.ones(1 << 10, 1 << 17, dtype=torch.int32),
    }
    save_file(tensors, path, metadata={"micro_batches": f"[{list(range(1 << 10))}]", "batch": "0", "mini_batch": "0"})
    del tensors
    before, times = anonymous_kib(), []
    for _ in range(20):
        start = time.thread_time()
        shard = load_shard(path)
        next(shard.micro_batches())
        times.append(time.thread_time() - start)
    assert int(shard["sequences"].sum()) == 1 << 27
    assert anonymous_kib() - before < 50_000
    assert sorted(times)[10] < 1e-3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: b"\xff" * 100,
        lambda data: b"PK\x03\x04" + data,
        lambda data: (2).to_bytes(8, "little") + b"{}",
    ],
    ids=["empty", "truncated header", "truncated", "noise", "zip", "foreign"],
)
def test_a_truncated_or_foreign_file_is_refused_by_name(path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(InvalidArgumentError, match=r"rank-000\.safetensors .*(is not a shard|is not a whole shard)"):
        load_shard(path)
    with pytest.raises(InvalidArgumentError, match="over the wire"):
        parse_shard(np.fromfile(path, np.uint8), "over the wire")


def test_only_the_file_that_was_told_of_is_mapped(path: Path, tmp_path: Path) -> None:
    size = path.stat().st_size
    assert is_mappable(str(path), size)
    assert not is_mappable(str(path), size + 1)
    assert not is_mappable(str(path) + "x", size)
    assert not is_mappable("nul\0", size)
    assert not is_mappable(str(tmp_path), os.stat(tmp_path).st_size)
    metadata = map_shard(str(path))[1]
    assert ShardAddress("run", "policy", 0, 0, 0).is_of(metadata)
    assert not ShardAddress("other", "policy", 0, 0, 0).is_of(metadata)


def test_streamed_bytes_and_a_mapped_file_say_the_same(path: Path) -> None:
    mapped, streamed = map_shard(str(path)), parse_shard(np.fromfile(path, np.uint8), "here")
    assert mapped[1] == streamed[1]
    assert mapped[0].keys() == streamed[0].keys()
    assert all(np.array_equal(mapped[0][name].numpy(), streamed[0][name].numpy()) for name in mapped[0])


# Messages.


@given(st.binary(max_size=300), st.booleans(), st.sampled_from([0, 1 << 7, 1 << 14, 1 << 20]))
def test_messages_made_by_hand_are_those_of_the_contract(data: bytes, is_zstd: bool, more: int) -> None:
    data += bytes(more)
    message = message_of(memoryview(data), is_zstd=is_zstd)
    parsed = trainer_pb2.ReadShardResponse.FromString(message)
    assert (parsed.data, parsed.is_zstd) == (data, is_zstd)
    for one in (message, parsed.SerializeToString()):
        piece, came_zstd = piece_of(one)
        assert (bytes(piece), came_zstd) == (data, is_zstd)


def test_a_message_of_a_newer_service_is_read() -> None:
    later = b"\xfa\x01\x03new"
    for message in (message_of(b"abc", is_zstd=True) + later, later + message_of(b"abc", is_zstd=True)):
        piece, is_zstd = piece_of(message)
        assert (bytes(piece), is_zstd) == (b"abc", True)


@pytest.mark.parametrize("spoil", [lambda message: message[:-1], lambda message: b"\x0a", lambda message: b"\x0a\xff"])
def test_bytes_that_are_no_message_are_refused(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is not a ReadShardResponse: .*; read the shard again"):
        piece_of(spoil(message_of(b"abc", is_zstd=False)))


def test_logprobs_are_those_of_each_response_token_as_the_token_before_it_predicts_it() -> None:
    micro = next(shard_of().micro_batches())
    tokens = micro["sequences"].long()
    logits = torch.randn(*tokens.shape, int(tokens.max()) + 1, dtype=torch.float64)
    logprobs, expected = micro.logprobs(logits), logits.log_softmax(-1)
    width, response = tokens.shape[1], micro["response_mask"].shape[1]
    for row, column in micro["response_mask"].nonzero().tolist():
        place = width - response + column
        assert logprobs[row, column].item() == pytest.approx(expected[row, place - 1, tokens[row, place]].item())
