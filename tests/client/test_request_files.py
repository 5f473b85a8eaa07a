"""Large requests of workers on the service's machine go by its memory, and by the wire wherever that does not work."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill import RolloutClient, RowOutcome, TrainerClient
from gristmill._client.connection.channels import Begun
from gristmill._client.rollout.request_files import RequestFiles, RequestInFile
from gristmill._wire.codecs.submit_codec import LARGE_BYTES
from gristmill._wire.shared_files import SHARED
from gristmill.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from gristmill.v1 import rollout_pb2
from gristmill_service.service import Service
from gristmill_service.settings import Settings
from gristmill_service.storage.request_files import RequestFiles as ServiceFiles
from tests.client.faces import Connect
from tests.redis.proxy import Proxy
from tests.run.harness import wait_until
from tests.serving import FREE_PORTS

_ROWS, _TOKENS = 6, 250_000
_REQUEST = b"x" * 100_000
_SETTINGS: dict[str, Any] = {
    "train_batch_size": _ROWS,
    "n_samples_per_prompt": 1,
    "policy_mini_batch_size": _ROWS,
    "micro_batch": {"size": 1},
}

pytestmark = pytest.mark.usefixtures("patient")


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


def _files_of(service: Service) -> dict[str, Any]:
    files = service._context.request_files
    assert files is not None, "it has shared memory"
    return {**files._files}


@pytest.fixture
def start_reading(tmp_path: Path) -> Iterator[Callable[[str], ServiceFiles]]:
    """Starts what a service reads files of workers with."""
    with ExitStack() as started:

        def start(name: str) -> ServiceFiles:
            files = ServiceFiles(tmp_path / name, 64 << 20)
            started.callback(files.close)
            return files

        yield start


@pytest.fixture
def reading(start_reading: Callable[[str], ServiceFiles]) -> ServiceFiles:
    return start_reading("requests")


def test_large_rows_do_not_cross_the_wire_and_train_as_they_were(
    service: Service, proxy: Proxy, run_name: str, connect: Connect
) -> None:
    output = _output()
    with connect(f"127.0.0.1:{proxy.port}", run_name) as client:
        client.create_run(_SETTINGS)
        assert set(client.submit(output)) == {RowOutcome.ACCEPTED}
        assert set(client.submit(output)) <= {RowOutcome.DUPLICATE, RowOutcome.SEALED}

    assert proxy.carried["requests"] < LARGE_BYTES
    assert len(_files_of(service)) == 1, "a process keeps one, for its next client"
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
    service: Service, proxy: Proxy, run_name: str, reading: ServiceFiles
) -> None:
    with RolloutClient(f"127.0.0.1:{proxy.port}", run_name) as client:
        client.create_run(_SETTINGS)
        client._core.sender.files.told(reading.offered())
        assert set(client.submit(_output())) == {RowOutcome.ACCEPTED}

    # The first message is sent; its answer tells the socket again.
    assert proxy.carried["requests"] > _ROWS * _TOKENS * 2
    wait_until(lambda: not reading._files)


def test_where_the_worker_cannot_connect_the_rows_are_sent(service: Service, proxy: Proxy, run_name: str) -> None:
    with RolloutClient(f"127.0.0.1:{proxy.port}", run_name) as client:
        client.create_run(_SETTINGS)
        client._core.sender.files.told("/nowhere/socket")
        assert set(client.submit(_output())) == {RowOutcome.ACCEPTED}

    assert proxy.carried["requests"] > _ROWS * _TOKENS * 4


def test_a_service_without_shared_memory_takes_rows_by_the_wire_alone(run_name: str) -> None:
    without = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5))
    without.start()
    try:
        with RolloutClient(without.grpc_address, run_name) as client:
            client.create_run(_SETTINGS)
            assert set(client.submit(_output())) == {RowOutcome.ACCEPTED}
            request = rollout_pb2.SubmitRowsRequest(run=run_name, file=rollout_pb2.RequestFile(name="one"))
            transport = client._transport
            with pytest.raises(InvalidArgumentError, match="reads no requests from files"):
                transport.call(transport.submit_rows, request.SerializeToString())
    finally:
        without.stop()


def test_the_file_of_a_worker_that_is_killed_goes_with_it(service: Service, run_name: str) -> None:
    before = _files_of(service)
    context = multiprocessing.get_context("spawn")
    worker = context.Process(target=_submit_and_die, args=(service.grpc_address, run_name))
    worker.start()
    wait_until(lambda: len(_files_of(service).keys() - before.keys()) == 1)
    worker.join()

    wait_until(lambda: _files_of(service).keys() <= before.keys())


def _submit_and_die(address: str, run: str) -> None:
    client = RolloutClient(address, run)
    client.create_run(_SETTINGS)
    client.submit(_output())
    os._exit(1)


def test_what_the_service_may_still_read_is_not_written_over(reading: ServiceFiles) -> None:
    files = RequestFiles()
    files.told(reading.offered())
    first = _written(files)
    files.failed(first, ResourceExhaustedError("there is no room", 1.0))
    again = _written(files)
    assert again.file is first.file

    files.failed(again, DeadlineExceededError("it may be read still"))

    other = _written(files)
    assert other.file is not first.file
    assert (again.blocks[0] == ord("x")).all()
    SHARED.retire(other.file)


def test_a_client_whose_requests_cannot_be_read_sends_them(reading: ServiceFiles) -> None:
    files = RequestFiles()
    for _ in range(2):
        files.told(reading.offered())
        files.failed(_written(files), UnavailableError("it cannot be read"))
        assert files.write([_REQUEST]) is None, "the next is sent"

    files.told(reading.offered())

    assert files.write([_REQUEST]) is None
    wait_until(lambda: not reading._files)


def test_requests_that_fail_together_are_one_failure(reading: ServiceFiles) -> None:
    files = RequestFiles()
    files.told(reading.offered())
    for request in [_written(files) for _ in range(3)]:
        files.failed(request, UnavailableError("it restarts"))

    files.told(reading.offered())

    SHARED.retire(_written(files).file)


def test_a_late_failure_at_a_service_of_before_leaves_the_next_one_in_use(
    start_reading: Callable[[str], ServiceFiles],
) -> None:
    files, before, now = RequestFiles(), start_reading("before"), start_reading("now")
    files.told(before.offered())
    late = _written(files)
    files.told(now.offered())

    files.failed(late, UnavailableError("it is gone"))

    wait_until(lambda: not before._files)
    SHARED.retire(_written(files).file)


def test_a_request_of_more_parts_than_a_service_reads_is_sent(reading: ServiceFiles) -> None:
    files = RequestFiles()
    files.told(reading.offered())
    file = SHARED.of(reading.offered())
    assert file is not None
    block = file.take(70_000)
    assert block is not None

    assert len(rollout_pb2.SubmitRowsRequest.FromString(_written(files, [block.data] * 256).message).file.parts) == 256
    assert files.write([block.data] * 257) is None
    SHARED.retire(file)


def test_a_service_that_was_away_for_a_moment_reads_files_again(reading: ServiceFiles) -> None:
    files = RequestFiles()
    for _ in range(5):
        files.told(reading.offered())
        request = _written(files)
        files.answered()
        files.failed(request, UnavailableError("it restarts"))

    files.told(reading.offered())

    SHARED.retire(_written(files).file)


@given(st.lists(st.integers(0, 200_000), max_size=12), st.randoms())
def test_a_request_in_a_file_is_the_request(sizes: list[int], rng: random.Random) -> None:
    with TemporaryDirectory() as directory, closing(ServiceFiles(Path(directory) / "requests", 64 << 20)) as requests:
        files = RequestFiles()
        files.told(requests.offered())
        file = SHARED.of(requests.offered())
        assert file is not None
        pieces: list[bytes | memoryview] = [b"head"]
        for size in sizes:
            block = file.take(size) if size and rng.random() < 0.5 else None
            memory = np.empty(size, np.uint8) if block is None else block
            memory[:] = rng.randrange(256)
            pieces.append(memory.data)

        message = rollout_pb2.SubmitRowsRequest.FromString(_written(files, pieces).message)

        found = requests.read(message.file.name, [part.data or (part.offset, part.size) for part in message.file.parts])
        assert bytes(found) == b"".join(pieces)
        SHARED.retire(file)


def _written(files: RequestFiles, pieces: Sequence[bytes | memoryview] = (_REQUEST,)) -> RequestInFile:
    request = files.write(pieces)
    assert request is not None
    return request


def test_each_table_is_sent_when_it_is_made_while_earlier_ones_are_answered(
    service: Service, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = list[str]()
    with RolloutClient(service.grpc_address, run_name, max_batch_bytes=1 << 20) as client:
        client.create_run(_SETTINGS)
        sender, begin = client._core.sender, client._transport.begin_submit_rows
        add = sender._add

        def answered(request: bytes, timeout: float) -> Begun:
            happened.append("sent")
            begun = begin(request, timeout=timeout)
            while not begun.is_done():
                time.sleep(0.001)
            return begun

        async def added(*arguments: Any) -> bool:
            happened.append("made")
            return await add(*arguments)

        monkeypatch.setattr(client._transport, "begin_submit_rows", answered)
        monkeypatch.setattr(sender, "_add", added)
        output = _output()
        client.submit(output | {"prompt_token_ids": [np.tile(row, 2) for row in output["prompt_token_ids"]]})

    assert happened == ["made", "sent"] * _ROWS
