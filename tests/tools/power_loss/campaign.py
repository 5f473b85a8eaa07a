"""A campaign: a service under load is recorded, and images of its disk are taken at many moments and checked."""

from __future__ import annotations

import random
import shutil
from copy import deepcopy
from pathlib import Path

from gristmill_service.storage.journal.run_log import Fsync
from tests.storage.dying_disk import PARTS, Disk
from tests.tools.power_loss.image import Findings, Image, Promised
from tests.tools.power_loss.load import RUN, recorded


def campaign(
    directory: Path, library: Path, fsync: Fsync, images: int, seed: int, seconds: float = 8.0, tolerance_s: float = 1.0
) -> Findings:
    """Checks that many images of one recording."""
    directory.mkdir()
    notes, draw, findings = recorded(directory, library, fsync, seed, seconds), random.Random(seed), Findings()
    begin = next(number for number, note in enumerate(notes) if note.kind == b"p" and note.promise == {"created": RUN})
    # Half at any moment of time, half at any change: many changes come at once.
    moments = {*draw.sample(range(begin + 1, len(notes)), images - images // 2)}
    while len(moments) < images:
        at = draw.randint(notes[begin].at, notes[-1].at)
        moments.add(next(number for number in range(begin, len(notes)) if notes[number].at >= at))
    disk, promised = Disk(directory / "disk"), Promised()
    for number, note in enumerate(notes):
        disk.apply(note)
        if note.kind == b"p":
            promised.learn(note)
        if number in moments:
            left = directory / "left"
            part = draw.choice(PARTS)
            disk.write(left, part, draw)
            outcome = Image(left, fsync, deepcopy(promised), note.at, tolerance_s).check()
            if outcome.wrong:
                print(f"{fsync}, seed {seed}, change {number}, {part}: {outcome}", flush=True)
            findings.add(outcome)
            shutil.rmtree(left)
    shutil.rmtree(directory)
    return findings
