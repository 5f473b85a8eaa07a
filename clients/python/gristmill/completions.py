"""Reads sampled tokens from an engine's answer to a call of the OpenAI API. An answer without token ids is refused,
because this module does not tokenize.

Engines return token ids if a call requests them:

    vLLM, chat and completions   `return_token_ids: true`, with `logprobs: true` (chat) or `logprobs: 0` (completions)
    vLLM, responses              `enable_response_messages: true`; it does not return logprobs of all tokens
    SGLang, chat                 `return_input_ids_in_sglext` and `return_output_ids_in_sglext: true`, `logprobs: true`;
                                 or, without streaming, `return_token_ids: true`
    SGLang, completions          `return_token_ids: true`, `logprobs: 1`
    Dynamo, chat and completions `nvext: {"extra_fields": ["completion_token_ids", "prompt_token_ids", "engine_data"]}`,
                                 with `logprobs: true` (chat) or `logprobs: 0` (completions), and one choice

The ids of a choice are in `token_ids`, which newer versions of SGLang call `response_token_ids` (35225, 38459).

The versions of the weights that sampled each token are in a choice's `weight_versions` (vLLM, `return_weight_versions:
true`) or in `metadata.weight_versions` (SGLang, first choice only). Label the engine's weights by policy version.

The candidates that top-p and top-k left for each token are in a choice's `sampling_mask`, one list per token. vLLM
returns it if started with `--return-sampling-mask`.

Sources: `entrypoints/openai/{chat_completion,completion,responses}` of vllm-project/vllm (pull request 22587),
`srt/entrypoints/openai` of sgl-project/sglang (30917 and 34488), and `lib/llm/src/protocols/openai` and
`components/src/dynamo/vllm/handlers.py` of ai-dynamo/dynamo (9509 and 13640).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gristmill._engines import samples
from gristmill._engines.samples import HOW_TO_ASK, Sampled
from gristmill.errors import InvalidArgumentError

__all__ = ["HOW_TO_ASK", "ChunkReader", "Sampled", "logprobs_of", "sampled"]


def sampled(completion: Any) -> list[Sampled]:
    """Return the choices of an answer in the order of their index, without choices that have no sampled token.

    completion: a chat completion, completion or response, as a mapping or an object of the `openai` package; or the
        chunks of a streamed answer, in their order.

    Raises InvalidArgumentError if token ids are missing, or if the answer has log-probabilities, but not one for each
    token: a finite number of at most 0, apart from rounding, and none of those that engines write for a missing one.
    """
    chunks = ChunkReader()
    if isinstance(completion, Iterable) and not isinstance(completion, (Mapping, str)) and not _is_model(completion):
        for chunk in completion:
            chunks.read(_mapping(chunk))
        return chunks.sampled()
    answer = _mapping(completion)
    if answer.get("object") == "response":
        return _of_response(answer)
    choices = [{"index": position, **choice} for position, choice in enumerate(answer.get("choices") or ())]
    if not choices:
        raise InvalidArgumentError("the answer has no choices; pass a chat completion, a completion or a response")
    by_index = {choice["index"]: choice for choice in choices}
    if len(by_index) != len(choices):
        raise InvalidArgumentError(
            f"the answer has {len(choices)} choices, and some with the same index; update the engine"
        )
    for index, choice in by_index.items():
        choice["finish_reason"] = choice.get("finish_reason") or ""
        choice["weight_versions"] = _first(choice.get("weight_versions"), None if index else _spans_of(answer))
    # A whole answer is read as a stream of one chunk.
    chunks.read({**answer, "choices": choices})
    return chunks.sampled()


class ChunkReader:
    """Collects the choices of a streamed answer from its chunks."""

    def __init__(self) -> None:
        self._prompt: Sequence[int] | None = None
        self._choices: dict[int, _Choice] = {}
        self._extension: Mapping[str, Any] = {}
        self._dynamo = _Dynamo()

    def read(self, chunk: Mapping[str, Any]) -> None:
        """Read the next chunk, as the engine sent it."""
        self._prompt = _first(self._prompt, chunk.get("prompt_token_ids"))
        if extension := chunk.get("sglext"):
            self._extension = {**self._extension, **extension}
        self._dynamo.read(chunk.get("nvext") or {})
        for choice in chunk.get("choices") or ():
            index = choice.get("index", 0)
            if (known := self._choices.get(index)) is None:
                known = self._choices[index] = _Choice()
            known.read(choice)

    @property
    def finished(self) -> int:
        """Return the number of choices that have a stop reason."""
        return sum(choice.stop_reason is not None for choice in self._choices.values())

    @property
    def has_prompt(self) -> bool:
        """Return whether the prompt's token ids have arrived."""
        return self._prompt is not None or any(choice.prompt is not None for choice in self._choices.values())

    def sampled(self) -> list[Sampled]:
        """Return the choices, like the function `sampled`. Also raises InvalidArgumentError if a choice has not ended
        because the stream was cut."""
        choices, dynamo = [], self._dynamo if len(self._choices) == 1 else _Dynamo()
        for index, choice in sorted(self._choices.items()):
            where = f"choice {index}"
            if choice.stop_reason is None:
                raise InvalidArgumentError(f"{where} has no finish_reason: the stream was cut; repeat the call")
            prompt = _first(self._prompt, choice.prompt, self._extension.get("input_ids"), dynamo.prompt)
            response = _first(choice.tokens, _at(self._extension.get("output_ids"), index), dynamo.response)
            logprobs, mask = _first(dynamo.logprobs, choice.logprobs), _first(choice.mask, dynamo.mask)
            sample = samples.checked(prompt, response, logprobs, choice.stop_reason, where, choice.spans, mask)
            choices.append(sample._replace(choice=index))
        if not choices:
            raise InvalidArgumentError("the stream has no choices; pass the chunks of a completion")
        return [choice for choice in choices if choice.response_ids]


