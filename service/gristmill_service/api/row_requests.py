"""The rows of a request, where invalid rows may be refused individually."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gristmill._wire.codecs.row_codec import Sent
from gristmill._wire.columns import Int64s
from gristmill.errors import GristmillError, InvalidArgumentError, TooLargeError
from gristmill_service.api.bounds import check_count
from gristmill_service.off_loop import let_the_loop_run
from gristmill_service.run.machine.answers import Outcome, Taken


class RowsRequest(NamedTuple):
    """The rows of a request, unchecked.

    number: how many. read: decodes the rows at these indices, in order; None: all. attempt: returns the trajectory and
    attempt of the row at an index. by_row: whether an invalid row is refused individually.
    """

    number: int
    read: Callable[[Int64s | None], Sent]
    attempt: Callable[[int], Hashable]
    by_row: bool

    @classmethod
    def of(cls, sent: Sent, by_row: bool) -> RowsRequest:
        """Raises TooLargeError for too many rows: those of a message that contains `rows` several times are merged."""
        steps = sent.steps
        check_count("rows", len(steps))
        return cls(
            len(steps),
            lambda rows: sent if rows is None else sent.take(rows),
            lambda row: (steps.key(row), int(steps.attempts[row])),
            by_row,
        )


class CheckedRows(NamedTuple):
    """The rows of a request that are valid by themselves.

    by_row: whether a row that the run refuses is refused individually. sent: the valid rows; None if there are none.
    places: their indices in the request, if some rows are refused. refused: the errors of the refused rows, by index.
    """

    by_row: bool
    sent: Sent | None
    places: Sequence[int] = ()
    refused: Mapping[int, GristmillError] = {}

    def answer(self, taken: Taken) -> Taken:
        """Returns the answer for the whole request. taken: the run's answer for the valid rows."""
        if not self.refused:
            return taken
        outcomes = [Outcome.REFUSED] * (len(self.places) + len(self.refused))
        for place, outcome in zip(self.places, taken.outcomes, strict=True):
            outcomes[place] = outcome
        refused = {**self.refused, **{self.places[row]: error for row, error in taken.refused.items()}}
        return Taken(outcomes, dict(sorted(refused.items())))


class RowsCheck:
    """Checks the rows of one request. Not thread-safe."""

    def __init__(self, read: Callable[[], RowsRequest], check: Callable[[Sent], Sent]) -> None:
        """read: decodes the request. check: returns the rows if each is valid by itself, else raises."""
        self._read, self._check = read, check
        self._request: RowsRequest | None = None

    @property
    def is_by_row(self) -> bool:
        """Whether invalid rows are refused individually; False before the request is decoded."""
        return self._request is not None and self._request.by_row

    def whole(self) -> CheckedRows:
        """Returns the rows of the request. Raises the error of `check`."""
        request = self._request = self._read()
        return CheckedRows(request.by_row, self._check(request.read(None)))

    def good(self, error: InvalidArgumentError) -> CheckedRows:
        """Returns the valid rows after `whole` raised this error. Rows after an invalid row of the same trajectory and
        attempt are refused, too. Raises the error again if rows are not refused individually, or if no row is invalid
        by itself."""
        request = self._request
        if request is None or not self.is_by_row or isinstance(error, TooLargeError):
            raise error
        refused = _bad_rows(np.arange(request.number), lambda rows: self._check(request.read(rows)))
        if not refused:
            raise error
        lost: dict[Hashable, GristmillError] = {}
        for row in range(request.number):
            attempt = request.attempt(row)
            if found := refused.get(row) or lost.get(attempt):
                refused[row] = lost[attempt] = found
        places = np.array([row for row in range(request.number) if row not in refused], np.int64)
        sent = self._check(request.read(places)) if len(places) else None
        return CheckedRows(True, sent, places.tolist(), refused)


def _bad_rows(rows: Int64s, check: Callable[[Int64s], Sent]) -> dict[int, GristmillError]:
    """Returns the errors of the rows that `check` refuses, by index. Bisects, so few invalid rows need few checks."""
    let_the_loop_run()
    if (error := _error_of(rows, check)) is None:
        return {}
    if len(rows) == 1:
        return {int(rows[0]): error}
    middle = len(rows) // 2
    return {**_bad_rows(rows[:middle], check), **_bad_rows(rows[middle:], check)}


def _error_of(rows: Int64s, check: Callable[[Int64s], Sent]) -> InvalidArgumentError | None:
    try:
        check(rows)
    except InvalidArgumentError as error:
        # Without frames, so that thousands of errors are freed without garbage collection.
        return error.with_traceback(None)
    return None
