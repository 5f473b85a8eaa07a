"""`make docs`: stages the documents of the repository, with generated reference, and builds the site.

Any warning fails: a link or an anchor that leads nowhere, a page that is not in the navigation, a name that is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import reference

ROOT = Path(__file__).resolve().parents[2]
STAGED = ROOT / "build" / "docs"
# Documents, and what they link to.
SOURCES = (*sorted(path.name for path in ROOT.glob("*.md")), "docs", "examples", "deploy", "protos")
NOT_STAGED = shutil.ignore_patterns("__pycache__", "site", "templates")


def stage() -> None:
    shutil.rmtree(STAGED, ignore_errors=True)
    for name in SOURCES:
        source, target = ROOT / name, STAGED / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=NOT_STAGED)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for name, text in reference.pages(ROOT).items():
        target = STAGED / "reference" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    # Lines of code are up to 120 characters wide.
    (STAGED / "reference" / "site.css").write_text(".md-grid { max-width: 84rem }\n", encoding="utf-8")


def main() -> int:
    stage()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
