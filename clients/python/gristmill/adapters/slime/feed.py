"""A run as slime's loop uses it: samples go in, a batch of train data comes out for each rollout of slime's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gristmill import AllRanksClient, RolloutClient, WholeBatch
from gristmill.adapters._ledger import Ledger
from gristmill.adapters.slime.rank_data import Data, rank_data
from gristmill.adapters.slime.settings import ADVANTAGE_FUNCTION, Options, columns_of, image_columns, run_settings
from gristmill.converters import from_slime
from gristmill.errors import AlreadyExistsError, FailedPreconditionError

_log = logging.getLogger("gristmill")

LEDGER = "rollout/gristmill.json"
"""In slime's `--save`, beside the state of its data source."""


class Feed:
    """Owns the clients of the run, and knows which batch is which rollout of slime's.

    A batch is acknowledged when it is handed over, since slime's asynchronous loop asks for the next one before it is
    trained. It is committed when a checkpoint has it; without checkpoints, when the next one is asked for.

    args, parallel: as `run_settings` has them. first: the rollout that slime begins with, after its checkpoint's.
    """

    def __init__(self, args: Any, parallel: Mapping[str, int], first: int) -> None:
        self.options = Options.of(args)
        self._args = args
        settings = run_settings(args, parallel, self.options)
        self._columns = [column.name for column in columns_of(settings) if column.source == "rollout"]
        self._images = image_columns(settings)
        self._per_token = args.custom_advantage_function_path == ADVANTAGE_FUNCTION
        self._rollouts = RolloutClient(self.options.address, self.options.run)
        self._create_run(settings)
        self._client = AllRanksClient(
            self.options.address, self.options.run, dp_size=settings["dp_size"], auto_commit=False
        )
        self._ledger = None if args.save_interval is None else Ledger(Path(args.save) / LEDGER)
        self._saved: int | None = None
        self._resume(first - 1)
        self._batches = iter(self._client)

    def _create_run(self, settings: dict[str, Any]) -> None:
        try:
            warnings = self._rollouts.create_run(settings)
        except AlreadyExistsError:
            # It may be of a trainer with other ranks, for which what is not trained is cut anew.
            ranks = self._rollouts.status().config["dp_size"]
            warnings = self._rollouts.create_run(settings | {"dp_size": ranks})
        for warning in warnings:
            _log.warning("run %r: %s", self.options.run, warning)

    def _resume(self, trained: int) -> None:
        """Puts the run to where slime's checkpoint is. trained: the last rollout that it has, -1 for none."""
        self._client.load_state_dict({})
        state = self._client.state_dict()
        if self.options.rollouts == "slime":
            self._drop_unsealed()
        if self._ledger is None:
            return
        step = self._ledger.step_at(state)
        if step is None:
            self._ledger.begin(trained, state)
            return
        if step > trained:
            raise FailedPreconditionError(
                f"run {self.options.run!r} is committed up to rollout {step}, and slime resumes after rollout "
                f"{trained}: the rollouts between them are freed. Resume from a checkpoint of rollout {step} or later, "
                f"or remove {self._ledger.path} to go on after rollout {trained} with other samples"
            )
        for number, batch in zip(range(step + 1, trained + 1), self._client, strict=False):
            # The checkpoint has it.
            batch.ack()
            self._ledger.record(number, self._client.state_dict())

    def _drop_unsealed(self) -> None:
        """Of a start that died, samples that are in no batch are sampled again: slime's data source went back, too."""
        for group in self._rollouts.groups():
            if not group.is_consumed:
                self._rollouts.abort_group(group.uid, round=group.round, reason="slime began again")
        # The numbers of slime's groups are its own in each start.
        self._start = self._rollouts.status().models["policy"].incarnation

    def begin(self, rollout_id: int) -> None:
        """Says that slime's next rollout begins, from the weights that all before it made."""
        if self._ledger is None:
            self._client.commit()
        try:
            self._client.announce_policy_version(rollout_id)
        except FailedPreconditionError:
            _log.info("policy version %d is trained again: rollout workers were told of a later one", rollout_id)

    @property
    def has_batch(self) -> bool:
        """Whether the next batch is there already: it was sampled before slime went back to its checkpoint."""
        return self._rollouts.status().batches_sealed > self._client.position.batch

    def submit(self, samples: Iterable[Any], rollout_id: int) -> None:
        """Sends what slime's rollout function returned, flat or nested."""
        rows = from_slime(
            samples,
            reward_key=self._args.reward_key,
            policy_version=rollout_id,
            columns=self._columns,
            ignore=self.options.ignore,
        )
        self._rollouts.submit({**row, "uid": f"{self._start}/{rollout_id}/{row['uid']}"} for row in rows)

    def next(self, rollout_id: int) -> list[Data]:
        """Waits for the next batch, and returns the train data of each rank.

        Raises FailedPreconditionError where the run is finished, and BatchFailedError for a batch that cannot be made.
        """
        batch = next(self._batches, None)
        if batch is None:
            raise FailedPreconditionError(
                f"run {self.options.run!r} is finished after {rollout_id} rollouts; give --num-rollout {rollout_id}"
            )
        ranks = self._data(batch)
        batch.ack()
        if self._ledger is not None:
            self._ledger.record(rollout_id, self._client.state_dict())
        return ranks

    def _data(self, batch: WholeBatch) -> list[Data]:
        ranks = rank_data(list(batch.epoch()), images=self._images, per_token=self._per_token)
        padding = sum(row < 0 for rank in ranks for row in rank["sample_indices"])
        if padding and self._args.calculate_per_token_loss:
            _log.warning(
                "batch %d has %d padding rows; slime counts one token of each in its mean over tokens",
                batch.number,
                padding,
            )
        return ranks

    def saved(self, rollout_id: int) -> None:
        """Says that slime saved a checkpoint after a rollout. One that is written in the background is complete when
        the next is saved."""
        if self._ledger is None:
            return
        is_complete = not self._args.async_save or rollout_id == self._args.num_rollout - 1
        complete = rollout_id if is_complete else self._saved
        self._saved = rollout_id
        if complete is not None:
            self._client.commit(self._ledger.of(complete))
            self._ledger.forget_before(complete)

    def finish(self) -> None:
        """Says that slime's loop has ended: without checkpoints its last batch is committed."""
        if self._ledger is None:
            self._client.commit()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
        self._rollouts.close()
