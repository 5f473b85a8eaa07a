"""The engine that Atropos' ManagedServer samples from, in the form of its `example_trainer/vllm_api_server.py`: POST
/generate takes token ids and answers each token that was sampled with its log-probability. And its tokenizer.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
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


def logprob_of(token: int) -> float:
    """A number that float32 holds."""
    return -(token % 7 + 1) / 8


class SumEngine:
    """Answers `1+N=`, the first of several samples rightly and the others with 0."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/generate", self.generate, methods=["POST"]), Route("/health", self.health, methods=["GET"])]
        )

    async def health(self, request: Request) -> JSONResponse:
        return JSONResponse({})

    async def generate(self, request: Request) -> JSONResponse:
        body: dict[str, Any] = await request.json()
        words = list(VOCABULARY)
        prompt = "".join(words[token] for token in body["prompt"]["prompt_token_ids"])
        self.prompts.append(prompt)
        right = 1 + int(prompt.rpartition("1+")[2][0])
        said = itertools.islice(itertools.chain([str(right)], itertools.repeat("0")), body["n"])
        completions = [[*(VOCABULARY[character] for character in text), VOCABULARY[END]] for text in said]
        logprobs = [[[{str(token): logprob_of(token)}] for token in completion] for completion in completions]
        return JSONResponse({"logprobs": logprobs, "finish_reasons": ["stop"] * len(completions)})
