"""Feeds prime-rl's trainer with a run's mini-batches: one of its steps is one mini-batch."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from gristmill import AllRanksClient, RolloutClient
from gristmill._wire.column_spec import specs_of
from gristmill.adapters._ledger import Ledger
from gristmill.adapters.prime_rl.micro_batches import COLUMNS, Encoding, check_columns
from gristmill.adapters.prime_rl.run_directory import BROADCAST_MARK, CHECKPOINT_MARK, LEDGER, Steps
from gristmill.adapters.prime_rl.session import BeganAnewError, Session, StoppedError, Trainer
from gristmill.adapters.prime_rl.transports import Files, Transport
from gristmill.errors import InvalidArgumentError

_log = logging.getLogger("gristmill")


class Bridge:
    """Hands a run's mini-batches to prime-rl's trainer, in the place of prime-rl's orchestrator.

    A step is sent, and acknowledged when the trainer has broadcast the weights that it made of it, whose version is
    announced. It is committed when a checkpoint of prime-rl has it. Whatever dies is started again: a bridge goes on
    where the trainer is, and a trainer that goes back to its checkpoint is given the steps after that again, the same
    ones. Each mini-batch is trained once by the weights that go on living.

    address, run: of the service. The run has `layout: packed` and `loss_reduction: none`.
    output_dir: prime-rl's run directory, its trainer's `output_dir`.
    dp_size: prime-rl's data-parallel ranks.
    checkpoint_dir: prime-rl's checkpoints, `output_dir / "checkpoints"` unless it has a `ckpt.output_dir`. None: it
        writes none, so that steps are committed as they are acknowledged.
    resume_step: the checkpoint that prime-rl is told to resume from; None: the newest that is complete.
    transport: Files, unless given.

        output = Path("outputs/my-run")
        Bridge("127.0.0.1:50051", "my-run", output, dp_size=8, checkpoint_dir=output / "checkpoints").run()
    """

    def __init__(
        self,
        address: str,
        run: str,
        output_dir: Path,
        *,
        dp_size: int,
        checkpoint_dir: Path | None,
        resume_step: int | None = None,
        transport: Transport | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        self._address, self._run, self._output_dir, self._dp_size = address, run, output_dir, dp_size
        self._checkpoint_dir, self._resume_step = checkpoint_dir, resume_step
        self._transport = transport or Files(output_dir, dp_size)
        self._encoding = encoding or Encoding()
        self._stopped = Event()

    def run(self) -> None:
        """Returns when the run is finished, its last step trained and, where there are checkpoints, in one; or after
        `stop`. Raises InvalidArgumentError for a run that prime-rl cannot train, and what the service refuses."""
        columns = self._columns()
        while not self._stopped.is_set():
            try:
                self._transport.begin(self._stopped.is_set)
                if not self._stopped.is_set():
                    self._train(columns)
                return
            except BeganAnewError:
                _log.info("prime-rl's trainer began anew: going on from its checkpoint")
                self._resume_step = None
            except StoppedError:
                return

    def stop(self) -> None:
        """Ends `run` soon; from any thread or signal handler."""
        self._stopped.set()

    def _train(self, columns: list[str]) -> None:
        trainer = Trainer(
            Steps(self._output_dir / "broadcasts", BROADCAST_MARK),
            None if self._checkpoint_dir is None else Steps(self._checkpoint_dir, CHECKPOINT_MARK),
            self._resume_step,
        )
        with (
            ThreadPoolExecutor(1) as thread,
            # Closed first, which ends what the thread waits for.
            AllRanksClient(
                self._address, self._run, dp_size=self._dp_size, auto_commit=False, columns=columns
            ) as client,
        ):
            ledger = Ledger(self._output_dir / LEDGER)
            Session(client, self._transport, trainer, ledger, self._encoding, self._stopped).train(thread)

    def _columns(self) -> list[str]:
        """The declared columns that prime-rl takes; checks that it can train the run."""
        with RolloutClient(self._address, self._run) as client:
            config = client.status().config
        for name, needed, reason in (
            ("layout", "packed", "prime-rl has all rows of a micro-batch on one axis"),
            ("loss_reduction", "none", "prime-rl divides by the trained tokens of a mini-batch itself"),
        ):
            if config[name] != needed:
                raise InvalidArgumentError(
                    f"run {self._run!r}: {name} is {config[name]}, and {reason}; create it with {name}: {needed}"
                )
        columns = specs_of(config["columns"])
        check_columns(columns)
        return [column.name for column in columns if column.name in COLUMNS]
