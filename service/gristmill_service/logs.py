"""The process's log on standard error, one line per event. Libraries also log through structlog."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from io import StringIO
from typing import Any, TextIO

import structlog

from gristmill_service import tracing
from gristmill_service.cli.terminal import printable


def configure_logs(level: str, form: str) -> None:
    """Configures logging with this minimum level, in the form human or json."""
    shared: list[Any] = [
        _add_ids,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    if form == "json":
        last: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_json)]
    else:
        last = [_escape, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_traceback)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # The service logs start and stop itself.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))
    # Otherwise httpx logs every request that is forwarded to another replica.
    logging.getLogger("httpx").setLevel(max(logging.WARNING, root.level))


# Values come from callers, who must not send codes to the terminal of a reader, nor begin what looks like another line.


def _escape(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escapes characters that are not printable. The renderer shows values that are no text by `repr`, which does so,
    too."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = printable(value)
    return event


def _traceback(output: TextIO, error: structlog.typing.ExcInfo) -> None:
    plain = StringIO()
    structlog.dev.plain_traceback(plain, error)
    output.write("\n".join(map(printable, plain.getvalue().split("\n"))))


def _json(event: object, **options: Any) -> str:
    # The only control character that JSON does not escape.
    return json.dumps(event, **options).replace("\x7f", r"\u007f")


def _add_ids(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Adds the ids of the current call and trace, if any."""
    for name, value in (("request_id", tracing.request_id()), ("trace_id", tracing.trace_id())):
        if value:
            event.setdefault(name, value)
    return event
