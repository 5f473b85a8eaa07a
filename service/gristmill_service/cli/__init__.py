"""The entry point of the command line. Its imports work in an install without the extra `service`."""

from __future__ import annotations

import signal
import sys

LACKS_PACKAGES = 2


def main() -> None:
    """Runs `gristmill`. If required packages are not installed, prints the remedy and exits with 2."""
    try:
        _run()
    except KeyboardInterrupt:
        # No other code handles Ctrl-C while packages are imported.
        sys.exit(128 + signal.SIGINT)


def _run() -> None:
    try:
        from gristmill_service.cli.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "gristmill").startswith("gristmill"):
            raise
        remedy = "pip install '.[service]' in gristmill's checkout"
        print(
            f"gristmill: the commands and the service need {error.name}, which is not installed; {remedy}",
            file=sys.stderr,
        )
        sys.exit(LACKS_PACKAGES)
    app()
