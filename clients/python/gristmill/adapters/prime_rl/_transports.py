"""Sends a step to the ranks of prime-rl's trainer, by files or by ZMQ."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from gristmill.adapters._core.checkpoint import write_atomically
from gristmill.adapters.prime_rl._run_directory import rank_file, rank_files
from gristmill.errors import InvalidArgumentError

_log = logging.getLogger("gristmill")

_POLL_MS = 50
_SUBSCRIBES = b"\x01"


class Transport(Protocol):
    """Sends steps to the trainer. keeps_steps: whether a sent step survives the bridge and the trainer."""

    keeps_steps: bool

    def begin(self, is_stopped: Callable[[], bool]) -> None:
        """Return when the trainer's ranks can receive steps."""

    def send(self, step: int, ranks: Sequence[bytes]) -> None:
        """Send a step. ranks: an encoded list of micro-batches for each rank."""

    def lacks(self, step: int) -> bool:
        """Return whether a sent step was removed and must be sent again."""

    def forget(self, after: int) -> None:
        """Remove sent steps later than `after`, because they will have other mini-batches."""

    def has_trainer_restarted(self) -> bool:
        """Return whether the trainer restarted since `begin`."""

    def close(self) -> None: ...


class Files:
    """prime-rl's `filesystem` transport: `batches/step_N/rank_R.bin` in its run directory.

    Files are written atomically and are not removed.
    batch_dir: the directory of the steps; by default output_dir / "batches". prime-rl 0.8.0 reads "rollouts".
    """

    keeps_steps = True

    def __init__(self, output_dir: Path, dp_size: int, batch_dir: Path | None = None) -> None:
        self._batch_dir, self._dp_size = batch_dir or output_dir / "batches", dp_size

    def begin(self, is_stopped: Callable[[], bool]) -> None:
        _log.info("steps are written to %s; prime-rl 0.8.0 reads rollouts, newer versions batches", self._batch_dir)

    def send(self, step: int, ranks: Sequence[bytes]) -> None:
        for path, data in zip(self._paths(step), ranks, strict=True):
            # prime-rl's launcher may remove the directory meanwhile. The missing step is then sent again.
            with suppress(FileNotFoundError):
                write_atomically(path, data)

    def lacks(self, step: int) -> bool:
        # prime-rl's launcher removes directories of steps that seem to be of an earlier start.
        return not all(path.exists() for path in self._paths(step))

    def forget(self, after: int) -> None:
        for path in rank_files(self._batch_dir, after):
            path.unlink(missing_ok=True)

    def has_trainer_restarted(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _paths(self, step: int) -> list[Path]:
        return [rank_file(self._batch_dir, step, rank) for rank in range(self._dp_size)]


class Zmq:
    """prime-rl's `zmq` transport. Each process of the trainer subscribes to its rank's steps on `port`, and reports
    once on the next port that it is ready.

    Messages have no step number and are not stored, so bridge and trainer start together, at the trainer's checkpoint.

    host, port: the address to listen at, as in prime-rl's `rollout_transport`.
    processes_per_rank: the trainer's world size divided by `dp_size`.
    """

    keeps_steps = False

    def __init__(self, host: str, port: int, dp_size: int, *, processes_per_rank: int = 1) -> None:
        try:
            import zmq
        except ImportError as missing:
            raise ImportError(f"prime-rl's zmq transport needs pyzmq ({missing}); run pip install pyzmq") from missing
        self._topics = [b"data_rank|%d|" % rank for rank in range(dp_size)]
        self._processes = processes_per_rank
        self._context = zmq.Context()
        # Like a PUB socket, but it also reports subscriptions. Messages sent before a subscription are lost.
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._ready = self._context.socket(zmq.PULL)
        self._endpoint = f"tcp://{host}:{port}"
        try:
            self._publisher.bind(self._endpoint)
            self._ready.bind(f"tcp://{host}:{port + 1}")
        except zmq.ZMQError as error:
            self.close()
            raise InvalidArgumentError(
                f"cannot listen at {self._endpoint} and on the next port: {error}; set a free port, here and in "
                "prime-rl's rollout_transport"
            ) from None

    def begin(self, is_stopped: Callable[[], bool]) -> None:
        _log.info("waiting for prime-rl's trainer to start, at %s", self._endpoint)
        subscribed: Counter[bytes] = Counter()
        ready: Counter[bytes] = Counter()
        while not is_stopped() and any(
            min(subscribed[topic], ready[topic]) < self._processes for topic in self._topics
        ):
            if self._publisher.poll(_POLL_MS):
                message = self._publisher.recv()
                if message[:1] == _SUBSCRIBES:
                    subscribed[message[1:]] += 1
            elif self._ready.poll(0):
                ready[b"data_rank|%s|" % self._ready.recv()] += 1

    def send(self, step: int, ranks: Sequence[bytes]) -> None:
        for topic, data in zip(self._topics, ranks, strict=True):
            self._publisher.send_multipart([topic, data])

    def lacks(self, step: int) -> bool:
        return False

    def forget(self, after: int) -> None:
        pass

    def has_trainer_restarted(self) -> bool:
        return bool(self._ready.poll(0))

    def close(self) -> None:
        for socket in (self._publisher, self._ready):
            socket.close(linger=0)
        self._context.term()
