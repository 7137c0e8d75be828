"""What the flags say that hold for a whole run of the command; set once, while the command line is read."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from enum import StrEnum


class Format(StrEnum):
    """How data are written to stdout."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    JSONL = "jsonl"
    NAME = "name"


@dataclass
class Settings:
    """The settings of this process."""

    debug: bool = False
    """Show tracebacks."""
    ask: bool = True
    """False: questions are answered by no."""
    format: Format = Format.TABLE


settings = Settings()


def can_ask() -> bool:
    """True where somebody is there to answer a question."""
    return settings.ask and sys.stdin.isatty() and sys.stderr.isatty()


def is_lively() -> bool:
    """True where stderr may be drawn on: a terminal that can move its cursor, and nobody said no."""
    return sys.stderr.isatty() and settings.ask and os.environ.get("TERM", "dumb") != "dumb"
