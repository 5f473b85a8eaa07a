"""Shards opened ahead: sooner there, and otherwise as if each were opened when it is asked for."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gristmill import (
    FailedPreconditionError,
    InvalidArgumentError,
    RolloutClient,
    StaleIncarnationError,
    TrainerClient,
    UnavailableError,
)
from gristmill._client.connection.transport import Transport
from gristmill._client.trainer.shards import shard_reader
from gristmill._client.trainer.shards.prefetch import Prefetch
from gristmill._client.trainer.shards.pull import stream
from gristmill._wire.addresses import Position, ShardAddress
from gristmill_service.pipeline.scheduling.plan import ShardAddress as Address
from gristmill_service.run.run import Run
from tests.client.test_comebacks import CONFIG, uids_of
from tests.on_loop import Service
from tests.serving import ServiceProcess

THREAD = "gristmill-prefetch"


def roll_out(service: Service | ServiceProcess, run: str, uids: Iterable[str], **more: Any) -> None:
    with RolloutClient(service.grpc_address, run) as client:
        client.create_run(CONFIG | {"dp_size": 1} | more)
        for uid in uids:
            for sample in range(2):
                with client.trajectory(uid, sample) as trajectory:
                    trajectory.step([1, 2], [3 + sample, 4], reward=float(sample), is_last_step=True)
            # Groups are sealed in the order in which they are complete.
            client.flush()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The streams that are opened, as (batch, mini-batch, whether ahead); a test may have some fail or wait."""
    seen = Opened()
    monkeypatch.setattr(shard_reader, "stream", lambda *call: seen.open(stream, *call))
    return seen


class Opened(list[tuple[int, int, bool]]):
    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.errors: list[Exception] = []

    def open(self, stream: Callable[..., Any], transport: Transport, address: ShardAddress, *more: Any) -> Any:
        is_ahead = threading.current_thread().name == THREAD
        self.append((address.batch, address.mini_batch, is_ahead))
        if is_ahead:
            assert self.gate.wait(20)
            if self.errors:
                raise self.errors.pop()
        return stream(transport, address, *more)

    def until(self, count: int) -> None:
        until(lambda: len(self) >= count and not threads())


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if is_so():
            return
        time.sleep(0.005)
    pytest.fail("it did not come to be in a minute")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@contextmanager
def training(service: Service, run: str, **more: Any) -> Iterator[TrainerClient]:
    with TrainerClient(service.grpc_address, run, 0, timeout_s=20, **more) as trainer:
        yield trainer
    assert not threads()


# What is opened ahead.


def test_the_next_shard_is_opened_while_one_is_trained(service: Service, run_name: str, opened: Opened) -> None:
    roll_out(service, run_name, "abcd")
    with training(service, run_name) as trainer:
        shards = next(iter(trainer)).mini_batches()
        next(shards).ack()
        opened.until(2)
        assert opened == [(0, 0, False), (0, 1, True)]
        second = next(shards)
        assert second.position == Position(0, 0, 1)
        second.ack()
        assert next(shards, None) is None
        assert opened == [(0, 0, False), (0, 1, True)]


def test_it_goes_on_with_the_next_batch_where_that_is_published(
    service: Service, run_name: str, opened: Opened
) -> None:
    roll_out(service, run_name, "abcdefgh", policy_mini_batch_size=4)
    with RolloutClient(service.grpc_address, run_name) as client:
        until(lambda: client.status().batches_published == 2)
    with training(service, run_name) as trainer:
        batches = iter(trainer)
        for shard in next(batches).mini_batches():
            opened.until(2)
            shard.ack()
        assert opened == [(0, 0, False), (1, 0, True)]
        assert [uids_of(shard) for shard in next(batches).mini_batches()] == [[*"eeffgghh"]]
        assert opened == [(0, 0, False), (1, 0, True)]


