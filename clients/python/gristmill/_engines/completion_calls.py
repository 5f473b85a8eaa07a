"""OpenAI's chat completions and completions: what is added to a call, and removed from its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gristmill._engines.events import DONE, Event
from gristmill._engines.fields import Document, EngineFields
from gristmill._engines.refusals import refuse, refuse_media
from gristmill.completions import ChunkReader, Sampled
from gristmill.errors import InvalidArgumentError

_RECORDED = ("image_url",)


class CompletionCall:
    """A call of `/v1/chat/completions` or `/v1/completions`. Raises InvalidArgumentError if its answer could not be
    recorded.

    choices: how many the answer has. logprobs: whether to request the logprob of each token. images: whether images are
    recorded.
    """

    def __init__(
        self, document: Document, fields: EngineFields, *, is_chat: bool, logprobs: bool, images: bool = False
    ) -> None:
        self._document, self._fields, self._is_chat = document, fields, is_chat
        self.comes_first = fields.comes_first
        if fields.refusal:
            raise InvalidArgumentError(fields.refusal)
        refuse(document, "use_beam_search", "beam search does not sample tokens")
        refuse(document, "echo", "the prompt would be recorded as sampled")
        if document.get("include_reasoning") is False:
            raise InvalidArgumentError(
                "include_reasoning is false, and the engine would omit token ids; omit include_reasoning"
            )
        refuse_media(document.get("messages"), _RECORDED if images else ())
        refuse(document, "prompt_embeds", "embeddings have no token ids")
        self.choices = _count(document.get("n")) * (1 if is_chat else _prompts(document.get("prompt")))
        if fields.is_single and self.choices != 1:
            raise InvalidArgumentError(
                f"the call asks for {self.choices} choices, and the engine returns token ids of one; call once for each"
            )
        # In a chat completion 0 is false; in a completion it asks for the logprobs of the tokens alone.
        self._keeps_logprobs = bool(document.get("logprobs")) if is_chat else _wants(document, "logprobs")
        self._asks_logprobs = logprobs and not self._keeps_logprobs
        flags = fields.flags(document)
        self._hidden = {part for part, asked in fields.asked_by.items() if not _wants(flags, asked)}

    @property
    def request(self) -> Document:
        """The request body for the engine."""
        return {**self._document, **self._fields.asked(self._document, self._is_chat, self._asks_logprobs)}

    def whole(self, answer: Document) -> Document:
        """Removes the added fields from an answer that is not streamed, in place."""
        self._strip(answer)
        return answer

    def strip_chunk(self, chunk: Document) -> Document | None:
        """Removes the added fields from a chunk. Returns None if nothing is left for the agent."""
        extension = self._fields.extension
        had_extension = extension in chunk
        self._strip(chunk)
        is_empty = had_extension and extension not in chunk and not chunk.get("choices") and not chunk.get("usage")
        return None if is_empty else chunk

    def _strip(self, answer: Document) -> None:
        extension = self._fields.extension
        for part in (answer, answer.get(extension) or {}, *(answer.get("choices") or ())):
            for name in self._hidden & part.keys():
                if self._fields.has_nulls:
                    part[name] = None
                else:
                    del part[name]
        if extension in answer and not answer[extension]:
            del answer[extension]
        for choice in answer.get("choices") or ():
            if not self._keeps_logprobs and "logprobs" in choice:
                choice["logprobs"] = None
                if self._fields.omits_logprobs and not self._is_chat:
                    del choice["logprobs"]
        if not self._keeps_logprobs and isinstance(data := (answer.get(extension) or {}).get("engine_data"), dict):
            data.pop("completion_logprobs", None)


class CompletionStream:
    """Reads the chunks of a completion.

    is_over: whether the stream has ended. has_failed: whether the engine reported an error; then nothing is recorded.
    """

    def __init__(self, call: CompletionCall) -> None:
        self._completion_call, self._reader = call, ChunkReader()
        self.is_over = self.has_failed = False
        self._is_first = call.comes_first

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended. From then on, buffer events until the answer is recorded."""
        return self._reader.finished >= self._completion_call.choices

    def sampled(self) -> list[Sampled]:
        """Returns the sampled choices. Raises InvalidArgumentError like `gristmill.completions.sampled`."""
        return self._reader.sampled()

    def read(self, event: Event) -> bytes:
        """Returns the bytes to send to the agent. Raises InvalidArgumentError if token ids are missing."""
        chunk = self.read_chunk(event)
        if chunk is None:
            return event.raw
        kept = self._completion_call.strip_chunk(chunk)
        return b"" if kept is None else b"data: " + self.encode(kept) + b"\n\n"

    def read_chunk(self, event: Event) -> Document | None:
        """Reads the event's chunk, and returns it; None if the event contains none, or an error."""
        if event.data == DONE:
            self.is_over = True
        if not event.data.startswith(b"{"):
            return None
        chunk = self.decode(event.data)
        if "error" in chunk or chunk.get("object") == "error":
            self.has_failed = True
            return None
        self._reader.read(chunk)
        if self._is_first and chunk.get("choices"):
            self._is_first = False
            if not self._reader.has_prompt:
                raise InvalidArgumentError("the first chunk of the stream does not contain the prompt's token ids")
        return chunk

    def decode(self, data: bytes) -> Document:
        document: Document = json.loads(data)
        return document

    def encode(self, chunk: Document) -> bytes:
        return json.dumps(chunk, separators=(",", ":")).encode()


def _wants(document: Mapping[str, Any], name: str) -> bool:
    """Returns whether the agent requests a field of the answer. 0 requests logprobs of the tokens alone."""
    asked = document.get(name)
    return asked is not None and asked is not False


def _count(n: Any) -> int:
    """Returns the number of choices per prompt. The engine refuses an invalid n."""
    return n if isinstance(n, int) and n > 0 else 1


def _prompts(prompt: Any) -> int:
    """Returns the number of prompts in a call of `/v1/completions`."""
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
