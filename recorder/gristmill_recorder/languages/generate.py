"""The engines' own routes, whose prompt is tokens: vLLM's `/inference/v1/generate` and SGLang's `/generate`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gristmill._engines import samples
from gristmill._engines.events import DONE, Event
from gristmill._engines.refusals import refuse
from gristmill.completions import Sampled
from gristmill_recorder.engines.vllm import VLLM
from gristmill_recorder.languages.chat import ChatForm
from gristmill_recorder.languages.language import Asking, Document, Stream
from gristmill_recorder.refusals import NotRecorded, WrongCall

_MEDIA = "the row would be without the images"
_OF_LOGPROBS = ("output_token_logprobs", "input_token_logprobs", "output_token_logprobs_length")


class VllmGenerateForm(ChatForm):
    """A call of `/inference/v1/generate`. Its answer has choices like a completion's."""

    def __init__(self, document: Document, asking: Asking) -> None:
        refuse(document, "features", _MEDIA)
        prompt, settings = prompt_of(document, "token_ids"), _settings(document)
        of_settings = {name: settings.get(name) for name in ("n", "logprobs", "prompt_logprobs")}
        counted = {**of_settings, "stream": document.get("stream")}
        super().__init__("completions", counted, asking._replace(api=VLLM))
        self.api, self.path, self.comes_first = "generate", "inference/v1/generate", False
        self._call, self._prompt, self._sampling = document, prompt, settings
        # The route always returns these.
        self._hidden -= {"token_ids", "weight_versions"}
        if document.get("return_token_ids"):
            self._hidden.remove("prompt_token_ids")

    @property
    def request(self) -> Document:
        # 0 is the logprob of the sampled token alone.
        logprobs = {"logprobs": 0} if self._asking.logprobs and not self._keeps_logprobs else {}
        settings = {**self._sampling, **logprobs, **self._prompt_logprobs}
        return {**self._call, "return_token_ids": True, "sampling_params": settings}

    def strip_chunk(self, chunk: Document) -> Document | None:
        # Other than in a whole answer, the field is missing if it was not requested.
        if "prompt_token_ids" in self._hidden:
            chunk.pop("prompt_token_ids", None)
        return super().strip_chunk(chunk)


class OwnRouteForm(ABC):
    """A call of an engine's own route with one prompt and one answer. prompt: the field of its tokens."""

    stream_later: Document | None = None

    def __init__(self, api: str, path: str, document: Document, asking: Asking, *, prompt: str) -> None:
        self.api, self.path, self._document, self._asking = api, path, document, asking
        self._prompt = prompt_of(document, prompt)

    @abstractmethod
    def samples(self, answer: Document, tokens: list[int], logprobs: Sequence[Any]) -> list[Sampled]:
        """Returns the answer, if it has tokens. logprobs: as the engine writes them. Raises NotRecorded if the answer
        does not contain all that was read and sampled."""

    @abstractmethod
    def strip(self, answer: Document) -> Document:
        """Removes what the recorder requested from an answer, or from a part of one, in place."""

    def sampled(self, tokens: list[int], logprobs: Sequence[Any], stop_reason: str) -> list[Sampled]:
        """Returns the answer with these tokens, if it has any."""
        used = logprobs if self._asking.logprobs else None
        return [samples.checked(self._prompt, tokens, used, stop_reason, "the answer")] if tokens else []

    def whole(self, answer: Document) -> Document:
        return self.strip(answer)


class OwnRouteStream(ABC):
    """Reads the events of an engine's own route. Each is an object with a part of the answer."""

    def __init__(self, form: OwnRouteForm) -> None:
        self.is_complete = self.is_over = self.has_failed = False
        self._form, self._answer = form, dict[str, Any]()
        self._tokens, self._logprobs = list[int](), list[Any]()

    @abstractmethod
    def add(self, answer: Document) -> None:
        """Adds a part of the answer. Sets `is_complete` with the last one."""

    def read(self, event: Event) -> bytes:
        if event.data == DONE:
            self.is_over = True
        if not event.data.startswith(b"{"):
            return event.raw
        answer: Document = orjson.loads(event.data)
        if "error" in answer:
            self.has_failed = True
            return event.raw
        self.add(answer)
        return b"data: " + orjson.dumps(self._form.strip(answer)) + b"\n\n"

    def choices(self) -> list[Document]:
        return []

    def sampled(self) -> list[Sampled]:
        return self._form.samples(self._answer, self._tokens, self._logprobs)


class SglangGenerateForm(OwnRouteForm):
    """A call of `/generate`."""

    def __init__(self, document: Document, asking: Asking) -> None:
        for name in ("image_data", "video_data", "audio_data"):
            refuse(document, name, _MEDIA)
        super().__init__("generate", "generate", document, asking, prompt="input_ids")
        if (count := _settings(document).get("n") or 1) != 1:
            raise WrongCall(f"sampling_params.n is {count}; call /generate once for each answer")

    @property
    def request(self) -> Document:
        return {**self._document, "return_logprob": True} if self._asking.logprobs else self._document

    def read(self, answer: Document) -> tuple[list[Sampled], list[Document]]:
        return self.samples(answer, answer["output_ids"], _logprobs(answer["meta_info"])), []

    def samples(self, answer: Document, tokens: list[int], logprobs: Sequence[Any]) -> list[Sampled]:
        meta = answer["meta_info"]
        if (read := meta.get("prompt_tokens", len(self._prompt))) != len(self._prompt):
            raise NotRecorded(
                f"the engine read {read} tokens, and the call has {len(self._prompt)}; send the whole prompt without "
                "session_params, and start SGLang without --allow-auto-truncate"
            )
        return self.sampled(tokens, logprobs, meta["finish_reason"]["type"])

    def strip(self, answer: Document) -> Document:
        if not self._document.get("return_logprob"):
            for name in _OF_LOGPROBS:
                answer["meta_info"].pop(name, None)
        return answer

    def stream(self) -> Stream:
        return SglangStream(self)


class SglangStream(OwnRouteStream):
    """Reads the events of `/generate`. Each has all tokens so far, or with a flag of the server the new ones."""

    def add(self, answer: Document) -> None:
        meta = answer["meta_info"]
        tokens, logprobs = answer.get("output_ids") or [], _logprobs(meta)
        count = meta["completion_tokens"]
        self._tokens = tokens if len(tokens) == count else [*self._tokens, *tokens]
        self._logprobs = logprobs if len(logprobs) == count else [*self._logprobs, *logprobs]
        if len(self._tokens) != count:
            raise NotRecorded(f"the engine's stream has {len(self._tokens)} of {count} tokens; repeat the call")
        self.is_complete, self._answer = meta["finish_reason"] is not None, answer


def prompt_of(document: Document, name: str) -> list[int]:
    """Returns the prompt. Raises WrongCall unless it is a list of tokens."""
    prompt = document.get(name)
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise WrongCall(f"the call has no list of tokens in {name}, and the engine does not return those of a text")
    return prompt


def _settings(document: Document) -> Mapping[str, Any]:
    settings = document.get("sampling_params") or {}
    if not isinstance(settings, dict):
        raise WrongCall("sampling_params is not an object; call once for each prompt")
    return settings


def _logprobs(meta: Mapping[str, Any]) -> list[float]:
    return [logprob for logprob, *_ in meta.get("output_token_logprobs") or ()]
