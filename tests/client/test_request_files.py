"""Large requests of workers on the service's machine go by its memory, and by the wire wherever that does not work."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill import RolloutClient, RowOutcome, TrainerClient
from gristmill._client.rollout.request_files import RequestFiles
from gristmill._wire.codecs.submit_codec import LARGE_BYTES
from gristmill.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from gristmill.v1 import rollout_pb2
from gristmill_service.service import Service
from gristmill_service.settings import Settings
from tests.client.faces import Connect
from tests.redis.proxy import Proxy
from tests.serving import FREE_PORTS

_ROWS, _TOKENS = 6, 250_000
_SETTINGS: dict[str, Any] = {
    "train_batch_size": _ROWS,
    "n_samples_per_prompt": 1,
    "policy_mini_batch_size": _ROWS,
    "micro_batch": {"size": 1},
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """With shared memory, which is what gives it files for requests."""
    running = Service(Settings(**FREE_PORTS, store="shared_memory", shutdown_grace_s=5))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def proxy(service: Service) -> Iterator[Proxy]:
    with Proxy(int(service.grpc_address.rpartition(":")[2])) as proxy:
        yield proxy


def _output(first: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(first)
    return {
        "uids": [f"prompt-{first + row}" for row in range(_ROWS)],
        "prompt_token_ids": [rng.integers(0, 150_000, _TOKENS, dtype=np.int32) for _ in range(_ROWS)],
        "response_ids": [rng.integers(0, 150_000, 5, dtype=np.int32) for _ in range(_ROWS)],
        "rewards": [1.0] * _ROWS,
    }


def _files_of(service: Service) -> list[Path]:
    files = service._context.request_files
    assert files is not None, "it has shared memory"
    return [*Path(files.offered()).iterdir()]


def test_large_rows_do_not_cross_the_wire_and_train_as_they_were(
    service: Service, proxy: Proxy, run_name: str, connect: Connect
) -> None:
    output = _output()
    with connect(f"127.0.0.1:{proxy.port}", run_name) as client:
        client.create_run(_SETTINGS)
        assert set(client.submit(output)) == {RowOutcome.ACCEPTED}
        assert set(client.submit(output)) <= {RowOutcome.DUPLICATE, RowOutcome.SEALED}
        assert _files_of(service)

    assert proxy.carried["requests"] < LARGE_BYTES
    assert not _files_of(service), "a client that is closed leaves none"
    with TrainerClient(service.grpc_address, run_name, 0) as trainer:
        [shard] = next(iter(trainer)).mini_batches()
        found = {
            uid: row[row != 0].tolist()
            for uid, row in zip(shard.metadata["uids"], shard.tensors["sequences"].numpy(), strict=True)
        }
        for uid, *parts in zip(output["uids"], output["prompt_token_ids"], output["response_ids"], strict=True):
            whole = np.concatenate(parts)
            assert found[uid] == whole[whole != 0].tolist()


def test_who_did_not_create_the_run_is_told_with_its_first_large_answer(
    service: Service, proxy: Proxy, run_name: str
) -> None:
    with RolloutClient(service.grpc_address, run_name) as creator:
        creator.create_run(_SETTINGS | {"train_batch_size": 2 * _ROWS})
    with RolloutClient(f"127.0.0.1:{proxy.port}", run_name) as client:
        client.submit(_output())
        whole = proxy.carried["requests"]
        client.submit(_output(100))

    assert whole > _ROWS * _TOKENS * 4
    assert proxy.carried["requests"] - whole < LARGE_BYTES


def test_where_the_service_cannot_read_the_file_the_rows_are_sent(
    service: Service, proxy: Proxy, run_name: str, tmp_path: Path
) -> None:
    with RolloutClient(f"127.0.0.1:{proxy.port}", run_name) as client:
        client.create_run(_SETTINGS)
        client._core.sender.files.told(str(tmp_path))
        assert set(client.submit(_output())) == {RowOutcome.ACCEPTED}

    # The first message is sent; its answer tells the directory again.
    assert proxy.carried["requests"] > _ROWS * _TOKENS * 2
    assert not [*tmp_path.iterdir()]


def test_where_the_worker_cannot_write_the_rows_are_sent(service: Service, proxy: Proxy, run_name: str) -> None:
    with RolloutClient(f"127.0.0.1:{proxy.port}", run_name) as client:
        client.create_run(_SETTINGS)
        client._core.sender.files.told("/nowhere/requests")
        assert set(client.submit(_output())) == {RowOutcome.ACCEPTED}

    assert proxy.carried["requests"] > _ROWS * _TOKENS * 4


def test_a_service_without_shared_memory_takes_rows_by_the_wire_alone(run_name: str) -> None:
    without = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5))
    without.start()
    try:
        with RolloutClient(without.grpc_address, run_name) as client:
            client.create_run(_SETTINGS)
            assert set(client.submit(_output())) == {RowOutcome.ACCEPTED}
            request = rollout_pb2.SubmitRowsRequest(run=run_name, file=rollout_pb2.RequestFile(name="one", size=1))
            transport = client._transport
            with pytest.raises(InvalidArgumentError, match="reads no requests from files"):
                transport.call(transport.submit_rows, request.SerializeToString())
    finally:
        without.stop()


def test_a_worker_that_is_killed_leaves_a_file_that_the_next_one_finds_gone(service: Service, run_name: str) -> None:
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=_submit_and_die, args=(service.grpc_address, run_name))
    worker.start()
    worker.join()
    files = service._context.request_files
    assert files is not None, "it has shared memory"
    assert [*files._directory.iterdir()], "it died with a file of its own"

    files._sweep_after = 0.0
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(_SETTINGS)

    assert not [*files._directory.iterdir()]


def _submit_and_die(address: str, run: str) -> None:
    client = RolloutClient(address, run)
    client.create_run(_SETTINGS)
    client.submit(_output())
    os._exit(1)


def test_a_file_is_written_again_after_its_answer_and_never_after_a_failure(tmp_path: Path) -> None:
    files = RequestFiles()
    files.told(str(tmp_path))
    first = files.write([b"first"])
    assert first is not None
    files.answered(first)
    again = files.write([b"again"])
    assert again is first

    files.failed(again, DeadlineExceededError("it may be read still"))
    other = files.write([b"other"])

    assert other is not None
    assert other is not first
    files.failed(other, UnavailableError("it cannot be read"))
    files.told(str(tmp_path))
    assert files.write([b"never"]) is None
    assert not [*tmp_path.iterdir()]
