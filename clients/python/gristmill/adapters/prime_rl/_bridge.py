"""Sends a run's mini-batches to prime-rl's trainer. One step of the trainer is one mini-batch."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from gristmill import RolloutClient
from gristmill.adapters._core.checkpoint import Ledger
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.session import RunSession
from gristmill.adapters._core.versions import check_version
from gristmill.adapters.prime_rl._micro_batches import COLUMNS, Encoding, check_columns
from gristmill.adapters.prime_rl._run_directory import BROADCAST_MARK, CHECKPOINT_MARK, LEDGER, Steps
from gristmill.adapters.prime_rl._session import Session, StoppedError, Trainer, TrainerRestartedError
from gristmill.adapters.prime_rl._settings import PACKED, UNREDUCED
from gristmill.adapters.prime_rl._transports import Files, Transport
from gristmill.errors import InvalidArgumentError

_log = logging.getLogger("gristmill")


class Bridge:
    """Sends a run's mini-batches to prime-rl's trainer, instead of prime-rl's orchestrator.

    The bridge sends a step, and acknowledges it after the trainer has broadcast the new weights; then it also announces
    their version. It commits a step after a checkpoint of prime-rl includes it. Restart a process that dies: the bridge
    continues at the trainer's step, and a trainer that resumes from its checkpoint gets the following steps again. The
    final weights were trained on each mini-batch once.

    gristmill: the run, which must exist with `layout: packed` and `loss_reduction: none`.
    output_dir: prime-rl's run directory, the `output_dir` of its trainer.
    dp_size: prime-rl's number of data-parallel ranks.
    checkpoint_dir: prime-rl's checkpoints: `ckpt.output_dir` if it is set, else `output_dir / "checkpoints"`. None: it
        writes no checkpoints, and steps are committed when they are acknowledged.
    resume_step: the checkpoint from which prime-rl resumes; None: the newest complete checkpoint.
    transport: by default `Files`.

        output = Path("outputs/my-run")
        gristmill = Gristmill("127.0.0.1:50051", "my-run")
        Bridge(gristmill, output, dp_size=8, checkpoint_dir=output / "checkpoints").run()
    """

    def __init__(
        self,
        gristmill: Gristmill,
        output_dir: Path,
        *,
        dp_size: int,
        checkpoint_dir: Path | None,
        resume_step: int | None = None,
        transport: Transport | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        check_version("prime-rl", "prime-rl", ["0.8"])
        self._gristmill, self._output_dir, self._dp_size = gristmill, output_dir, dp_size
        self._checkpoint_dir, self._resume_step = checkpoint_dir, resume_step
        self._transport = transport or Files(output_dir, dp_size)
        self._encoding = encoding or Encoding()
        self._stopped = Event()

    def run(self) -> None:
        """Train the run to its end. Return after its last step was trained (and is in a checkpoint, if prime-rl writes
        checkpoints), or after `stop`. Raises InvalidArgumentError for a run that prime-rl cannot train."""
        columns = self._columns()
        while not self._stopped.is_set():
            try:
                self._transport.begin(self._stopped.is_set)
                if not self._stopped.is_set():
                    self._train(columns)
                return
            except TrainerRestartedError:
                _log.info("prime-rl's trainer restarted; continuing from its checkpoint")
                self._resume_step = None
            except StoppedError:
                return

    def stop(self) -> None:
        """Make `run` return soon. May be called from any thread or signal handler."""
        self._stopped.set()

    def _train(self, columns: list[str]) -> None:
        trainer = Trainer(
            Steps(self._output_dir / "broadcasts", BROADCAST_MARK),
            None if self._checkpoint_dir is None else Steps(self._checkpoint_dir, CHECKPOINT_MARK),
            self._resume_step,
        )
        with (
            ThreadPoolExecutor(1) as thread,
            # The session is closed first, which ends the thread's wait.
            RunSession(self._gristmill, None, dp_size=self._dp_size, auto_commit=False, columns=columns) as run,
        ):
            ledger = Ledger(self._output_dir / LEDGER)
            Session(run, self._transport, trainer, ledger, self._encoding, self._stopped).train(thread)

    def _columns(self) -> list[str]:
        """Check that prime-rl can train the run, and return the declared columns that it uses."""
        address, run = self._gristmill.address, self._gristmill.run
        with RolloutClient(address, run, timeout_s=self._gristmill.timeout_s) as client:
            config = client.status().config
        for name, needed, why in (PACKED, UNREDUCED):
            if config[name] != needed:
                raise InvalidArgumentError(
                    f"run {run!r}: {name} is {config[name]}, but {why}; create the run with {name}: {needed}"
                )
        columns = config["columns"]
        check_columns(columns)
        return [column["name"] for column in columns if column["name"] in COLUMNS]
