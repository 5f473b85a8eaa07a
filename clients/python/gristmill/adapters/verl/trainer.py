"""verl's V1 trainer on the service's batches: what is scored and cut there is trained by verl's own workers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils import tensordict_utils
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from gristmill import AllRanksClient, RolloutClient, WholeBatch
from gristmill._torch.jagged import Jagged
from gristmill._wire.addresses import Position
from gristmill.adapters.verl.run_settings import bypasses_old_logprobs, run_config
from gristmill.adapters.verl.tensor_dicts import MiniBatchData, RankParts
from gristmill.adapters.verl.trained_batch import TrainedBatch
from gristmill.adapters.verl.workers import LAST_OF_BATCH, MiniBatchActorWorker, MiniBatchWorker
from gristmill.errors import AlreadyExistsError, InvalidArgumentError

_log = logging.getLogger("gristmill")

# Beside verl's own files in each of its checkpoints.
STATE_FILE = "gristmill.json"
# Our columns that verl's workers compute, by verl's names.
_COLUMNS = {"old_logprobs": "old_log_probs", "ref_logprobs": "ref_log_prob", "values": "values"}


# What workers are given, where there is any: of a pass, and of an update.
_INFERRED = ("input_ids", "position_ids", "loss_mask")
_TRAINED = (
    *("input_ids", "position_ids", "prompts", "responses", "loss_mask", "response_mask"),
    *("advantages", "returns", "old_log_probs", "ref_log_prob", "values"),
)
_NO_SERVERS = "gristmill"
RolloutReplicaRegistry.register(_NO_SERVERS, lambda: RolloutReplica)


class RunFinishedError(Exception):
    """The run has no more batches: training ends, as it does after the last step."""


class NoAgentLoops:
    """In the place of verl's agent loops: rollouts come from elsewhere."""

    @classmethod
    def create(cls, **parts: Any) -> NoAgentLoops:
        return cls()


