"""slime's arguments and samples, for slime and for gristmill alike. All numbers are exact in float32."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

PARALLEL = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def arguments(**changes: Any) -> SimpleNamespace:
    """Those of slime that its RolloutManager and the adapter read; two steps of two prompts a rollout."""
    return SimpleNamespace(
        **{
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "global_batch_size": 4,
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": 24,
            "micro_batch_size": None,
            "balance_data": False,
            "balance_by_flops": False,
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": False,
            "normalize_advantages": False,
            "use_critic": False,
            "calculate_per_token_loss": False,
            "custom_advantage_function_path": None,
            "custom_reward_post_process_path": None,
            "custom_convert_samples_to_train_data_path": None,
            "reward_key": None,
            "rollout_top_p": 1.0,
            "log_passrate": False,
            "debug_rollout_only": False,
            "debug_train_only": True,
            "rollout_global_dataset": True,
            "num_rollout": 8,
            "save": None,
            "save_interval": None,
            "async_save": False,
            "data_source_path": "tests.adapters.slime.samples.DataSource",
            "rollout_function_path": "tests.adapters.slime.samples.generate",
            "eval_function_path": "tests.adapters.slime.samples.generate",
            "load_debug_rollout_data": None,
            "save_debug_rollout_data": None,
            "ci_test": False,
            "use_fault_tolerance": False,
        }
        | changes
    )


class DataSource:
    """Counts groups and samples, as slime's does."""

    def __init__(self, args: Any) -> None:
        self._args, self.groups, self.given = args, 0, 0

    def get_samples(self, count: int) -> list[list[dict[str, int]]]:
        """Where slime gives empty samples, their numbers."""
        size, self.given = self._args.n_samples_per_prompt, self.given + count
        samples = [
            [{"group_index": group, "index": group * size + number} for number in range(size)]
            for group in range(self.groups, self.groups + count)
        ]
        self.groups += count
        return samples

    def save(self, rollout_id: int) -> None:
        pass


def sampled(numbers: dict[str, int], sample_type: Any) -> Any:
    """One of slime's samples. sample_type: slime's `Sample`, or a substitute for it."""
    index = numbers["index"]
    draw, status = random.Random(index), type(sample_type().status)
    response = draw.randint(1, 9)
    tokens = [draw.randint(1, 99) for _ in range(draw.randint(1, 6) + response)]
    return sample_type(
        **numbers,
        tokens=tokens,
        response_length=response,
        reward=float(draw.randint(0, 1)),
        loss_mask=[1, *(draw.randint(0, 1) for _ in range(response - 1))],
        rollout_log_probs=[-number / 8 for number in range(response)],
        status=status.COMPLETED if index % 5 else status.TRUNCATED,
    )


def generate(args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False) -> Any:
    """A rollout function of slime's."""
    return [
        [sampled(numbers, args.sample_type) for numbers in group]
        for group in data_source.get_samples(args.rollout_batch_size)
    ]