def test_a_next_batch_that_is_not_published_yet_is_waited_for_as_ever(
    service: Service, run_name: str, opened: Opened
) -> None:
    roll_out(service, run_name, "abcd", policy_mini_batch_size=4)
    with training(service, run_name) as trainer:
        batches = iter(trainer)
        for shard in next(batches).mini_batches():
            until(lambda: not threads())
            shard.ack()
        roll_out(service, run_name, "efgh", policy_mini_batch_size=4)
        assert [uids_of(shard) for shard in next(batches).mini_batches()] == [[*"eeffgghh"]]
    assert opened == [(0, 0, False), (1, 0, False)]


def test_after_a_forward_pass_the_first_mini_batch_is_there(service: Service, run_name: str, opened: Opened) -> None:
    roll_out(service, run_name, "abcd")
    with training(service, run_name) as trainer:
        batch = next(iter(trainer))
        for _ in batch.forward():
            until(lambda: not threads())
        opened.until(3)
        assert next(batch.mini_batches()).position == Position(0)
    assert opened[:3] == [(0, 0, False), (0, 1, True), (0, 0, True)]


def test_every_epoch_has_shards_of_its_own(service: Service, run_name: str) -> None:
    roll_out(service, run_name, "abcd", policy_mini_batch_size=4, update_epochs_per_batch=3)
    with training(service, run_name) as trainer:
        sums = []
        for shard in next(iter(trainer)).mini_batches():
            sums.append((shard.position.epoch, int(shard["sequences"].sum())))
            until(lambda: not threads())
            shard["sequences"].zero_()
            shard.ack()
    assert [epoch for epoch, _ in sums] == [0, 1, 2]
    assert len({total for _, total in sums}) == 1


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_what_is_trained_is_the_same_however_much_is_opened_ahead(
    service: Service, run_name: str, opened: Opened, prefetch: int
) -> None:
    roll_out(service, run_name, "abcdefgh", policy_mini_batch_size=1, update_epochs_per_batch=2)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.finish()
    seen: list[tuple[object, ...]] = []
    with training(service, run_name, prefetch=prefetch) as trainer:
        for batch in trainer:
            for shard in batch.mini_batches():
                until(lambda: not threads())
                assert len([one for one in opened if one[2]]) <= prefetch + len(seen)
                seen.append((*shard.position, *uids_of(shard)))
                shard.ack()
    expected = [
        (b, e, m, uid, uid) for b in range(2) for e in range(2) for m, uid in enumerate("abcdefgh"[4 * b :][:4])
    ]
    assert seen == expected
    assert any(is_ahead for *_, is_ahead in opened) == bool(prefetch)


def test_a_number_of_shards_ahead_that_is_none_is_refused(service: Service, run_name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="prefetch is -1; set the number of shards to open ahead, 0 or"):
        TrainerClient(service.grpc_address, run_name, 0, prefetch=-1)


# What it does not do.


def test_opening_ahead_acknowledges_nothing(service: Service, run_name: str, opened: Opened) -> None:
    roll_out(service, run_name, "abcd")
    with training(service, run_name) as trainer, RolloutClient(service.grpc_address, run_name) as client:
        shards = next(iter(trainer)).mini_batches()
        next(shards)
        opened.until(2)
        assert client.status().models["policy"].next[0] == trainer.position == Position(0)


def test_an_error_that_is_met_ahead_is_raised_when_its_shard_is_asked_for(
    service: Service, run_name: str, opened: Opened
) -> None:
    roll_out(service, run_name, "abcd")
    opened.errors = [InvalidArgumentError("these bytes are no shard")]
    with training(service, run_name) as trainer:
        batch = next(iter(trainer))
        shards = batch.mini_batches()
        first = next(shards)
        opened.until(2)
        first.ack()
        with pytest.raises(InvalidArgumentError, match="these bytes are no shard"):
            next(shards)
        assert next(batch.mini_batches()).position == Position(0, 0, 1)


def test_a_service_that_was_away_meanwhile_is_asked_again(service: Service, run_name: str, opened: Opened) -> None:
    roll_out(service, run_name, "abcd")
    opened.errors = [UnavailableError("away")]
    with training(service, run_name) as trainer:
        for _ in next(iter(trainer)).forward():
            until(lambda: not threads())
    assert opened[:3] == [(0, 0, False), (0, 1, True), (0, 1, False)]


