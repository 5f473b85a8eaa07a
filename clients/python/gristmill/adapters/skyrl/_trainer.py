"""SkyRL's trainer, with what the service decides taken from it: advantages, mini-batches, padding and ranks."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from typing import Any

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.io import io
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import ResumeMode

from gristmill import WholeBatch
from gristmill.adapters.skyrl._batches import BatchRows
from gristmill.adapters.skyrl._options import Gristmill
from gristmill.adapters.skyrl._replay import Replay
from gristmill.adapters.skyrl._session import Part, Rows, Session
from gristmill.adapters.skyrl._settings import makes_checkpoints, run_settings
from gristmill.errors import InvalidArgumentError

_STATE_FILE = "gristmill.json"
# The columns that are written back, and under which name SkyRL has computed them.
_WRITTEN = {"old_logprobs": "action_log_probs", "ref_logprobs": "base_action_log_probs", "values": "values"}


class GristmillPPOTrainer(RayPPOTrainer):  # type: ignore[misc]
    """`RayPPOTrainer` on the batches of a run: SkyRL samples, computes log-probabilities and values, and optimizes.

    Each step's rollouts are submitted as they were sampled; the batch that the service makes of them is trained, rank
    by rank and mini-batch by mini-batch as it is cut, with its advantages. SkyRL's settings for these become the run's.
    Checkpoints have the place in the run, and free what is before it. A trainer that comes back trains the batches that
    the run still holds, before it samples again.

    gristmill: where the run is. The other arguments are SkyRL's.
    Raises InvalidArgumentError for a configuration that the service cannot follow, saying what to change.
    """

    def __init__(self, *arguments: Any, gristmill: Gristmill, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._gristmill, self._configured = gristmill, self.cfg
        # What is refused is refused before models are loaded, which know how many ranks there are.
        self._settings(dp_size=1)
        self.cfg: Any = _without_decisions(self._configured)
        self.generator: Any
        self._session: Session
        self._held: list[dict[str, Rows]] = []
        self._batch: dict[str, WholeBatch] = {}
        self._rows: BatchRows

    def _settings(self, dp_size: int) -> dict[str, Any]:
        return run_settings(
            self._configured, self._gristmill, dp_size=dp_size, pad_token_id=self.tokenizer.pad_token_id
        )

    # The run.

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:  # noqa: N803  SkyRL's names
        super().build_models(PolicyWorker, CriticWorker, RefWorker)
        dp_size = self.dispatch.dp_size("policy")
        sizes = {"all models": self.dispatch.get_lcm_dp_size()}
        if self.has_critic:
            sizes["the critic"] = self.dispatch.dp_size("critic")
        for name, size in sizes.items():
            if size != dp_size:
                raise InvalidArgumentError(
                    f"trainer.placement: the policy has {dp_size} data-parallel ranks and {name} together {size}; the "
                    "batch is cut for the policy's: give the critic as many, and the reference model as many or fewer"
                )
        self._session = Session(self._gristmill, self._settings(dp_size), auto_commit=not makes_checkpoints(self.cfg))
        self._announce_versions()
        if self.resume_mode == ResumeMode.NONE:
            self._resume(None)

    def _announce_versions(self) -> None:
        """Announces each version once SkyRL has handed its weights to the engines."""
        hand_over = self.dispatch.save_weights_for_sampler

        async def announcing(*arguments: Any, **more: Any) -> Any:
            result = await hand_over(*arguments, **more)
            self._session.announce(self.global_step)
            return result

        self.dispatch.save_weights_for_sampler = announcing

    async def train(self) -> None:
        try:
            await super().train()
        finally:
            self._session.close()

    # Checkpoints.

    def save_checkpoints(self) -> str:
        states = self._session.states()
        folder = os.path.join(self.cfg.trainer.ckpt_path, f"global_step_{self.global_step}")
        io.makedirs(folder, exist_ok=True)
        # First, for SkyRL names the checkpoint as the latest one last.
        with io.open_file(os.path.join(folder, _STATE_FILE), "w") as file:
            file.write(json.dumps(states) + "\n")
        super().save_checkpoints()
        self._session.commit(states)
        return folder

    def load_checkpoints(self) -> Any:
        found = super().load_checkpoints()
        self._resume(found[1])
        return found

    def _resume(self, checkpoint: str | None) -> None:
        """checkpoint: its directory; None where training begins anew."""
        self._session.resume(None if checkpoint is None else _read_states(checkpoint))
        self._held = self._session.held_batches()
        if self._held:
            by_uid: dict[str, list[Rows]] = {}
            for batch in self._held:
                for uid, rows in batch.items():
                    by_uid.setdefault(uid, []).append(rows)
            generator = self.generator
            step_wise = self.cfg.generator.step_wise_trajectories
            self.generator = Replay(generator, by_uid, step_wise, lambda: setattr(self, "generator", generator))

    # A step, in SkyRL's order.

    def _remove_tail_data(self, entries: list[Any]) -> list[Any]:
        """The service pads."""
        return entries

    def postprocess_generator_output(
        self, generator_output: GeneratorOutput, uids: list[str], *metrics: Any, **more: Any
    ) -> Any:
        """Submits the rollouts; of SkyRL's own there remain the metrics."""
        if not self._session.holds_next_batch:
            self._session.submit(self._parts(generator_output, uids))
        return super().postprocess_generator_output(generator_output, uids, *metrics, **more)

    def _parts(self, output: GeneratorOutput, uids: list[str]) -> list[Part]:
        return [Part(output, uids, self.global_step - 1)]

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingInputBatch:
        """The batch that the service made of them."""
        self._batch = self._session.next_batch()
        self._held = self._held[1:]
        plan = self._batch["policy"].plan
        self._rows = BatchRows(list(self._batch["policy"].forward()))
        data = self._rows.training_input(self._columns())
        self.all_metrics |= _metrics(plan)
        self.all_metrics["generate/batch_num_seq"] = plan["rows"]
        self.all_metrics["generate/batch_padded_seq_len"] = data["sequences"].shape[1]
        return data

    def _columns(self) -> list[str]:
        return [column["name"] for column in self._gristmill.settings.get("columns", ())]

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Takes advantages and returns from the service, once it has what they depend on."""
        batch, rows = self._batch["policy"], self._rows
        if batch.awaits:
            for name in batch.awaits:
                for shard, values in rows.of_shards(data[_WRITTEN[name]]):
                    self._session.policy.write(shard, {name: values})
            rows = BatchRows(list(batch.epoch()))
            self.all_metrics |= _metrics(batch.plan)
        data["advantages"] = rows.tensor("advantages")
        data["returns"] = rows.tensor("returns") if "returns" in rows else data["advantages"]
        return data

    def _normalize_advantages(self, data: TrainingInputBatch, *boundaries: Any) -> TrainingInputBatch:
        """The loss's reduction is in the service's advantages."""
        return data

    def _execute_training_step(self, model: str, data: TrainingInputBatch) -> dict[str, float]:
        if model == "critic":
            rows = BatchRows(list(self._batch["critic"].epoch()))
            data = rows.training_input(("values", "returns"))
            data.metadata["global_step"] = self.global_step
        found: dict[str, float] = super()._execute_training_step(model, data)
        return found

    def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
        status: dict[str, float] = super().train_critic_and_policy(data)
        for batch in self._batch.values():
            batch.ack()
        return status


def _without_decisions(cfg: Any) -> Any:
    """The configuration as SkyRL's code is to read it: without what the service does."""
    cfg = copy.deepcopy(cfg)
    cfg.generator.merge_stepwise_output = False
    cfg.trainer.algorithm.zero_variance_filter = False
    return cfg


def _read_states(checkpoint: str) -> dict[str, Any]:
    path = os.path.join(checkpoint, _STATE_FILE)
    try:
        with io.open_file(path, "r") as file:
            found: dict[str, Any] = json.loads(file.read())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"{path}: cannot read the position in the run: {error}; resume a checkpoint that this trainer wrote, or "
            "begin anew with another run"
        ) from None
    return found


def _metrics(plan: dict[str, Any]) -> dict[str, float]:
    """The plan's numbers, for the tracker."""
    own: Sequence[str] = ("rows_received", "rows", "prompts", "optimizer_steps")
    numbers = {name: plan[name] for name in own} | plan["counts"] | plan["metrics"]
    found = {f"gristmill/{name}": number for name, number in numbers.items() if isinstance(number, int | float)}
    return found | {"loss/avg_final_rewards": plan["metrics"]["score_mean"]}
