"""`gristmill token create` creates a token for a caller, and its entry in the service's file of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill_service.access.roles import ROLES
from gristmill_service.access.tokens import create_token
from gristmill_service.cli.terminal import refusals

_tokens = typer.Typer(no_args_is_help=True, help="Create tokens for callers.")


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.add_typer(_tokens, name="token")


@_tokens.callback()
def about() -> None:
    """Create tokens for callers."""


@_tokens.command("create")
def create(
    name: Annotated[str, typer.Argument(help="The caller's name, used in logs.")],
    role: Annotated[list[str], typer.Option(help="A role of the caller; can be repeated.", metavar="|".join(ROLES))],
    run: Annotated[list[str] | None, typer.Option(help="A pattern of runs, such as 'math-*'; can be repeated.")] = None,
    rank: Annotated[int | None, typer.Option(help="The only rank that the token permits.", min=0)] = None,
    tokens_file: Annotated[
        Path, typer.Option(help="The file that `gristmill serve --tokens-file` reads; created if it does not exist.")
    ] = Path("tokens.yaml"),
) -> None:
    """Create a token, print it, and add its digest to the file of tokens.

    The token itself is not stored: pass it to the caller in GRISTMILL_TOKEN, or in a file named by
    GRISTMILL_TOKEN_FILE. A running service reloads the file. To revoke the token, remove its entry from the file.

    Roles: worker (submits rollouts), trainer (pulls shards), viewer (views runs, but no tokens of rows), data_reader
    (also views tokens of rows), scraper (metrics), admin (everything, including deleting runs).

        gristmill token create rollouts --role worker --run 'math-*' --tokens-file tokens.yaml
    """
    with refusals():
        token = create_token(tokens_file, name, role, run or ["*"], rank)
    typer.echo(token)
