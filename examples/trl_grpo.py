"""GRPO with TRL, its batches made by gristmill: a tiny policy learns to say low words, in a minute on a CPU.

    gristmill serve &
    pip install trl==1.16.0 '.[torch]'        # in gristmill's checkout
    python examples/trl_grpo.py

Lines that differ from a plain TRL script are marked. Nothing is downloaded: the model and its vocabulary are made here.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import GRPOConfig

from gristmill.adapters.trl import Gristmill, GristmillGRPOTrainer  # gristmill

WORDS, LOW = 64, 16


def low_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the reward: the share of low words."""
    return [sum(token < LOW for token in ids) / len(ids) for ids in completion_ids]


def vocabulary() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def tiny_model() -> Qwen2ForCausalLM:
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=WORDS, num_key_value_heads=2, eos_token_id=1, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--address", default="127.0.0.1:50051", help="of gristmill serve (default: %(default)s)")
    parser.add_argument("--run", default="trl-example", help="the run's name (default: %(default)s)")
    parser.add_argument("--directory", default=tempfile.mkdtemp(), help="where checkpoints go")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    arguments = parser.parse_args()
    config = GRPOConfig(
        output_dir=arguments.directory,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=6,
        max_steps=20,
        learning_rate=1e-2,
        save_steps=5,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
    )
    trainer = GristmillGRPOTrainer(  # gristmill
        model=tiny_model(),
        reward_funcs=low_words,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"w{number}"} for number in range(2, 42)]),
        processing_class=vocabulary(),
        gristmill=Gristmill(arguments.address, arguments.run),  # gristmill
    )
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward of the first step {rewards[0]:.2f}, of the last {rewards[-1]:.2f}")


if __name__ == "__main__":
    main()
