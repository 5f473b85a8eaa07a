"""A run store that stores nothing: appended records are dropped, and rows live on the heap of whoever put them."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping

from gristmill._wire.steps import Steps
from gristmill.errors import NotFoundError
from gristmill_service.storage.row_tables import Stored
from gristmill_service.storage.run_configs import check_config
from gristmill_service.storage.run_store import CheckTable, Replay


class MemoryRunStore:
    """See `gristmill_service.storage.run_store.RunStore`. It lists no run: whoever created one holds its log."""

    is_shared = False

    def names(self) -> list[str]:
        return []

    def create(self, name: str, config: bytes) -> MemoryRunLog:
        check_config(name, config)
        return MemoryRunLog(config)

    def open(self, name: str) -> MemoryRunLog:
        raise NotFoundError(f"run {name!r} is not stored; create it first")

    def delete(self, name: str) -> None:
        pass

    def unreachable_reason(self) -> str:
        return ""

    def unhealthy_reason(self) -> str:
        return ""

    def close(self) -> None:
        pass


class MemoryRunLog:
    """See `gristmill_service.storage.run_store.RunLog`. The run holds its tables."""

    reads_rows = is_remote = is_lost = is_long = False
    log_bytes = first_number = 0
    lease: float | None = None

    def __init__(self, config: bytes = b"{}") -> None:
        self.config, self.run_id = config, uuid.uuid4().hex

    def check(self, has_rows: bool = True) -> None:
        pass

    def replay(self) -> Replay:
        return Replay(None, ())

    def note_generation(self, generation: int) -> None:
        pass

    def append(self, record: bytes, tables: Mapping[int, Steps]) -> None:
        pass

    def flush(self) -> None:
        pass

    def compact(self, snapshot: bytes) -> None:
        pass

    def get(self, number: int) -> Stored:
        raise NotFoundError(f"table {number} of rows is held by its run")

    def get_all(self, numbers: Collection[int]) -> dict[int, Stored]:
        return {number: self.get(number) for number in numbers}

    def remove(self, numbers: Collection[int]) -> None:
        pass

    def retain(self, numbers: Collection[int], check: CheckTable) -> set[int]:
        return set(numbers)

    def close(self) -> None:
        pass
