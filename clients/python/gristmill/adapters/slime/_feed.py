"""Connects slime's loop to a run: submits samples, and returns a batch of train data for each rollout of slime."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gristmill.adapters._core.checkpoint import Ledger
from gristmill.adapters._core.session import RunSession
from gristmill.adapters._core.versions import check_version
from gristmill.adapters.slime._rank_data import Data, rank_data
from gristmill.adapters.slime._settings import (
    ADVANTAGE_FUNCTION,
    image_columns,
    options_of,
    run_settings,
    sampled_columns,
)
from gristmill.converters import from_slime
from gristmill.errors import FailedPreconditionError

_log = logging.getLogger("gristmill")

LEDGER = "rollout/gristmill.json"
"""The path in slime's `--save`, next to the state of the data source."""


class Feed:
    """Connects slime's loop to the run, and maps slime's rollouts to batches.

    A batch is acknowledged when it is returned, because slime's asynchronous loop requests the next batch before it
    trains this one. It is committed when a checkpoint includes it, or without checkpoints at the next request.

    args: slime's arguments. parallel: `dp_size` and other parallel sizes that slime's train actors report. first: the
    first rollout of this start, which follows the checkpoint's rollout.
    """

    def __init__(self, args: Any, parallel: Mapping[str, int], first: int) -> None:
        check_version("slime", "slime", ["0.3"])
        self.options, self._args = options_of(args), args
        config = Namespace(**{**vars(args), "train_parallel_config": dict(parallel)})
        dp_size = parallel["dp_size"]
        settings = run_settings(config, self.options, dp_size=dp_size)
        self._columns, self._images = sampled_columns(settings), image_columns(settings)
        self._per_token = args.custom_advantage_function_path == ADVANTAGE_FUNCTION
        self._session = RunSession(self.options, settings, dp_size=dp_size, auto_commit=False)
        self._ledger = None if args.save_interval is None else Ledger(Path(args.save) / LEDGER)
        self._saved: int | None = None
        self._resume(first - 1)

    @property
    def is_sampled_by_slime(self) -> bool:
        return self.options.rollouts != "workers"

    def _state(self) -> Mapping[str, Any]:
        return self._session.states()["policy"]

    def _resume(self, trained: int) -> None:
        """Resume the run at slime's checkpoint. trained: the last rollout in it, -1 for none."""
        self._session.resume(None)
        state = self._state()
        if self.is_sampled_by_slime:
            # slime's data source also resumed at the checkpoint, so samples in no batch are sampled again.
            self._session.give_up_unsealed()
            # slime numbers its groups from 0 in each start.
            self._start = self._session.rollouts.status().models["policy"].incarnation
        if self._ledger is None:
            return
        step = self._ledger.step_at(state)
        if step is None:
            self._ledger.start(trained, state)
            return
        if step > trained:
            raise FailedPreconditionError(
                f"run {self.options.run!r} is committed up to rollout {step}, but slime resumes after rollout "
                f"{trained}, and the rollouts between are freed; resume from a checkpoint of rollout {step} or later, "
                f"or remove {self._ledger.path} to continue after rollout {trained} with other samples"
            )
        for number, batch in zip(range(step + 1, trained + 1), self._session.batches(), strict=False):
            # The checkpoint already includes this batch.
            batch["policy"].ack()
            self._ledger.record(number, self._state())

    def begin(self, rollout_id: int) -> None:
        """Report that slime starts a rollout, with weights that were trained on all earlier rollouts."""
        if self._ledger is None:
            self._session.commit()
        self._session.announce(rollout_id)

    @property
    def has_batch(self) -> bool:
        """Whether the next batch was sampled before slime resumed at its checkpoint."""
        sealed: int = self._session.rollouts.status().batches_sealed
        return sealed > self._session.position.batch

    def submit(self, samples: Iterable[Any], rollout_id: int) -> None:
        """Submit the samples that slime's rollout function returned, flat or nested."""
        rows = from_slime(
            samples,
            reward_key=self._args.reward_key,
            policy_version=rollout_id,
            columns=self._columns,
            ignore=self.options.ignore,
        )
        self._session.rollouts.submit({**row, "uid": f"{self._start}/{rollout_id}/{row['uid']}"} for row in rows)

    def next(self, rollout_id: int) -> list[Data]:
        """Wait for the next batch, and return the train data of each rank.

        Raises FailedPreconditionError at the end of the run, and BatchFailedError for a batch that cannot be built.
        """
        batches = self._session.next_batch()
        if batches is None:
            raise FailedPreconditionError(
                f"run {self.options.run!r} is finished after {rollout_id} rollouts; set --num-rollout {rollout_id}"
            )
        ranks = self._data(batches["policy"])
        batches["policy"].ack()
        if self._ledger is not None:
            self._ledger.record(rollout_id, self._state())
        return ranks

    def _data(self, batch: Any) -> list[Data]:
        shards = [list(mini_batch.shards.values()) for mini_batch in batch.epoch()]
        ranks = rank_data(shards, images=self._images, per_token=self._per_token)
        padding = sum(row < 0 for rank in ranks for row in rank["sample_indices"])
        if padding and self._args.calculate_per_token_loss:
            _log.warning(
                "batch %d has %d padding rows; slime includes one token of each in its mean over tokens",
                batch.number,
                padding,
            )
        return ranks

    def saved(self, rollout_id: int) -> None:
        """Report that slime saved a checkpoint after a rollout. A checkpoint that is written in the background is
        complete when the next one is saved."""
        if self._ledger is None:
            return
        is_complete = not self._args.async_save or rollout_id == self._args.num_rollout - 1
        complete = rollout_id if is_complete else self._saved
        self._saved = rollout_id
        if complete is not None:
            self._session.commit({"policy": self._ledger.state_after(complete)})
            self._ledger.forget_before(complete)

    def finish(self) -> None:
        """Report that slime's loop has ended. Without checkpoints, this commits the last batch."""
        if self._ledger is None:
            self._session.commit()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()
