"""How much preemptible capacity there is now: whoever sees it come and go says so in a file in the state directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

__all__ = ["preemptible_workers", "set_preemptible_workers"]

_log = logging.getLogger("geofed.capacity")
_FILE = "preemptible"


def set_preemptible_workers(state_dir: Path, workers: int) -> None:
    """So many preemptible workers are there from now on; the agent sees it within a second, and after a restart."""
    fresh = state_dir / f".{_FILE}.{os.getpid()}"
    fresh.write_text(f"{workers}\n")
    os.replace(fresh, state_dir / _FILE)


def preemptible_workers(state_dir: Path, most: int) -> int:
    """Preemptible workers that are there now, ``most`` at most; all where nobody has said otherwise.

    0 where what was said cannot be read: capacity is never guessed.
    """
    try:
        return max(0, min(most, int((state_dir / _FILE).read_text())))
    except FileNotFoundError:
        return most
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be read, so there are no preemptible workers: %s", state_dir / _FILE, error)
        return 0
