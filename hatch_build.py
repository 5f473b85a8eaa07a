"""What a package says of its project: the readme and the addresses.

GRISTMILL_REPOSITORY is where the repository is served, such as https://github.com/OWNER/gristmill: a release sets it.
With it the readme's links lead to that version's files, so that they work on a package index; without it a package
names no address, for it cannot know any.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)]+)\)")
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class ProjectPage(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        readme = (root / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("GRISTMILL_REPOSITORY", "").rstrip("/")
        if repository:
            match = _VERSION.search((root / "clients/python/gristmill/__init__.py").read_text(encoding="utf-8"))
            assert match is not None
            readme = with_absolute_links(readme, repository, f"v{match[1]}")
            metadata["urls"] = urls(repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def with_absolute_links(text: str, repository: str, revision: str) -> str:
    """The document with links into the repository, at this revision, in place of relative ones."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({repository}/{kind}/{revision}/{match['path']})"

    return _RELATIVE.sub(absolute, text)


def urls(repository: str) -> dict[str, str]:
    """Where a reader finds what, by the labels that package indexes know."""
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Source": repository,
    }
