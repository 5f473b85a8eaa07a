"""What a worker's client knows of the columns that its run declares, and how it learns of others."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill import InvalidArgumentError, RolloutClient, RowOutcome
from tests.client.faces import Connect
from tests.on_loop import Service
from tests.rows import make_config

CONFIG: dict[str, Any] = make_config(merge="prefix")


def declaring(*columns: dict[str, Any]) -> dict[str, Any]:
    return CONFIG | {"columns": list(columns)}


def ids(dtype: str, **more: Any) -> dict[str, Any]:
    return {"name": "ids", "dtype": dtype, "scope": "response"} | more


@pytest.fixture
def client(service: Service, run_name: str, connect: Connect) -> Any:
    with connect(service.grpc_address, run_name) as made:
        yield made


def test_a_step_that_lacks_a_column_is_refused_at_the_call_and_may_be_given_again(client: Any) -> None:
    client.create_run(declaring(ids("int16"), ids("int16", name="more", required=False)))
    with client.trajectory("a", 0) as trajectory:
        for columns in (None, {}, {"more": [1]}):
            with pytest.raises(InvalidArgumentError, match="uid 'a' sample 0 step 0: column 'ids' is missing"):
                trajectory.step([1], [7], columns=columns)
        trajectory.step([1], [7], columns={"ids": [3]})
        with pytest.raises(InvalidArgumentError, match="uid 'a' sample 0 step 1: column 'ids' is missing"):
            trajectory.step([1, 7], [8], reward=1.0, is_last_step=True)
        trajectory.step([1, 7], [8], reward=1.0, is_last_step=True, columns={"ids": [4]})
    client.flush()
    assert client.status().rows_accepted == 2


def test_who_neither_created_the_run_nor_gives_columns_learns_from_the_first_refusal(
    service: Service, run_name: str, client: Any
) -> None:
    service.runs.create(run_name, declaring(ids("int16")))
    client.trajectory("a", 0).step([1], [7])
    with pytest.raises(InvalidArgumentError, match="column 'ids' is missing"):
        client.flush()
    with pytest.raises(InvalidArgumentError, match="column 'ids' is missing"):
        client.trajectory("b", 0).step([1], [7])


@pytest.mark.parametrize("columns", [[("ids", [1])], "ids", 3])
def test_columns_that_are_no_mapping_are_refused_by_what_they_are(client: Any, columns: Any) -> None:
    client.create_run(declaring(ids("int16")))
    kind = type(columns).__name__
    with pytest.raises(InvalidArgumentError, match=f"uid 'a' sample 0: columns is a {kind}; pass a mapping"):
        client.trajectory("a", 0).step([1], [7], columns=columns)


class TestARunThatIsMadeAnew:
    def test_a_value_that_its_column_holds_now_is_taken_at_once(
        self, service: Service, run_name: str, client: Any
    ) -> None:
        client.create_run(declaring(ids("int8")))
        with pytest.raises(InvalidArgumentError, match="ids"):
            client.trajectory("a", 0).step([1], [7], columns={"ids": [1000]})
        service.runs.delete(run_name)
        service.runs.create(run_name, declaring(ids("int16")))
        with client.trajectory("a", 0) as trajectory:
            trajectory.step([1], [7], reward=1.0, is_last_step=True, columns={"ids": [1000]})
        row = {"uid": "b", "sample": 0, "prompt_token_ids": [1], "response_ids": [7], "loss_mask": [1], "reward": 0.0}
        assert client.submit([{**row, "ids": [2000]}]) == [RowOutcome.ACCEPTED]

    def test_a_type_that_the_service_refuses_is_the_new_one_from_then_on(
        self, service: Service, run_name: str, client: Any
    ) -> None:
        client.create_run(declaring(ids("int8")))
        service.runs.delete(run_name)
        service.runs.create(run_name, declaring(ids("float32")))
        client.trajectory("a", 0).step([1], [7], columns={"ids": [1]})
        with pytest.raises(InvalidArgumentError, match="ids has int8 values"):
            client.flush()
        with client.trajectory("a", 0, attempt=1) as trajectory:
            trajectory.step([1], [7], reward=1.0, is_last_step=True, columns={"ids": [1.5]})
        client.flush()
        assert client.status().groups_complete + client.status().batches_sealed == 1

    def test_columns_that_it_needs_no_more_may_be_left_out(self, service: Service, run_name: str, client: Any) -> None:
        client.create_run(declaring(ids("int8")))
        service.runs.delete(run_name)
        service.runs.create(run_name, CONFIG)
        with client.trajectory("a", 0) as trajectory:
            trajectory.step([1], [7], reward=1.0, is_last_step=True)
        client.flush()
        assert client.status().rows_accepted == 1


def test_one_client_that_creates_a_run_twice_keeps_what_it_knows(client: RolloutClient) -> None:
    client.create_run(declaring(ids("int16")))
    client.create_run(declaring(ids("int16")))
    with pytest.raises(InvalidArgumentError, match="column 'ids' is missing"):
        client.trajectory("a", 0).step([1], [7])
