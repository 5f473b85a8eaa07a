"""Rollouts for both ways: as gristmill's rows, and as the batch that verl's own trainer would make of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils
from verl.workers.utils.padding import response_to_nested

from tests.trainers.verl.tiny_model import WORDS

Row = dict[str, Any]


def rollouts(groups: int, samples: int, *, seed: int = 0, most_turns: int = 3) -> list[Row]:
    """Trajectories of one turn or several, each prompt going on from the turn before; the last has the reward."""
    draw = random.Random(seed)

    def words(least: int, most: int) -> list[int]:
        return [draw.randrange(2, WORDS) for _ in range(draw.randint(least, most))]

    rows = []
    for group in range(groups):
        question = words(2, 9)
        for sample in range(samples):
            sequence, turns = list(question), draw.randint(1, most_turns)
            for step in range(turns):
                response = words(1, 12)
                rows.append(
                    {
                        "uid": f"p{group}",
                        "sample": sample,
                        "step": step,
                        "is_last_step": step == turns - 1,
                        "prompt_token_ids": sequence,
                        "response_ids": response,
                        "loss_mask": [1] + [int(draw.random() < 0.9) for _ in response[1:]],
                        "reward": float(draw.random() < 0.5) if step == turns - 1 else 0.0,
                    }
                )
                sequence = sequence + response + words(0, 3)
    return rows


def native(rows: list[Row]) -> Any:
    """The rows as verl's V1 trainer has them before an update: as its agent loops put them into its queue, with
    advantages by its own GRPO, of each trajectory's last output."""
    scores = {(row["uid"], row["sample"]): row["reward"] for row in rows if row["is_last_step"]}
    lists: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        prompt, response = row["prompt_token_ids"], row["response_ids"]
        score = scores[row["uid"], row["sample"]]
        fields = {
            "prompts": prompt,
            "responses": response,
            "input_ids": prompt + response,
            "position_ids": list(range(len(prompt) + len(response))),
            "response_mask": row["loss_mask"],
            "token_level_rewards": [0.0] * (len(response) - 1) + [score],
        }
        for name, values in fields.items():
            lists.setdefault(name, []).append(torch.tensor(values))
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in lists.items()}
    padded = DataProto.from_dict(
        {name: nested[name].to_padded_tensor(0) for name in ("response_mask", "token_level_rewards")},
        non_tensors={"uid": np.array([row["uid"] for row in rows], dtype=object)},
    )
    keys = [f"{row['uid']}_{row['sample']}_{row['step']}" for row in rows]
    scored = compute_advantage_for_multi_trajectories(padded, keys, "grpo").batch["advantages"]
    nested |= {
        "loss_mask": nested["response_mask"],
        "advantages": response_to_nested(scored, nested["response_mask"]),
    }
    return tensordict_utils.get_tensordict(nested)
