"""Images in the messages of a chat completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gristmill_recorder.languages.language import Document
from gristmill_recorder.refusals import WrongCall

_PART = "image_url"


def image_part(url: str) -> Document:
    """Returns the part of a message that shows an image. url: of the image, or a data URL that contains it."""
    return {"type": _PART, _PART: {"url": url}}


def data_url(media_type: str, data: str) -> str:
    """Returns the URL of an image in base64."""
    return f"data:{media_type};base64,{data}"


def results(call_id: Any, text: str, images: Sequence[Document]) -> Iterator[Document]:
    """Yields the result of a tool as a message, and its images as one of the user, as vLLM translates Anthropic's
    messages: few templates show images of tools."""
    yield {"role": "tool", "tool_call_id": call_id, "content": text}
    if images:
        yield {"role": "user", "content": list(images)}


def urls_of_images(request: Mapping[str, Any]) -> list[str]:
    """Returns the URLs of all images of a call, in the order of its prompt. Raises WrongCall for one without a URL."""
    messages = request.get("messages")
    contents = (
        [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return [_url(part.get(_PART)) for part in parts if _is_image(part)]


def _is_image(part: Mapping[str, Any]) -> bool:
    """Returns whether a part is an image. vLLM also takes {"image_url": "https://..."}, without a type."""
    return bool(part.get("type", _PART if _PART in part else "") == _PART)


def _url(image: Any) -> str:
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or not url:
        raise WrongCall("an image has no URL, so that the row would be without it; send its URL, or its data as one")
    return url
