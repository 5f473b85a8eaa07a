"""`gristmill token create`: a token for a caller, and its entry in the service's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill_service.access.roles import ROLES
from gristmill_service.access.tokens import create_token
from gristmill_service.cli.terminal import refusals

_tokens = typer.Typer(no_args_is_help=True, help="Tokens that callers show the service.")


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.add_typer(_tokens, name="token")


@_tokens.callback()
def about() -> None:
    """Tokens that callers show the service."""


@_tokens.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Who will have it, as logs name them.")],
    role: Annotated[list[str], typer.Option(help="What they may do; again for more.", metavar="|".join(ROLES))],
    run: Annotated[list[str] | None, typer.Option(help="Runs by a pattern, such as 'math-*'; again for more.")] = None,
    rank: Annotated[int | None, typer.Option(help="The only rank that a trainer with it may be.", min=0)] = None,
    tokens_file: Annotated[
        Path, typer.Option(help="The file that `gristmill serve --tokens-file` reads; made where there is none.")
    ] = Path("tokens.yaml"),
) -> None:
    """Make a token, print it, and add its digest to the file of those who may call.

    The token itself is kept nowhere: give it to its caller, as GRISTMILL_TOKEN or in a file that GRISTMILL_TOKEN_FILE
    names. A service that runs reads the file again. Take the entry out of the file to withdraw the token.

    Roles: worker (submits rollouts), trainer (pulls shards), viewer (sees runs, but no tokens of rows), data_reader
    (those, too), scraper (metrics), admin (everything, also deleting runs).

        gristmill token create rollouts --role worker --run 'math-*' --tokens-file tokens.yaml
    """
    with refusals():
        token = create_token(tokens_file, name, role, run or ["*"], rank)
    typer.echo(token)
