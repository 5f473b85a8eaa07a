"""The process's log on standard error, one line per event. Libraries also log through structlog."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from gristmill_service import tracing


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
        last: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
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


def _add_ids(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Adds the ids of the current call and trace, if any."""
    for name, value in (("request_id", tracing.request_id()), ("trace_id", tracing.trace_id())):
        if value:
            event.setdefault(name, value)
    return event
