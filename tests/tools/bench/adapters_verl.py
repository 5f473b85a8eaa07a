"""`make bench-verl`: the time of a training step that is not verl's, compared with verl's own preparation of the batch.

Both ways go through the trainer's own calls, from the batch to its metrics, with workers that compute nothing: they
take what they are handed, as verl hands it out, and answer with numbers made beforehand, as verl collects them. verl's
V1 trainer has its rollouts in TransferQueue; it balances them, reads and writes log-probabilities, computes advantages,
hands the rows out and makes metrics. Through gristmill the adapter opens shards, makes verl's TensorDicts of them for
both passes, hands them out, acknowledges, and has the same metrics made. verl's environment has not all that the other
benchmarks need, so that this one is run alone.
"""

from __future__ import annotations

import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import BatchData
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.utils import tensordict_utils
from verl.utils.ray_utils import parallel_put
from verl.utils.transferqueue_utils import _meta_to_realdata

from gristmill import RolloutClient
from gristmill.adapters._core.session import RunSession
from gristmill.adapters.verl import Gristmill, run_settings
from tests.tools.bench.figures import Figure, report
from tests.tools.bench.processes import served

PROMPTS, SAMPLES, PROMPT, RESPONSE, RANKS, MICRO_BATCH = 250, 8, 200, 800, 2, 10
ROWS = PROMPTS * SAMPLES
ROUNDS = 5
REACH = 0.2
OVERRIDES = [
    "algorithm.adv_estimator=grpo",
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={MICRO_BATCH}",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=False",
    "trainer.v1.trainer_mode=gristmill",
    "+trainer.v1.gristmill.run=bench",
]


class Workers:
    """In the place of verl's worker group: rows are handed out as verl does, and answered without computing."""

    def __init__(self) -> None:
        self._dispatch_info = {"actor": list(range(RANKS))}

    def compute_log_prob(self, batch: Any) -> Any:
        parts = self._hand_out(batch)
        answers = [{name: _of_rows(part["input_ids"]) for name in ("log_probs", "entropy")} for part in parts]
        parts_logprobs = [TensorDict(answer, batch_size=len(part)) for part, answer in zip(parts, answers, strict=True)]
        if not isinstance(batch, KVBatchMeta):
            return BatchData(parts_logprobs).concat()
        # Workers write what they computed into the queue.
        size = len(batch) // RANKS
        for rank, fields in enumerate(parts_logprobs):
            keys = batch.keys[rank * size : (rank + 1) * size]
            tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)
        return batch

    def update_actor(self, batch: Any) -> TensorDict:
        self._hand_out(batch)
        return tensordict_utils.get_tensordict({}, {"metrics": {"mfu": [0.0], "grad_norm": [1.0]}})

    def _hand_out(self, batch: Any) -> list[TensorDict]:
        """Each rank's part, as its worker has it."""
        got = ray.get(parallel_put(BatchData(batch).chunk(RANKS)))
        return [_meta_to_realdata(part) for part in got] if isinstance(batch, KVBatchMeta) else got


def _of_rows(input_ids: Any) -> torch.Tensor:
    """A number a token, as a model would give it."""
    return torch.nested.nested_tensor_from_jagged(torch.full((len(input_ids.values()),), -1.0), input_ids.offsets())


def trainer_of(kind: Any, config: Any) -> Any:
    """A trainer that its own constructor does not start workers for."""
    made = object.__new__(kind)
    made.config, made.use_critic, made.use_reference_policy, made.global_steps = config, False, False, 1
    made.actor_rollout_wg, made.parameter_sync_step, made.trainer_mode = Workers(), 1, "sync"
    made.distillation_config, made.tokenizer = None, SimpleNamespace(eos_token_id=1, pad_token_id=0)
    made.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: RANKS)
    made._rollout_moe_lb_metrics_accumulator = None
    return made


# --- verl's own


