"""Parses JSON bodies of rows in pieces: parsing holds the GIL, and a parsed document needs tens of times its bytes."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import orjson

from gristmill.errors import InvalidArgumentError
from gristmill_service.api.bounds import check_count, check_row

_PYTHON_BYTES = 512 << 10


class _Rows(msgspec.Struct, forbid_unknown_fields=True):
    rows: list[msgspec.Raw]
    refuse_by_row: bool = False


_decoder = msgspec.json.Decoder(_Rows)


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
    check_count("rows", len(document.rows))
    return [_read(row, number) for number, row in enumerate(document.rows)], document.refuse_by_row


def _read(row: msgspec.Raw, number: int) -> Any:
    view = memoryview(row)
    check_row(view, number)
    try:
        return orjson.loads(view)
    except orjson.JSONDecodeError:
        # orjson rejects unpaired surrogates and large numbers; Python's parser finds the row at fault.
        with suppress(ValueError, RecursionError):
            return json.loads(bytes(view))
        raise InvalidArgumentError(f"row {number} is not valid JSON; send an object") from None


def _rows_of_python(body: bytes, error: Exception) -> tuple[list[Any], bool]:
    """Parses with Python's parser what orjson rejects, such as NaN, so that the error names the row."""
    if len(body) <= _PYTHON_BYTES:
        with suppress(ValueError, RecursionError):
            document = json.loads(body)
            if isinstance(document, dict) and document.keys() - {"refuse_by_row"} == {"rows"}:
                rows, by_row = document["rows"], document.get("refuse_by_row", False)
                if isinstance(rows, list) and isinstance(by_row, bool):
                    check_count("rows", len(rows))
                    return rows, by_row
    raise InvalidArgumentError(
        f'the body is not valid JSON: {error}; send {{"rows": [...]}}, or protobuf with the header content-type: '
        "application/x-protobuf"
    ) from None
