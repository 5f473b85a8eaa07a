"""One start of prime-rl's trainer: from the checkpoint that it goes on from, step by step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import Event

from gristmill import AllRanksClient, MiniBatch
from gristmill.adapters._ledger import Ledger
from gristmill.adapters.prime_rl.micro_batches import Encoding
from gristmill.adapters.prime_rl.run_directory import Steps
from gristmill.adapters.prime_rl.transports import Transport
from gristmill.errors import BatchFailedError, FailedPreconditionError

_log = logging.getLogger("gristmill")

_POLL_S = 0.05
_NO_STEP = -1


class BeganAnewError(Exception):
    """The trainer was started again, and goes on from a checkpoint."""


class StoppedError(Exception):
    """The bridge is asked to end."""


@dataclass(frozen=True)
class Trainer:
    """What is known of prime-rl's trainer, from its run directory.

    weights: those that it broadcast. checkpoints: None where it writes none. resume_step: the checkpoint that it was
    told to resume from, None: the newest.
    """

    weights: Steps
    checkpoints: Steps | None
    resume_step: int | None = None

    def begin(self, *, keeps_steps: bool) -> int:
        """The step after which the trainer begins, or, where steps that were sent outlive both it and the bridge, is
        given steps again. What it wrote in an earlier start does not count any more where that has to be told apart."""
        if not keeps_steps:
            self.weights.forget()
        if self.checkpoints is None:
            return max(self.resume_step or 0, self.weights.newest() or 0)
        if self.resume_step is None:
            return self.checkpoints.newest() or 0
        self.checkpoints.forget(after=self.resume_step)
        return self.resume_step


class Session:
    """Hands mini-batches over. Steps count from 1, as prime-rl's; step 0 is what training begins with."""

    def __init__(
        self,
        client: AllRanksClient,
        transport: Transport,
        trainer: Trainer,
        ledger: Ledger,
        encoding: Encoding,
        stopped: Event,
    ) -> None:
        self._client, self._transport, self._trainer, self._ledger = client, transport, trainer, ledger
        self._encoding, self._stopped = encoding, stopped
        self._trained = trainer.begin(keeps_steps=transport.keeps_steps)
        self._broadcast = _NO_STEP
        self._step = self._resume()
        self._committed = self._step

    def train(self, thread: Executor) -> None:
        """Hands over all mini-batches, each when the one before is trained. thread: where batches are waited for,
        while the trainer is watched here; what is submitted last ends when the client is closed."""
        mini_batches = self._mini_batches()
        while True:
            found = thread.submit(next, mini_batches, None)
            self._wait_until(found.done)
            mini_batch = found.result()
            if mini_batch is None:
                break
            self._hand_over(mini_batch)
        if self._trainer.checkpoints is not None:
            _log.info("the run is finished; waiting for prime-rl's checkpoint of step %d", self._step)
            self._wait_until(lambda: self._committed >= self._step)

    def _resume(self) -> int:
        """Puts the run back to what is committed, and returns the step that this is."""
        self._client.load_state_dict({})
        state = self._client.state_dict()
        step = self._ledger.step_at(state)
        if step is not None and step > self._trained and self._trainer.checkpoints is not None:
            raise FailedPreconditionError(
                f"run {self._client.run!r} is committed up to step {step}, and prime-rl resumes from step "
                f"{self._trained}: the steps between them are freed. Resume from a checkpoint of step {step} or later, "
                f"or remove {self._ledger.path} to go on after step {self._trained} with other rollouts"
            )
        if step is None or step > self._trained:
            # The first start, or a trainer without checkpoints that begins anew, on what is left.
            self._transport.forget(after=self._trained)
            self._trainer.weights.forget(after=self._trained)
            self._ledger.begin(self._trained, state)
            return self._trained
        return step

    def _mini_batches(self) -> Iterator[MiniBatch]:
        while True:
            try:
                for batch in self._client:
                    yield from batch.mini_batches()
                return
            except BatchFailedError as error:
                _log.error("%s; going on behind it", error)

    def _hand_over(self, mini_batch: MiniBatch) -> None:
        """Has prime-rl train one more step, unless its checkpoint has it already, and acknowledges it."""
        step = self._step + 1
        if step > self._trained:
            self._send(step, mini_batch)
            self._wait_until(lambda: self._broadcast >= step, lambda: self._send_again(step, mini_batch))
        mini_batch.ack()
        self._step = step
        self._ledger.record(step, self._client.state_dict())
        if self._trainer.checkpoints is None:
            self._commit(step)

    def _send(self, step: int, mini_batch: MiniBatch) -> None:
        self._transport.send(step, [self._encoding.encode(shard) for shard in mini_batch])
        _log.info("step %d sent: %s", step, mini_batch.position)

    def _send_again(self, step: int, mini_batch: MiniBatch) -> None:
        if self._transport.lacks(step):
            self._send(step, mini_batch)

    def _wait_until(self, is_over: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Watches the trainer until then. Commits in the meantime too: until then a batch that is waited for may find
        no room."""
        while not is_over():
            self._watch()
            meanwhile()
            if self._stopped.wait(_POLL_S):
                raise StoppedError

    def _watch(self) -> None:
        newest = self._trainer.weights.newest()
        version = _NO_STEP if newest is None else newest
        if version < self._broadcast or self._transport.trainer_began_anew():
            raise BeganAnewError
        if version > self._broadcast:
            self._broadcast = version
            self._announce(version)
        if self._trainer.checkpoints is not None:
            saved = self._trainer.checkpoints.newest(up_to=self._step)
            if saved is not None and saved > self._committed:
                self._commit(saved)

    def _announce(self, version: int) -> None:
        try:
            self._client.announce_policy_version(version)
        except FailedPreconditionError:
            _log.info("policy version %d is trained again: rollout workers were told of a later one", version)

    def _commit(self, step: int) -> None:
        self._client.commit(self._ledger.of(step))
        self._committed = step
        self._ledger.forget_before(step)
