"""TRL's `GRPOTrainer`, whose batches gristmill schedules and scores.

The seams are TRL's: `get_train_dataloader` gives shards, one an optimizer step; `training_step` trains a shard's
micro-batches one after another with TRL's own step and loss; `_calculate_rewards` tells the rewards of what TRL
generated. All else, generation, logging, checkpoints and evaluation among it, is TRL's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, set_seed
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from trl import GRPOTrainer

from gristmill import Batch, FailedPreconditionError, InvalidArgumentError, Shard
from gristmill._wire.addresses import Position
from gristmill.adapters.trl import _settings
from gristmill.adapters.trl._generations import Generations
from gristmill.adapters.trl._inputs import LOSS_WEIGHT, Inputs, Normaliser, tokens_a_step, training_inputs
from gristmill.adapters.trl._logprobs import write_columns
from gristmill.adapters.trl._options import Gristmill
from gristmill.adapters.trl._prompts import Prompts
from gristmill.adapters.trl._session import Session


class GristmillGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` with the same arguments and one more: which run it trains.

    gristmill: the run, and who makes its rollouts. Where workers do, `reward_funcs` and `train_dataset` may be left
        out.

    Raises InvalidArgumentError for what of `GRPOConfig` the service has no equal for, saying what to set instead,
    before a model is loaded.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *more: Any,
        gristmill: Gristmill,
        **named: Any,
    ) -> None:
        if args is not None:
            _settings.check(args, gristmill)
            args = copy(args)
        if gristmill.rollouts == "workers":
            reward_funcs = _scored_by_workers if reward_funcs is None else reward_funcs
            train_dataset = Dataset.from_dict({"prompt": [""]}) if train_dataset is None else train_dataset
        elif train_dataset is not None and not isinstance(train_dataset, Dataset):
            raise InvalidArgumentError(
                f"train_dataset is a {type(train_dataset).__name__}, which cannot be continued where a checkpoint left "
                "it; give a datasets.Dataset"
            )
        super().__init__(model, reward_funcs, args, train_dataset, *more, **named)
        self.gristmill = gristmill
        self.run_settings = _settings.run_settings(self.args, gristmill, self._tokenizer.pad_token_id)
        self._columns = _settings.loss_columns(self.args, gristmill)
        self._steps_a_batch = _settings.steps_a_batch(self.args)
        self._trl_accumulation: int = self.args.gradient_accumulation_steps
        # A shard is what `Trainer` takes for a batch, and one is an optimizer step; the service knows where to go on.
        self.args.gradient_accumulation_steps, self.args.ignore_data_skip = 1, True
        self._session: Session | None = None
        self._prompt_sampler: Any = None
        self._rewards: torch.Tensor | None = None
        self._shard: Shard | None = None
        self._tokens_a_step = 0.0
        self._normaliser = Normaliser(
            self.args.loss_type,
            self.args.steps_per_generation,
            self.accelerator.num_processes,
            is_scaled=self.run_settings.get("loss_reduction", "none") != "none",
        )
        self.add_callback(_Steps(self))

    # A session lasts as long as a `train()`.

    @property
    def session(self) -> Session:
        if self._session is None:
            raise FailedPreconditionError(f"run {self.gristmill.run!r}: the trainer is connected only within train()")
        return self._session

    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: Any = None, **named: Any) -> Any:
        self._session = Session(
            self.gristmill,
            self.run_settings,
            self.accelerator,
            checkpoint=resume_from_checkpoint,
            auto_commit=self.args.save_strategy == SaveStrategy.NO,
        )
        try:
            return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **named)
        finally:
            self._session.close()
            self._session = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        saved = self.session.save(directory)
        super()._save_checkpoint(model, trial)
        self.session.commit(saved)

    def begun(self) -> None:
        """Called when the weights are those that training begins with."""
        if (
            self.gristmill.rollouts == "trainer"
            and self.state.global_step == 0
            and self.session.position != Position(0)
        ):
            raise FailedPreconditionError(
                f"run {self.gristmill.run!r} is at {self.session.position}, and training begins anew; resume from its "
                "checkpoint (resume_from_checkpoint=True), or name another run"
            )
        self._publish_weights()

    def stepped(self) -> bool:
        """Called when the optimizer has made its step on a shard; returns whether a checkpoint has to be made now."""
        assert self._shard is not None
        self._shard.ack()
        if self.session.position.batch == self._shard.position.batch:
            return False
        self._publish_weights()
        return self.session.needs_commit(self.run_settings["train_batch_size"])

    def _publish_weights(self) -> None:
        version = self.session.position.batch
        if self.gristmill.publish_weights is not None:
            self.gristmill.publish_weights(self, version)
        if self.gristmill.publish_weights is not None or self.gristmill.rollouts == "trainer":
            self.session.announce(version)

    def get_total_train_batch_size(self, args: Any) -> int:
        """The rows of an optimizer step, for `Trainer`'s log."""
        return int(super().get_total_train_batch_size(args)) * self._trl_accumulation

    # What is trained.

    def get_train_dataloader(self) -> _Shards:
        """One shard an optimizer step. Not prepared by accelerate, which would open one ahead of its turn."""
        if self.gristmill.rollouts == "workers":
            return _Shards(self._submitted)
        loader = super().get_train_dataloader()
        assert self._prompt_sampler is not None
        prompts = Prompts(loader, self._prompt_sampler)
        return _CountedShards(lambda: self._generated(prompts), len(prompts) * self._steps_a_batch)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's, which repeats a generation's prompts for every step that trains it: here it is wanted once."""
        self._prompt_sampler = super()._get_train_sampler(dataset)
        self._prompt_sampler.repeat_count = 1
        return self._prompt_sampler

    def _submitted(self) -> Iterator[Shard]:
        """Shards of what workers submitted, to the end of the run."""
        for batch in self.session.batches():
            self._log_rewards(batch)
            yield from self._mini_batches(batch)
        self.control.should_training_stop = True

    def _generated(self, prompts: Prompts) -> Iterator[Shard]:
        """Shards of an epoch, each batch generated as its turn comes."""
        batches, generations = self.session.batches(), self._new_generations()
        for inputs in prompts.batches(self.session.position.batch):
            position = self.session.position
            is_generated = self._generate_batch(generations, position, inputs)
            if (batch := next(batches, None)) is None:
                self.control.should_training_stop = True
                return
            if not is_generated:
                self._log_rewards(batch)
            yield from self._mini_batches(batch)

    def _generate_batch(self, generations: Generations, position: Position, inputs: Any) -> bool:
        """Has TRL generate a batch and submits it, unless the run has it from before the trainer was killed; returns
        whether it was generated. Random numbers are a batch's own, so that the batches after are the same either way.

        inputs: of this rank's rows.
        """
        number = position.batch
        if position != Position(number):
            return False
        self._seed(number)
        self.model_wrapped.train()
        wanted = generations.begin(number, len(inputs))
        if wanted:
            with self._as_trl_generates():
                output = self._generate_and_score_completions(inputs)
            generations.submit(number, wanted, output, self._own_rewards(len(inputs)), version=number)
        self._seed(number)
        return bool(wanted)

    def _new_generations(self) -> Generations:
        return Generations(
            self.session.rollouts,
            self.accelerator,
            samples=self.num_generations,
            columns=[column["name"] for column in self.run_settings.get("columns", ())],
            keeps_sampling_logprobs="sampling_per_token_logps" in self._columns,
            end_tokens=[*self.eos_token_ids, self._tokenizer.pad_token_id],
            attempt=self.session.incarnation,
        )

    @contextmanager
    def _as_trl_generates(self) -> Iterator[None]:
        """TRL asks its accumulation whether the weights change before a row is trained. Completions that were cut off
        stay whole: the run masks them, and TRL would leave no trace of where they end."""
        self.args.gradient_accumulation_steps, self.mask_truncated_completions = self._trl_accumulation, False
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps = 1
            self.mask_truncated_completions = self.args.mask_truncated_completions

    def _seed(self, batch: int) -> None:
        set_seed(self.args.seed + batch * self.accelerator.num_processes, device_specific=True)

    def _calculate_rewards(self, *args: Any, **named: Any) -> torch.Tensor:
        found: torch.Tensor = super()._calculate_rewards(*args, **named)
        self._rewards = found
        return found

    def _own_rewards(self, rows: int) -> torch.Tensor:
        """The rewards of this rank's rows, (rows,): the weighted sum of what functions gave it, NaN where none did."""
        assert self._rewards is not None
        first = rows * self.accelerator.process_index
        found = self._rewards[first : first + rows]
        total: torch.Tensor = (found * self.reward_weights.to(found.device)).nansum(1)
        return total.masked_fill(found.isnan().all(1), torch.nan)

    def _mini_batches(self, batch: Batch) -> Iterator[Shard]:
        if batch.awaits:
            write_columns(self, self.session, batch)
        for name, value in batch.plan["metrics"].items():
            self._metrics["train"][f"gristmill/{name}"].append(value)
        self._tokens_a_step = tokens_a_step(batch.plan)
        for self._shard in batch.mini_batches():
            yield self._shard

    def _log_rewards(self, batch: Batch) -> None:
        """What TRL logs of rollouts as it generates them, where it did not."""
        metrics, logged = batch.plan["metrics"], self._metrics["train"]
        self.state.num_input_tokens_seen += metrics.get("tokens", 0)
        logged["num_tokens"] = [self.state.num_input_tokens_seen]
        if "score_mean" in metrics:
            logged["reward"].append(metrics["score_mean"])
            logged["completions/mean_length"].append(metrics["response_length_mean"])

    # An optimizer step.

    def training_step(self, model: Any, inputs: Shard, num_items_in_batch: Any = None) -> torch.Tensor:
        """The gradients of a shard, and its loss: TRL's step for each micro-batch, as `Trainer` makes it for several
        batches that accumulate."""
        count = len(inputs.metadata["micro_batches"])
        # TRL logs a step's time when it has made as many as accumulate.
        self._step, self.current_gradient_accumulation_steps = 0, count
        losses = []
        for index, micro in enumerate(training_inputs(inputs, self._columns, self._normaliser, self._tokens_a_step), 1):
            self.accelerator.gradient_state._set_sync_gradients(index == count)
            with self._accumulating(model, is_last=index == count):
                losses.append(super().training_step(model, micro, num_items_in_batch))
        return torch.stack(losses).sum()

    def _accumulating(self, model: Any, *, is_last: bool) -> AbstractContextManager[None]:
        syncs_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if is_last or syncs_each or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return nullcontext()
        waiting: AbstractContextManager[None] = self.accelerator.no_sync(model)
        return waiting

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """A micro-batch is ready as it is; for evaluation TRL generates."""
        return generation_batch if self.model.training else super()._prepare_inputs(generation_batch)

    def _compute_loss(self, model: Any, inputs: Inputs) -> torch.Tensor:
        with _uneven_rows(self.accelerator):
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        weight: float = inputs.get(LOSS_WEIGHT, 1.0)
        return loss * weight


