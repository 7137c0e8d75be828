"""Present number of preemptible workers, which a hook of the cloud writes to a file in the state directory."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

__all__ = ["preemptible_workers", "set_preemptible_workers"]

_log = structlog.get_logger("geofed.capacity")
_FILE = "preemptible"
"""Name of the file in the state directory."""


def set_preemptible_workers(state_dir: Path, workers: int) -> None:
    """Set the number of preemptible workers. The agent reads it within a second, and after a restart."""
    fresh = state_dir / f".{_FILE}.{os.getpid()}"
    fresh.write_text(f"{workers}\n")
    os.replace(fresh, state_dir / _FILE)


def preemptible_workers(state_dir: Path, most: int) -> int:
    """Return the present number of preemptible workers, at most ``most``; ``most`` if none was set.

    0 if the file cannot be read, since capacity is never guessed.
    """
    try:
        return max(0, min(most, int((state_dir / _FILE).read_text())))
    except FileNotFoundError:
        return most
    except (OSError, ValueError) as error:
        path = str(state_dir / _FILE)
        _log.warning("cannot read how many workers are preemptible: there are none", path=path, error=str(error))
        return 0
