"""A model and tokenizer of a few thousand weights, in a folder as those of the Hub are."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = 48


def save(folder: Path, *, seed: int = 0) -> None:
    """Qwen2 of 2 layers, float32, and a tokenizer of as many words."""
    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, WORDS)}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
