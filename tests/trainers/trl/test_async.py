"""`AsyncGRPOTrainer` is fed from a run.

All of TRL's trainer runs but what needs a GPU or a server: the attention kernel, which is replaced by the same
attention written out, the transfer of weights to vLLM, which does nothing here, and the question of the GPU's speed.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from gristmill import FailedPreconditionError, InvalidArgumentError, RolloutClient
from gristmill.adapters.trl import Gristmill, GristmillRolloutWorker, async_run_settings
from tests.on_loop import Service
from tests.trainers.trl.play import SAMPLES, Rollout, policy, replayed, rollouts, submit, tokenizer, weights

# Of three steps, and what TRL takes ahead.
KNOWN = rollouts(prompts=8)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """FlashAttention's `flash_attn_varlen_func`: each segment's queries are the last of its keys."""
    heads = query.shape[1] // key.shape[1]
    parts = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        q, k, v = query[q0:q1], key[k0:k1].repeat_interleave(heads, 1), value[k0:k1].repeat_interleave(heads, 1)
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", shares, v))
    return torch.cat(parts)


class NoTransfer:
    """TRL's `WeightTransferProtocol`, to nowhere."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Iterator[Any]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


@pytest.fixture
def args(tmp_path: Path) -> AsyncGRPOConfig:
    """Of a step with 2 prompts of 4 samples."""
    return AsyncGRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_steps=3,
        token_budget=0,
        max_staleness=8,
        dtype="float32",
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )


def train(args: AsyncGRPOConfig, directory: Path, worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer, after its steps on the CPU."""
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    policy().save_pretrained(directory / "model")
    trainer = AsyncGRPOTrainer(
        model=str(directory / "model"),
        reward_funcs=replayed,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["w2"]}),
        processing_class=tokenizer(),
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
        callbacks=[worker] if isinstance(worker, GristmillRolloutWorker) else [],
    )
    trainer.train()
    return trainer


def sample_of(rollout: Rollout, advantage: float, group: int) -> RolloutSample:
    """As TRL's own worker makes it."""
    before = len(rollout.prompt)
    logprobs = [logprob if on else 0.0 for logprob, on in zip(rollout.logprobs, rollout.said, strict=True)]
    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=np.array([*rollout.prompt, *rollout.completion], np.int64),
        completion_mask=np.array([0] * before + rollout.said, np.int64),
        old_log_probs=np.array([0.0] * before + logprobs, np.float32),
        advantage=advantage,
        model_version=1,
        group_id=group,
        metrics={"reward": rollout.reward},
    )


def own_samples() -> list[RolloutSample]:
    samples_sent = []
    for group, samples in enumerate(KNOWN.values()):
        rewards = np.array([rollout.reward for rollout in samples])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        samples_sent += [
            sample_of(rollout, float(one), group) for rollout, one in zip(samples, advantages, strict=True)
        ]
    return samples_sent


class Given:
    """TRL's `RolloutWorkerProtocol` over samples that are there."""

    def __init__(self, samples: list[RolloutSample]) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


def test_an_async_trainer_trains_a_run_as_it_trains_the_same_samples(
    service: Service, run_name: str, args: AsyncGRPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"step_wise": True, "merge": "prefix", "seal_order": "admission"}
    gristmill = Gristmill(service.grpc_address, run_name, settings=settings)
    worker = GristmillRolloutWorker(gristmill, args)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(async_run_settings(args, gristmill))
        submit(client, KNOWN, turns=True, version=1)
    ours = train(args, tmp_path, worker, monkeypatch)
    theirs = train(args, tmp_path, Given(own_samples()), monkeypatch)
    before, others = weights(policy()), weights(theirs.model)
    for name, weight in weights(ours.model).items():
        update = others[name] - before[name]
        assert float((weight - others[name]).abs().max() / update.abs().max()) < 1e-4, name
    status = service.runs.get(run_name).status()
    # Of the third step it is not known yet that it was trained; of the last group before, whether whole.
    assert (status.batches_freed, status.policy_version) == (5, 4)
    rewards = [entry["reward"] for entry in ours.state.log_history if "reward" in entry]
    assert rewards == pytest.approx([entry["reward"] for entry in theirs.state.log_history if "reward" in entry])


def wait_for_the_end(worker: GristmillRolloutWorker) -> None:
    """Asks as the trainer does, until it is answered."""
    for _ in range(1200):
        worker.check_health(60)
        time.sleep(0.05)


def test_a_worker_that_is_no_callback_is_refused(service: Service, run_name: str, args: AsyncGRPOConfig) -> None:
    worker = GristmillRolloutWorker(Gristmill(service.grpc_address, run_name), args)
    with pytest.raises(FailedPreconditionError, match="callbacks=\\[worker\\]"):
        worker.start()


def test_a_run_without_log_probabilities_ends_training_with_the_reason(
    service: Service, run_name: str, args: AsyncGRPOConfig
) -> None:
    worker = GristmillRolloutWorker(Gristmill(service.grpc_address, run_name), args)
    worker.on_train_begin(None, None, None)
    worker.start()
    with RolloutClient(service.grpc_address, run_name) as client:
        for sample in range(SAMPLES):
            with client.trajectory("p", sample) as trajectory:
                trajectory.step([2, 3], [4], reward=float(sample), is_last_step=True)
    with pytest.raises(InvalidArgumentError, match="rows have no rollout_logprobs"):
        wait_for_the_end(worker)
    worker.stop()


def test_a_finished_run_is_said_to_be_finished(service: Service, run_name: str, args: AsyncGRPOConfig) -> None:
    worker = GristmillRolloutWorker(Gristmill(service.grpc_address, run_name), args)
    worker.on_train_begin(None, None, None)
    worker.start()
    worker.check_health(60)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.finish()
    with pytest.raises(FailedPreconditionError, match="is finished, but the trainer waits for more"):
        wait_for_the_end(worker)
    worker.stop()


def test_what_would_contradict_trls_own_batching_is_refused(args: AsyncGRPOConfig) -> None:
    larger = Gristmill("here:1", "run", settings={"max_buffered_batches": 3})
    assert async_run_settings(args, larger)["max_buffered_batches"] == 3
    own = async_run_settings(args, Gristmill("here:1", "run", settings={"max_staleness": 1}))
    # Two groups a step: two steps that may be stale, two more of TRL and the worker, one group that is read in part.
    assert (own["max_batches_ahead"], own["max_buffered_batches"]) == (9, 10)
    with pytest.raises(InvalidArgumentError, match="train_batch_size is fixed at 1, because AsyncGRPOTrainer selects"):
        async_run_settings(args, Gristmill("here:1", "run", settings={"train_batch_size": 4}))