def test_a_shard_that_is_on_its_way_is_waited_for_not_opened_twice(
    service: Service, run_name: str, opened: Opened
) -> None:
    roll_out(service, run_name, "abcd")
    opened.gate.clear()
    with training(service, run_name) as trainer:
        shards = next(iter(trainer)).forward()
        next(shards)
        until(lambda: len(opened) == 2)
        threading.Timer(0.1, opened.gate.set).start()
        assert next(shards).position == Position(0, 0, 1)
        assert opened[:2] == [(0, 0, False), (0, 1, True)]


# Leaving the order.


def test_what_was_opened_ahead_goes_with_the_order_that_is_left(
    service: Service, run_name: str, opened: Opened
) -> None:
    roll_out(service, run_name, "abcd")
    with training(service, run_name) as trainer:
        batch = next(iter(trainer))
        for _ in batch.forward():
            opened.until(2)
            break
        assert [shard.position.mini_batch for shard in batch.mini_batches()] == [0, 1]
        assert opened[:3] == [(0, 0, False), (0, 1, True), (0, 0, False)]


def test_a_position_that_is_loaded_throws_away_what_was_opened_before(
    service: Service, run_name: str, opened: Opened
) -> None:
    roll_out(service, run_name, "abcd", dp_size=2)
    with TrainerClient(service.grpc_address, run_name, 0, auto_commit=False) as trainer:
        shards = next(iter(trainer)).mini_batches()
        next(shards)
        opened.until(2)
        with TrainerClient(service.grpc_address, run_name, 0, dp_size=1, auto_commit=False) as alone:
            alone.load_state_dict(trainer.state_dict())
        trainer._order._expected_dp_size = 1
        trainer.load_state_dict({}, launch="again")
        cut_anew = next(shards)
    assert opened == [(0, 0, False), (0, 1, True), (0, 1, False)]
    assert uids_of(cut_anew) == [*"ccdd"], "all of it, where two ranks had half each"


def test_one_that_is_on_its_way_when_a_position_is_loaded_is_nobody_s(
    service: Service, run_name: str, opened: Opened
) -> None:
    roll_out(service, run_name, "abcd")
    opened.gate.clear()
    with training(service, run_name, auto_commit=False) as trainer:
        batches = iter(trainer)
        shards = next(batches).mini_batches()
        next(shards)
        until(lambda: len(opened) == 2)
        trainer.load_state_dict(trainer.state_dict())
        assert next(shards).position == Position(0, 0, 1), "without waiting for the other"
        opened.gate.set()
    assert opened[:3] == [(0, 0, False), (0, 1, True), (0, 1, False)]


def test_a_trainer_that_was_taken_over_learns_it_from_the_next_shard_or_acknowledgement(
    service: Service, run_name: str, opened: Opened
) -> None:
    roll_out(service, run_name, "abcd")
    with training(service, run_name) as trainer, TrainerClient(service.grpc_address, run_name, 0) as newer:
        shards = next(iter(trainer)).mini_batches()
        first = next(shards)
        opened.until(2)
        newer.load_state_dict(trainer.state_dict())
        with pytest.raises(StaleIncarnationError):
            first.ack()
        with pytest.raises(StaleIncarnationError):
            next(shards).ack()
        until(lambda: not threads())


# The end.


