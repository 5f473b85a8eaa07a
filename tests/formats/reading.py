"""What services kept: a file a format, written by the version that had it, with what was read from it then."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill_service.run.machine import codec
from gristmill_service.settings import Settings
from gristmill_service.storage import row_tables
from gristmill_service.storage.journal import database
from gristmill_service.storage.redis import run_store
from tests.formats import kept, story
from tests.on_loop import Service
from tests.redis.servers import RedisServer

DIRECTORY = Path(__file__).with_name("fixtures")
# What this version writes: the numbers of all that has one.
_WITHIN = f"{codec.FORMAT}.{row_tables.FORMAT}"
JOURNAL = f"journal-{database.FORMAT}.{_WITHIN}"
REDIS = f"redis-{run_store.FORMAT}.{_WITHIN}"


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    """The address of a service with these settings."""
    service = Service(Settings(**story.SETTINGS, **settings))
    try:
        service.start()
        yield service.grpc_address
    finally:
        service.stop()


Json = dict[str, Any]
Through = Callable[[Json, Path, Callable[[str], Any]], tuple[Any, Json]]


def write() -> list[Path]:
    """Writes the fixtures of this version's formats again."""
    DIRECTORY.mkdir(exist_ok=True)
    written = []
    for name, through in ((JOURNAL, through_journal), (REDIS, through_redis)):
        with tempfile.TemporaryDirectory() as directory:
            _, kept_now = through({}, Path(directory, "before"), story.begin)
            contents = read(kept_now, Path(directory, "after"), through)
        path = DIRECTORY / f"{name}.json"
        path.write_text(json.dumps({"kept": kept_now, "found": contents}, indent=1) + "\n")
        written.append(path)
    return written


def read(kept_before: Json, directory: Path, through: Through) -> Json:
    """What this version finds in what was kept, in a directory of its own; as JSON has it."""
    contents: Json = json.loads(json.dumps(through(kept_before, directory, story.go_on)[0]))
    return contents


def through_journal(files: Json, directory: Path, ask: Callable[[str], Any]) -> tuple[Any, Json]:
    """What `ask` returns of a service on a journal with these files, and its files afterwards."""
    journal, memory = directory / "journal", directory / "memory"
    memory.mkdir(parents=True)
    kept.put_files(files, journal)
    with serving(journal_dir=journal, journal_fsync="always", shared_memory_dir=memory) as address:
        answer = ask(address)
    return answer, kept.files_of(journal)


def through_redis(keys: Json, directory: Path, ask: Callable[[str], Any]) -> tuple[Any, Json]:
    """What `ask` returns of a service on a Redis with these keys, and its keys afterwards."""
    with RedisServer(directory) as server:
        kept.put_keys(keys, server.client())
        with serving(store="redis", redis_url=server.url) as address:
            answer = ask(address)
        return answer, kept.keys_of(server.client())
