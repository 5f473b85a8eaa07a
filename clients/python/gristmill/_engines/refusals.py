"""Refuses calls that cannot be recorded, before the engine is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MEDIA = ("image", "audio", "video", "file")


def refuse(document: Mapping[str, Any], name: str, reason: str, error: type[Exception]) -> None:
    """Raises the error if the field is set."""
    if document.get(name):
        raise error(f"{name} is set, but {reason}; omit {name}")


def refuse_media(items: Any, error: type[Exception]) -> None:
    """Raises the error for images, audio, video and files: the row would be trained without them."""
    for item in items if isinstance(items, list) else ():
        content = item.get("content") if isinstance(item, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = str(part.get("type", "")) if isinstance(part, dict) else ""
            if any(medium in kind for medium in _MEDIA):
                raise error(unrecorded(f"part of type {kind}"))


def unrecorded(part: str) -> str:
    return (
        f"a message contains a {part}, but gristmill records only tokens; submit these rows with a client, and "
        "declare columns for the images"
    )
