"""Refuses calls that cannot be recorded, before the engine is called."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gristmill.errors import InvalidArgumentError

_MEDIA = ("image", "audio", "video", "file", "embeds")


def refuse(document: Mapping[str, Any], name: str, reason: str) -> None:
    """Raises InvalidArgumentError if the field is set."""
    if document.get(name):
        raise InvalidArgumentError(f"{name} is set, but {reason}; omit {name}")


def refuse_media(items: Any, recorded: Collection[str] = ()) -> None:
    """Raises InvalidArgumentError for images, audio, video, files and embeddings: the row would be trained without
    them.

    recorded: the types of parts that are recorded, or refused later.
    """
    for item in items if isinstance(items, list) else ():
        content = item.get("content") if isinstance(item, dict) else None
        for part in content if isinstance(content, list) else ():
            # vLLM also takes {"image_url": "https://..."}, without a type.
            kind = str(part.get("type") or ", ".join(part)) if isinstance(part, dict) else ""
            if kind not in recorded and any(medium in kind for medium in _MEDIA):
                raise unrecorded(f"part of type {kind}")


def unrecorded(part: str) -> InvalidArgumentError:
    """Returns the error for a part of a message, such as `part of type input_audio`."""
    remedy = (
        "record images by gristmill record --columns images"
        if "image" in part
        else "submit these rows with a client, and declare columns for what they contain"
    )
    return InvalidArgumentError(f"a message contains a {part}, but gristmill records only tokens; {remedy}")
