"""A tiny model, prompts, rollouts in several turns, and what SkyRL is to do with them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tests.trainers.skyrl.cpu_patches  # noqa: F401  isort: skip

import torch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.generators.utils import get_rollout_metrics
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.trainers.skyrl.cpu_workers import WEIGHTS, ValueModel

WORDS = 128


def save_model(directory: Path, seed: int = 0) -> str:
    """Returns where it is, with its tokenizer: words w0 (padding), w1 (end), w2 and so on are tokens 0, 1, 2."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=WORDS, num_hidden_layers=2, **shape)).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(directory)
    return str(directory)


def config(directory: Path, **overrides: Any) -> SkyRLTrainConfig:
    """One step of two mini-batches by gradient descent. overrides: SkyRL's names with `__` for dots."""
    settings: dict[str, Any] = {
        "trainer.policy.model.path": directory / "model",
        "trainer.policy.optimizer_config.lr": 4.0,
        "trainer.policy.optimizer_config.adam_betas": [0.0, 0.0],
        "trainer.critic.optimizer_config.lr": 0.5,
        "trainer.critic.optimizer_config.adam_betas": [0.0, 0.0],
        "trainer.placement.colocate_all": False,
        "trainer.placement.colocate_policy_ref": False,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 2,
        "trainer.critic_mini_batch_size": 2,
        "trainer.micro_train_batch_size_per_gpu": 3,
        "trainer.micro_forward_batch_size_per_gpu": 3,
        "trainer.flash_attn": False,
        "trainer.remove_microbatch_padding": False,
        "trainer.gradient_checkpointing": False,
        "trainer.ckpt_path": directory / "checkpoints",
        "trainer.export_path": directory / "exports",
        "trainer.log_path": directory / "logs",
        "trainer.ckpt_interval": -1,
        "trainer.eval_interval": -1,
        "trainer.eval_before_train": False,
        "trainer.print_example_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.logger": "console",
        "trainer.enable_ray_gpu_monitor": False,
        "generator.n_samples_per_prompt": 4,
        "generator.step_wise_trajectories": True,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "generator.inference_engine.num_engines": 1,
        "data.dataloader.num_workers": 0,
    }
    settings |= {name.replace("__", "."): value for name, value in overrides.items()}
    return SkyRLTrainConfig.from_cli_overrides(settings)


def tokenizer(cfg: SkyRLTrainConfig) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(cfg.trainer.policy.model.path)


class Prompts:
    """A data set of numbered prompts."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": f"w{2 + number}"}], "env_class": "none", "uid": str(number)}

    def collate_fn(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**item, "env_extras": {}} for item in items]


class Engine:
    """Replaces SkyRL's client of its inference engines, which sample nothing here."""

    async def pause_generation(self) -> None:
        pass

    async def resume_generation(self) -> None:
        pass

    def increment_weight_version(self) -> None:
        pass


class Tracker:
    """Keeps what is logged; also in a file, a line a time."""

    def __init__(self, path: Path | None = None) -> None:
        self.logs: list[dict[str, Any]] = []
        self._path = path

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        self.logs.append({**data, "step": step})
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(self.logs[-1], default=float) + "\n")

    def finish(self) -> None:
        pass


Step = dict[str, Any]


def drawn_trajectory(uid: str, sample: int) -> list[Step]:
    """Turns that mostly go on from the one before; the same at every call."""
    drawn = random.Random(f"{uid}/{sample}")

    def tokens(least: int, most: int) -> list[int]:
        return [drawn.randrange(2, WORDS) for _ in range(drawn.randint(least, most))]

    steps: list[Step] = []
    context = [2 + int(uid), *tokens(1, 5)]
    for _ in range(drawn.randint(1, 3)):
        response = tokens(1, 5)
        steps.append(
            {
                "prompt_token_ids": list(context),
                "response_ids": response,
                "loss_masks": [int(drawn.random() < 0.9) for _ in response[1:]] + [1],
                "rollout_logprobs": [-3.5 - drawn.random() for _ in response],
                "rewards": 0.0,
            }
        )
        context = [*context, *response, *tokens(0, 3)]
        if drawn.random() < 0.2:
            context[1] = 2 + (context[1] + 1) % (WORDS - 2)
    steps[-1]["rewards"] = round(drawn.random(), 3)
    return steps


class Recorded(GeneratorInterface):  # type: ignore[misc]
    """Gives the same rollouts for the same prompts: of several turns where steps are trained, else of one."""

    def __init__(self, cfg: SkyRLTrainConfig) -> None:
        self._step_wise = cfg.generator.step_wise_trajectories

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        rows = []
        for trajectory in input_batch["trajectory_ids"]:
            steps = drawn_trajectory(trajectory.instance_id, trajectory.repetition_id)
            if not self._step_wise:
                ones = [1] * len(steps[0]["response_ids"])
                steps = [steps[0] | {"rewards": steps[-1]["rewards"], "loss_masks": ones}]
            rows += [(trajectory, step, step is steps[-1]) for step in steps]
        return generator_output(rows, self._step_wise)


def generator_output(rows: Sequence[tuple[Any, Step, bool]], step_wise: bool) -> GeneratorOutput:
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")
    output: dict[str, Any] = {name: [step[name] for _, step, _ in rows] for name in names}
    output |= {
        "stop_reasons": ["stop"] * len(rows),
        "trajectory_ids": [trajectory for trajectory, _, _ in rows] if step_wise else None,
        "is_last_step": [last for _, _, last in rows] if step_wise else None,
        "rollout_metrics": get_rollout_metrics(output["response_ids"], output["rewards"]),
    }
    return output


def weights_of(cfg: SkyRLTrainConfig) -> dict[str, torch.Tensor]:
    """The samples that were handed over last."""
    weights: dict[str, torch.Tensor] = torch.load(Path(cfg.trainer.export_path) / WEIGHTS, weights_only=True)
    return weights


def first_weights(cfg: SkyRLTrainConfig) -> dict[str, torch.Tensor]:
    model = Qwen2ForCausalLM.from_pretrained(cfg.trainer.policy.model.path, dtype=torch.float32)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def first_values(cfg: SkyRLTrainConfig) -> dict[str, torch.Tensor]:
    """The critic's weights before training."""
    return {name: weight.detach() for name, weight in ValueModel(cfg.trainer.policy.model.path).named_parameters()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> float:
    """The largest difference of a parameter's update, over the largest update of that parameter. All are updated."""
    updates = {name: (other[name] - weight).abs().max() for name, weight in first.items()}
    assert all(updates.values()), updates
    return max(float((one[name] - other[name]).abs().max() / update) for name, update in updates.items())
