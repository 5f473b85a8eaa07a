"""A language is an API in which agents call an engine.

Its form belongs to one call: it translates the request, so that the engine returns token ids, and translates the
answer, whole or streamed, so that the agent gets what it asked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from gristmill._engines.events import Event
from gristmill.completions import Sampled
from gristmill_recorder.engines.api import EngineApi

Document = dict[str, Any]


class Asking(NamedTuple):
    """The data that the recorder requests. api: of the engine. logprobs, prompt_logprobs: whether to request them.
    images: whether they are recorded. whole: whether to request chat completions whole where the agent streams."""

    api: EngineApi
    logprobs: bool
    prompt_logprobs: bool = False
    images: bool = False
    whole: bool = False


class Stream(Protocol):
    """Reads a streamed answer event by event."""

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended. From then on, events are buffered until the answer is recorded."""

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended."""

    @property
    def has_failed(self) -> bool:
        """Whether the engine reported an error. Then nothing is recorded."""

    def read(self, event: Event) -> bytes:
        """Returns the bytes to send to the agent. Raises InvalidArgumentError if token ids are missing."""

    def choices(self) -> list[Document]:
        """Returns the choices of a chat completion, without their tokens; none of another answer."""

    def sampled(self) -> list[Sampled]:
        """Returns the sampled choices. Raises InvalidArgumentError like `gristmill.completions.sampled`."""


class Form(Protocol):
    """A call. api: its label in metrics. path: its path at the engine. stream_later: the `stream_options` of a stream
    that the recorder makes of a whole answer; None if it makes none."""

    api: str
    path: str
    stream_later: Document | None

    @property
    def request(self) -> Document:
        """The request body for the engine."""

    def read(self, answer: Document) -> tuple[list[Sampled], list[Document]]:
        """Returns the samples of an answer that is not streamed, and its choices if it is a completion. Raises
        InvalidArgumentError like `gristmill.completions.sampled`."""

    def whole(self, answer: Document) -> Document:
        """Converts an answer that is not streamed into the answer for the agent. May change it in place."""

    def stream(self) -> Stream: ...
