"""Names that others gave, for a terminal: a uid or a reason may hold anything."""


def printable(text: str) -> str:
    """The text with what a terminal would take for a command or a new line written out, as in `\\x1b`."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