class _Shards:
    """What `Trainer` iterates in place of a data loader, once an epoch."""

    def __init__(self, epoch: Callable[[], Iterator[Shard]]) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Shard]:
        return self._epoch()


class _CountedShards(_Shards):
    """With as many an epoch as the data set gives."""

    def __init__(self, epoch: Callable[[], Iterator[Shard]], count: int) -> None:
        super().__init__(epoch)
        self._count = count

    def __len__(self) -> int:
        return self._count


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Tells the trainer of its own steps: between the optimizer's and the checkpoint's there is no other seam."""

    def __init__(self, trainer: GristmillGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.begun()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save |= self._trainer.stepped()
        return control


@contextmanager
def _uneven_rows(accelerator: Any) -> Iterator[None]:
    """Within it `gather` takes one number a row of ranks with different rows, as TRL's clip ratios are: NaN stands for
    those that a rank lacks, which TRL leaves out of minima and maxima."""
    gather = accelerator.gather

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1:
            tensor = accelerator.pad_across_processes(tensor, pad_index=torch.nan)
        found: torch.Tensor = gather(tensor)
        return found

    accelerator.gather = gathered
    try:
        yield
    finally:
        del accelerator.gather


def _scored_by_workers(prompts: list[Any], **_: Any) -> list[float]:
    """A reward function for TRL, which wants one; nothing is scored here."""
    return [0.0] * len(prompts)
