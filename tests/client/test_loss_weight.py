"""Weights of tokens from workers to ranks, by gRPC and HTTP; a rank reads them only if it wants them."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
import safetensors.torch
import torch

from gristmill import InvalidArgumentError, RolloutClient, TrainerClient
from tests.on_loop import Service
from tests.rows import make_config, make_row

COLUMN = {"name": "loss_weight", "dtype": "float32", "scope": "response"}
ROWS = [
    make_row(step=0, last=False, response=[7, 8], loss_weight=[0.5, -1.0]),
    make_row(step=1, prompt=[1, 2, 7, 8, 9], loss_weight=[2.0]),
]


def roll_out(service: Service, run_name: str, rows: list[dict[str, Any]], *, by_http: bool, **settings: Any) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(make_config(merge="prefix", **settings))
        if by_http:
            url, data = f"{service.http_url}/v1/runs/{run_name}/rows", json.dumps({"rows": rows}).encode()
            urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=20)
        else:
            client.submit(rows)
        client.finish()


def tensors(service: Service, run_name: str, **options: Any) -> dict[str, torch.Tensor]:
    with TrainerClient(service.grpc_address, run_name, 0, prefetch=0, **options) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        return shard.tensors


def over_http(service: Service, run_name: str, columns: str) -> set[str]:
    url = f"{service.http_url}/v1/runs/{run_name}/batches/0/policy/0/0?columns={columns}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return set(safetensors.torch.load(answer.read()))


@pytest.mark.parametrize("by_http", [False, True], ids=["gRPC", "HTTP"])
def test_weights_arrive_on_their_own_tokens(service: Service, run_name: str, by_http: bool) -> None:
    roll_out(service, run_name, ROWS, by_http=by_http, columns=[COLUMN], observation_weight=0.25)
    weights = tensors(service, run_name, dtypes={"floats": torch.float64})["loss_weight"]
    assert weights.dtype == torch.float64
    assert weights.tolist() == [[0.5, -1.0, 0.25, 2.0]]


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_rank_that_wants_no_weights_gets_none(service: Service, run_name: str, is_declared: bool) -> None:
    rows = ROWS if is_declared else [{k: v for k, v in row.items() if k != "loss_weight"} for row in ROWS]
    columns = [COLUMN] if is_declared else []
    roll_out(service, run_name, rows, by_http=False, columns=columns, observation_weight=0.25)
    assert "loss_weight" in tensors(service, run_name)
    assert "loss_weight" in tensors(service, run_name, columns=["loss_weight"])
    assert "loss_weight" not in tensors(service, run_name, columns=[])
    assert over_http(service, run_name, "loss_weight") - over_http(service, run_name, "") == {"loss_weight"}


def test_a_row_without_weights_is_refused_in_a_run_whose_rows_have_them(service: Service, run_name: str) -> None:
    rows = [ROWS[0], {name: value for name, value in ROWS[1].items() if name != "loss_weight"}]
    with pytest.raises(InvalidArgumentError, match=r"sample 0 step 1: .*loss_weight.* missing"):
        roll_out(service, run_name, rows, by_http=False, columns=[COLUMN])
