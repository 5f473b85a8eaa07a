"""Tests with real environments. `make test-environments` makes a virtual environment for each package of them."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def _is_installed(folder: Path) -> bool:
    """Whether it is the one of the folder's packages."""
    package, _, wanted = (folder / "requirements.txt").read_text(encoding="utf-8").split()[0].partition("==")
    try:
        return version(package) == wanted
    except PackageNotFoundError:
        return False


# A package's tests are collected only where it is installed, which is never the virtual environment of `make test`.
collect_ignore = [
    folder.parent.name
    for folder in Path(__file__).parent.glob("*/requirements.txt")
    if not _is_installed(folder.parent)
]
