"""The engine that Atropos' ManagedServer samples from, in the form of its `example_trainer/vllm_api_server.py`: POST
/generate takes token ids and answers each token that was sampled with its log-probability.
"""

from __future__ import annotations

import itertools
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.environments.toy_tokenizer import END, VOCABULARY


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