def test_closing_ends_what_is_being_opened(service: Service, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    roll_out(service, run_name, "abcd")
    pending = threading.Event()
    read = Run.read_shard

    async def never(self: Run, batch: int, address: Address) -> AsyncIterator[bytes]:
        if address.mini_batch == 1:
            await asyncio.to_thread(pending.wait, 30)
        return await read(self, batch, address)

    monkeypatch.setattr(Run, "read_shard", never)
    with training(service, run_name) as trainer:
        shards = next(iter(trainer)).forward()
        next(shards)
        until(lambda: bool(threads()))
    pending.set()
    trainer.close()
    with pytest.raises(FailedPreconditionError, match="this TrainerClient is closed"):
        next(shards)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_is_refused_what_was_opened_ahead(service_process: ServiceProcess, run_name: str) -> None:
    roll_out(service_process, run_name, "abcd")
    with TrainerClient(service_process.grpc_address, run_name, 0) as trainer:
        shards = next(iter(trainer)).mini_batches()
        next(shards)
        until(lambda: not threads())
        child = os.fork()
        if not child:
            try:
                next(shards)
            except FailedPreconditionError:
                trainer.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert next(shards).position == Position(0, 0, 1)


# Prefetching in itself.


def test_no_more_is_held_than_was_said() -> None:
    loaded: list[str] = []

    def load(key: str, is_wanted: Callable[[], bool]) -> str:
        loaded.append(key)
        return key

    ahead = Prefetch(load, 2)
    ahead.expect("abc")
    until(lambda: not threads())
    assert loaded == ["a", "b"]
    assert [ahead.take(key) for key in "abc"] == ["a", "b", None]
    ahead.expect("bcd")
    until(lambda: not threads())
    ahead.expect("cde")
    until(lambda: not threads())
    assert loaded == ["a", "b", "b", "c", "d"]
    assert [ahead.take(key) for key in "bcd"] == [None, "c", "d"]
    ahead.close()


def test_loading_sees_that_its_value_is_not_wanted_any_more() -> None:
    asked = threading.Event()
    unwanted: list[str] = []

    def load(key: str, is_wanted: Callable[[], bool]) -> None:
        asked.set()
        until(lambda: not is_wanted())
        unwanted.append(key)

    ahead: Prefetch[str, None] = Prefetch(load, 1)
    ahead.expect("a")
    assert asked.wait(10)
    ahead.expect("b")
    ahead.close()
    assert unwanted == ["a"]


# Copies to a device, on a machine that has none: in which order what is called.


class FakeCuda:
    """Streams and events that note what is done with them; copies are made at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        calls = self.calls

        class Stream:
            def __init__(self, device: object) -> None:
                self.device = device

            def __enter__(self) -> None:
                calls.append("side stream")

            def __exit__(self, *error: object) -> None:
                calls.append("current stream")

            def record_event(self) -> str:
                calls.append("event")
                return "copied"

            def wait_event(self, event: str) -> None:
                calls.append(f"wait until {event}")

        current = Stream("meta")
        for name, value in {
            "is_available": lambda: True,
            "Stream": Stream,
            "stream": lambda stream: stream,
            "current_stream": lambda device: current,
            "current_device": lambda: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

        def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
            calls.append("pin")
            return tensor

        to = torch.Tensor.to

        def copied(
            tensor: torch.Tensor, device: object = None, dtype: torch.dtype | None = None, non_blocking: bool = False
        ) -> torch.Tensor:
            if non_blocking:
                calls.append(f"copy to {device}")
            return to(tensor, dtype=dtype or tensor.dtype)

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(torch.Tensor, "to", copied)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: calls.append("keep"))


COPIED = ["side stream", "pin", "copy to cuda:0", "event", "current stream"]
USED = ["wait until copied", "keep"]


def test_tensors_go_to_the_device_beside_the_computation_which_waits_for_them(
    service: Service, run_name: str, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    roll_out(service, run_name, "abcd")
    cuda = FakeCuda(monkeypatch)
    with training(service, run_name, device="cuda", dtypes={"tokens": torch.int64}) as trainer:
        shards = next(iter(trainer)).forward()
        first = next(shards)
        until(lambda: len(opened) == 2 and not threads())
        assert not cuda.calls, "what was never used is not copied ahead"
        [micro, *_] = first.micro_batches()
        assert micro["sequences"].dtype == torch.int64
        assert cuda.calls == [*COPIED, *USED]

        second = next(shards)
        until(lambda: not threads())
        third = trainer.open_shard(Position(0))
        assert cuda.calls == [*COPIED, *USED, *COPIED], "what was used before is"
        cuda.calls.clear()
        for micro in third.micro_batches():
            expected = torch.tensor([[1, 2, 3, 4], [1, 2, 4, 4]], dtype=torch.int64)
            assert micro["sequences"].equal(expected)
            assert cuda.calls == USED
            cuda.calls.clear()
    assert second["row"].tolist() == [4, 5, 6, 7]
