"""Where keys of the job file stand: methods are below `advanced` in the file, and at the top level of what is stored.

The stored form is that of control planes and agents that know no `advanced`, and what digests and signatures are about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ADVANCED", "SECTION", "as_stored", "as_written", "moved_path"]

SECTION = "advanced"
ADVANCED = ("collective", "k", "channel", "merge", "wan")
"""Keys below `advanced`; files may still have them at the top level, where they once were."""
_STORED_FIRST = (
    "apiVersion", "kind", "metadata", "task", "data", "train", "clients", "objective", "regions", "collective",
    "parallelism", "k", "channel", "merge", "wan",
)  # fmt: skip
"""Order of the first keys in the stored form: with another one the same job would have another digest."""


def as_written(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job as its file has it, from either form."""
    moved = {key: value for key, value in job.items() if key in ADVANCED}
    if not moved:
        return dict(job)
    rest = {key: value for key, value in job.items() if key not in moved and key != SECTION}
    return {**rest, SECTION: {**job.get(SECTION, {}), **moved}}


def as_stored(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job as it is stored and sent, from the form of the file."""
    flat = {key: value for key, value in job.items() if key != SECTION} | dict(job.get(SECTION, {}))
    return {**{key: flat[key] for key in _STORED_FIRST if key in flat}, **flat}


def moved_path(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the place in the file of a key that may be at its old one, at the top level."""
    return (SECTION, *path) if path[:1] and path[0] in ADVANCED else path
