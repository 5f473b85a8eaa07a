"""Rollouts made by the real frameworks, for the recorded data and for tests where a framework is installed.

Each function imports its framework when it is called. Models, engines and environments are replaced at the framework's
own seams; what pads, masks, scores and names the tensors is the framework's code.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import typing
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

CHAT_TEMPLATE = (
    "{% for message in messages %}w9 {{ message['content'] }} w1 {% endfor %}"
    "{% if add_generation_prompt %}w9{% endif %}"
)


def tokenizer() -> Any:
    """Words w0 (padding), w1 (end), w2 and so on are the tokens 0, 1, 2 and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    made.chat_template = CHAT_TEMPLATE
    return made


# verl 0.9.1


def _verl_outputs() -> list[Any]:
    """Three agent loops: two samples of a prompt, the first with a tool call, and one of another prompt."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    made = []
    for prompt, response, mask, reward in (
        ([2, 3, 4], [5, 6, 20, 21, 7, 1], [1, 1, 0, 0, 1, 1], 1.0),
        ([2, 3, 4], [8, 1], [1, 1], 0.0),
        ([10, 11, 12, 13, 14], [15, 0, 1], [1, 1, 1], 0.25),
    ):
        ran = len(prompt) + len(response) - 1
        made.append(
            AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=response,
                response_mask=mask,
                response_logprobs=[-0.5 * on for on in mask],
                routed_experts=(np.arange(ran * 4, dtype=np.int16) % 8).reshape(ran, 2, 2),
                reward_score=reward,
                num_turns=2,
                metrics=AgentLoopMetrics(),
                extra_fields={"min_global_steps": 3, "max_global_steps": 4},
            )
        )
    return made


def verl_batch() -> Any:
    """The result of `AgentLoopWorker.generate_sequences`: a padded DataProto, with routed experts."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    worker = AgentLoopWorker.__new__(AgentLoopWorker)
    worker.tokenizer, worker.processor, worker.hf_model_type = tokenizer(), None, None
    worker.rollout_config = SimpleNamespace(prompt_length=6, response_length=8)
    worker.mm_processor_kwargs, worker.reward_loop_worker_handles, worker.distillation_enabled = {}, None, False

    async def padded() -> list[Any]:
        prompt = [{"role": "user", "content": "text"}]
        return [await worker._agent_loop_postprocess(output, False, raw_prompt=prompt) for output in _verl_outputs()]

    uids = np.array(["a", "a", "b"], dtype=object)
    return worker._postprocess(asyncio.run(padded()), input_non_tensor_batch={"uid": uids})


def verl_queue() -> tuple[list[str], Any]:
    """Keys and rows as `AgentLoopWorkerTQ` puts them into its queue; the second session gave two outputs."""
    import torch
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    keys, fields = [], []
    for output, (uid, session, index) in zip(_verl_outputs(), (("a", 1, 1), ("a", 0, 0), ("a", 1, 0)), strict=True):
        field = output.as_dict() | {"uid": uid, "session_id": session, "global_steps": 5}
        field["loss_mask"], field["multi_modal_inputs"] = field["response_mask"], {}
        field["rm_scores"] = torch.zeros_like(field["rm_scores"])
        field["rm_scores"][-1] = 0.5 if session else 0.0
        field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
        field["position_ids"] = torch.arange(len(field["input_ids"]))
        keys.append(f"{uid}_{session}_{index}")
        fields.append(field)
    return keys, list_of_dict_to_tensordict(fields)


# TRL 1.16.0


def trl_output() -> dict[str, Any]:
    """The result of `GRPOTrainer._generate_and_score_completions` for two prompts with two generations, one of which
    has tokens that a tool gave."""
    import torch
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    prompt_ids = [[2, 3], [2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    completion_ids = [[8, 20, 21, 9, 1], [10, 1], [11, 12, 1], [13]]
    made = {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[-0.25] * len(ids) for ids in completion_ids],
        "env_mask": [[0 if token >= 20 else 1 for token in ids] for ids in completion_ids],
    }
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    rows = [{"prompt": "w2 w3"}, {"prompt": "w2 w3"}, {"prompt": "w4 w5 w6 w7"}, {"prompt": "w4 w5 w6 w7"}]
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=Qwen2ForCausalLM(config),
            args=GRPOConfig(
                output_dir=directory, per_device_train_batch_size=4, num_generations=2, use_cpu=True, report_to="none"
            ),
            reward_funcs=lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            rollout_func=lambda prompts, trainer: made,
        )
        trainer.model.train()
        return dict(trainer._generate_and_score_completions(rows))


