"""Finds the language of a call by its path."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

from gristmill_recorder.languages.chat import ChatForm
from gristmill_recorder.languages.gemini import GeminiForm
from gristmill_recorder.languages.generate import SglangGenerateForm, VllmGenerateForm
from gristmill_recorder.languages.language import Asking, Document, Form
from gristmill_recorder.languages.llamacpp import LlamaForm
from gristmill_recorder.languages.messages import MessagesForm
from gristmill_recorder.languages.responses import ResponsesForm

FormMaker = Callable[[Document, Asking], Form]
"""Raises WrongCall or InvalidArgumentError if the answer to the call could not be recorded."""

_FORMS: dict[str, FormMaker] = {
    "v1/chat/completions": partial(ChatForm, "chat/completions"),
    "v1/completions": partial(ChatForm, "completions"),
    "v1/responses": ResponsesForm,
    "v1/messages": MessagesForm,
    "inference/v1/generate": VllmGenerateForm,
    "generate": SglangGenerateForm,
    "completion": partial(LlamaForm, "completion"),
    "completions": partial(LlamaForm, "completions"),
}
# Google's libraries call a version of their API: v1, or v1beta.
_GEMINI = re.compile(r"v1(?:alpha|beta)?/models/(?P<model>.+):(?P<method>generateContent|streamGenerateContent)")
RECORDED = (*_FORMS, "v1beta/models/MODEL:generateContent", "v1beta/models/MODEL:streamGenerateContent")
"""The paths of all calls that are recorded."""


def form_at(path: str) -> FormMaker | None:
    """Returns how to make the form of a call at this path; None if such calls are not recorded."""
    if gemini := _GEMINI.fullmatch(path):
        return partial(GeminiForm, model=unquote(gemini["model"]), stream=gemini["method"] == "streamGenerateContent")
    return _FORMS.get(path)
