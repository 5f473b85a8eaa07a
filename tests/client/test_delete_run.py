"""A run deleted by a worker's client."""

from __future__ import annotations

import pytest

from gristmill import NotFoundError
from tests.client.faces import FACES, connecting
from tests.on_loop import Service

CONFIG = {"train_batch_size": 1, "n_samples_per_prompt": 2, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
WITH_COLUMN = {**CONFIG, "columns": [{"name": "teacher", "dtype": "float32", "scope": "response"}]}
ROW = {"uid": "a", "sample": 0, "prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "reward": 1.0}


@pytest.mark.parametrize("face", FACES)
def test_a_run_is_deleted_with_all_it_holds_and_once_more_changes_nothing(
    service: Service, run_name: str, face: str
) -> None:
    with connecting(face) as connect, connect(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        client.submit([ROW])
        assert client.delete_run() is True
        assert run_name not in service.runs.names()
        assert client.delete_run() is False


@pytest.mark.parametrize("face", FACES)
def test_rows_that_were_not_sent_go_with_it_and_the_client_closes_in_peace(
    service: Service, run_name: str, face: str
) -> None:
    with connecting(face) as connect, connect(service.grpc_address, run_name, timeout_s=20) as client:
        client.create_run(CONFIG)
        client.trajectory("a", 0).step([1], [2], reward=1.0, is_last_step=True)
        client.delete_run()
        with pytest.raises(NotFoundError):
            client.status()


@pytest.mark.parametrize("face", FACES)
def test_the_next_run_of_the_name_declares_its_own_columns(service: Service, run_name: str, face: str) -> None:
    with connecting(face) as connect, connect(service.grpc_address, run_name) as client:
        client.create_run(WITH_COLUMN)
        client.submit([ROW | {"teacher": [0.5]}])
        client.delete_run()
        client.create_run(CONFIG)
        client.submit([ROW])
        assert client.status().rows_accepted == 1
