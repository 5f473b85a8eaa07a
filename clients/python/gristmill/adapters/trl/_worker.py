"""A rollout worker for `AsyncGRPOTrainer` that samples nothing: it hands over what others submitted to a run."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from typing import Any

from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from gristmill import RolloutClient, TrainerClient
from gristmill._wire.addresses import Position
from gristmill.adapters.trl._samples import samples_of
from gristmill.errors import FailedPreconditionError, InvalidArgumentError

_STOP_S = 10.0
_LOOK_S = 0.2


def async_run_settings(args: Any, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings with which a worker of these arguments creates its run.

    A batch is one prompt group, which the trainer can have as soon as it is complete: what is trained together is
    decided by TRL. As many groups are kept as `max_staleness` lets the sampler be ahead.

    args: an `AsyncGRPOConfig`. settings: more of the run's. Raises InvalidArgumentError for those that contradict.
    """
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    derived = {
        "n_samples_per_prompt": args.num_generations,
        "train_batch_size": 1,
        "policy_mini_batch_size": 1,
        "micro_batch": {"count": 1},
        "layout": "packed",
        "max_buffered_batches": ceil((args.max_staleness + 1) * rows / args.num_generations) + 1,
    }
    for name in settings or {}:
        if name in derived and name != "max_buffered_batches":
            raise InvalidArgumentError(
                f"settings: {name} must be {derived[name]!r}, because AsyncGRPOTrainer decides which samples are "
                "trained together; leave it out"
            )
    return derived | dict(settings or {})


class GristmillRolloutWorker(TrainerCallback):  # type: ignore[misc]
    """The `rollout_worker` of an `AsyncGRPOTrainer`, and one of its `callbacks`.

        worker = GristmillRolloutWorker("127.0.0.1:50051", "my-run", args)
        trainer = AsyncGRPOTrainer(..., args=args, rollout_worker=worker, callbacks=[worker])

    A group is acknowledged when it was trained, and is not offered again then: training that is continued from a
    checkpoint goes on with new rollouts. The trainer's versions are announced to whoever samples.

    address, run, timeout_s: as for `TrainerClient`. args: the trainer's `AsyncGRPOConfig`. settings: of the run, as for
    `async_run_settings`.
    """

    def __init__(
        self, address: str, run: str, args: Any, settings: Mapping[str, Any] | None = None, timeout_s: float = 120.0
    ) -> None:
        self._address, self._run, self._timeout_s = address, run, timeout_s
        self._settings = async_run_settings(args, settings)
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=args.num_generations)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._stopping = threading.Event()
        self._is_callback, self._taken = False, 0
        self._error: Exception | None = None
        self._feeder: threading.Thread | None = None
        self._rollouts: RolloutClient | None = None
        self._keeper: TrainerClient | None = None
        self._reader: TrainerClient | None = None

    # What `RolloutWorkerProtocol` asks for; the main process alone is asked.

    def start(self) -> None:
        if not self._is_callback:
            raise FailedPreconditionError(
                f"run {self._run!r}: nothing would be acknowledged; give the worker to the trainer's callbacks too: "
                "AsyncGRPOTrainer(..., rollout_worker=worker, callbacks=[worker])"
            )
        self._connect()
        # Reads ahead of what is acknowledged, by a client of its own.
        self._reader = TrainerClient(self._address, self._run, 0, dp_size=1, acks=False, timeout_s=self._timeout_s)
        self._feeder = threading.Thread(target=self._feed, args=(self._reader,), name="gristmill-rollouts", daemon=True)
        self._feeder.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._reader is not None:
            self._reader.close()
        if self._feeder is not None:
            self._feeder.join(_STOP_S)
        if self._keeper is not None and self._rollouts is not None:
            self._keeper.close()
            self._rollouts.close()

    def update_model_version(self, model_version: int) -> None:
        """Announces it, unless a later one was: versions never go back."""
        rollouts, keeper = self._connect()
        if model_version > rollouts.policy_version():
            keeper.announce_policy_version(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raises what ended the feeding. A run whose rollouts take long is healthy."""
        if self._error is not None:
            raise self._error
        if self._feeder is not None and not self._feeder.is_alive() and self.rollout_buffer.empty():
            raise FailedPreconditionError(
                f"run {self._run!r} is finished, and the trainer waits for more; set max_steps to what it has"
            )

    # What is trained.

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._is_callback = True

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Acknowledges groups that were trained. TRL takes them in the order of the queue, a micro-batch ahead: what it
        had taken when the step before ended is trained now, but for the last group, which it may have had in part."""
        if self._keeper is None:
            return
        while self._keeper.position.batch < self._taken:
            number = self._keeper.position.batch
            self._keeper.ack(Position(number), Position(number + 1))
        self._taken = max(train_dataloader.collate_fn.groups_trained, default=0)

    def _connect(self) -> tuple[RolloutClient, TrainerClient]:
        if self._rollouts is None or self._keeper is None:
            self._rollouts = RolloutClient(self._address, self._run, timeout_s=self._timeout_s)
            self._rollouts.create_run(self._settings)
            self._keeper = TrainerClient(self._address, self._run, 0, dp_size=1, timeout_s=self._timeout_s)
            # Not torch.distributed's choice, for which all processes would have to be here.
            self._keeper.load_state_dict({}, launch=secrets.token_hex(16))
        return self._rollouts, self._keeper

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
