"""A rollout worker for `AsyncGRPOTrainer` that does not sample: it passes the groups of a run to the trainer."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from typing import Any

from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from gristmill import Position, TrainerClient
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.session import RunSession
from gristmill.adapters._core.versions import check_version
from gristmill.adapters.trl._async_settings import async_run_settings
from gristmill.adapters.trl._samples import samples_of
from gristmill.errors import FailedPreconditionError

_STOP_S = 10.0
_LOOK_S = 0.2


class GristmillRolloutWorker(TrainerCallback):  # type: ignore[misc]
    """The `rollout_worker` of an `AsyncGRPOTrainer`. It must also be one of its `callbacks`.

        worker = GristmillRolloutWorker(Gristmill("127.0.0.1:50051", "my-run"), args)
        trainer = AsyncGRPOTrainer(..., args=args, rollout_worker=worker, callbacks=[worker])

    A group is acknowledged after it was trained, and is not sent again. Training that resumes from a checkpoint
    continues with new rollouts. The worker announces the trainer's versions.

    gristmill: the run. args: the trainer's `AsyncGRPOConfig`.
    Raises InvalidArgumentError for settings that contradict it, and UnsupportedError for an untested version of TRL.
    """

    def __init__(self, gristmill: Gristmill, args: Any) -> None:
        check_version("TRL", "trl", ["1.16"])
        self._gristmill, self._settings = gristmill, async_run_settings(args, gristmill)
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=args.num_generations)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._stopping = threading.Event()
        self._is_callback, self._taken = False, 0
        self._error: Exception | None = None
        self._feeder: threading.Thread | None = None
        self._opened: RunSession | None = None
        self._reader: TrainerClient | None = None

    # `RolloutWorkerProtocol`, which TRL calls only in the main process.

    def start(self) -> None:
        if not self._is_callback:
            raise FailedPreconditionError(
                f"run {self._gristmill.run!r}: the worker is not a callback, so groups would not be acknowledged; use "
                "AsyncGRPOTrainer(..., rollout_worker=worker, callbacks=[worker])"
            )
        self._session()
        # This client reads ahead. The session sends the acknowledgements.
        self._reader = TrainerClient(
            self._gristmill.address, self._gristmill.run, 0, dp_size=1, acks=False, timeout_s=self._gristmill.timeout_s
        )
        self._feeder = threading.Thread(target=self._feed, args=(self._reader,), name="gristmill-rollouts", daemon=True)
        self._feeder.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._reader is not None:
            self._reader.close()
        if self._feeder is not None:
            self._feeder.join(_STOP_S)
        if self._opened is not None:
            self._opened.close()

    def update_model_version(self, model_version: int) -> None:
        self._session().announce(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that stopped the feeding thread. A run with slow rollouts is healthy."""
        if self._error is not None:
            raise self._error
        if self._feeder is not None and not self._feeder.is_alive() and self.rollout_buffer.empty():
            raise FailedPreconditionError(
                f"run {self._gristmill.run!r} is finished, but the trainer waits for more rollouts; set max_steps to "
                "the number of steps in the run"
            )

    # `TrainerCallback`.

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._is_callback = True

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Acknowledge groups that were trained. TRL reads the queue one micro-batch ahead. This step trained all groups
        that were read before it, except the last one: TRL may have read only a part of it."""
        if self._opened is None:
            return
        while self._opened.position.batch < self._taken:
            number = self._opened.position.batch
            self._opened.policy.ack(Position(number), Position(number + 1))
        self._taken = max(train_dataloader.collate_fn.groups_trained, default=0)

    def _session(self) -> RunSession:
        """Open the session at the first call, in the main process."""
        if self._opened is None:
            self._opened = RunSession(self._gristmill, self._settings, dp_size=1, auto_commit=True)
            self._opened.resume(None)
        return self._opened

    def _feed(self, reader: TrainerClient) -> None:
        try:
            for batch in reader:
                for shard in batch.mini_batches():
                    for sample in samples_of(shard, first_group=batch.number):
                        self._put(sample)
                    shard.ack()
        except Exception as error:  # noqa: BLE001
            if not self._stopping.is_set():
                self._error = error

    def _put(self, sample: RolloutSample) -> None:
        is_taken = False
        while not is_taken and not self._stopping.is_set():
            sample.enqueued_at = time.time()
            with suppress(queue.Full):
                self.rollout_buffer.put(sample, timeout=_LOOK_S)
                is_taken = True
