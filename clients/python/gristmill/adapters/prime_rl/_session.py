"""Sends steps to one start of prime-rl's trainer, beginning after the checkpoint from which it resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import Event
from typing import Any

from gristmill.adapters._core.checkpoint import Ledger
from gristmill.adapters._core.session import RunSession
from gristmill.adapters.prime_rl._micro_batches import Encoding
from gristmill.adapters.prime_rl._run_directory import Steps
from gristmill.adapters.prime_rl._transports import Transport
from gristmill.errors import BatchFailedError, FailedPreconditionError

_log = logging.getLogger("gristmill")

_POLL_S = 0.05
_NO_STEP = -1


class TrainerRestartedError(Exception):
    """The trainer restarted and continues from a checkpoint."""


class StoppedError(Exception):
    """The bridge was stopped."""


@dataclass(frozen=True)
class Trainer:
    """The state of prime-rl's trainer, read from its run directory.

    weights: the steps with broadcast weights. checkpoints: the steps with checkpoints; None if it writes none.
    resume_step: the checkpoint from which it resumes; None: the newest.
    """

    weights: Steps
    checkpoints: Steps | None
    resume_step: int | None = None

    def begin(self, *, keeps_steps: bool) -> int:
        """Return the step after which the trainer starts.

        keeps_steps: whether sent steps survive the trainer and the bridge. If not, weights that the trainer broadcast
            in an earlier start are ignored, because their steps are sent again.
        """
        if not keeps_steps:
            self.weights.forget()
        if self.checkpoints is None:
            return max(self.resume_step or 0, self.weights.newest() or 0)
        if self.resume_step is None:
            return self.checkpoints.newest() or 0
        self.checkpoints.forget(after=self.resume_step)
        return self.resume_step


class Session:
    """Sends mini-batches. Steps count from 1, as in prime-rl. Step 0 has the initial weights of the training."""

    def __init__(
        self,
        run: RunSession,
        transport: Transport,
        trainer: Trainer,
        ledger: Ledger,
        encoding: Encoding,
        stopped: Event,
    ) -> None:
        self._run, self._transport, self._trainer, self._ledger = run, transport, trainer, ledger
        self._encoding, self._stopped = encoding, stopped
        self._trained = trainer.begin(keeps_steps=transport.keeps_steps)
        self._broadcast = _NO_STEP
        self._step = self._resume()
        self._committed = self._step

    def train(self, thread: Executor) -> None:
        """Send all mini-batches, each after the previous one was trained.

        thread: waits for batches, while this thread watches the trainer. Its last wait ends when the run's session is
            closed.
        """
        mini_batches = self._mini_batches()
        while True:
            following = thread.submit(next, mini_batches, None)
            self._wait_until(following.done)
            mini_batch = following.result()
            if mini_batch is None:
                break
            self._train_step(mini_batch)
        if self._trainer.checkpoints is not None:
            _log.info("the run is finished; waiting for prime-rl's checkpoint of step %d", self._step)
            self._wait_until(lambda: self._committed >= self._step)

    def _state(self) -> Mapping[str, Any]:
        return self._run.states()["policy"]

    def _resume(self) -> int:
        """Resume the run at its committed position, and return the step there."""
        self._run.resume(None)
        state = self._state()
        step = self._ledger.step_at(state)
        if step is not None and step > self._trained and self._trainer.checkpoints is not None:
            raise FailedPreconditionError(
                f"run {self._run.run!r} is committed up to step {step}, but prime-rl resumes from step "
                f"{self._trained}, and the steps between are freed; resume from a checkpoint of step {step} or later, "
                f"or remove {self._ledger.path} to continue after step {self._trained} with other rollouts"
            )
        if step is None or step > self._trained:
            # This is the first start, or a restart of a trainer without checkpoints, with the remaining batches.
            self._transport.forget(after=self._trained)
            self._trainer.weights.forget(after=self._trained)
            self._ledger.start(self._trained, state)
            return self._trained
        return step

    def _mini_batches(self) -> Iterator[Any]:
        while True:
            try:
                for batch in self._run.batches():
                    yield from batch["policy"].mini_batches()
                return
            except BatchFailedError as error:
                _log.error("%s; continuing with the next batch", error)

    def _train_step(self, mini_batch: Any) -> None:
        """Let prime-rl train the next step, unless its checkpoint already includes it, and acknowledge the step."""
        step = self._step + 1
        if step > self._trained:
            self._send(step, mini_batch)
            self._wait_until(lambda: self._broadcast >= step, lambda: self._send_again(step, mini_batch))
        mini_batch.ack()
        self._step = step
        self._ledger.record(step, self._state())
        if self._trainer.checkpoints is None:
            self._commit(step)

    def _send(self, step: int, mini_batch: Any) -> None:
        self._transport.send(step, [self._encoding.encode(shard) for shard in mini_batch.shards.values()])
        _log.info("step %d sent: %s", step, mini_batch.position)

    def _send_again(self, step: int, mini_batch: Any) -> None:
        if self._transport.lacks(step):
            self._send(step, mini_batch)

    def _wait_until(self, is_over: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Watch the trainer until `is_over`. Commits meanwhile, because the next batch may need a commit's capacity."""
        while not is_over():
            self._watch()
            meanwhile()
            if self._stopped.wait(_POLL_S):
                raise StoppedError

    def _watch(self) -> None:
        newest = self._trainer.weights.newest()
        version = _NO_STEP if newest is None else newest
        if version < self._broadcast or self._transport.has_trainer_restarted():
            raise TrainerRestartedError
        if version > self._broadcast:
            self._broadcast = version
            self._run.announce(version)
        if self._trainer.checkpoints is not None:
            saved = self._trainer.checkpoints.newest(up_to=self._step)
            if saved is not None and saved > self._committed:
                self._commit(saved)

    def _commit(self, step: int) -> None:
        self._run.commit({"policy": self._ledger.state_after(step)})
        self._committed = step
        self._ledger.forget_before(step)
