"""What the control plane keeps, as items with the time from which their retention counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from control_plane.core import TERMINAL
from control_plane.store import JobUse, RowUse
from geofed_pb.storage import Found, Keep, Stored

__all__ = ["KEEP", "Inventory", "Item", "inventory_of"]

_DAY_SECONDS = 86_400.0
KEEP: Keep = {
    "models": None,
    "bundles": None,
    "events": 90 * _DAY_SECONDS,
    "logs": 90 * _DAY_SECONDS,
    "history": 365 * _DAY_SECONDS,
    "measurements": 365 * _DAY_SECONDS,
    "unused": 7 * _DAY_SECONDS,
    "uploads": _DAY_SECONDS,
}
"""Default rules, by kind. Models and code stay with their job, since nothing can bring them back; an upload that was
interrupted is continued within a day or not at all."""
_TABLES = {
    "events": "events",
    "logs": "logs",
    "runs": "measurements",
    "weights": "measurements",
    "deletions": "history",
}
"""Kinds of the tables' rows."""


@dataclass(frozen=True)
class Item:
    """Something that is kept, and where."""

    stored: Stored
    file: Found | None = None
    rows: RowUse | None = None


@dataclass(frozen=True)
class Inventory:
    """What was found. The jobs are read after the files, so that every file's job is known."""

    jobs: Mapping[str, JobUse]
    initial: Mapping[str, str]
    """Digest of the model that each active job has started from, by job."""
    whole: Iterable[Found]
    unfinished: Iterable[Found]
    rows: Iterable[RowUse] = ()


def inventory_of(found: Inventory) -> list[Item]:
    """Return the items: whole blobs, unfinished uploads, and rows of histories.

    A blob has one kind, of what needs it the longest: "models" and "bundles" belong to jobs, "unused" to none. A model
    from which an active job has started is in use, also if its own job has ended or was deleted.
    """
    uses: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for job in found.jobs.values():
        for kind, digest in (("models", job.model_digest), ("bundles", job.bundle_digest)):
            uses[digest][kind].add(job.id)
    for job_id, digest in found.initial.items():
        uses[digest]["models"].add(job_id)
    blobs = [_blob(file, uses.get(f"sha256:{file.path.name}", {}), found.jobs) for file in found.whole]
    uploads = [
        Item(Stored("uploads", file.path.name, file.bytes, file.changed_at), file=file) for file in found.unfinished
    ]
    return [*blobs, *uploads, *(_rows(use, found.jobs) for use in found.rows)]


def _blob(file: Found, uses: Mapping[str, set[str]], jobs: Mapping[str, JobUse]) -> Item:
    kind = next((kind for kind in ("models", "bundles") if uses.get(kind)), "unused")
    stored = Stored(kind, f"sha256:{file.path.name}", file.bytes, file.changed_at)
    of = sorted({job for ids in uses.values() for job in ids})
    return Item(_of_jobs(stored, [jobs[job] for job in of if job in jobs]), file=file)


def _of_jobs(stored: Stored, jobs: list[JobUse]) -> Stored:
    """Return what belongs to jobs: it is in use until they have ended, and its retention counts from then."""
    return replace(
        stored,
        jobs=tuple(job.id for job in jobs),
        in_use=any(job.phase not in TERMINAL for job in jobs),
        since=max([stored.since, *(job.ended_at for job in jobs)]),
    )


def _rows(use: RowUse, jobs: Mapping[str, JobUse]) -> Item:
    job, kind = jobs.get(use.job), _TABLES[use.table]
    if kind == "events" and job is None:
        kind = "history"
    stored = Stored(kind, f"{use.table}/{use.job}", use.bytes, use.at, count=use.rows)
    return Item(_of_jobs(stored, [job] if job is not None else []), rows=use)
