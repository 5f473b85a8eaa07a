"""A tiny model, rollouts in several turns that are the same for every trainer, and what TRL is to do with them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig

from gristmill import RolloutClient

WORDS, SAMPLES = 64, 4
END = 1
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Turn:
    """What the policy said, and what the environment answered."""

    said: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Rollout:
    prompt: tuple[int, ...]
    turns: tuple[Turn, ...]
    reward: float

    @property
    def completion(self) -> list[int]:
        return [token for turn in self.turns for token in (*turn.said, *turn.answer)]

    @property
    def said(self) -> list[int]:
        """1 on the policy's own tokens of the completion."""
        return [on for turn in self.turns for on in [1] * len(turn.said) + [0] * len(turn.answer)]

    @property
    def logprobs(self) -> list[float]:
        """Of the completion, as a sampler of other weights might have given them."""
        return [-4.0 - 0.01 * (token % 7) for token in self.completion]


def rollouts(prompts: int, seed: int = 0) -> dict[str, list[Rollout]]:
    """By prompt, `SAMPLES` of each."""
    drawn = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(drawn.randrange(2, WORDS) for _ in range(drawn.randint(least, most)))

    by_prompt: dict[str, list[Rollout]] = {}
    while len(by_prompt) < prompts:
        prompt = tokens(2, 6)
        last = [Turn((*tokens(1, 5), END), ()) for _ in range(SAMPLES)]
        before = [tuple(Turn(tokens(1, 4), tokens(1, 3)) for _ in range(drawn.randint(0, 2))) for _ in range(SAMPLES)]
        by_prompt[" ".join(f"w{token}" for token in prompt)] = [
            Rollout(prompt, (*turns, end), round(drawn.random(), 3)) for turns, end in zip(before, last, strict=True)
        ]
    return by_prompt


class Replay:
    """TRL's `rollout_func`: gives each prompt's rollouts in their order, to every rank those of its rows."""

    def __init__(self, known: dict[str, list[Rollout]]) -> None:
        self._known = known

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        first = len(prompts) * trainer.accelerator.process_index
        columns: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "score": []}
        for place, prompt in enumerate(prompts, first):
            rollout = self._known[prompt][place % SAMPLES]
            columns["prompt_ids"].append(list(rollout.prompt))
            columns["completion_ids"].append(rollout.completion)
            columns["logprobs"].append(rollout.logprobs)
            columns["env_mask"].append(rollout.said)
            columns["score"].append(rollout.reward)
        return columns


def replayed(completions: list[str], score: list[float], **_: Any) -> list[float]:
    """A reward function: what the rollouts come with."""
    return score


def submit(client: RolloutClient, known: dict[str, list[Rollout]], *, turns: bool, version: int = 0) -> None:
    """Submits the rollouts as workers do: turn by turn, or each as one row."""
    for uid, samples in known.items():
        client.begin_groups([uid])
        for sample, rollout in enumerate(samples):
            with client.trajectory(uid, sample, policy_version=version) as trajectory:
                if not turns:
                    trajectory.step(
                        list(rollout.prompt),
                        rollout.completion,
                        loss_mask=rollout.said,
                        rollout_logprobs=rollout.logprobs,
                        reward=rollout.reward,
                        is_last_step=True,
                    )
                    continue
                context, at = list(rollout.prompt), 0
                for turn in rollout.turns:
                    end = turn is rollout.turns[-1]
                    logprobs = rollout.logprobs[at : at + len(turn.said)]
                    reward = rollout.reward if end else 0.0
                    trajectory.step(
                        context, list(turn.said), rollout_logprobs=logprobs, reward=reward, is_last_step=end
                    )
                    context = [*context, *turn.said, *turn.answer]
                    at += len(turn.said) + len(turn.answer)


def policy() -> Qwen2ForCausalLM:
    """The same at every call."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=END,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 (padding), w1 (end), w2 and so on are the tokens 0, 1, 2 and so on."""
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def prompts_of(known: dict[str, list[Rollout]]) -> Dataset:
    return Dataset.from_list([{"prompt": prompt} for prompt in known])


def config(directory: Path, **more: Any) -> GRPOConfig:
    """Of one optimizer step by SGD, with 4 prompts of 4 samples in micro-batches of 4 rows on one rank."""
    arguments = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": SAMPLES,
        "max_completion_length": 24,
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return GRPOConfig(**arguments | more)


def weights(model: torch.nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def difference(ours: Weights, theirs: Weights, before: Weights) -> float:
    """The largest difference of any parameter's update, relative to that parameter's largest."""
    shares = []
    for name, start in before.items():
        update = theirs[name] - start
        assert update.abs().max() > 0, name
        shares.append(float((ours[name] - theirs[name]).abs().max() / update.abs().max()))
    return max(shares)