class _Choice:
    """The parts of a choice that have arrived."""

    def __init__(self) -> None:
        self.prompt: Sequence[int] | None = None
        self.tokens: list[int] | None = None
        self.logprobs: list[float] | None = None
        self.stop_reason: str | None = None
        self.spans: Sequence[Mapping[str, Any]] | None = None
        self.mask: list[Sequence[int]] | None = None

    def read(self, part: Mapping[str, Any]) -> None:
        self.prompt = _first(self.prompt, part.get("prompt_token_ids"))
        if (tokens := _ids_of(part)) is not None:
            self.tokens = self.tokens or []
            self.tokens += tokens
        if (logprobs := logprobs_of(part.get("logprobs"))) is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += logprobs
        if (mask := part.get("sampling_mask")) is not None:
            self.mask = self.mask or []
            self.mask += mask
        self.stop_reason = _first(self.stop_reason, part.get("finish_reason"))
        self.spans = _first(part.get("weight_versions"), self.spans)


class _Dynamo:
    """Dynamo's extension of an answer with one choice; it does not say to which of several choices its tokens belong.

    The named fields are Dynamo's own; each chunk of a stream has the new tokens. `engine_data` is the engine's: some
    engines have none, and it is missing if Dynamo ended the answer at a stop string.
    """

    def __init__(self) -> None:
        self._tokens: list[int] | None = None
        self._prompt: Sequence[int] | None = None
        self._data: Mapping[str, Any] = {}

    def read(self, nvext: Mapping[str, Any]) -> None:
        if (tokens := nvext.get("completion_token_ids")) is not None:
            self._tokens = self._tokens or []
            self._tokens += tokens
        self._prompt = _first(nvext.get("prompt_token_ids"), self._prompt)
        self._data = nvext.get("engine_data") or self._data

    @property
    def prompt(self) -> Any:
        """Return what the engine read; else what Dynamo sent to it."""
        return _first(self._data.get("prompt_token_ids"), self._prompt)

    @property
    def response(self) -> Any:
        sampled = self._data.get("completion_token_ids")
        if self._tokens is not None and sampled is not None and sampled[: len(self._tokens)] != self._tokens:
            raise InvalidArgumentError(
                f"the {len(self._tokens)} tokens of nvext.completion_token_ids are not the first of the {len(sampled)} "
                "tokens of engine_data; update Dynamo"
            )
        return _first(self._tokens, sampled)

    @property
    def logprobs(self) -> Any:
        return self._of_tokens("completion_logprobs")

    @property
    def mask(self) -> Any:
        return self._of_tokens("sampling_mask")

    def _of_tokens(self, name: str) -> Any:
        """Read a field of engine_data, if it is about the same tokens."""
        return self._data.get(name) if self._data.get("completion_token_ids") == self.response else None


def _ids_of(choice: Mapping[str, Any]) -> Any:
    """Read the sampled tokens of a choice, or of a chunk of a choice."""
    return _first(choice.get("token_ids"), choice.get("response_token_ids"))


def logprobs_of(logprobs: Mapping[str, Any] | None) -> list[float] | None:
    """Read a choice's log-probabilities in the form of chat (`content`) or of completions (`token_logprobs`)."""
    if logprobs is None:
        return None
    if (content := logprobs.get("content")) is not None:
        return [token["logprob"] for token in content]
    return logprobs.get("token_logprobs")


def _of_response(answer: Mapping[str, Any]) -> list[Sampled]:
    """Read the turns of a response. vLLM runs its built-in tools within a response: `input_messages` contains the
    prompt of the first turn, and `output_messages` alternates between an output and the next prompt."""
    messages = [*(answer.get("input_messages") or ()), *(answer.get("output_messages") or ())]
    tokens = [message.get("tokens") if isinstance(message, Mapping) else None for message in messages]
    if not tokens or len(tokens) % 2 or None in tokens:
        raise InvalidArgumentError(
            "the response has no token ids; set enable_response_messages: true with vLLM (for models without the "
            "Harmony format), or use chat completions"
        )
    status = answer.get("status") or ""
    turns = zip(tokens[::2], tokens[1::2], strict=True)
    last = len(tokens) // 2 - 1
    stops = {"completed": "stop", "incomplete": "length"}
    checked = [
        samples.checked(
            prompt, response, None, stops.get(status, status) if turn == last else "tool_calls", f"turn {turn}"
        )
        for turn, (prompt, response) in enumerate(turns)
    ]
    return [turn for turn in checked if turn.response_ids]


def _spans_of(answer: Mapping[str, Any]) -> Any:
    """Read SGLang's spans of weight versions."""
    return (answer.get("metadata") or {}).get("weight_versions")


def _mapping(answer: Any) -> Mapping[str, Any]:
    if isinstance(answer, Mapping):
        return answer
    if _is_model(answer):
        # The openai package declares metadata as a mapping of strings, which SGLang's is not.
        mapping: Mapping[str, Any] = answer.model_dump(warnings=False)
        return mapping
    raise InvalidArgumentError(
        f"the completion is a {type(answer).__name__}; pass an object of the openai package, or the answer as a mapping"
    )


def _is_model(answer: Any) -> bool:
    """Return whether the answer is a pydantic model, like the classes of the openai package. Iterating over a model
    yields its fields."""
    return hasattr(answer, "model_dump")


def _first(*values: Any) -> Any:
    for value in values:
        if value is not None:
            return value
    return None


def _at(values: Sequence[Any] | None, index: int) -> Any:
    return values[index] if values is not None and index < len(values) else None
