"""A random model and its tokenizer, whose tokens are bytes, in a folder as those of the Hub are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, BEGIN, END, *CALL = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
_WORDS = [PAD, BEGIN, END, *CALL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save(folder: Path, max_tokens: int = 4096) -> None:
    """Saves Qwen2 of two layers in float32."""
    numbers = {word: number for number, word in enumerate(_WORDS)}
    backend = Tokenizer(models.BPE(numbers, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)
    tokenizer.add_special_tokens({"additional_special_tokens": [BEGIN]})
    tokenizer.add_tokens(CALL)
    tokenizer.chat_template = _TEMPLATE
    save_with(tokenizer, folder, max_tokens)


def save_with(tokenizer: PreTrainedTokenizerFast, folder: Path, max_tokens: int = 4096) -> None:
    """Saves a model of the tokenizer's vocabulary."""
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_tokens,
        # Of the initial weights the default makes all tokens about as likely as one another.
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


def load(folder: Path) -> Any:
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
    """The logprobs of a response by one forward pass over all of it."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
