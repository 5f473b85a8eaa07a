"""`gristmill serve` on a machine that is going to lose its power: its journal is checkpointed and compacted often."""

from __future__ import annotations

import sys

from gristmill_service.cli import main
from gristmill_service.run import compaction
from gristmill_service.storage import run_store
from gristmill_service.storage.journal import database, run_log
from gristmill_service.storage.journal.disk_room import DiskRoom


def serve(is_small: bool) -> None:
    """is_small: whether the limits are those of small journals."""
    database.this_boot = lambda: "the boot before"  # type: ignore[assignment]
    run_store._SHORT_TAIL, compaction._PAUSE_S = 1 << 14, 1.0
    if is_small:
        run_log._SHORT_WAL = 1 << 16
        DiskRoom.wal_limit = 200_000  # type: ignore[assignment, method-assign]
    main()


if __name__ == "__main__":
    serve(sys.argv.pop(1) == "small")
