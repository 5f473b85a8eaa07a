"""The reference batches: whole pipeline against tensors that SkyRL computed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from gristmill._wire.rows import from_rows
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import parse_config
from gristmill_service.pipeline import BuiltBatch, build_batch
from tests import naive

REFERENCE = Path(__file__).parents[1] / "reference" / "batch_cases.jsonl.gz"
CASES = [json.loads(line) for line in gzip.decompress(REFERENCE.read_bytes()).splitlines()]
REFUSED = [case for case in CASES if "refused" in case["expected"]]
BUILT = [case for case in CASES if "refused" not in case["expected"]]


def names(cases: list[dict[str, Any]]) -> list[str]:
    return [case["name"] for case in cases]


def built_case(case: dict[str, Any]) -> BuiltBatch:
    config = parse_config(case["config"])
    return build_batch(from_rows(case["rows"], step_wise=config.step_wise), config, run="reference", batch=0)


@pytest.mark.parametrize("case", BUILT, ids=names(BUILT))
def test_rows_after_merging_are_those_of_the_reference(case: dict[str, Any]) -> None:
    batch, expected = built_case(case), case["expected"]["rows_after_merge"]
    assert batch.plan.rows == len(expected)
    seen = {}
    for shard in batch.shards:
        if shard.address.model != "policy":
            continue
        tensors = load(naive.shard_bytes(shard))
        _, metadata = naive.read_shard(shard)
        uids, stop_reasons = metadata["uids"], metadata["stop_reasons"]
        for i, row in enumerate(tensors["row"].tolist()):
            if row >= 0:
                seen[row] = {
                    "uid": uids[i],
                    "sample": int(tensors["sample"][i]),
                    "is_last_step": bool(tensors["is_last_step"][i]),
                    "stop_reason": stop_reasons[i],
                    "tokens": tensors["sequences"][i][tensors["attention_mask"][i] == 1].tolist(),
                }
    for index, row in enumerate(expected):
        assert seen[index] == {
            **{name: row[name] for name in ("uid", "sample", "is_last_step", "stop_reason")},
            "tokens": row["prompt_token_ids"] + row["response_ids"],
        }


def tensors_of(case: dict[str, Any]) -> dict[str, Any]:
    """The reference's tensors. It masks the last turn alone of a trajectory that ended overlong, and the specification
    all of them (DAPO), which then do not count as loss tokens."""
    tensors = {name: np.array(one["data"]).reshape(one["shape"]) for name, one in case["expected"]["tensors"].items()}
    reasons = case["config"].get("overlong_filter", [])
    if not reasons:
        return tensors
    assert case["config"]["loss_reduction"] == "token_mean"
    before = tensors["loss_mask"].sum()
    ends = {(row["uid"], row["sample"]): row["stop_reason"] for row in case["rows"] if row.get("is_last_step", True)}
    for index, row in enumerate(case["expected"]["rows_after_merge"]):
        if ends[row["uid"], row["sample"]] in reasons:
            tensors["loss_mask"][index] = 0
    tensors["advantages"] = tensors["advantages"] * before / tensors["loss_mask"].sum()
    return tensors


@pytest.mark.parametrize("case", BUILT, ids=names(BUILT))
def test_tensors_are_those_of_the_reference(case: dict[str, Any]) -> None:
    batch, expected = built_case(case), tensors_of(case)
    compared = 0
    for shard in batch.shards:
        tensors = load(naive.shard_bytes(shard))
        rows = tensors["row"]
        for name, reference in expected.items():
            if name == "advantages" and shard.address.model == "critic":
                continue
            np.testing.assert_allclose(
                tensors[name][rows >= 0], reference[rows[rows >= 0]], rtol=1e-4, atol=1e-7, err_msg=name
            )
            compared += 1
    assert compared >= len(expected)


@pytest.mark.parametrize("case", BUILT, ids=names(BUILT))
def test_boundaries_and_ranks_are_those_of_the_reference(case: dict[str, Any]) -> None:
    plan, expected = built_case(case).plan, case["expected"]
    for model in ("policy", "critic"):
        parts = [part for part in plan.mini_batches if part.model == model]
        bounds = [[part.start, part.end] for part in parts]
        assert bounds == (expected[f"{model}_boundaries"] or [])
    policy = [part for part in plan.mini_batches if part.model == "policy"]
    assert [[rank.rows for rank in part.ranks] for part in policy] == expected["policy_ranks"]


@pytest.mark.parametrize("case", REFUSED, ids=names(REFUSED))
def test_what_the_reference_refuses_is_refused_with_the_trajectory(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"uid '.*' sample \d"):
        built_case(case)
