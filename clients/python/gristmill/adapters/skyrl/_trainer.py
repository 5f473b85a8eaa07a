"""SkyRL's trainer without the steps that the service does: advantages, mini-batches, padding and ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.io import io
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.trainer_utils import ResumeMode

from gristmill.adapters._core.checkpoint import read_states
from gristmill.adapters._core.options import Gristmill
from gristmill.adapters._core.versions import check_version
from gristmill.adapters.skyrl._batches import BatchRows
from gristmill.adapters.skyrl._replay import Replay
from gristmill.adapters.skyrl._session import Part, Rows, Session
from gristmill.adapters.skyrl._settings import WRITTEN, makes_checkpoints, run_settings
from gristmill.errors import InvalidArgumentError


class GristmillPPOTrainer(RayPPOTrainer):  # type: ignore[misc]
    """`RayPPOTrainer` on the batches of a run: SkyRL samples, computes log-probabilities and values, and optimizes.

    The adapter submits each step's rollouts as they were sampled. The service builds a batch from them, and SkyRL
    trains it by rank and mini-batch, with the service's advantages. SkyRL's settings become settings of the run.
    Checkpoints include the position in the run, and free the batches before it. A trainer that resumes first trains the
    batches that the run still stores, before it samples again.

    gristmill: the run. The other arguments are SkyRL's.
    Raises InvalidArgumentError for a configuration that a run cannot follow, and UnsupportedError for a version of
    SkyRL that was not tested, before models are loaded.
    """

    def __init__(self, *arguments: Any, gristmill: Gristmill, **more: Any) -> None:
        check_version("SkyRL", "skyrl", ["0.3", "0.4"])
        super().__init__(*arguments, **more)
        self._gristmill, self._configured = gristmill, self.cfg
        # Refuse unsupported settings before models are loaded. The number of ranks is known only afterwards.
        self._settings(dp_size=1)
        self.cfg: Any = _without_decisions(self._configured)
        self.generator: Any
        self._session: Session
        self._stored: list[dict[str, Rows]] = []
        self._batch: dict[str, Any] = {}
        self._rows: BatchRows

    def _settings(self, dp_size: int) -> dict[str, Any]:
        pad_token_id = self.tokenizer.pad_token_id
        return run_settings(self._configured, self._gristmill, dp_size=dp_size, pad_token_id=pad_token_id)

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
                    f"trainer.placement: the policy has {dp_size} data-parallel ranks, but the number for {name} is "
                    f"{size}; use the policy's number for the critic, and at most this number for the reference model"
                )
        self._session = Session(
            self._gristmill, self._settings(dp_size), dp_size=dp_size, auto_commit=not makes_checkpoints(self.cfg)
        )
        self._announce_versions()
        if self.resume_mode == ResumeMode.NONE:
            self._resume(None)

    def _announce_versions(self) -> None:
        """Announce each version after SkyRL has sent its weights to the engines."""
        send_weights = self.dispatch.save_weights_for_sampler

        async def announcing(*arguments: Any, **more: Any) -> Any:
            result = await send_weights(*arguments, **more)
            self._session.announce(self.global_step)
            return result

        self.dispatch.save_weights_for_sampler = announcing

    async def train(self) -> None:
        with self._session:
            await super().train()

    # Checkpoints.

    def save_checkpoints(self) -> str:
        folder = os.path.join(self.cfg.trainer.ckpt_path, f"global_step_{self.global_step}")
        io.makedirs(folder, exist_ok=True)
        # Save the states first, because SkyRL marks the checkpoint as the latest at the end.
        states = self._session.save(folder, io.open_file)
        super().save_checkpoints()
        self._finish_saves()
        self._session.commit(states)
        return folder

    def _finish_saves(self) -> None:
        """Wait for checkpoints that SkyRL 0.4 writes in the background (`async_dist_ckpt_save`).

        The commit frees batches, which would be lost by a crash before the checkpoint is complete.
        """
        finish = getattr(self.dispatch, "finalize_pending_saves", None)
        for model in ("policy", "critic") if self.has_critic else ("policy",):
            if finish is not None:
                finish(model)

    def load_checkpoints(self) -> Any:
        loaded = super().load_checkpoints()
        self._resume(loaded[1])
        return loaded

    def _resume(self, checkpoint: str | None) -> None:
        """Resume at a checkpoint. checkpoint: its folder; None if training starts from the beginning."""
        self._session.restart(None if checkpoint is None else read_states(checkpoint, io.open_file))
        self._stored = self._session.stored_batches()
        if self._stored:
            by_uid: dict[str, list[Rows]] = {}
            for batch in self._stored:
                for uid, rows in batch.items():
                    by_uid.setdefault(uid, []).append(rows)
            generator = self.generator
            step_wise = self.cfg.generator.step_wise_trajectories
            dtypes = {column["name"]: column["dtype"] for column in self._columns}
            self.generator = Replay(generator, by_uid, step_wise, lambda: setattr(self, "generator", generator), dtypes)

    # A step, in SkyRL's order.

    def _remove_tail_data(self, entries: list[Any]) -> list[Any]:
        """Keep all entries, because the service pads."""
        return entries

    def postprocess_generator_output(
        self, generator_output: GeneratorOutput, uids: list[str], *metrics: Any, **more: Any
    ) -> Any:
        """Submit the rollouts, and let SkyRL compute its metrics."""
        if not self._session.has_next_batch:
            self._submit(self._parts(generator_output, uids))
        return super().postprocess_generator_output(generator_output, uids, *metrics, **more)

    def _submit(self, parts: list[Part]) -> None:
        self._session.submit(parts, columns=self._own_columns, wait_s=self._gristmill.timeout_s)

    @property
    def _own_columns(self) -> list[str]:
        return [column["name"] for column in self._columns]

    @property
    def _columns(self) -> Sequence[Mapping[str, Any]]:
        columns: Sequence[Mapping[str, Any]] = self._gristmill.settings.get("columns", ())
        return columns

    def _parts(self, output: GeneratorOutput, uids: list[str]) -> list[Part]:
        return [Part(output, uids, self.global_step - 1)]

    def convert_to_training_input(self, generator_output: GeneratorOutput, uids: list[str]) -> TrainingInputBatch:
        """Return the batch that the service built from the rollouts."""
        self._batch = self._session.required_batch()
        self._stored = self._stored[1:]
        policy = self._batch["policy"]
        self._rows = BatchRows(list(policy.forward()))
        data = self._rows.training_input(self._own_columns)
        self._log_metrics()
        self.all_metrics["generate/batch_num_seq"] = policy.plan["rows"]
        self.all_metrics["generate/batch_padded_seq_len"] = data["sequences"].shape[1]
        return data

    def _log_metrics(self) -> None:
        figures = self._session.metrics()
        self.all_metrics |= figures | {"loss/avg_final_rewards": figures["gristmill/score_mean"]}

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """Use the service's advantages and returns. First write the columns on which they depend."""
        batch, rows = self._batch["policy"], self._rows
        if batch.awaits:
            computed = rows.by_shard({name: data[name] for name in map(WRITTEN.__getitem__, batch.awaits)})
            self._session.write_back(batch.awaits, WRITTEN, computed)
            rows = BatchRows(list(batch.epoch()))
            self._log_metrics()
        data["advantages"] = rows.tensor("advantages")
        data["returns"] = rows.tensor("returns") if "returns" in rows else data["advantages"]
        return data

    def _normalize_advantages(self, data: TrainingInputBatch, *boundaries: Any) -> TrainingInputBatch:
        """Change nothing, because the service's advantages include the loss reduction."""
        return data

    def _execute_training_step(self, model: str, data: TrainingInputBatch) -> dict[str, float]:
        if model == "critic":
            rows = BatchRows(list(self._batch["critic"].epoch()))
            data = rows.training_input(("values", "returns"))
            data.metadata["global_step"] = self.global_step
        status: dict[str, float] = super()._execute_training_step(model, data)
        return status

    def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
        status: dict[str, float] = super().train_critic_and_policy(data)
        for batch in self._batch.values():
            batch.ack()
        return status


def _without_decisions(cfg: Any) -> Any:
    """Return the configuration for SkyRL's own code, without settings that the service implements."""
    cfg = copy.deepcopy(cfg)
    cfg.generator.merge_stepwise_output = False
    cfg.trainer.algorithm.zero_variance_filter = False
    return cfg
