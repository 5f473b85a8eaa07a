"""Columns that trainers write back, through either API; each test is put to both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from gristmill._wire.columns import Array
from tests.api.apis import CONFIG, Api, HttpApi, Json, Refused, group

WAIT_S = 60.0
COLUMNS = [{"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"}]
PLACES = [(0, mini_batch, rank) for mini_batch in range(2) for rank in range(2)]


@pytest.fixture
def run(api: Api, run_name: str) -> str:
    """A run whose first batch waits for the critic's values."""
    api.create(run_name, {**CONFIG, "advantage_estimator": "gae", "columns": COLUMNS})
    for uid in "ab":
        api.submit(run_name, group(uid))
    assert api.batch(run_name, 0, wait_s=WAIT_S)["state"] == "forward"
    return run_name


def values_for(api: Api, run: str, place: tuple[int, int, int]) -> dict[str, Array]:
    mask = load(api.read(run, *place))["response_mask"]
    return {"values": np.where(mask == 1, np.float32(0.25), np.float32(99)).astype(np.float32)}


def test_a_batch_is_forward_until_its_columns_are_written_and_published_then(api: Api, run: str) -> None:
    batch = api.batch(run, 0)
    assert batch["plan"]["rows"] == 4
    assert batch["awaits"] == [
        {"mini_batch": mini_batch, "rank": rank, "column": "values"} for _, mini_batch, rank in PLACES
    ]
    assert api.batch(run, 0, ranks=[1])["awaits"] == [one for one in batch["awaits"] if one["rank"] == 1]
    assert api.shard(run, 0)["state"] == "pending"
    forward = api.shard(run, 0, forward=True)
    assert (forward["state"], forward["incarnation"]) == ("forward", 1)
    assert forward["size_bytes"] == len(api.read(run, 0, 0, 0))
    for number, place in enumerate(PLACES):
        assert api.write(run, place, 1, save(values_for(api, run, place))) == 3 - number
    forward = api.shard(run, 0, wait_s=WAIT_S)
    assert forward["state"] == "published"
    shard = load(api.read(run, 0, 0, 0))
    np.testing.assert_array_equal(shard["values"], 0.25 * shard["response_mask"])
    assert {"advantages", "returns"} <= shard.keys()
    assert "awaits" not in api.batch(run, 0)
    assert api.get(run)["batches_published"] == 1


def test_the_same_bytes_again_are_no_error_and_others_are_one(api: Api, run: str) -> None:
    tensors = values_for(api, run, PLACES[0])
    assert api.write(run, PLACES[0], 1, save(tensors)) == 3
    assert api.write(run, PLACES[0], 1, save(tensors)) == 3
    with pytest.raises(Refused) as refused:
        api.write(run, PLACES[0], 1, save({"values": tensors["values"] + 1}))
    assert (refused.value.code, refused.value.kind) == ("ALREADY_EXISTS", "AlreadyExistsError")
    second = api.resume(run, "second")["incarnation"]
    with pytest.raises(Refused) as refused:
        api.write(run, PLACES[0], 1, save(tensors))
    assert refused.value.kind == "StaleIncarnationError"
    assert api.write(run, PLACES[0], second, save({"values": tensors["values"] + 1})) == 3


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (b"", "0 bytes are not a safetensors file of columns"),
        (b"\xff" * 20, "20 bytes are not a safetensors file"),
        (save({"values": np.zeros(3, np.float32)})[:-1], "not a safetensors file of columns"),
        (save({"values": np.zeros((1, 1), np.float32)}), "values is F32"),
        (save({"rewards": np.zeros((1, 1), np.float32)}), "'rewards' is not in a column that trainers"),
        (save({"values": np.zeros((1, 1), np.uint32)}), "dtype 'U32', which columns do not support"),
    ],
)
def test_what_is_no_file_of_columns_is_refused_with_the_reason(
    api: Api, run: str, tensors: bytes, message: str
) -> None:
    before: Json = api.batch(run, 0)
    with pytest.raises(Refused) as refused:
        api.write(run, PLACES[0], 1, tensors)
    assert refused.value.code == "INVALID_ARGUMENT"
    assert message in refused.value.message
    assert api.batch(run, 0) == before


@pytest.mark.parametrize(
    ("place", "incarnation", "code"),
    [
        ((7, 0, 0), 1, "UNAVAILABLE"),
        ((-1, 0, 0), 1, "INVALID_ARGUMENT"),
        ((0, 2, 0), 1, "INVALID_ARGUMENT"),
        ((0, 0, 2), 1, "INVALID_ARGUMENT"),
        ((0, -1, 0), 1, "INVALID_ARGUMENT"),
        ((0, 0, 0), 0, "INVALID_ARGUMENT"),
        ((0, 0, 0), 9, "FAILED_PRECONDITION"),
    ],
)
def test_a_shard_that_there_is_not_is_refused(api: Api, run: str, place: Any, incarnation: int, code: str) -> None:
    tensors = save(values_for(api, run, PLACES[0]))
    with pytest.raises(Refused) as refused:
        api.write(run, place, incarnation, tensors)
    assert refused.value.code == code


def test_rows_that_bring_such_a_column_are_refused(http_api: HttpApi, run_name: str) -> None:
    http_api.create(run_name, {**CONFIG, "advantage_estimator": "gae", "columns": COLUMNS})
    with pytest.raises(Refused, match="values was sent, but the trainer writes it") as refused:
        http_api.submit(run_name, [{**one, "values": [0.5, 0.5]} for one in group("c")])
    assert refused.value.code == "INVALID_ARGUMENT"
