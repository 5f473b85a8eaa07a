"""`gristmill plan --what-if`: what batches become with other settings, as a table or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.table import Table
from rich.text import Text

from gristmill._client.connection.credentials import Credentials
from gristmill.errors import InvalidArgumentError, UnavailableError
from gristmill_service.cli.checks import trust
from gristmill_service.cli.terminal import FittingTable, printable, screen


def alternatives_of_run(url: str, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Asks a service what a batch becomes with other settings. url: of the batch on the service's page. Raises
    InvalidArgumentError if the service refuses, and UnavailableError."""
    match = re.fullmatch(r"(https?://[^/#]+)/#/([^/]+)/(\d+)(?:/.*)?", url)
    if match is None:
        raise InvalidArgumentError(f"{url} is not the page of a batch; write http://HOST:PORT/#/RUN/BATCH")
    host, run, batch = match.groups()
    credentials = Credentials()
    if (place := urlsplit(host)).scheme == "http":
        credentials.check_reach(f"{place.hostname}:{place.port or 80}")
    try:
        with httpx.Client(verify=trust(credentials), headers=credentials.metadata(), trust_env=False) as client:
            costs = f"{host}/v1/runs/{run}/batches/{batch}/costs"
            answer = client.get(costs, params={"what_if": [*texts]}, timeout=_TIMEOUT_S)
            document = answer.json()
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise UnavailableError(f"{host} does not answer: {error}; start the service, or correct the address") from None
    if not answer.is_success:
        raise InvalidArgumentError(document["error"]["message"])
    alternatives: list[dict[str, Any]] = document["costs"]
    return alternatives


def print_alternatives(alternatives: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Prints a row for each alternative, and below the table the reasons for numbers that are missing."""
    if as_json:
        print(json.dumps({"alternatives": alternatives}))
        return
    output = screen(160)
    output.print(FittingTable(alternatives_table(alternatives)))
    for figures in alternatives:
        if figures["reason"]:
            output.print(Text(printable(f"{figures['setting'] or _OWN}: {figures['reason']}")))


def alternatives_table(alternatives: Sequence[Mapping[str, Any]], *columns: str) -> Table:
    """Returns a table with a row for each alternative. columns: those to show; all by default."""
    table = Table("settings", box=None, header_style="bold")
    for column in columns or _COLUMNS:
        table.add_column(column, justify="right")
    for figures in alternatives:
        shown = [_COLUMNS[column] for column in columns or _COLUMNS]
        cells = ("-" if figures[key] is None else text.format(figures[key]) for key, text in shown)
        table.add_row(Text(printable(figures["setting"] or _OWN)), *cells)
    return table


_OWN, _TIMEOUT_S = "as configured", 600.0
_COLUMNS = {
    "steps": ("steps", "{:,}"),
    "groups": ("groups", "{:,}"),
    "zero groups": ("zero_share", "{:.1%}"),
    "rows": ("rows", "{:,}"),
    "padding rows": ("padding_rows", "{:,}"),
    "tokens": ("tokens", "{:,}"),
    "padding share": ("padding_share", "{:.1%}"),
    "loss tokens": ("loss_tokens", "{:,}"),
    "slowest rank": ("barrier_ratio", "{:.2f} x mean"),
    "advantage": ("advantage_mean", "{:.3f}"),
    "std": ("advantage_std", "{:.3f}"),
    "largest": ("advantage_largest", "{:.3f}"),
}
"""The header of each column, its name in JSON, and its format."""
