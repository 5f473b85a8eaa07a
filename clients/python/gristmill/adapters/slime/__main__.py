"""`python -m gristmill.adapters.slime train.py ...`: runs a script of slime on gristmill's batches."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from gristmill.adapters.slime import swap


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m gristmill.adapters.slime path/to/slime/train.py ARGUMENTS OF slime")
    del sys.argv[0]
    # Python also inserts a script's directory.
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    swap()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
