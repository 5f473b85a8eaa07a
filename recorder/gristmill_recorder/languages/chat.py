"""OpenAI's chat completions and completions, which engines answer themselves."""

from __future__ import annotations

import orjson

from gristmill._engines.completion_calls import CompletionCall, CompletionStream
from gristmill._engines.events import Event
from gristmill.completions import Sampled, sampled
from gristmill_recorder.languages.choices import ChoiceReader
from gristmill_recorder.languages.language import Asking, Document

_STREAMING = frozenset(("stream", "stream_options"))


class ChatForm(CompletionCall):
    """A call of `/v1/chat/completions` or `/v1/completions`. Raises InvalidArgumentError if its answer could not
    be recorded."""

    def __init__(self, api: str, document: Document, asking: Asking) -> None:
        self.api, self.path = api, f"v1/{api}"
        self._asking = asking
        is_chat = api == "chat/completions"
        self.stream_later: Document | None = None
        if asking.whole and is_chat and document.get("stream"):
            options = document.get("stream_options")
            self.stream_later = options if isinstance(options, dict) else {}
            document = {name: value for name, value in document.items() if name not in _STREAMING}
        super().__init__(document, asking.api.fields, is_chat=is_chat, logprobs=asking.logprobs, images=asking.images)
        # Streams do not contain them, but the engine would read the whole prompt again to compute them.
        is_asked = asking.prompt_logprobs and not document.get("stream") and document.get("prompt_logprobs") is None
        self._prompt_logprobs = asking.api.prompt_logprobs if is_asked else {}

    @property
    def request(self) -> Document:
        return {**super().request, **self._prompt_logprobs}

    def read(self, answer: Document) -> tuple[list[Sampled], list[Document]]:
        samples = sampled(answer)
        # Copies: `whole` removes from the choices what the agent did not request. Of a chat completion, the logprobs
        # of the prompt are those of all choices.
        shared = {"prompt_logprobs": answer.get("prompt_logprobs")}
        return samples, [{**shared, **choice} for choice in answer.get("choices") or ()]

    def stream(self) -> ChatStream:
        return ChatStream(self)


class ChatStream(CompletionStream):
    """Reads the chunks of a completion, and its choices."""

    def __init__(self, form: ChatForm) -> None:
        super().__init__(form)
        self._choices = ChoiceReader()

    def choices(self) -> list[Document]:
        return self._choices.choices()

    def read_chunk(self, event: Event) -> Document | None:
        chunk = super().read_chunk(event)
        if chunk is not None:
            self._choices.read(chunk)
        return chunk

    def decode(self, data: bytes) -> Document:
        document: Document = orjson.loads(data)
        return document

    def encode(self, chunk: Document) -> bytes:
        return orjson.dumps(chunk)
