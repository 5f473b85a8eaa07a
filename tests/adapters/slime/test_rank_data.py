"""A batch's shards become slime's train data, value for value what its own RolloutManager makes of the samples."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from gristmill._torch.conversion import Conversion
from gristmill._torch.shard_files import parse_shard
from gristmill._wire.addresses import Position
from gristmill._wire.rows import from_rows
from gristmill.adapters.slime import Gristmill, run_settings
from gristmill.adapters.slime._rank_data import ADVANTAGES, RETURNS, rank_data
from gristmill.converters import from_slime
from gristmill.torch import Shard
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import join
from tests.adapters.slime.golden import GOLDEN, plain
from tests.adapters.slime.samples import DataSource, arguments, generate
from tests.client.converters.stand_ins import Sample, Status
from tests.strategies import Row

OPTIONS = Gristmill("here", "run")


def rollout(args: Any) -> list[Row]:
    """The rows of slime's first rollout."""
    return from_slime(generate(args, 0, DataSource(args)))


def mini_batches(rows: list[Row], settings: dict[str, Any]) -> list[list[Shard]]:
    """By mini-batch and rank."""
    config = parse_config(settings)
    batch = build_batch(from_rows(rows, columns=config.columns), config, run="run", batch=0)
    parts: list[list[Shard]] = []
    for laid_out in batch.shards:
        tensors, metadata = parse_shard(np.frombuffer(bytearray(join(laid_out.iovec())), np.uint8), "here")
        if metadata["rank"] == 0:
            parts.append([])
        parts[-1].append(Shard(tensors, metadata, Conversion(), Position(0, 0, len(parts) - 1), is_mapped=False))
    return parts


def train_data(changes: dict[str, Any] | None = None, **settings: Any) -> list[dict[str, Any]]:
    """changes: of slime's arguments. settings: of the run."""
    args = arguments(sample_type=Sample, **(changes or {}))
    made = run_settings(args, Gristmill("here", "run", settings=settings), dp_size=2)
    return rank_data(mini_batches(rollout(args), made), per_token=True)


def test_a_rank_s_data_are_slime_s_own() -> None:
    args = arguments(sample_type=Sample)
    ours = rank_data(mini_batches(rollout(args), run_settings(args, OPTIONS, dp_size=2)))
    assert [plain(rank) for rank in ours] == json.loads(GOLDEN.read_text())


def padded() -> list[dict[str, Any]]:
    """A batch of one row a training step, of which the second rank has none."""
    changes = {"rollout_batch_size": 2, "n_samples_per_prompt": 1, "global_batch_size": 1}
    return train_data(changes)


def test_rows_stand_in_the_whole_batch_s_order_and_padding_rows_behind_them() -> None:
    first, second = padded()
    assert (first["partition"], second["partition"]) == ([0, 1], [2, 3])
    assert second["sample_indices"] == [-1, -1]
    assert second["rollout_ids"] == [2, 3]
    assert second["total_lengths"] == [*map(len, first["tokens"]), 2, 2] == first["total_lengths"]
    assert second["raw_reward"] == first["raw_reward"]
    assert second["raw_reward"][2:] == [0.0, 0.0]


def test_padding_rows_have_one_token_of_response_which_is_not_trained() -> None:
    _, second = padded()
    assert second["response_lengths"] == [1, 1]
    assert [mask.tolist() for mask in second["loss_masks"]] == [[0], [0]]
    assert [row.tolist() for row in second["rollout_log_probs"]] == [[0.0], [0.0]]
    assert second["rewards"] == [0.0, 0.0]
    assert second["rollout_mask_sums"].tolist() == [1.0, 1.0]
    assert second["micro_batch_indices"] == [[0], [1]]


def test_merged_rows_share_their_rollout_s_denominator() -> None:
    args = arguments(sample_type=Sample, rollout_batch_size=1, global_batch_size=2)
    turns = [
        Sample(0, 0, rollout_id=0, tokens=[1, 2, 3], response_length=1, reward=1.0, status=Status.COMPLETED),
        Sample(0, 1, rollout_id=0, tokens=[9, 2, 3, 4], response_length=2, reward=1.0, status=Status.COMPLETED),
        Sample(0, 2, rollout_id=2, tokens=[1, 2, 5], response_length=1, reward=0.0, status=Status.COMPLETED),
    ]
    shards = mini_batches(from_slime(turns), run_settings(args, OPTIONS, dp_size=2))
    rows: dict[int, tuple[int, float]] = {}
    for rank in rank_data(shards):
        sums = rank["rollout_mask_sums"].tolist()
        rows |= dict(zip(rank["partition"], zip(rank["rollout_ids"], sums, strict=True), strict=True))
        assert rank["global_batch_sizes"] == [2]
    assert [rows[place] for place in range(3)] == [(0, 3.0), (0, 3.0), (1, 1.0)]


