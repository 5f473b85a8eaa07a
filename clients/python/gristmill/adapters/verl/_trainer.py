"""verl's V1 trainer on the service's batches. verl's workers train them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils import tensordict_utils
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from gristmill import Shard
from gristmill.adapters._core.checkpoint import States, read_states
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.session import RunSession
from gristmill.adapters._core.versions import check_version
from gristmill.adapters.verl._settings import OPTIONS, WRITTEN, bypasses_old_logprobs, run_settings
from gristmill.adapters.verl._tensor_dicts import MiniBatchData, RankParts
from gristmill.adapters.verl._trained_batch import TrainedBatch
from gristmill.adapters.verl._workers import LAST_OF_BATCH, MiniBatchActorWorker, MiniBatchWorker
from gristmill.torch import Jagged

# The fields to send to workers, if they exist: for a forward pass, and for an update.
_INFERRED = ("input_ids", "position_ids", "loss_mask")
_TRAINED = (
    *("input_ids", "position_ids", "prompts", "responses", "loss_mask", "response_mask"),
    *("advantages", "returns", "old_log_probs", "ref_log_prob", "values"),
)
_NO_SERVERS = "gristmill"
RolloutReplicaRegistry.register(_NO_SERVERS, lambda: RolloutReplica)


class RunFinishedError(Exception):
    """The run has no more batches. Training ends, as after the last step."""


class NoAgentLoops:
    """Replaces verl's agent loops, because workers send the rollouts."""

    @classmethod
    def create(cls, **parts: Any) -> NoAgentLoops:
        return cls()


