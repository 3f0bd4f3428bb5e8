"""How a process of ours logs: structlog and the standard library through one handler, to stderr.

Lines for people or JSON documents; never with local variables, which hold payloads and secrets.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, NamedTuple, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from schemas.errors import TidewheelIOError

LEVELS = ("debug", "info", "warning", "error", "critical")
_CHATTY = ("uvicorn", "httpx", "httpcore", "asyncio")  # of interest only to the one who looks for everything


class LogStyle(NamedTuple):
    """How this process logs; the level of a library is its application's."""

    level: str | None
    is_json: bool


_style = LogStyle(None, is_json=False)


def style() -> LogStyle:
    """How this process logs, for a child to log the same way."""
    return _style


def apply_style(given: LogStyle) -> None:
    """Log as the parent does, to stderr."""
    if given.level is None:
        log_as_a_library()
    else:
        configure_logs(given.level, is_json=given.is_json)


def configure_logs(level: str, *, is_json: bool, stream: TextIO | None = None) -> None:
    """Send what structlog and `logging` are told to `stream` (stderr, if None)."""
    global _style
    _style = LogStyle(level, is_json)
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso" if is_json else "%H:%M:%S.%f", utc=is_json),
        structlog.processors.StackInfoRenderer(),
        _without_expected_traceback,
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(stream, is_json)],
        )
    )
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
    logging.captureWarnings(True)


def log_as_a_library() -> None:
    """Leave it to the application's `logging` what is shown, unless the application has set structlog up itself."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _renderers(stream: TextIO, is_json: bool) -> list[Processor]:
    if is_json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return [
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
        )
    ]


def _without_expected_traceback(_: WrappedLogger, level: str, event: EventDict) -> EventDict:
    """An I/O error says what the operator must do; where it was raised is of no use to them, nor where in a driver."""
    error: Any = event.get("exc_info")
    error = error[1] if isinstance(error, tuple) else error
    is_expected = isinstance(error, TidewheelIOError) or str(event.get("logger", "")).startswith("cassandra.")
    if is_expected and not logging.getLogger().isEnabledFor(logging.DEBUG):
        event.pop("exc_info", None)
    return event
