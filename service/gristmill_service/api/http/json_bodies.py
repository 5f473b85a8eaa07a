"""Parses JSON bodies in small pieces: parsing holds the GIL, and a parsed document needs tens of times its bytes."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import orjson

from gristmill.errors import InvalidArgumentError

_MOST_BYTES, _MOST_BYTES_OF_ROWS, _MOST_BYTES_OF_A_ROW = 1 << 20, 8 << 20, 4 << 20
MOST_ROWS = 1 << 14
_ROWS_PATH = "/rows"


class _Rows(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[msgspec.Raw]
    refuse_by_row: bool = False


_decoder = msgspec.json.Decoder(_Rows)


def check_size(body: bytes, path: str) -> None:
    """Raises InvalidArgumentError if the document would take too long to parse."""
    most = most_bytes(path)
    if len(body) > most:
        raise InvalidArgumentError(
            f"the body exceeds {most} bytes, the limit for JSON in this call; send less per request, or send rows as "
            "application/x-protobuf or over gRPC"
        )


def most_bytes(path: str) -> int:
    """Returns the maximum size in bytes of a document for this path."""
    return _MOST_BYTES_OF_ROWS if path.endswith(_ROWS_PATH) else _MOST_BYTES


def rows_of(body: bytes) -> tuple[list[Any], bool]:
    """Returns the rows of a document `{"rows": [...]}`, each parsed separately, and its `refuse_by_row`. Raises
    InvalidArgumentError for another document."""
    try:
        document = _decoder.decode(body)
    except msgspec.ValidationError:
        raise InvalidArgumentError(
            'the body is not an object with the list rows, and optionally refuse_by_row; send {"rows": [...]}'
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _rows_of_python(body, error)
    _check_count(len(document.rows))
    return [_read(row, number) for number, row in enumerate(document.rows)], document.refuse_by_row


def _read(row: msgspec.Raw, number: int) -> Any:
    view = memoryview(row)
    if len(view) > _MOST_BYTES_OF_A_ROW:
        raise InvalidArgumentError(
            f"row {number} has {len(view)} bytes, and the limit for JSON is {_MOST_BYTES_OF_A_ROW}; send it as "
            "application/x-protobuf, or over gRPC"
        )
    try:
        return orjson.loads(view)
    except orjson.JSONDecodeError:
        # orjson rejects unpaired surrogates and large numbers; Python's parser finds the row at fault.
        with suppress(ValueError, RecursionError):
            return json.loads(bytes(view))
        raise InvalidArgumentError(f"row {number} is not valid JSON; send an object") from None


def _rows_of_python(body: bytes, error: Exception) -> tuple[list[Any], bool]:
    """Parses with Python's parser what orjson rejects, such as NaN, so that the error names the row."""
    if len(body) <= _MOST_BYTES:
        with suppress(ValueError, RecursionError):
            document = json.loads(body)
            if isinstance(document, dict) and document.keys() - {"refuse_by_row"} == {"rows"}:
                rows, by_row = document["rows"], document.get("refuse_by_row", False)
                if isinstance(rows, list) and isinstance(by_row, bool):
                    _check_count(len(rows))
                    return rows, by_row
    raise InvalidArgumentError(
        f'the body is not valid JSON: {error}; send {{"rows": [...]}}, or protobuf with the header content-type: '
        "application/x-protobuf"
    ) from None


def _check_count(count: int) -> None:
    if count > MOST_ROWS:
        raise InvalidArgumentError(f"the request has {count} rows, and the limit is {MOST_ROWS}; send several requests")
