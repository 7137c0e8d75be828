"""The log of a daemon, on stderr: text for people, or a JSON object a line."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

__all__ = ["LOG_FORMATS", "configure_logs", "describe_process"]

LOG_FORMATS = ("text", "json")
"""Values of the daemons' option ``--log-format``."""
_LEVELS = ("debug", "info", "warning", "error")
_of_process: dict[str, object] = {}
"""Values of every JSON line of this process."""


def describe_process(**values: object) -> None:
    """Add values to every JSON line of this process that does not have them itself, such as the region of an agent. A
    function is called for each line; None is left out."""
    _of_process.update(values)


def configure_logs(log_format: str, level: str = "info", *, relayed: bool = False) -> None:
    """Configure the log of this process, both for structlog and for the standard library.

    A JSON line has ``timestamp`` (ISO 8601, UTC), ``level``, ``logger``, ``event``, and the values of the event, of the
    context (structlog's context variables) and of the process (`describe_process`). With ``relayed`` another process
    reads the lines and adds the time, so that the text has none. Such a process may log by the standard library alone:
    structlog, whose import takes 0.15 s, is imported with the first line that is written.

    Raises ``GeofedError("CONFIG_INVALID")`` for an unknown format or level.
    """
    if log_format not in LOG_FORMATS:
        raise GeofedError("CONFIG_INVALID", f"unknown log format {log_format}; use {' or '.join(LOG_FORMATS)}")
    if level not in _LEVELS:
        raise GeofedError("CONFIG_INVALID", f"unknown log level {level}; use one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(log_format, timed=not (relayed and log_format == "text")))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name in ("alembic", "httpx2"):
        # They log every migration and every request.
        logging.getLogger(name).setLevel(logging.WARNING)
    if relayed:
        return
    import structlog

    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_describing(timed=True),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


class _Formatter(logging.Formatter):
    """Formats records by structlog, which it imports with the first one."""

    def __init__(self, log_format: str, *, timed: bool) -> None:
        super().__init__()
        self._log_format, self._timed = log_format, timed
        self._structured: logging.Formatter | None = None

    def format(self, record: logging.LogRecord) -> str:
        if self._structured is None:
            self._structured = _structured_formatter(self._log_format, timed=self._timed)
        return self._structured.format(record)


def _describing(*, timed: bool) -> list[Processor]:
    """Return the processors that add level, logger and time to an event."""
    import structlog

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        *([structlog.processors.TimeStamper(fmt="iso", utc=True)] if timed else []),
        structlog.processors.StackInfoRenderer(),
    ]


def _with_process(_: object, __: str, event: EventDict) -> EventDict:
    for name, value in _of_process.items():
        told = value() if callable(value) else value
        if told is not None:
            event.setdefault(name, told)
    return event


def _structured_formatter(log_format: str, *, timed: bool) -> logging.Formatter:
    import structlog

    # Tracebacks omit the values of variables, which may include tokens and keys.
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    plain = structlog.dev.plain_traceback
    render: list[Processor] = (
        [_with_process, structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
        if log_format == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_describing(timed=timed),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )
