"""The documents a reader is given: the files, headings, make targets and commands that they name exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from gristmill_service.cli.commands import app

ROOT = Path(__file__).parents[1]
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
}
# `make batch` is a span's name.
_TARGET = r"(?:^    |`)make (?!batch`)([a-z-]+)"
_FILE = r"`((?:tests|service|clients|recorder|protos|deploy|docs)/[\w./-]+)`"
_LINK = r"\]\((?!\w+://)([^)\s]+)\)"


def matches(pattern: str) -> list[tuple[str, str]]:
    """Return each document's name with each match of `pattern` outside of its code blocks."""
    return [
        (document, match)
        for document, text in TEXTS.items()
        for match in sorted(set(re.findall(pattern, re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)))
    ]


def anchors(path: Path) -> set[str]:
    """Return the headings of a document as links name them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_somewhere(document: str, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = ROOT.joinpath(document).parent.joinpath(file).resolve() if file else ROOT / document
    return target.exists() and (not anchor or anchor in anchors(target))


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = matches(_TARGET)
    assert named
    assert [(document, target) for document, target in named if target not in targets] == []


def test_every_link_leads_somewhere() -> None:
    links = matches(_LINK)
    assert links
    assert [(document, link) for document, link in links if not leads_somewhere(document, link)] == []


def test_the_table_of_versions_is_that_of_the_tests_environments() -> None:
    rows = []
    for name, trainer in [
        ("trl", "TRL"),
        ("trl-later", "TRL"),
        ("skyrl", "SkyRL"),
        ("skyrl-0.4", "SkyRL"),
        ("verl", "verl"),
    ]:
        lists = [ROOT / "constraints.txt", *sorted((ROOT / "tests/trainers" / name).glob("*.txt"))]
        pins = dict(re.findall(r"^([\w-]+)==([\d.]+\d)", "\n".join(path.read_text() for path in lists), re.MULTILINE))
        target = "make test-later" if "-" in name else "make test-trainers"
        rows.append(f"| {trainer} {pins[trainer.lower()]} | {pins['transformers']} | {pins['torch']} | `{target}` |")
    assert "\n".join(rows) in TEXTS["docs/compatibility.md"]


def test_every_message_that_is_explained_is_one_that_the_code_has() -> None:
    sources = [
        path.read_text(encoding="utf-8") for top in ("service", "clients") for path in (ROOT / top).rglob("*.py")
    ]
    # A string over several lines is one string.
    code = " ".join(re.sub(r'"\s*\n\s*f?"', "", "".join(sources)).split())
    first_cells = re.findall(r"^\| (.+?) \|", TEXTS["docs/messages.md"], re.MULTILINE)
    quoted = [part for cell in first_cells for part in re.findall(r"`([^`/]+ [^`]+)`", cell)]
    # Capitals, dots and paths replace numbers and names.
    parts = [part.strip(" :;.,()") for text in quoted for part in re.split(r"\.\.\.|\b[A-Z]+\b|: /|/dev/shm|=", text)]
    assert [part for part in parts if len(part) > 6 and part not in code] == []


def test_nothing_names_a_package_index_that_has_gristmill() -> None:
    sources = [path for top in ("service", "clients", "recorder", "examples") for path in (ROOT / top).rglob("*.py")]
    texts = {**TEXTS, **{str(path): path.read_text(encoding="utf-8") for path in sources}}
    assert [
        name for name, text in texts.items() if re.search(r"""pip install [^`\n]*(?<!/)\bgristmill\[""", text)
    ] == []


def test_every_file_that_is_named_exists() -> None:
    files = matches(_FILE)
    assert files
    assert [(document, file) for document, file in files if not (ROOT / file).exists()] == []


def unknown_words(line: str) -> list[str]:
    """Return the commands and flags of a command line that `gristmill` does not have."""
    command: Any = typer.main.get_command(app)
    words = [word for word in shlex.split(line.rstrip("& "), comments=True)[1:] if not word.startswith("$")]
    while hasattr(command, "commands"):
        if words[0] not in command.commands:
            return [words[0]]
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return sorted({word.partition("=")[0] for word in words if word.startswith("--")} - known)


def test_every_command_line_has_only_commands_and_flags_that_exist() -> None:
    lines = {
        (document, line)
        for document, text in TEXTS.items()
        for line in re.findall(r"^(?:    |\$ )?(gristmill [a-z].*)$", text.replace("\\\n", " "), re.MULTILINE)
    }
    assert lines
    assert [(document, line, words) for document, line in sorted(lines) if (words := unknown_words(line))] == []


def tree() -> Iterator[Path]:
    """Yield the folders of CONTRIBUTING's tree, which is indented by four spaces per level."""
    text = TEXTS["CONTRIBUTING.md"]
    parents: list[str] = []
    for line in text[text.index("## Where things are") : text.index("## Words")].splitlines():
        if match := re.match(r"((?: {4})+)((?:\w[\w./-]*/ ?)+)", line):
            parents[len(match[1]) // 4 - 1 :] = [match[2].split()[0]]
            yield from (ROOT.joinpath(*parents[:-1], name) for name in match[2].split())


def test_the_tree_has_every_package_and_only_folders_that_exist() -> None:
    folders = set(tree())
    assert [folder for folder in folders if not folder.is_dir()] == []
    inits = (path for top in ("service", "recorder") for path in ROOT.glob(f"{top}/**/__init__.py"))
    packages = {path.parent for path in inits} | {ROOT / "service/gristmill_service/dashboard"}
    unlisted = {ROOT / "service/gristmill_service/cli/watch"}
    assert {path for path in packages if path.name not in {"__pycache__", "v1"}} - unlisted <= folders


def test_the_glossary_is_short_and_has_each_word_once() -> None:
    text = TEXTS["docs/concepts.md"]
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
