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
from typing import Any, NamedTuple

from gristmill.errors import InvalidArgumentError

__all__ = ["HOW_TO_ASK", "ChunkReader", "Sampled", "logprobs_of", "sampled"]

_DIGITS = 10  # The digits of 2**31 - 1.
# For a token without a logprob vLLM writes this, and SGLang and llama.cpp the lowest float.
_NO_LOGPROB = -9999.0
_ROUNDING = 1e-3

HOW_TO_ASK = (
    "request them: with vLLM 0.10.2 or newer by return_token_ids and logprobs, with SGLang by "
    "return_input_ids_in_sglext, return_output_ids_in_sglext and logprobs, with Dynamo by nvext.extra_fields and "
    "logprobs"
)


class Sampled(NamedTuple):
    """One choice of an answer: the tokens that the engine read, and the tokens that it sampled.

    rollout_logprobs: one log-probability per sampled token; None if the answer has none. stop_reason: the engine's name
    for it; "" if the answer has none. policy_versions: the version of the weights that sampled each token, -1 where
    the label is not a number; None if the answer has no numeric labels. sampling_mask: the tokens from which each token
    was sampled; None if the answer has none. choice: the index of the choice in the answer.
    """

    prompt_token_ids: Sequence[int]
    response_ids: Sequence[int]
    rollout_logprobs: Sequence[float] | None
    stop_reason: str
    policy_versions: Sequence[int] | None = None
    sampling_mask: Sequence[Sequence[int]] | None = None
    choice: int = 0


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
            sample = checked_choice(prompt, response, logprobs, choice.stop_reason, where, choice.spans, mask)
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
        checked_choice(
            prompt, response, None, stops.get(status, status) if turn == last else "tool_calls", f"turn {turn}"
        )
        for turn, (prompt, response) in enumerate(turns)
    ]
    return [turn for turn in checked if turn.response_ids]


def checked_choice(
    prompt: Sequence[int] | None,
    response: Sequence[int] | None,
    logprobs: Sequence[float] | None,
    stop_reason: Any,
    where: str,
    spans: Sequence[Mapping[str, Any]] | None = None,
    mask: Sequence[Sequence[int]] | None = None,
) -> Sampled:
    """Return a choice. Raises InvalidArgumentError that names it (`where`), like `sampled`, if it is incomplete.

    spans: the versions of the weights, as the engine writes them. mask: the sampling mask.
    """
    if prompt is None or response is None:
        missing = "prompt's" if prompt is None else "response's"
        raise InvalidArgumentError(f"{where}: the answer lacks the {missing} token ids; {HOW_TO_ASK}")
    for what, values in (("logprobs", logprobs), ("lists in sampling_mask", mask)):
        if values is not None and len(values) != len(response):
            raise InvalidArgumentError(
                f"{where}: the answer has {len(values)} {what} for {len(response)} token ids; expected one per token id"
            )
    for place, logprob in enumerate(logprobs or ()):
        if not (isinstance(logprob, (int, float)) and _NO_LOGPROB < logprob < _ROUNDING):
            raise InvalidArgumentError(
                f"{where}: token {place} has the logprob {logprob!r}; expected a number of more than {_NO_LOGPROB:g}, "
                "which vLLM writes for none, and at most 0; repeat the call, or update the engine"
            )
    if not isinstance(stop_reason, str):
        raise InvalidArgumentError(f"{where}: finish_reason is {stop_reason!r}; expected a string or null")
    return Sampled(prompt, response, logprobs, stop_reason, _versions(spans, len(response), where), mask)


def _spans_of(answer: Mapping[str, Any]) -> Any:
    """Read SGLang's spans of weight versions."""
    return (answer.get("metadata") or {}).get("weight_versions")


def _versions(spans: Sequence[Mapping[str, Any]] | None, count: int, where: str) -> list[int] | None:
    """Return the version of each sampled token, from consecutive spans `{version, start, end}`."""
    versions: list[int] = []
    for span in spans or ():
        start, end = span["start"], span["end"]
        if start != len(versions) or not start <= end <= count:
            raise InvalidArgumentError(
                f"{where}: weight_versions has a span of {start}..{end} after {len(versions)} of {count} tokens; "
                "expected consecutive spans that cover each token once"
            )
        versions += [_version(span["version"])] * (end - start)
    if spans and len(versions) != count:
        raise InvalidArgumentError(f"{where}: weight_versions covers {len(versions)} of {count} tokens; expected all")
    return versions if any(version >= 0 for version in versions) else None


def _version(label: Any) -> int:
    """Return the policy version from a label of weights; -1 if the label is not a number."""
    text = str(label)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < _DIGITS else -1


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