class _NoPrompts:
    """In the place of verl's data loader, of which a checkpoint has the state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@register_trainer("gristmill")
class GristmillTrainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer of a run: `trainer.v1.trainer_mode=gristmill`, and `trainer.v1.gristmill.address` and `.run`.

    Batches, advantages, mini-batches, micro-batches and ranks are the service's. Log-probabilities, values and updates
    are verl's: its workers, losses, optimizers, checkpoints and loggers. Rollouts come from elsewhere, so that no
    inference engine is started; a policy's version is announced when a checkpoint has its weights.
    """

    # verl's own switch: no inference engines beside the workers that train.
    _enable_hybrid_replicas = False

    def __init__(self, config: DictConfig) -> None:
        settings: Any = config.trainer.v1.get("gristmill") or {}
        for name in ("address", "run"):
            if not settings.get(name):
                raise InvalidArgumentError(
                    f"trainer.v1.gristmill.{name} is not set; give the service's address and the run's name: "
                    "+trainer.v1.gristmill.address=127.0.0.1:50051 +trainer.v1.gristmill.run=my-run"
                )
        self._settings = settings
        # What cannot be mapped is refused before workers are started; how many ranks there are is known afterwards.
        run_config(config, dp_size=1)
        with open_dict(config):
            rollout = config.actor_rollout_ref.rollout
            rollout.agent.agent_loop_manager_class = f"{__name__}.{NoAgentLoops.__name__}"
            # What manages inference servers asks for their kind and nodes, also where it has none to start.
            rollout.name, rollout.nnodes = _NO_SERVERS, max(1, rollout.nnodes)
        super().__init__(config)
        # In this mode verl's queue has nothing that a checkpoint would need.
        self.trainer_mode = "sync"
        self._clients: dict[str, AllRanksClient] = {}
        self._batches: dict[str, Iterator[WholeBatch]] = {}

    # What verl makes of its configuration.

    def _build_replay_buffer(self) -> None:
        """None: the service has the rollouts."""

    def _init_dataloader(self) -> None:
        """No prompts: rollout workers have them."""
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
        """verl's checkpoint and the place in the run that it was saved at."""
        super()._load_checkpoint()
        states = self._saved_states()
        self._open_run()
        for model, client in self._clients.items():
            client.load_state_dict(states.get(model, {}))
        for client in self._clients.values():
            client.commit()

    def _saved_states(self) -> dict[str, Any]:
        """By model; empty where training begins."""
        if not self.global_steps:
            return {}
        trainer = self.config.trainer
        folder = (
            Path(trainer.resume_from_path)
            if trainer.resume_mode == "resume_path"
            else Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        )
        path = folder / STATE_FILE
        if not path.exists():
            raise InvalidArgumentError(
                f"{path} does not exist, so where the run was at this checkpoint is not known: it was saved without "
                "trainer_mode=gristmill; begin with trainer.resume_mode=disable, or load its weights as the model"
            )
        states: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return states

    def _open_run(self) -> None:
        dispatch = self.actor_rollout_wg._query_dispatch_info("actor")
        dp_size = max(dispatch) + 1
        settings = run_config(self.config, dp_size)
        address, run = self._settings.address, self._settings.run
        with RolloutClient(address, run) as rollouts:
            try:
                warnings = rollouts.create_run(settings)
            except AlreadyExistsError:
                # It may be of a trainer with other ranks, for which what is not trained is cut anew.
                ranks = rollouts.status().config["dp_size"]
                warnings = rollouts.create_run(settings | {"dp_size": ranks})
        for warning in warnings:
            _log.warning("run %r: %s", run, warning)
        for model in ("policy", "critic") if self.use_critic else ("policy",):
            client = AllRanksClient(
                address, run, dp_size=dp_size, model=model, auto_commit=self.config.trainer.save_freq <= 0
            )
            self._clients[model], self._batches[model] = client, iter(client)

    def _save_checkpoint(self) -> None:
        """verl's checkpoint with our state in it, which is there before verl names the checkpoint as its latest."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        states = {model: client.state_dict() for model, client in self._clients.items()}
        (folder / STATE_FILE).write_text(json.dumps(states), encoding="utf-8")
        super()._save_checkpoint()
        for client in self._clients.values():
            client.commit()
        self._announce()

    def _announce(self) -> None:
        """Tells rollout workers of the weights that a checkpoint has: the version is its number of steps."""
        self._clients["policy"].announce_policy_version(self.global_steps)

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
            for client in self._clients.values():
                client.close()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Trains one batch of the run, all its epochs. Returns what verl's queue has of it: nothing."""
        with marked_timer("gen", timing_raw, color="red"):
            batches = {model: self._next_batch(model) for model in self._clients}
        self._batch = TrainedBatch(batches["policy"].plan)
        self._compute_columns(batches["policy"], timing_raw)
        if self.use_critic:
            with marked_timer("update_critic", timing_raw, color="pink"):
                metrics.update(self._update_critic(batches["critic"]))
        with marked_timer("update_actor", timing_raw, color="red"):
            metrics.update(self._update_actor(batches["policy"]))
        return KVBatchMeta(partition_id="train", keys=["gristmill"], tags=[{}])

    def _next_batch(self, model: str) -> WholeBatch:
        batch = next(self._batches[model], None)
        if batch is None:
            raise RunFinishedError
        return batch

    def _compute_columns(self, batch: WholeBatch, timing_raw: dict[str, float]) -> None:
        """What workers compute of a whole batch before its first update: kept for the updates, and written back where
        advantages depend on it."""
        passes = list(self._passes())
        for shards in batch.forward() if passes else ():
            part = MiniBatchData(shards)
            found = self._batch.computed[shards.position.mini_batch] = {}
            for timer, compute in passes:
                with marked_timer(timer, timing_raw):
                    found |= compute(part)
            if batch.awaits:
                columns = {name: part.to_shards(found[_COLUMNS[name]], shards) for name in batch.awaits}
                for rank, shard in enumerate(shards):
                    own = {name: of_ranks[rank] for name, of_ranks in columns.items()}
                    self._clients["policy"].write(shard, own)

    def _passes(self) -> Iterator[tuple[str, Callable[[MiniBatchData], dict[str, Jagged]]]]:
        if not bypasses_old_logprobs(self.config):
            yield "old_log_prob", self._old_log_probs
        if self.use_reference_policy:
            yield "ref", self._ref_log_probs
        if self.use_critic:
            yield "values", self._values

    def _old_log_probs(self, part: MiniBatchData) -> dict[str, Jagged]:
        output = self.actor_rollout_wg.compute_log_prob(self._to_infer(part, calculate_entropy=True))
        log_probs, entropy = part.of_responses(output["log_probs"]), part.of_responses(output["entropy"])
        return {"old_log_probs": log_probs, "entropy": entropy}

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
        """The mini-batch with what verl's workers have to know of it; its micro-batches are cut already."""
        known = {
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": part.rows_per_micro_batch,
        }
        return part.of_ranks(names, known | settings)

    def _update_critic(self, batch: WholeBatch) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for shards in batch.mini_batches():
            part = MiniBatchData(shards)
            output = self.critic_wg.train_mini_batch(self._to_train(part, batch, shards.position, self.config.critic))
            append_to_dict(found, tensordict_utils.get(output.get(), "metrics"))
            shards.ack()
        return _reduced(found, "critic")

    def _update_actor(self, batch: WholeBatch) -> dict[str, Any]:
        actor, found = self.config.actor_rollout_ref.actor, dict[str, Any]()
        calculate_entropy = actor.calculate_entropy or actor.entropy_coeff != 0.0
        is_warming_up = self.global_steps < self.config.trainer.critic_warmup
        for shards in batch.mini_batches():
            part = MiniBatchData(shards)
            self._batch.add(shards.position.mini_batch, part)
            if bypasses_old_logprobs(self.config):
                part.add({"old_log_probs": part["rollout_log_probs"]})
            if not is_warming_up:
                data = self._to_train(part, batch, shards.position, actor, calculate_entropy=calculate_entropy)
                append_to_dict(found, tensordict_utils.get(self.actor_rollout_wg.update_actor(data), "metrics"))
            shards.ack()
        return _reduced(found, "actor") if found else {}

    def _to_train(
        self, part: MiniBatchData, batch: WholeBatch, position: Position, settings: DictConfig, **more: Any
    ) -> RankParts:
        mini_batches = len(batch) // settings.ppo_epochs
        known = {
            "global_batch_size": int(part.is_real.sum()),
            "mini_batch_size": len(part.is_real),
            "epochs": 1,
            "seed": settings.data_loader_seed,
            "dataloader_kwargs": {"shuffle": False},
            "distillation_use_topk": False,
            "distillation_only": False,
            LAST_OF_BATCH: position.epoch * mini_batches + position.mini_batch == len(batch) - 1,
        }
        return self._of_ranks(part, _TRAINED, known | more)

    def on_sample_end(self) -> None:
        """Nothing: no inference engine shares the accelerators."""

    def on_step_end(self) -> None:
        """Nothing: rollout workers have their weights from checkpoints."""

    # Metrics.

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        """verl's own of the batch, padding left out, and those of the plan under `gristmill/`."""
        metrics |= {"training/global_step": global_steps, "training/epoch": epoch}
        metrics |= self._batch.metrics(
            self.config.actor_rollout_ref.actor, timing_raw, self._get_n_gpus_for_throughput()
        )


def _reduced(metrics: dict[str, Any], model: str) -> dict[str, Any]:
    """The metrics of a batch's updates as verl logs them."""
    named = rename_dict(metrics, f"{model}/")
    named[f"perf/mfu/{model}"] = named.pop(f"{model}/mfu")
    reduced: dict[str, Any] = reduce_metrics(named)
    return reduced
