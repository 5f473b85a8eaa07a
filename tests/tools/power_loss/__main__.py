"""Power losses under load: python -m tests.tools.power_loss --images 100"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import structlog

from tests.storage.dying_disk import compiled
from tests.tools.power_loss.campaign import campaign
from tests.tools.power_loss.image import PROMISED_S, Findings

_IMAGES_EACH = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.power_loss", description=__doc__)
    parser.add_argument("--images", type=int, default=100, help="of each mode")
    parser.add_argument("--modes", nargs="+", choices=PROMISED_S, default=[*PROMISED_S])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load in each recording")
    chosen = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    compiler = shutil.which("cc")
    if compiler is None:
        sys.exit("needs a C compiler, cc")
    is_wrong = False
    with tempfile.TemporaryDirectory() as temporary:
        library = compiled(Path(temporary), compiler)
        for fsync in chosen.modes:
            findings = Findings()
            for number, first in enumerate(range(0, chosen.images, _IMAGES_EACH)):
                count = min(_IMAGES_EACH, chosen.images - first)
                directory = Path(temporary) / f"{fsync}-{number}"
                findings.add(campaign(directory, library, fsync, count, chosen.seed + number, chosen.seconds))
            print(f"{fsync}: {findings}", flush=True)
            is_wrong = is_wrong or bool(findings.wrong)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