def put_rollouts(rows: list[dict[str, Any]]) -> KVBatchMeta:
    """The rollouts as verl's agent loops leave them in the queue."""
    keys, tags, fields = [], [], []
    for row in rows:
        prompt, response = torch.tensor(row["prompt_token_ids"]), torch.tensor(row["response_ids"])
        mask, length = torch.ones(len(response), dtype=torch.int64), len(prompt) + len(response)
        scores = torch.zeros(len(response))
        scores[-1] = row["reward"]
        keys.append(f"{row['uid']}_{row['sample']}_0")
        tags.append({"seq_len": length, "min_global_steps": 0, "max_global_steps": 0, "global_steps": 1})
        fields.append(
            {
                "uid": row["uid"],
                "prompts": prompt,
                "responses": response,
                "input_ids": torch.cat([prompt, response]),
                "position_ids": torch.arange(length),
                "response_mask": mask,
                "loss_mask": mask,
                "rm_scores": scores,
                "rollout_log_probs": torch.full((len(response),), -1.0),
                "num_turns": 2,
            }
        )
    batch: KVBatchMeta = tq.kv_batch_put(
        keys=keys, partition_id="train", fields=tensordict_utils.list_of_dict_to_tensordict(fields), tags=tags
    )
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train", fields=batch.fields, extra_info={})


def verls_step(trainer: Any, batch: KVBatchMeta) -> None:
    metrics: dict[str, Any] = {}
    timing: dict[str, float] = defaultdict(lambda: 1.0)
    batch = trainer._balance_batch(batch, metrics=metrics)
    batch = trainer._compute_old_log_prob(batch, metrics=metrics)
    batch = trainer._compute_advantage(batch, metrics=metrics)
    batch = trainer._update_actor(batch, metrics=metrics)
    trainer._compute_metrics(batch, metrics, {"step": 1.0} | dict(timing), global_steps=1, epoch=0)
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)


# --- Through gristmill


def our_step(trainer: Any) -> None:
    metrics: dict[str, Any] = {}
    timing: dict[str, float] = {}
    batch = trainer.step(metrics, timing)
    trainer._compute_metrics(batch, metrics, timing | {"step": 1.0}, global_steps=1, epoch=0)


def rollouts(number: int) -> list[dict[str, Any]]:
    drawn = np.random.default_rng(number)
    questions = drawn.integers(2, 30_000, (PROMPTS, PROMPT)).tolist()
    return [
        {
            "uid": uuid.UUID(int=number << 32 | prompt).hex,
            "sample": sample,
            "step": 0,
            "is_last_step": True,
            "prompt_token_ids": question,
            "response_ids": drawn.integers(2, 30_000, RESPONSE).tolist(),
            "loss_mask": [1] * RESPONSE,
            "rollout_logprobs": [-1.0] * RESPONSE,
            "reward": float(drawn.random() < 0.5),
        }
        for prompt, question in enumerate(questions)
        for sample in range(SAMPLES)
    ]


def measured(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a step, and this process's CPU seconds in all its threads."""
    begin, computed = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - begin, time.process_time() - computed


def rounds() -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Of each round, ours and verl's."""
    with initialize_config_dir(str(files("verl") / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", OVERRIDES)
    with served() as service, RolloutClient(service.grpc_address, "bench") as client:
        gristmill = Gristmill(service.grpc_address, "bench")
        settings = run_settings(config, gristmill, dp_size=RANKS)
        ours, theirs = trainer_of(get_trainer_cls("gristmill"), config), trainer_of(PPOTrainerSync, config)
        with RunSession(gristmill, settings, dp_size=RANKS, auto_commit=True) as ours._session:
            ours._session.resume(None)
            for number in range(ROUNDS):
                rows = rollouts(number)
                client.begin_groups(list(dict.fromkeys(row["uid"] for row in rows)))
                client.submit(rows)
                batch = put_rollouts(rows)
                yield measured(partial(our_step, ours)), measured(partial(verls_step, theirs, batch))


def figures() -> Iterator[Figure]:
    """`verl_cpu`: what the trainer's process computes of both, which a busy machine does not change."""
    pairs = list(rounds())[1:]
    for name, index in (("adapters.verl", 0), ("adapters.verl_cpu", 1)):
        ratio = statistics.median(ours[index] / theirs[index] for ours, theirs in pairs)
        bound = statistics.median(theirs[index] for _, theirs in pairs)
        yield Figure(name, ratio, "x verl's own batch", REACH, bound, "s, verl's own batch")


def main() -> int:
    # PyTorch's threads wait for one another by computing, which on a busy machine is most of what they do.
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    with initialize_config_dir(str(files("verl") / "trainer" / "config"), version_base=None):
        queue = compose("ppo_trainer", ["transfer_queue.backend.SimpleStorage.num_data_storage_units=1"]).transfer_queue
    queue.enable = True
    tq.init(queue)
    try:
        return report("adapters_verl", figures())
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