def trl_samples() -> list[Any]:
    """The samples of one group in the queue of an `AsyncGRPOTrainer`: two conversations, one of two turns."""
    from trl.experimental.async_grpo import async_rollout_worker as worker

    def sequences(*turns: tuple[list[int], list[int]]) -> list[Any]:
        records = [worker.TurnRecord(prompt, output, [-0.5] * len(output)) for prompt, output in turns]
        return list(worker._chain_to_sequences(records, "conversation", 1)[0])

    first = sequences(([2, 3], [4, 5]), ([2, 3, 4, 5, 20, 21], [6, 1]))
    group = worker.RolloutGroup(
        prompts=[[{"role": "user", "content": "w2 w3"}]] * 2,
        reward_kwargs={},
        completions=[[{"role": "assistant", "content": "w4"}], [{"role": "assistant", "content": "w7"}]],
        completions_ids=[[4, 5, 6, 1], [7, 1]],
        completions_sequences=[first, sequences(([2, 3], [7, 1]))],
        tool_call_counts=[1, 0],
        tool_failure_counts=[0, 0],
        model_version=6,
        group_id=17,
        env_rewards=[None, None],
        rollout_rewards=[None, None],
    )
    loop = worker._AsyncRolloutLoop.__new__(worker._AsyncRolloutLoop)
    loop.reward_funcs = [lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids]]
    loop.reward_func_names, loop._env_reward_types, loop._provides_rollout_reward = ["length"], [], False
    return list(asyncio.run(loop._score_group(group)))


# SkyRL 0.3.0


def _make_skyrl_importable() -> None:
    """It wants Python 3.12's TypedDict, and two functions of a GPU package that generators do not use."""
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
    padding = ModuleType("flash_attn.bert_padding")
    padding.__dict__.update(pad_input=None, unpad_input=None)
    sys.modules.setdefault("flash_attn", ModuleType("flash_attn"))
    sys.modules.setdefault("flash_attn.bert_padding", padding)


class _Engine:
    """Samples two tokens for every prompt."""

    async def generate(self, engine_input: Any, **_: Any) -> dict[str, Any]:
        prompts = engine_input["prompt_token_ids"]
        return {
            "responses": ["w30 w1"] * len(prompts),
            "response_ids": [[30, 1] for _ in prompts],
            "stop_reasons": ["stop"] * len(prompts),
            "response_logprobs": [[-0.5, -0.25] for _ in prompts],
            "rollout_expert_indices": None,
        }

    async def finish_session(self, session_id: str) -> None:
        pass


def skyrl_output(*, step_wise: bool) -> tuple[Any, Any]:
    """The trajectory ids of the generator's input, and what `SkyRLGymGenerator.generate` returns for two prompts of two
    samples, each of two turns."""
    _make_skyrl_importable()
    from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from skyrl_gym.envs.registration import register, registry

    if "two-turns" not in registry:
        register(id="two-turns", entry_point=f"{__package__}.skyrl_environment:TwoTurns")
    config = GeneratorConfig()
    config.batched, config.max_turns, config.max_input_length = False, 2, 64
    config.step_wise_trajectories = step_wise
    config.sampling_params.max_generate_length, config.sampling_params.logprobs = 16, 1
    gym = SkyRLGymConfig()
    gym.max_env_workers = 0
    generator = SkyRLGymGenerator(config, gym, _Engine(), tokenizer())
    ids = [TrajectoryID(uid, sample) for uid in ("a", "b") for sample in range(2)]
    prompts = [[{"role": "user", "content": content}] for content in ("w2 w3", "w4") for _ in range(2)]
    made = generator.generate(
        {
            "prompts": prompts,
            "env_classes": ["two-turns"] * 4,
            "env_extras": [{"score": float(score)} for score in range(4)],
            "sampling_params": None,
            "trajectory_ids": ids,
            "batch_metadata": None,
        },
        disable_tqdm=True,
    )
    return ids, asyncio.run(made)
