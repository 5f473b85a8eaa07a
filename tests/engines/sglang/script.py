"""Makes SGLang sample given tokens, with the logprobs that the model gives them."""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class Script(CustomLogitProcessor):
    """Makes the next token of `script` the most likely one. Where it has ended, the model goes on by itself."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        for row, params in zip(logits, custom_param_list or (), strict=True):
            script, place = params["script"], len(params["__req__"].output_ids)
            if place < len(script):
                row[script[place]] = row.max() + 1
        return logits