class _NoPrompts:
    """Replaces verl's data loader, the state of which is in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@register_trainer("gristmill")
class GristmillTrainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer for a run: `trainer.v1.trainer_mode=gristmill`, with the options in `trainer.v1.gristmill`.

    The service computes advantages, and plans batches, mini-batches, micro-batches and the rows of each rank. verl
    computes log-probabilities, values and updates, with its workers, losses, optimizers, checkpoints and loggers.
    Workers send the rollouts, so no inference engine is started. A policy version is announced after a checkpoint with
    its weights was saved.
    """

    # A setting of verl: start no inference engines next to the workers that train.
    _enable_hybrid_replicas = False

    def __init__(self, config: DictConfig) -> None:
        check_version("verl", "verl", ["0.9.1"])
        self._gristmill = Gristmill.of(config.trainer.v1.get("gristmill"), OPTIONS)
        # Refuse unsupported settings before workers are started. The number of ranks is known only afterwards.
        run_settings(config, self._gristmill, dp_size=1)
        with open_dict(config):
            rollout = config.actor_rollout_ref.rollout
            rollout.agent.agent_loop_manager_class = f"{__name__}.{NoAgentLoops.__name__}"
            # The manager of inference servers reads their kind and nodes even if there are none to start.
            rollout.name, rollout.nnodes = _NO_SERVERS, max(1, rollout.nnodes)
        super().__init__(config)
        # verl's queue is empty in this mode, and checkpoints do not need it.
        self.trainer_mode = "sync"
        self._session: RunSession | None = None

    @property
    def session(self) -> RunSession:
        assert self._session is not None, "verl calls _load_checkpoint before it trains"
        return self._session

    # verl's parts, as its configuration describes them.

    def _build_replay_buffer(self) -> None:
        """Build nothing, because the service stores the rollouts."""

    def _init_dataloader(self) -> None:
        """Load no prompts, because rollout workers have them."""
        self.total_training_steps = self.steps_per_epoch = self.config.trainer.total_training_steps
        self.train_dataloader = self.val_dataloader = _NoPrompts()
        with open_dict(self.config):
            self.config.trainer.total_epochs = 1
            for optimizer in (self.config.actor_rollout_ref.actor.optim, self.config.critic.optim):
                optimizer.total_training_steps = self.total_training_steps

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            worker = MiniBatchWorker if role is Role.Critic else MiniBatchActorWorker
            self.role_worker_mapping[role] = ray.remote(worker)

    # Checkpoints.

    def _load_checkpoint(self) -> None:
        """Load verl's checkpoint, and resume at its position in the run."""
        super()._load_checkpoint()
        states = self._saved_states()
        dp_size = max(self.actor_rollout_wg._query_dispatch_info("actor")) + 1
        pad_token_id = self.tokenizer.pad_token_id or 0
        self._session = RunSession(
            self._gristmill,
            run_settings(self.config, self._gristmill, dp_size=dp_size, pad_token_id=pad_token_id),
            dp_size=dp_size,
            auto_commit=self.config.trainer.save_freq <= 0,
        )
        self._session.resume(states)
        self._session.announce(self.global_steps)

    def _saved_states(self) -> States | None:
        """Return the states in the checkpoint; None if training starts from the beginning."""
        if not self.global_steps:
            return None
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path":
            return read_states(trainer.resume_from_path)
        return read_states(self._checkpoint_folder())

    def _checkpoint_folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _save_checkpoint(self) -> None:
        """Save verl's checkpoint with the position in the run, which is written before verl marks the checkpoint as
        the latest."""
        folder = self._checkpoint_folder()
        folder.mkdir(parents=True, exist_ok=True)
        states = self.session.save(folder)
        super()._save_checkpoint()
        self.session.commit(states)
        # The version is the number of steps that the checkpoint's weights were trained.
        self.session.announce(self.global_steps)

    # Training.

    def fit(self, agent_loop_manager: NoAgentLoops) -> None:
        try:
            super().fit(agent_loop_manager)
        except RunFinishedError:
            self.global_steps -= 1
            if self.config.trainer.save_freq > 0 and self.global_steps % self.config.trainer.save_freq:
                self._save_checkpoint()
            self.on_train_end()
            self._shutdown_dump_executor()
        finally:
            if self._session is not None:
                self._session.close()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Train one batch of the run in all its epochs. Returns a placeholder for the data in verl's queue."""
        with marked_timer("gen", timing_raw, color="red"):
            batches = self.session.next_batch()
        if batches is None:
            raise RunFinishedError
        self._batch = TrainedBatch()
        self._compute_columns(batches["policy"], timing_raw)
        if self.use_critic:
            with marked_timer("update_critic", timing_raw, color="pink"):
                metrics.update(self._update_critic(batches["critic"]))
        with marked_timer("update_actor", timing_raw, color="red"):
            metrics.update(self._update_actor(batches["policy"]))
        return KVBatchMeta(partition_id="train", keys=["gristmill"], tags=[{}])

    def _compute_columns(self, batch: Any, timing_raw: dict[str, float]) -> None:
        """Compute values of the whole batch that are needed before its first update, and write back the columns on
        which advantages depend."""
        passes = list(self._passes())
        for mini_batch in batch.forward() if passes else ():
            shards = list(mini_batch.shards.values())
            part = MiniBatchData(shards)
            computed = self._batch.computed[mini_batch.position.mini_batch] = {}
            for timer, compute in passes:
                with marked_timer(timer, timing_raw):
                    computed |= compute(part)
            if batch.awaits:
                written = {name: computed[name] for name in map(WRITTEN.__getitem__, batch.awaits)}
                self.session.write_back(batch.awaits, WRITTEN, _by_shard(part, written, shards))

    def _passes(self) -> Iterator[tuple[str, Callable[[MiniBatchData], dict[str, Jagged]]]]:
        if not bypasses_old_logprobs(self.config):
            yield "old_log_prob", self._old_log_probs
        if self.use_reference_policy:
            yield "ref", self._ref_log_probs
        if self.use_critic:
            yield "values", self._values

    def _old_log_probs(self, part: MiniBatchData) -> dict[str, Jagged]:
        squared = bool(self.config.actor_rollout_ref.actor.calculate_sum_pi_squared)
        data = self._to_infer(part, calculate_entropy=True, calculate_sum_pi_squared=squared)
        output = self.actor_rollout_wg.compute_log_prob(data)
        names = {"old_log_probs": "log_probs", "entropy": "entropy"}
        names |= {"sum_pi_squared": "sum_pi_squared"} if squared else {}
        return {name: part.of_responses(output[theirs]) for name, theirs in names.items()}

    def _ref_log_probs(self, part: MiniBatchData) -> dict[str, Jagged]:
        if self.ref_in_actor:
            data = self._to_infer(part, calculate_entropy=False, no_lora_adapter=True)
            output = self.actor_rollout_wg.compute_log_prob(data)
        else:
            output = self.ref_policy_wg.compute_ref_log_prob(self._to_infer(part, calculate_entropy=False))
        return {"ref_log_prob": part.of_responses(output["log_probs"])}

    def _values(self, part: MiniBatchData) -> dict[str, Jagged]:
        output = self.critic_wg.infer_batch(self._to_infer(part)).get()
        return {"values": part.of_responses(output["values"])}

    def _to_infer(self, part: MiniBatchData, **settings: Any) -> RankParts:
        return self._of_ranks(part, _INFERRED, {"compute_loss": False} | settings)

    def _of_ranks(self, part: MiniBatchData, names: Sequence[str], settings: dict[str, Any]) -> RankParts:
        """Return the mini-batch with the settings that verl's workers need. Its micro-batches are already planned."""
        common = {
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": part.rows_per_micro_batch,
        }
        return part.of_ranks(names, common | settings)

    def _update_critic(self, batch: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for mini_batch in batch.mini_batches():
            part = MiniBatchData(list(mini_batch.shards.values()))
            data = self._to_train(part, batch, mini_batch.position, self.config.critic)
            output = self.critic_wg.train_mini_batch(data)
            append_to_dict(metrics, tensordict_utils.get(output.get(), "metrics"))
            mini_batch.ack()
        return _reduced(metrics, "critic")

    def _update_actor(self, batch: Any) -> dict[str, Any]:
        actor, metrics = self.config.actor_rollout_ref.actor, dict[str, Any]()
        calculate_entropy = actor.calculate_entropy or actor.entropy_coeff != 0.0
        is_warming_up = self.global_steps < self.config.trainer.critic_warmup
        for mini_batch in batch.mini_batches():
            part = MiniBatchData(list(mini_batch.shards.values()))
            self._batch.add(mini_batch.position.mini_batch, part)
            if bypasses_old_logprobs(self.config):
                part.add({"old_log_probs": part["rollout_log_probs"]})
            if not is_warming_up:
                data = self._to_train(part, batch, mini_batch.position, actor, calculate_entropy=calculate_entropy)
                append_to_dict(metrics, tensordict_utils.get(self.actor_rollout_wg.update_actor(data), "metrics"))
            mini_batch.ack()
        return _reduced(metrics, "actor") if metrics else {}

    def _to_train(self, part: MiniBatchData, batch: Any, position: Any, settings: DictConfig, **more: Any) -> RankParts:
        mini_batches = len(batch) // settings.ppo_epochs
        common = {
            "global_batch_size": int(part.is_real.sum()),
            "mini_batch_size": len(part.is_real),
            "epochs": 1,
            "seed": settings.data_loader_seed,
            "dataloader_kwargs": {"shuffle": False},
            "distillation_use_topk": False,
            "distillation_only": False,
            LAST_OF_BATCH: position.epoch * mini_batches + position.mini_batch == len(batch) - 1,
        }
        return self._of_ranks(part, _TRAINED, common | more)

    def on_sample_end(self) -> None:
        """Do nothing, because no inference engine shares the accelerators."""

    def on_step_end(self) -> None:
        """Do nothing, because rollout workers load their weights from checkpoints."""

    # Metrics.

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        """Add verl's metrics of the batch without padding, and the service's metrics under `gristmill/`."""
        metrics |= {"training/global_step": global_steps, "training/epoch": epoch}
        metrics |= self._batch.metrics(
            self.config.actor_rollout_ref.actor, timing_raw, self._get_n_gpus_for_throughput()
        )
        metrics |= self.session.metrics()


def _by_shard(
    part: MiniBatchData, computed: dict[str, Jagged], shards: Sequence[Shard]
) -> Iterator[tuple[Shard, dict[str, list[torch.Tensor]]]]:
    """Split values that were computed for a mini-batch by shard."""
    of_ranks = {name: part.to_shards(values, shards) for name, values in computed.items()}
    for rank, shard in enumerate(shards):
        yield shard, {name: values[rank] for name, values in of_ranks.items()}


def _reduced(metrics: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the metrics of a batch's updates in the form in which verl logs them."""
    named = rename_dict(metrics, f"{model}/")
    named[f"perf/mfu/{model}"] = named.pop(f"{model}/mfu")
    reduced: dict[str, Any] = reduce_metrics(named)
    return reduced