def test_credit_of_tokens_goes_with_the_data_where_it_is_asked_for() -> None:
    changes = {"custom_advantage_function_path": "gristmill.adapters.slime.advantages"}
    ranks = train_data(changes, advantage_estimator="reinforce++", gamma=0.5, whiten="batch")
    for rank in ranks:
        assert [len(row) for row in rank[ADVANTAGES]] == [len(row) for row in rank[RETURNS]] == rank["response_lengths"]
        assert any(len(row.unique()) > 1 for row in rank[ADVANTAGES])


def test_every_row_has_memory_of_its_own() -> None:
    ((first, *_),) = [rank["tokens"] for rank in train_data()[:1]]
    assert first.untyped_storage().nbytes() == 8 * len(first)


def test_routed_experts_lack_the_last_token_s_and_are_distinct_in_padding_rows() -> None:
    args = arguments(sample_type=Sample, rollout_batch_size=1, n_samples_per_prompt=1, global_batch_size=1)
    args.use_rollout_routing_replay, args.num_layers, args.num_experts, args.moe_router_topk = True, 2, 24, 3
    experts = np.arange(24, dtype=np.int32).reshape(4, 2, 3)
    rows = [row | {"rollout_routed_experts": experts[: len(row["prompt_token_ids"]) + 1]} for row in rollout(args)[:1]]
    rows[0] |= {"prompt_token_ids": [1, 2, 3], "response_ids": [4], "loss_mask": [1], "rollout_logprobs": [-1.0]}
    rows[0]["rollout_routed_experts"] = experts
    first, second = rank_data(mini_batches(rows, run_settings(args, OPTIONS, dp_size=2)))
    assert torch.equal(first["rollout_routed_experts"][0], torch.from_numpy(experts[:-1]))
    assert second["rollout_routed_experts"][0].tolist() == [[[0, 1, 2], [0, 1, 2]]]


def test_the_tokens_that_top_p_kept_go_with_each_response_and_padding_rows_have_none() -> None:
    args = arguments(sample_type=Sample, rollout_batch_size=1, n_samples_per_prompt=1, global_batch_size=1)
    args.rollout_top_p = 0.9
    rows = rollout(args)[:1]
    rows[0] |= {"prompt_token_ids": [1, 2], "response_ids": [3, 4], "loss_mask": [1, 1], "rollout_logprobs": [-1.0] * 2}
    rows[0] |= {"rollout_top_p_token_ids": [3, 9, 4], "rollout_top_p_token_ids_offsets": [0, 2, 3]}
    first, second = rank_data(mini_batches(rows, run_settings(args, OPTIONS, dp_size=2)))
    names = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
    assert [first[name][0].tolist() for name in names] == [[3, 9, 4], [0, 2, 3]]
    assert [second[name][0].tolist() for name in names] == [[], [0, 0]]
    assert {rank[name][0].dtype for rank in (first, second) for name in names} == {torch.int32}


def test_images_are_a_mapping_a_row_and_none_where_there_are_none() -> None:
    columns = [
        {"name": "pixel_values", "dtype": "float32", "scope": "items", "shape": [2], "required": False},
        {"name": "image_grid_thw", "dtype": "int64", "scope": "items", "shape": [3], "required": False},
    ]
    args = arguments(sample_type=Sample, rollout_batch_size=1, global_batch_size=2)
    rows = rollout(args)
    rows[0] |= {"pixel_values": [[0.5, 1.0]] * 4, "image_grid_thw": [[1, 2, 2]]}
    settings = run_settings(args, Gristmill("here", "run", settings={"columns": columns}), dp_size=2)
    ranks = rank_data(mini_batches(rows, settings), images=["pixel_values", "image_grid_thw"])
    images, lacking = ranks[0]["multimodal_train_inputs"][0], ranks[1]["multimodal_train_inputs"][0]
    assert images["pixel_values"].tolist() == [[0.5, 1.0]] * 4
    assert images["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert lacking is None
