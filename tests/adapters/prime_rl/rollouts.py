"""The same rollouts for prime-rl and for gristmill, cut alike by both: of lengths 10, 10, 8 and 8, two to a micro-batch
of at most 20 tokens, a micro-batch to each of two ranks. All numbers are exact in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_TOKENS = 20
DP_SIZE = 2
LAYERS, TOP_K = 2, 3


@dataclass(frozen=True)
class Sampled:
    uid: str
    sample: int
    env_name: str
    temperature: float
    prompt: list[int]
    response: list[int]
    reward: float

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.response

    def of_response(self, first: float) -> list[float]:
        """A number for each response token."""
        return [first - index / 8 for index in range(len(self.response))]

    def of_tokens(self, first: float) -> list[float]:
        """The same, with 0 for prompt tokens, as prime-rl has streams."""
        return [0.0] * len(self.prompt) + self.of_response(first)

    @property
    def experts(self) -> np.ndarray[Any, np.dtype[np.int16]]:
        """int16 (tokens, LAYERS, TOP_K)."""
        count = len(self.tokens) * LAYERS * TOP_K
        return (np.arange(count, dtype=np.int16) + self.tokens[0]).reshape(-1, LAYERS, TOP_K)


SAMPLES = [
    Sampled("p0", 0, "math", 0.5, [1, 2, 3, 4], [11, 12, 13, 14, 15, 16], 1.0),
    Sampled("p0", 1, "math", 0.5, [1, 2, 3, 4], [21, 22, 23, 24, 25, 26], 0.0),
    Sampled("p1", 0, "code", 1.0, [5, 6, 7], [31, 32, 33, 34, 35], 0.0),
    Sampled("p1", 1, "code", 1.0, [5, 6, 7], [41, 42, 43, 44, 45], 1.0),
]

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "micro_batch": {"max_tokens": MAX_TOKENS},
    "dp_size": DP_SIZE,
    "layout": "packed",
    "grpo_norm_by_std": False,
    "seal_order": "admission",
}
STREAMS = {"ref_logprobs": -1.0, "rl_weights": 2.0, "ce_weights": 0.5, "ref_kl_weights": 0.25}
COLUMNS: list[dict[str, Any]] = [
    *({"name": name, "dtype": "float32", "scope": "response"} for name in STREAMS),
    {"name": "temperatures", "dtype": "float32", "scope": "row"},
    {"name": "routed_experts", "dtype": "int16", "scope": "token", "shape": [LAYERS, TOP_K]},
]


def rows(*, with_columns: bool) -> list[dict[str, Any]]:
    """As gristmill takes them."""
    sent = []
    for sampled in SAMPLES:
        row: dict[str, Any] = {
            "uid": sampled.uid,
            "sample": sampled.sample,
            "prompt_token_ids": sampled.prompt,
            "response_ids": sampled.response,
            "loss_mask": [1] * len(sampled.response),
            "rollout_logprobs": sampled.of_response(-0.5),
            "reward": sampled.reward,
        }
        if with_columns:
            row |= {name: sampled.of_response(first) for name, first in STREAMS.items()}
            row |= {"tag": sampled.env_name, "temperatures": sampled.temperature, "routed_experts": sampled.experts}
        sent.append(row)
    return sent


def training_samples(types: Any, *, with_columns: bool) -> list[Any]:
    """As prime-rl's orchestrator has them. types: its module of that name."""
    samples = []
    for sampled in SAMPLES:
        prompt, response = len(sampled.prompt), len(sampled.response)
        advantage = sampled.reward - 0.5
        streams = {name: sampled.of_tokens(first) for name, first in STREAMS.items()}
        experts = sampled.experts
        routed = types.RoutedExperts(experts.tobytes(), list(experts.shape), "int16")
        samples.append(
            types.TrainingSample(
                token_ids=sampled.tokens,
                mask=[False] * prompt + [True] * response,
                logprobs=sampled.of_tokens(-0.5),
                temperatures=[sampled.temperature if with_columns else 1.0] * (prompt + response),
                env_name=sampled.env_name if with_columns else "rollouts",
                advantages=[0.0] * prompt + [advantage] * response,
                **(streams | {"routed_experts": routed} if with_columns else {}),
            )
        )
    return samples
