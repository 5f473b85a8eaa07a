"""What a caller's runs may hold in all, as the caller's token says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from gristmill.errors import ResourceExhaustedError
from gristmill_service.access.caller import Caller

_BRINGING = frozenset(["begin_groups", "submit_rows", "stream_rows"])


class Held(Protocol):
    """The runs that there are. With Redis, bytes are those of the runs that this process decides for."""

    def names(self) -> Iterable[str]: ...

    def row_bytes(self) -> Mapping[str, int]: ...


def check_quota(found: Caller, call: str, run: str | None, held: Held) -> None:
    """Raises ResourceExhaustedError where the call would add to runs that hold as much as the caller's may: those whose
    names its token is for."""
    if call == "create_run" and found.max_runs is not None:
        own = [name for name in held.names() if found.sees(name)]
        if run not in own and len(own) >= found.max_runs:
            raise ResourceExhaustedError(
                f"{found.name} may have {found.max_runs} runs of the names {', '.join(found.runs)}, and there are "
                f"{len(own)}; delete one, or raise max_runs of the token"
            )
    if call in _BRINGING and found.max_row_bytes is not None:
        nbytes = sum(nbytes for name, nbytes in held.row_bytes().items() if found.sees(name))
        if nbytes >= found.max_row_bytes:
            raise ResourceExhaustedError(
                f"runs of the names {', '.join(found.runs)} hold {nbytes} bytes of rows, and {found.name} may have "
                f"them hold {found.max_row_bytes}; free batches, or raise max_row_bytes of the token"
            )
