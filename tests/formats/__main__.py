"""`make formats`: writes the fixtures of the current formats."""

from __future__ import annotations

from tests.formats.reading import write

if __name__ == "__main__":
    for path in write():
        print(f"{path}: {path.stat().st_size} bytes")
