"""The documents a reader is given: the files, headings and make targets that they name exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gristmill_service.cli.commands import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
# `make batch` is a span's name.
_TARGET = r"(?:^    |`)make (?!batch`)([a-z-]+)"
_FILE = r"`((?:tests|service|clients|recorder|protos|deploy|docs)/[\w./-]+)`"


def found(pattern: str) -> Iterator[object]:
    """A parameter for each document and match outside of code blocks."""
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for match in sorted(set(re.findall(pattern, text, re.MULTILINE))):
            yield pytest.param(path, match, id=f"{path.name}-{match}")


def anchors(path: Path) -> set[str]:
    """The headings of a document as links name them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("path", "target"), list(found(_TARGET)))
def test_every_make_target_that_is_named_exists(path: Path, target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("path", "link"), list(found(r"\]\((?!\w+://)([^)\s]+)\)")))
def test_every_link_leads_somewhere(path: Path, link: str) -> None:
    file, _, anchor = link.partition("#")
    target = (path.parent / file).resolve() if file else path
    assert target.exists()
    if anchor:
        assert anchor in anchors(target)


@pytest.mark.parametrize(("path", "file"), list(found(_FILE)))
def test_every_file_that_is_named_exists(path: Path, file: str) -> None:
    assert (ROOT / file).exists()


def commands() -> Iterator[object]:
    """A parameter for each command line of gristmill in a block of a document."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in sorted(set(re.findall(r"^(?:    |\$ )?(gristmill [a-z].*)$", text, re.MULTILINE))):
            yield pytest.param(line, id=f"{path.name}-{line[:60]}")


@pytest.mark.parametrize("line", list(commands()))
def test_every_command_line_is_of_commands_and_flags_that_there_are(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = [word for word in shlex.split(line.rstrip("& "), comments=True)[1:] if not word.startswith("$")]
    while hasattr(command, "commands"):
        assert words[0] in command.commands, line
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known | {"--help"}


def rooms() -> Iterator[Path]:
    """The places in CONTRIBUTING's tree, which is indented by four spaces a level."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    above: list[str] = []
    for line in text[text.index("## Where things are") : text.index("## Words")].splitlines():
        if found := re.match(r"((?: {4})+)((?:\w[\w./-]*/ ?)+)", line):
            above[len(found[1]) // 4 - 1 :] = [found[2].split()[0]]
            yield from (ROOT.joinpath(*above[:-1], name) for name in found[2].split())


@pytest.mark.parametrize("place", list(rooms()), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_room_of_the_tree_exists(place: Path) -> None:
    assert place.is_dir()


def test_the_tree_has_every_package() -> None:
    inner = {"__pycache__", "v1"}
    inits = (path for top in ("service", "recorder") for path in ROOT.glob(f"{top}/**/__init__.py"))
    packages = {path.parent for path in inits} | {ROOT / "service/gristmill_service/dashboard"}
    wanted = {path for path in packages if path.name not in inner}
    assert wanted - {ROOT / "service/gristmill_service/cli/watch"} <= set(rooms())


def test_the_glossary_is_short_and_has_each_word_once() -> None:
    text = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w, -]+) \| (.+) \|$", text[text.index("## Glossary") :], re.MULTILINE)
    words = [word for names, _ in rows[1:] for word in names.split(", ") if word != "---"]
    assert 0 < len(words) <= 30
    assert len(set(words)) == len(words)


def test_no_module_is_longer_than_the_house_rules_say() -> None:
    modules = [
        path
        for top in ("service", "clients", "recorder")
        for path in (ROOT / top).rglob("*.py")
        if path.parent.name != "v1"
    ]
    assert modules
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    assert [path for path, length in lengths.items() if length > 500] == []
    assert sorted(lengths.values())[len(lengths) // 2] < 200
