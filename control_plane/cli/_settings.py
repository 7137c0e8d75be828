"""Global options of a command, set once while the command line is parsed."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from enum import StrEnum


class Format(StrEnum):
    """Formats of the data on stdout."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    JSONL = "jsonl"
    NAME = "name"


@dataclass
class ProcessSettings:
    """The settings of this process."""

    debug: bool = False
    """Print tracebacks of errors."""
    ask: bool = True
    """False with --no-input: never ask for confirmation, and draw no live display."""
    format: Format = Format.TABLE
    """Format of the data on stdout."""


settings = ProcessSettings()


def can_ask() -> bool:
    """Whether the user can be asked: stdin and stderr are terminals, and --no-input is not set."""
    return settings.ask and sys.stdin.isatty() and sys.stderr.isatty()


def stdout_is_terminal() -> bool:
    """Whether data are read by a person at a terminal that has bold text and colours."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def is_interactive() -> bool:
    """Whether stderr can show a live display: a terminal with a movable cursor, and --no-input is not set."""
    return sys.stderr.isatty() and settings.ask and os.environ.get("TERM", "dumb") != "dumb"
