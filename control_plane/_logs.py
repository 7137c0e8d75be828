"""Configure logging to stderr, as text or JSON, for structlog and the standard library."""

from __future__ import annotations

import logging
import sys

import structlog

from geofed_pb.errors import GeofedError


def configure_logs(style: str) -> None:
    """Configure structlog and logging for the process. Raises ``GeofedError("CONFIG_INVALID")``."""
    if style not in ("console", "json"):
        raise GeofedError("CONFIG_INVALID", f"unknown log format {style}; use console or json")
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    # Tracebacks omit the values of variables, which may include tokens and keys.
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    plain = structlog.dev.plain_traceback
    render: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
        if style == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
