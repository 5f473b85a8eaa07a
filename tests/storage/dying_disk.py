"""A disk that loses its power, image by image.

A process runs under `syscalls.c`, which notes each of its writes and syncs, with the time; clients note in between what
was promised to them. From the notes come the files as a disk may have them at any moment: what was synced, and any part
of what came later, in any order. A new, renamed or deleted file counts as synced when its directory is.
"""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

_NOTE = struct.Struct("=cqqII")
_BLOCK = 4096

Part = Literal["nothing", "a beginning", "any blocks", "all"]
"""What a disk has of the changes after the last sync."""

PARTS: tuple[Part, ...] = ("nothing", "a beginning", "any blocks", "all")


class Note(NamedTuple):
    """kind: c(reate), w(rite), t(runcate), s(ync), u(nlink), r(ename), of a d(irectory) that it is created, or
    p(romise). at: the monotonic clock, in ns."""

    kind: bytes
    at: int
    offset: int
    path: str
    data: bytes

    @property
    def promise(self) -> Any:
        return json.loads(self.data)


def compiled(directory: Path, compiler: str) -> Path:
    """Returns the library that notes what a process does."""
    library, source = directory / "syscalls.so", Path(__file__).with_name("syscalls.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def environment(library: Path, directory: Path, notes: Path) -> dict[str, str]:
    """Returns the environment of a process whose changes below the directory are noted."""
    return {**os.environ, "LD_PRELOAD": str(library), "NOTED": str(directory), "NOTES": str(notes)}


class Promises:
    """Notes what was promised, among the changes that came before and come after."""

    def __init__(self, notes: Path) -> None:
        self._file = os.open(notes, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def note(self, promise: object) -> None:
        data = json.dumps(promise).encode()
        os.write(self._file, _NOTE.pack(b"p", time.monotonic_ns(), 0, 0, len(data)) + data)

    def close(self) -> None:
        os.close(self._file)


def read_notes(notes: Path) -> list[Note]:
    data, position, read = notes.read_bytes(), 0, []
    while position < len(data):
        kind, at, offset, length, size = _NOTE.unpack_from(data, position)
        position += _NOTE.size + length + size
        path = data[position - length - size : position - size].decode()
        read.append(Note(kind, at, offset, path, data[position - size : position]))
    return read


@dataclass(slots=True)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    later: list[tuple[bytes, int, bytes]] = field(default_factory=list)

    def sync(self) -> None:
        self.synced, self.later = bytearray(self.left("all", random.Random())), []

    def left(self, part: Part, generator: random.Random) -> bytes:
        content = bytearray(self.synced)
        upto = {"nothing": 0, "a beginning": generator.randint(0, len(self.later))}.get(part, len(self.later))
        likelihood = generator.choice([0.2, 0.5, 0.8, 0.95]) if part == "any blocks" else 1.0
        for kind, offset, data in self.later[:upto]:
            if kind == b"t":
                if generator.random() < likelihood:
                    _change(content, kind, offset, data)
                continue
            at = 0
            while at < len(data):
                end = at + _BLOCK - (offset + at) % _BLOCK
                if generator.random() < likelihood:
                    _change(content, kind, offset + at, data[at:end])
                at = end
        return bytes(content)

    def write(self, path: Path, part: Part, generator: random.Random) -> None:
        path.write_bytes(self.left(part, generator))


def _change(content: bytearray, kind: bytes, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    if kind == b"t":
        del content[offset:]
    else:
        content[offset : offset + len(data)] = data


class _Directory:
    """versions: its entries at the last sync and after each later change."""

    def __init__(self) -> None:
        self.versions: list[dict[str, _File | _Directory]] = [{}]

    @property
    def now(self) -> dict[str, _File | _Directory]:
        return self.versions[-1]

    def change(self, name: str, entry: _File | _Directory | None) -> None:
        others = {other: one for other, one in self.now.items() if other != name}
        self.versions.append(others if entry is None else {**others, name: entry})

    def sync(self) -> None:
        del self.versions[:-1]

    def write(self, path: Path, part: Part, generator: random.Random) -> None:
        path.mkdir()
        last = len(self.versions) - 1
        entries = self.versions[{"nothing": 0, "all": last}.get(part, generator.randint(0, last))]
        for name, entry in entries.items():
            entry.write(path / name, part, generator)


class Disk:
    """The files of a directory, change by change."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._root = directory, _Directory()

    def apply(self, note: Note) -> None:
        if note.kind == b"p" or note.path.endswith(" (deleted)"):
            return
        *parents, name = Path(note.path).relative_to(self._directory).parts or [""]
        directory = self._below(parents)
        match note.kind:
            case b"c" | b"d":
                if name not in directory.now:
                    directory.change(name, _File() if note.kind == b"c" else _Directory())
            case b"w" | b"t":
                file = directory.now[name]
                assert isinstance(file, _File)
                file.later.append((note.kind, note.offset, note.data))
            case b"s":
                synced = directory.now.get(name) if name else self._root
                if synced is not None:
                    synced.sync()
            case b"u":
                directory.change(name, None)
            case b"r":
                *to_parents, to = Path(note.data.decode()).relative_to(self._directory).parts
                moved = directory.now.get(name)
                directory.change(name, None)
                self._below(to_parents).change(to, moved)

    def _below(self, parents: list[str]) -> _Directory:
        directory = self._root
        for name in parents:
            below = directory.now[name]
            assert isinstance(below, _Directory)
            directory = below
        return directory

    def write(self, directory: Path, part: Part, generator: random.Random) -> None:
        """Writes the files as they may be after the machine died now."""
        self._root.write(directory, part, generator)
