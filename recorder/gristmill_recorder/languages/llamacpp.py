"""llama.cpp's own route, `/completion`, whose prompt is tokens.

Source: `tools/server/{server-context,server-task}.cpp` of ggml-org/llama.cpp (pull requests 10783 and 10853), b11434.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gristmill._engines.refusals import refuse
from gristmill.completions import Sampled
from gristmill_recorder.languages.generate import OwnRouteForm, OwnRouteStream
from gristmill_recorder.languages.language import Asking, Document, Stream
from gristmill_recorder.refusals import NotRecorded, WrongCall

_LOGPROBS = "completion_probabilities"
# The server's logprob of a token with probability 0.
_LOWEST = -3.4e38


class LlamaForm(OwnRouteForm):
    """A call of `/completion`. path: that, or its older name `/completions`."""

    def __init__(self, path: str, document: Document, asking: Asking) -> None:
        super().__init__("completion", path, document, asking, prompt="prompt")
        for name in ("n_cmpl", "n"):
            if (count := document.get(name) or 1) != 1:
                raise WrongCall(f"{name} is {count}; call /{path} once for each answer")
        refuse(document, "response_fields", "the answer would lack the tokens")
        if asking.logprobs and document.get("stop") and not document.get("stream"):
            raise WrongCall(
                "stop is set, and llama.cpp omits the logprobs of a stop string's tokens; set stream, or start the "
                "recorder with --no-logprobs"
            )
        self._keeps_logprobs = bool(document.get("n_probs") or document.get("logprobs"))

    @property
    def request(self) -> Document:
        request = {**self._document, "return_tokens": True}
        if self._asking.logprobs and not self._keeps_logprobs:
            # Those of the distribution from which the token was sampled.
            request |= {"n_probs": 1, "post_sampling_probs": True}
        return request

    def read(self, answer: Document) -> tuple[list[Sampled], list[Document]]:
        return self.samples(answer, answer["tokens"], answer.get(_LOGPROBS) or ()), []

    def samples(self, answer: Document, tokens: list[int], logprobs: Sequence[Any]) -> list[Sampled]:
        read, count = answer["tokens_evaluated"], answer["tokens_predicted"]
        if read != len(self._prompt):
            raise NotRecorded(f"the engine read {read} tokens of a prompt of {len(self._prompt)}; shorten the prompt")
        if answer["truncated"] and answer["tokens_cached"] < read + count - 1:
            raise NotRecorded(
                "the engine dropped tokens from its context while it sampled; start llama-server without "
                "--context-shift, or with a larger --ctx-size"
            )
        if len(tokens) != count:
            raise NotRecorded(
                f"the engine's stream has {len(tokens)} of {count} tokens, because llama.cpp omits those that end "
                "within a character; do not set stream"
            )
        values = _logprobs(tokens, logprobs) if self._asking.logprobs else ()
        return self.sampled(tokens, values, "length" if answer["stop_type"] == "limit" else "stop")

    def whole(self, answer: Document) -> Document:
        if not self._document.get("return_tokens"):
            answer["tokens"] = []
        return self.strip(answer)

    def strip(self, answer: Document) -> Document:
        if self._keeps_logprobs:
            return answer
        answer.pop(_LOGPROBS, None)
        if settings := answer.get("generation_settings"):
            settings |= {"n_probs": 0, "post_sampling_probs": bool(self._document.get("post_sampling_probs"))}
        return answer

    def stream(self) -> Stream:
        return LlamaStream(self)


class LlamaStream(OwnRouteStream):
    """Reads the events of `/completion`. Each has the new tokens, the last none."""

    def add(self, answer: Document) -> None:
        # An event about the progress of the prompt has a token that was not sampled.
        if "prompt_progress" not in answer:
            self._tokens += answer["tokens"]
            self._logprobs += answer.get(_LOGPROBS) or ()
        if answer["stop"]:
            self.is_complete = self.is_over = True
            self._answer = answer


def _logprobs(tokens: list[int], probabilities: Sequence[Document]) -> list[float]:
    pairs = [(each["id"], _logprob(each)) for each in probabilities]
    logprobs = [logprob for _, logprob in pairs if logprob is not None]
    if [token for token, logprob in pairs if logprob is not None] != tokens:
        raise NotRecorded(
            f"the answer has the logprobs of {len(logprobs)} of {len(tokens)} tokens, because llama.cpp omits those of "
            "tokens that end within a character, of drafted tokens and of stop strings; start the recorder with "
            "--no-logprobs, or llama-server without drafts"
        )
    return logprobs


def _logprob(entry: Document) -> float | None:
    """Returns the logprob of a sampled token; None if its probability is 0, or unknown because it was drafted: then the
    entry has no candidates."""
    if "prob" in entry:
        return math.log(entry["prob"]) if entry["prob"] > 0 and entry["top_probs"] else None
    return entry["logprob"] if entry["logprob"] > _LOWEST and entry["top_logprobs"] else None
