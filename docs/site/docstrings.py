"""Converts docstrings to Markdown: a line that begins with an argument's name begins a list item."""

from __future__ import annotations

import re
from typing import Any

import griffe

# `name: text`, or `one, other: text`, as docstrings here list arguments and fields. Prose has a capital, or more words.
_ITEM = re.compile(r"^((?:[a-z_][\w.]*)(?:, [a-z_][\w.]*)*): (?=\S)")


def as_markdown(text: str) -> str:
    """Returns the docstring with a list instead of the lines that name arguments; code is not changed."""
    lines: list[str] = []
    is_item = False
    for line in text.splitlines():
        if match := _ITEM.match(line):
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            # A list begins after an empty line.
            lines += [*([] if is_item else [""]), f"- {names}: {line[match.end() :]}"]
            is_item = True
        elif is_item and line.startswith("    ") and lines[-1]:
            lines.append(line)
        else:
            if is_item and line:
                lines.append("")
            is_item = is_item and not line
            lines.append(line)
    return "\n".join(lines)


class PlainDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
