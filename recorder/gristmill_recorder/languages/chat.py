"""OpenAI's chat completions and completions, which engines answer themselves."""

from __future__ import annotations

from typing import Any

import orjson

from gristmill.completions import ChunkReader, Sampled, sampled
from gristmill.errors import InvalidArgumentError
from gristmill_recorder.languages.events import DONE, Event
from gristmill_recorder.languages.language import Asking, Document, refuse, refuse_media
from gristmill_recorder.refusals import WrongCall
from gristmill_recorder.splicing.conversation import ChoiceReader


class ChatForm:
    """A call of `/v1/chat/completions` or `/v1/completions`. Raises WrongCall if its answer could not be recorded."""

    def __init__(self, api: str, document: Document, asking: Asking) -> None:
        self.api, self.path = api, f"v1/{api}"
        self._document, self._asking = document, asking
        self._is_chat = api == "chat/completions"
        self.comes_first = asking.api.comes_first
        refuse(document, "use_beam_search", "beam search does not sample tokens")
        refuse(document, "echo", "the prompt would be recorded as sampled")
        if document.get("include_reasoning") is False:
            raise WrongCall("include_reasoning is false, and the engine would omit token ids; omit include_reasoning")
        refuse_media(document.get("messages"))
        refuse(document, "prompt_embeds", "embeddings have no token ids")
        self.choices = _count(document.get("n")) * (1 if self._is_chat else _prompts(document.get("prompt")))
        self._keeps_logprobs = _wants_logprobs(document)
        self._hidden = [part for part, asked in asking.api.asked_by.items() if not document.get(asked)]

    @property
    def request(self) -> Document:
        logprobs = self._asking.logprobs and not self._keeps_logprobs
        asked = self._asking.api.asked(self._document, self._is_chat, logprobs)
        return {**self._document, **asked}

    def read(self, answer: Document) -> tuple[list[Sampled], list[Document]]:
        return sampled(answer), list(answer.get("choices") or ())

    def whole(self, answer: Document) -> Document:
        self._strip(answer)
        return answer

    def stream(self) -> ChatStream:
        return ChatStream(self)

    def strip_chunk(self, chunk: Document) -> Document | None:
        """Removes the recorder's fields from a chunk. Returns None if nothing is left for the agent."""
        had_extension = "sglext" in chunk
        self._strip(chunk)
        is_empty = had_extension and "sglext" not in chunk and not chunk.get("choices") and not chunk.get("usage")
        return None if is_empty else chunk

    def _strip(self, answer: Document) -> None:
        for part in (answer, answer.get("sglext") or {}, *(answer.get("choices") or ())):
            for name in self._hidden:
                part.pop(name, None)
        if "sglext" in answer and not answer["sglext"]:
            del answer["sglext"]
        for choice in answer.get("choices") or ():
            if not self._keeps_logprobs and "logprobs" in choice:
                choice["logprobs"] = None


class ChatStream:
    """Reads the chunks of a completion."""

    def __init__(self, form: ChatForm) -> None:
        self._form, self._reader, self._choices = form, ChunkReader(), ChoiceReader()
        self.is_over = self.has_failed = False
        self._is_first = form.comes_first

    @property
    def is_complete(self) -> bool:
        return self._reader.finished >= self._form.choices

    def choices(self) -> list[Document]:
        return self._choices.choices()

    def sampled(self) -> list[Sampled]:
        return self._reader.sampled()

    def read(self, event: Event) -> bytes:
        chunk = self.read_chunk(event)
        if chunk is None:
            return event.raw
        kept = self._form.strip_chunk(chunk)
        return b"" if kept is None else b"data: " + orjson.dumps(kept) + b"\n\n"

    def read_chunk(self, event: Event) -> Document | None:
        """Reads the event's chunk, and returns it; None if the event contains none, or an error."""
        if event.data == DONE:
            self.is_over = True
        if not event.data.startswith(b"{"):
            return None
        chunk: Document = orjson.loads(event.data)
        if "error" in chunk or chunk.get("object") == "error":
            self.has_failed = True
            return None
        self._reader.read(chunk)
        self._choices.read(chunk)
        if self._is_first and chunk.get("choices"):
            self._is_first = False
            if not self._reader.has_prompt:
                raise InvalidArgumentError("the first chunk of the stream does not contain the prompt's token ids")
        return chunk


def _wants_logprobs(document: Document) -> bool:
    asked = document.get("logprobs")
    return asked is not None and asked is not False


def _count(n: Any) -> int:
    """Returns the number of choices per prompt. The engine refuses an invalid n."""
    return n if isinstance(n, int) and n > 0 else 1


def _prompts(prompt: Any) -> int:
    """Returns the number of prompts in a call of `/v1/completions`."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
