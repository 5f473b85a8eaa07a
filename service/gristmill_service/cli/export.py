"""`gristmill export` writes rows of a running service to a rollout file, for `gristmill plan` and `gristmill batch`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from gristmill._client.connection.transport import Transport
from gristmill._wire.codecs.row_codec import decode
from gristmill._wire.column_spec import specs_of
from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import run_pb2, trainer_pb2
from gristmill_service.cli.options import ADDRESS, AddressOption
from gristmill_service.cli.terminal import refusals
from gristmill_service.rollout_lines import CONVERSATION, conversation_lines, json_lines

Lines = Callable[[Steps], Iterator[bytes]]

# The rows of a whole run may take longer than those of a batch.
_ALL_S = 120.0


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command()(export)


def export(
    run: Annotated[str, typer.Argument(help="The run.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The rollout file to write: .jsonl or .jsonl.gz.")],
    batch: Annotated[
        int | None,
        typer.Argument(
            help="The number of a sealed batch, from 0, that is not freed; all such batches by default, and then the "
            "complete groups that no batch has yet.",
            show_default=False,
        ),
    ] = None,
    address: AddressOption = ADDRESS,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Also write the run's configuration to this file, as YAML."),
    ] = None,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="Write what was said in place of the columns: messages and tokens.")
    ] = False,
) -> None:
    """Write the submitted rows of a sealed batch, or of all complete groups, to a file.

    Example: gristmill export my-run 12 --out rollouts.jsonl.gz --config run.yaml

    Example: gristmill export my-run --out rollouts.jsonl.gz --config run.yaml

    From the two files of the first example, gristmill batch builds the same tensors as the service, except for the
    advantages of rae, whose baselines begin at 0. With --conversations the file has the messages of the run's column
    `conversation` next to the tokens.
    """
    with refusals(), closing(Transport(address, 10.0, "gristmill export")) as transport:
        settings = _settings(transport, run)
        if config is not None:
            config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        columns = specs_of(settings.get("columns", ()))
        if conversations and CONVERSATION not in {column.name for column in columns}:
            raise InvalidArgumentError(
                f"--conversations: run {run!r} has no column {CONVERSATION}; declare it, and start gristmill record "
                f"with --columns {CONVERSATION}"
            )
        lines = conversation_lines if conversations else json_lines
        request = trainer_pb2.ExportBatchRequest(run=run, batch=batch or 0, all=batch is None)
        _write(transport, request, partial(lines, columns=columns), out)


def _settings(transport: Transport, run: str) -> dict[str, Any]:
    """Returns the run's configuration, with which the offline commands build the same batch as the service."""
    status = transport.call(transport.runs.GetRun, run_pb2.GetRunRequest(run=run)).status
    settings: dict[str, Any] = json.loads(status.config_json)
    if settings.get("zero_variance_filter") == "replace":
        # The service replaced groups before it sealed the batch, and the offline commands cannot.
        del settings["zero_variance_filter"]
    return settings


def _write(transport: Transport, request: trainer_pb2.ExportBatchRequest, lines_of: Lines, out: Path) -> None:
    """Writes the complete file, or no file."""
    if out.suffix not in (".jsonl", ".gz"):
        raise InvalidArgumentError(f"--out {out} is not a rollout file; use the extension .jsonl or .jsonl.gz")
    draft = out.with_name(f".{out.name}.draft")
    try:
        pages = transport.call(
            lambda request, timeout: list(transport.trainers.ExportBatch(request, timeout=timeout)),
            request,
            wait_s=_ALL_S if request.all else 0.0,
        )
        with gzip.open(draft, "wb") if out.suffix == ".gz" else draft.open("wb") as file:
            for page in pages:
                file.writelines(lines_of(decode(page.rows)))
        draft.rename(out)
    finally:
        draft.unlink(missing_ok=True)
