"""The command line. Commands live with what they do; heavy imports happen inside them."""

from __future__ import annotations

import typer

from gristmill_service import export, offline, serve

app = typer.Typer(
    name="gristmill", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def about() -> None:
    """Rollouts of LLM reinforcement learning in, train-ready shards out."""


serve.register(app)
offline.register(app)
export.register(app)


def main() -> None:
    app()
