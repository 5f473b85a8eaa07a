"""A worker of Dynamo that repeats the last message, with logprobs.

`python -m tests.engines.dynamo.worker FOLDER MODEL SIZE PARSER`: FOLDER has the tokenizer, SIZE is how many tokens it
sends at once. Its `engine_data` are those of `components/src/dynamo/vllm/handlers.py` of ai-dynamo/dynamo. The model
"bare" has none, like other engines than vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LlmRegistration
from dynamo.common.backend.run import run
from dynamo.common.backend.sample_engine import SampleLLMEngine
from transformers import AutoTokenizer

FOLDER, MODEL, SIZE, PARSER = sys.argv[1:]
_TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
_FLAGS = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq", "--disable-kv-routing")


def answer_of(prompt: list[int]) -> list[int]:
    text = _TOKENIZER.decode(prompt).rpartition("user\n")[2].partition("<|im_end|>")[0]
    tokens: list[int] = _TOKENIZER.encode(text, add_special_tokens=False)
    return [*tokens, _TOKENIZER.eos_token_id]


class Worker(SampleLLMEngine):  # type: ignore[misc]
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        engine, config = await super().from_args([*_FLAGS, "--component", MODEL])
        config.model_name, config.served_model_name = FOLDER, MODEL
        config.tool_call_parser = PARSER
        return engine, config

    async def start(self, worker_id: int) -> Any:
        registration = LlmRegistration(
            context_length=4096, kv_cache_block_size=16, total_kv_blocks=1000, max_num_seqs=64
        )
        return EngineConfig(model=FOLDER, served_model_name=MODEL, llm=registration)

    async def generate(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        prompt, limit = request["token_ids"], (request.get("stop_conditions") or {}).get("max_tokens")
        whole = answer_of(prompt)
        tokens = whole[: limit or len(whole)]
        logprobs = [-(place % 64 + 1) / 64 for place in range(len(tokens))]
        has_logprobs = (request.get("output_options") or {}).get("logprobs") is not None
        extension = (request.get("extra_args") or {}).get("nvext") or {}
        size = int(SIZE)
        for begin in range(0, len(tokens), size):
            part: dict[str, Any] = {"token_ids": tokens[begin : begin + size], "index": 0}
            if has_logprobs:
                part["log_probs"] = logprobs[begin : begin + size]
            if begin + size >= len(tokens):
                part["finish_reason"] = "stop" if tokens == whole else "length"
                counts = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
                part["completion_usage"] = {**counts, "total_tokens": sum(counts.values())}
                if "engine_data" in (extension.get("extra_fields") or ()) and MODEL != "bare":
                    part["engine_data"] = {"prompt_token_ids": prompt, "completion_token_ids": tokens, "finished": True}
                    part["engine_data"] |= {"completion_logprobs": logprobs} if has_logprobs else {}
            yield part


if __name__ == "__main__":
    run(Worker)
