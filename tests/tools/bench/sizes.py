"""How large the project is: lines and files of its parts, generated code apart.

`python -m tests.tools.bench.sizes` prints them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
PARTS = {"service": "service", "clients": "clients", "recorder": "recorder", "tests": "tests"}


class Size(NamedTuple):
    lines: int
    files: int


def sizes() -> dict[str, Size]:
    """Counts each part."""
    return {name: _size(ROOT / folder) for name, folder in PARTS.items()}


def _size(folder: Path) -> Size:
    files = [path for path in folder.rglob("*.py") if "_pb2" not in path.name and "v1" not in path.parts]
    return Size(sum(len(path.read_text().splitlines()) for path in files), len(files))


if __name__ == "__main__":
    for name, size in sizes().items():
        print(f"{name}: {size.lines} lines in {size.files} files")
