"""A tokenizer for tests with real packages, whose tokens are characters. Needs transformers."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

BEGIN, END = "<|im_start|>", "<|im_end|>"
_CHARACTERS = "\n+=0123456789abcdefghijklmnopqrstuvwxyz "
VOCABULARY = {word: number for number, word in enumerate([BEGIN, END, *_CHARACTERS])}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_in(directory: Path) -> Path:
    """Writes one whose tokens are characters."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.add_special_tokens({"additional_special_tokens": [BEGIN]})
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)
    return directory
