"""TRL's `GRPOTrainer` on batches that the service schedules and scores.

The adapter overrides methods of TRL. `get_train_dataloader` returns one shard per optimizer step. `training_step`
trains a shard's micro-batches with TRL's own step and loss. `_calculate_rewards` stores the rewards of generated
samples. Generation, logging, checkpoints and evaluation are TRL's.
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

from gristmill import FailedPreconditionError, InvalidArgumentError, Shard
from gristmill.adapters._core.checkpoint import read_states
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.versions import check_version
from gristmill.adapters.trl._generations import Generations
from gristmill.adapters.trl._inputs import LOSS_WEIGHT, Inputs, Normalizer, tokens_per_step, training_inputs
from gristmill.adapters.trl._logprobs import write_columns
from gristmill.adapters.trl._prompts import Prompts
from gristmill.adapters.trl._session import Session
from gristmill.adapters.trl._settings import loss_columns, run_settings, steps_per_batch


class GristmillGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` with an additional argument: the run that it trains.

    gristmill: the run, and whether TRL or workers sample. With workers, `reward_funcs` and `train_dataset` may be
        omitted.

    Raises InvalidArgumentError for a `GRPOConfig` that a run cannot follow, and UnsupportedError for a version of TRL
    that was not tested, before a model is loaded.
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
        check_version("TRL", "trl", ["1.16"])
        if args is not None:
            run_settings(args, gristmill, dp_size=args.world_size)
            args = copy(args)
        if gristmill.rollouts == "workers":
            reward_funcs = _no_rewards if reward_funcs is None else reward_funcs
            train_dataset = Dataset.from_dict({"prompt": [""]}) if train_dataset is None else train_dataset
        elif train_dataset is not None and not isinstance(train_dataset, Dataset):
            raise InvalidArgumentError(
                f"train_dataset is a {type(train_dataset).__name__}, which cannot be resumed from a checkpoint; pass a "
                "datasets.Dataset"
            )
        super().__init__(model, reward_funcs, args, train_dataset, *more, **named)
        self.gristmill = gristmill
        dp_size = self.accelerator.num_processes
        pad_token_id = self._tokenizer.pad_token_id
        self.run_settings = run_settings(self.args, gristmill, dp_size=dp_size, pad_token_id=pad_token_id)
        self._columns = loss_columns(self.args, gristmill)
        self._steps_per_batch = steps_per_batch(self.args, dp_size)
        self._trl_accumulation: int = self.args.gradient_accumulation_steps
        # `Trainer` treats a shard as a batch, which is one optimizer step. The service stores the position.
        self.args.gradient_accumulation_steps, self.args.ignore_data_skip = 1, True
        self._session: Session | None = None
        self._prompt_sampler: Any = None
        self._rewards: torch.Tensor | None = None
        self._shard: Shard | None = None
        self._tokens_per_step = 0.0
        self._normalizer = Normalizer(
            self.args.loss_type,
            self.args.steps_per_generation,
            dp_size,
            is_scaled=self.run_settings.get("loss_reduction", "none") != "none",
        )
        self.add_callback(_Steps(self))

    # Each `train()` has its own session.

    @property
    def session(self) -> Session:
        if self._session is None:
            raise FailedPreconditionError(f"run {self.gristmill.run!r}: the trainer is connected only within train()")
        return self._session

    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: Any = None, **named: Any) -> Any:
        states = None if resume_from_checkpoint is None else read_states(resume_from_checkpoint)
        self._session = Session(
            self.gristmill,
            self.run_settings,
            self.accelerator,
            auto_commit=self.args.save_strategy == SaveStrategy.NO,
        )
        try:
            self._session.resume(states, only_new_run=self.gristmill.rollouts != "workers")
            return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **named)
        finally:
            self._session.close()
            self._session = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        saved = self.session.save_checkpoint(directory)
        super()._save_checkpoint(model, trial)
        self.session.commit(saved)

    def publish_weights(self) -> None:
        """Publish and announce the initial weights, or the weights after a batch."""
        version = self.session.position.batch
        if self.gristmill.publish_weights is not None:
            self.gristmill.publish_weights(self, version)
        if self.gristmill.publish_weights is not None or self.gristmill.rollouts != "workers":
            self.session.announce(version)

    def end_step(self) -> bool:
        """Acknowledge the shard of the last optimizer step. Return whether a checkpoint is needed now."""
        assert self._shard is not None
        self._shard.ack()
        if self.session.position.batch == self._shard.position.batch:
            return False
        self.publish_weights()
        return self.session.needs_commit(self.run_settings["train_batch_size"])

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of rows per optimizer step, for `Trainer`'s log."""
        return int(super().get_total_train_batch_size(args)) * self._trl_accumulation

    # Batches.

    def get_train_dataloader(self) -> _Shards:
        """Return one shard per optimizer step. Not prepared by accelerate, which would open shards too early."""
        if self.gristmill.rollouts == "workers":
            return _Shards(self._submitted)
        loader = super().get_train_dataloader()
        assert self._prompt_sampler is not None
        prompts = Prompts(loader, self._prompt_sampler)
        return _CountedShards(lambda: self._generated(prompts), len(prompts) * self._steps_per_batch)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Return TRL's sampler, which must not repeat a generation's prompts for each step that trains them."""
        self._prompt_sampler = super()._get_train_sampler(dataset)
        self._prompt_sampler.repeat_count = 1
        return self._prompt_sampler

    def _submitted(self) -> Iterator[Shard]:
        """Yield shards of the workers' rollouts until the end of the run."""
        for batches in self.session.batches():
            self._log_rewards(batches["policy"])
            yield from self._mini_batches(batches["policy"])
        self.control.should_training_stop = True

    def _generated(self, prompts: Prompts) -> Iterator[Shard]:
        """Yield the shards of an epoch. Generate each batch before it is trained."""
        generations = self._new_generations()
        for inputs in prompts.batches(self.session.position.batch):
            position = self.session.position
            is_generated = self._generate_batch(generations, position, inputs)
            if (batches := self.session.next_batch()) is None:
                self.control.should_training_stop = True
                return
            if not is_generated:
                self._log_rewards(batches["policy"])
            yield from self._mini_batches(batches["policy"])

    def _generate_batch(self, generations: Generations, position: Any, inputs: Any) -> bool:
        """Let TRL generate a batch and submit it, unless the run has it from an earlier start of the trainer. Return
        whether it was generated. Each batch has its own seed, so that later batches are the same in both cases.

        inputs: this rank's rows.
        """
        number = position.batch
        if position.epoch or position.mini_batch:
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
        """Set the arguments that TRL's generation reads. From the accumulation steps, TRL infers whether weights change
        before a row is trained. The run masks truncated completions; if TRL did it, their ends would be unknown."""
        self.args.gradient_accumulation_steps, self.mask_truncated_completions = self._trl_accumulation, False
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps = 1
            self.mask_truncated_completions = self.args.mask_truncated_completions

    def _seed(self, batch: int) -> None:
        set_seed(self.args.seed + batch * self.accelerator.num_processes, device_specific=True)

    def _calculate_rewards(self, *args: Any, **named: Any) -> torch.Tensor:
        self._rewards = super()._calculate_rewards(*args, **named)
        return self._rewards

    def _own_rewards(self, rows: int) -> torch.Tensor:
        """Return this rank's rewards, (rows,): the weighted sums of the reward functions; NaN without a score."""
        assert self._rewards is not None
        first = rows * self.accelerator.process_index
        scores = self._rewards[first : first + rows]
        total: torch.Tensor = (scores * self.reward_weights.to(scores.device)).nansum(1)
        return total.masked_fill(scores.isnan().all(1), torch.nan)

    def _mini_batches(self, batch: Any) -> Iterator[Shard]:
        if batch.awaits:
            write_columns(self, self.session, batch)
        for name, value in self.session.metrics().items():
            self._metrics["train"][name].append(value)
        self._tokens_per_step = tokens_per_step(batch.plan)
        for self._shard in batch.mini_batches():
            yield self._shard

    def _log_rewards(self, batch: Any) -> None:
        """Log TRL's metrics of a generation for rollouts that TRL did not generate now."""
        metrics, logged = batch.plan["metrics"], self._metrics["train"]
        self.state.num_input_tokens_seen += metrics.get("tokens", 0)
        logged["num_tokens"] = [self.state.num_input_tokens_seen]
        if "score_mean" in metrics:
            logged["reward"].append(metrics["score_mean"])
            logged["completions/mean_length"].append(metrics["response_length_mean"])

    # An optimizer step.

    def training_step(self, model: Any, inputs: Shard, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute a shard's gradients and return its loss. Calls TRL's step for each micro-batch, like `Trainer` with
        gradient accumulation."""
        count = len(inputs.metadata["micro_batches"])
        # TRL logs the time of a step after the accumulated steps.
        self._step, self.current_gradient_accumulation_steps = 0, count
        losses = []
        micro_batches = training_inputs(inputs, self._columns, self._normalizer, self._tokens_per_step)
        for index, micro in enumerate(micro_batches, 1):
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
        """Return a micro-batch unchanged. For evaluation, let TRL generate."""
        return generation_batch if self.model.training else super()._prepare_inputs(generation_batch)

    def _compute_loss(self, model: Any, inputs: Inputs) -> torch.Tensor:
        with _uneven_rows(self.accelerator):
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        weight: float = inputs.get(LOSS_WEIGHT, 1.0)
        return loss * weight


class _Shards:
    """Replaces the data loader, which `Trainer` iterates once per epoch."""

    def __init__(self, epoch: Callable[[], Iterator[Shard]]) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Shard]:
        return self._epoch()


class _CountedShards(_Shards):
    """Shards with a known number per epoch, which follows from the data set."""

    def __init__(self, epoch: Callable[[], Iterator[Shard]], count: int) -> None:
        super().__init__(epoch)
        self._count = count

    def __len__(self) -> int:
        return self._count


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Calls the trainer between an optimizer step and the checkpoint, for which TRL has no method to override."""

    def __init__(self, trainer: GristmillGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.publish_weights()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save |= self._trainer.end_step()
        return control


@contextmanager
def _uneven_rows(accelerator: Any) -> Iterator[None]:
    """Let `gather` accept one number per row from ranks with different numbers of rows, for TRL's clip ratios. Missing
    numbers are NaN, which TRL ignores in minima and maxima."""
    gather = accelerator.gather

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1:
            tensor = accelerator.pad_across_processes(tensor, pad_index=torch.nan)
        result: torch.Tensor = gather(tensor)
        return result

    accelerator.gather = gathered
    try:
        yield
    finally:
        del accelerator.gather


def _no_rewards(prompts: list[Any], **_: Any) -> list[float]:
    """Replaces the reward function that TRL requires, because workers compute rewards."""
    return [0.0] * len(prompts)
