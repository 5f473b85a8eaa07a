"""Batches whose rows share their beginnings: groups with a common prompt, turns that go on, fork, break and come back
retokenized, of few kinds of tokens, so that samples also begin alike by chance."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.strategies import Row

SAMPLES = 3


def rollouts(random: Random, has_logprobs: bool | None = None) -> list[Row]:
    kinds, prompts = random.choice([1, 2, 9]), random.randint(1, 4)
    has_logprobs = random.random() < 0.5 if has_logprobs is None else has_logprobs
    rows: list[Row] = []
    for prompt in range(prompts):
        shared = [random.randrange(kinds) for _ in range(random.choice([1, 3, 8]))]
        for sample in sorted(random.sample(range(SAMPLES), random.randint(1, SAMPLES))):
            begin = shared
            if random.random() < 0.2:
                begin = [*shared[: random.randint(1, len(shared))], random.randrange(kinds)]
            rows += _trajectory(random, f"p{prompt}", sample, begin, kinds, has_logprobs)
    return rows


def _trajectory(random: Random, uid: str, sample: int, prompt: list[int], kinds: int, has_logprobs: bool) -> list[Row]:
    def some(most: int) -> list[int]:
        return [random.randrange(kinds) for _ in range(random.randint(1, most))]

    rows: list[Row] = []
    sequences: list[list[int]] = []
    count = random.randint(1, 5)
    for step in range(count):
        response = some(4)
        rows.append(
            {
                "uid": uid,
                "sample": sample,
                "step": step,
                "is_last_step": step == count - 1,
                "prompt_token_ids": prompt,
                "response_ids": response,
                "loss_mask": [random.randrange(2) if random.random() < 0.3 else 1 for _ in response],
                "reward": random.choice([0.0, 1.0, 0.7, -0.5]),
                "stop_reason": random.choice(["stop", "length"]),
                "policy_version": random.randint(0, 2),
            }
        )
        if has_logprobs:
            rows[-1]["rollout_logprobs"] = [-(100.0 * sample + 10.0 * step + at + 1.0) for at in range(len(response))]
        sequences.append(prompt + response)
        kind = random.random()
        before = sequences[-1] if kind < 0.7 else random.choice(sequences)
        cut = random.randint(1, 5) if 0.7 < kind < 0.85 else 0
        prompt = before[: max(1, len(before) - cut)] + (some(3) if random.random() < 0.8 else [])
    return rows


def settings(random: Random, rows: list[Row], **fixed: Any) -> dict[str, Any]:
    """A configuration with this layout that takes the rows as one batch, the rest as it comes."""
    groups = len({row["uid"] for row in rows})
    sizes = [size for size in range(1, groups + 1) if groups % size == 0]
    config: dict[str, Any] = {
        "train_batch_size": groups,
        "n_samples_per_prompt": SAMPLES,
        "policy_mini_batch_size": random.choice(sizes),
        "step_wise": True,
        "merge": random.choice(["none", "none", "prefix", "tree"]),
        "trajectory_score": random.choice(["last_step", "sum"]),
        "advantage_estimator": random.choice(["grpo", "rloo"]),
        "grpo_norm_by_std": True,
        "loss_reduction": random.choice(["none", "token_mean", "prompt_mean"]),
        "dp_size": random.choice([1, 1, 2, 3]),
        "micro_batch": random.choice(
            [{"size": random.randint(1, 6)}, {"max_tokens": random.randint(1, 80)}, {"count": 6 * random.randint(1, 2)}]
        ),
        "layout": "prefix_tree",
        "pad_to_multiple_of": random.choice([1, 4]),
        "pad_token_id": random.choice([0, 77]),
    }
    if random.random() < 0.3:
        config["critic_mini_batch_size"] = random.choice(sizes)
    if random.random() < 0.3:
        config |= {"vpp_size": 2, "microbatch_group_size": random.choice([1, 2, 3])}
    elif random.random() < 0.2 and not fixed.keys() & {"dp_size", "micro_batch"}:
        config |= {"mini_batch_unit": "sequence", "micro_batch": {"size": random.randint(1, 3)}}
        config |= {"policy_mini_batch_size": config["dp_size"] * random.randint(1, 4), "critic_mini_batch_size": None}
    balance = random.choice(["none", "none", "tokens", "flops"])
    config |= {"balance": balance} | ({"flops": {"linear": 1.0, "quadratic": 0.5}} if balance == "flops" else {})
    config |= fixed
    if config["merge"] != "none":
        config.setdefault("retokenized_tail", random.choice([0, 0, 1, 3]))
    return config
