"""Steps over prime-rl's ZMQ wire: nothing is sent before every process of the trainer listens."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from gristmill import InvalidArgumentError, RolloutClient
from gristmill.adapters.prime_rl import Zmq
from tests.adapters.prime_rl.conftest import CONFIG, DP_SIZE, Running, eventually, group

HOST = "127.0.0.1"


class Receiver:
    """A process of prime-rl's trainer, as `ZMQMicroBatchReceiver` talks (src/prime_rl/transports/rollouts/zmq.py)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int, rank: int) -> None:
        self._steps, self._ready = context.socket(zmq.SUB), context.socket(zmq.PUSH)
        self._steps.connect(f"tcp://{HOST}:{port}")
        self._steps.setsockopt(zmq.SUBSCRIBE, b"data_rank|%d|" % rank)
        self._ready.connect(f"tcp://{HOST}:{port + 1}")
        self._ready.send(b"%d" % rank)

    def receive(self) -> set[int]:
        """The tokens of the next step."""
        _, payload = self._steps.recv_multipart()
        return {token for micro in msgspec.msgpack.decode(payload) for token in micro[0]}

    def is_given_a_step(self, within_ms: int = 0) -> bool:
        return bool(self._steps.poll(within_ms))

    def close(self) -> None:
        self._steps.close(linger=0)
        self._ready.close(linger=0)


@pytest.fixture
def port() -> int:
    """One with a free one behind it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind((HOST, 0))
            number: int = first.getsockname()[1]
            try:
                second.bind((HOST, number + 1))
            except (OSError, OverflowError):
                continue
            return number


@pytest.fixture
def receive(port: int) -> Iterator[Callable[[int], Receiver]]:
    """Starts a process of the trainer, of the rank that is given."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[Receiver] = []

    def start(rank: int) -> Receiver:
        made.append(Receiver(context, port, rank))
        return made[-1]

    yield start
    for receiver in made:
        receiver.close()
    context.term()


@pytest.fixture
def transport(port: int) -> Iterator[Zmq]:
    transport = Zmq(HOST, port, DP_SIZE)
    yield transport
    transport.close()


def stable(output_dir: Path, step: int) -> None:
    """Weights of a step are broadcast."""
    path = output_dir / f"broadcasts/step_{step}/STABLE"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch()


def roll_out(rollouts: RolloutClient, count: int) -> None:
    rollouts.create_run(CONFIG | {"max_buffered_batches": 8})
    for number in range(1, count + 1):
        rollouts.submit(group(number))
    rollouts.finish()


def test_each_rank_receives_its_steps_when_all_listen(
    rollouts: RolloutClient,
    bridge: Callable[..., Running],
    transport: Zmq,
    receive: Callable[[int], Receiver],
    tmp_path: Path,
) -> None:
    roll_out(rollouts, 2)
    # Of an earlier start of the trainer: no sign that this one trained.
    stable(tmp_path, 1)
    running = bridge(transport=transport, checkpoint_dir=None)
    first = receive(0)
    assert not first.is_given_a_step(within_ms=300)
    second = receive(1)
    assert first.receive() == second.receive() == {1}
    assert not first.is_given_a_step(within_ms=300)
    stable(tmp_path, 1)
    assert first.receive() == second.receive() == {2}
    stable(tmp_path, 2)
    running.finished()


def test_a_trainer_that_begins_again_is_given_the_steps_after_its_checkpoint(
    rollouts: RolloutClient,
    bridge: Callable[..., Running],
    transport: Zmq,
    receive: Callable[[int], Receiver],
    tmp_path: Path,
) -> None:
    roll_out(rollouts, 4)
    running = bridge(transport=transport)
    ranks = [receive(0), receive(1)]
    assert [rank.receive() for rank in ranks] == [{1}, {1}]
    stable(tmp_path, 1)
    saved = tmp_path / "checkpoints/step_1/trainer/.metadata"
    saved.parent.mkdir(parents=True)
    saved.touch()
    assert [rank.receive() for rank in ranks] == [{2}, {2}]
    stable(tmp_path, 2)
    assert [rank.receive() for rank in ranks] == [{3}, {3}]
    for rank in ranks:
        rank.close()
    again = [receive(0), receive(1)]
    for step in (2, 3, 4):
        assert [rank.receive() for rank in again] == [{step}, {step}]
        stable(tmp_path, step)
    last = tmp_path / "checkpoints/step_4/trainer/.metadata"
    last.parent.mkdir(parents=True)
    last.touch()
    running.finished()


def test_every_process_of_a_rank_is_waited_for(port: int, receive: Callable[[int], Receiver]) -> None:
    transport = Zmq(HOST, port, 1, processes_per_rank=2)
    polls = 0

    def is_stopped() -> bool:
        nonlocal polls
        polls += 1
        if polls == 3:
            receive(0)
        return polls > 100

    receive(0)
    transport.begin(is_stopped)
    transport.close()
    assert 3 <= polls <= 100


def test_a_port_that_is_taken_is_refused(transport: Zmq, port: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Address already in use .*; set a free port"):
        Zmq(HOST, port, DP_SIZE)


def test_a_stopped_bridge_does_not_wait_for_the_trainer(
    rollouts: RolloutClient, bridge: Callable[..., Running], transport: Zmq
) -> None:
    rollouts.create_run(CONFIG)
    running = bridge(transport=transport)
    running.stop()
    eventually(lambda: running.is_over)
