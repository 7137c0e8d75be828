"""What the control plane keeps, as items with the time from which their retention counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from control_plane.core import TERMINAL
from control_plane.store import JobUse, RowUse
from geofed_pb.storage import Found, Keep, Stored

__all__ = ["KEEP", "KINDS", "Item", "file_items", "job_item", "kind_of_rows", "rows_item"]

_DAY_SECONDS = 86_400.0
"""Seconds of a day: ages are in days."""
KEEP: Keep = {
    "jobs": None,
    "models": None,
    "bundles": None,
    "events": 90 * _DAY_SECONDS,
    "logs": 90 * _DAY_SECONDS,
    "history": 365 * _DAY_SECONDS,
    "measurements": 365 * _DAY_SECONDS,
    "unused": 7 * _DAY_SECONDS,
    "uploads": _DAY_SECONDS,
}
"""Default rules, by kind. Jobs stay, and models and code with them, since nothing can bring them back; an upload that
was interrupted is continued within a day or not at all."""
KINDS = {"events": "events", "logs": "logs", "runs": "measurements", "weights": "measurements", "deletions": "history"}
"""Kind of each history's rows; events of no job are "history"."""


@dataclass(frozen=True)
class Item:
    """Something that is kept; ``file``: where, unless it is rows."""

    stored: Stored
    file: Found | None = None


def file_items(
    whole: Iterable[Found],
    unfinished: Iterable[Found],
    jobs: Mapping[str, JobUse],
    initial: Mapping[str, Iterable[str]],
    parts: Mapping[str, Iterable[str]],
) -> list[Item]:
    """Return the items of blobs and of unfinished uploads.

    A blob has one kind, of what needs it the longest: "models" and "bundles" belong to jobs, "unused" to none. A model
    from which an active job has started is in use, also if its own job has ended or was deleted.

    Args:
        initial: digests of the files that each active job has started from, by job.
        parts: digests of the files that belong to archives of task folders, by the archive's digest.
    """
    uses: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for job in jobs.values():
        for digest in (job.bundle_digest, *parts.get(job.bundle_digest, ())):
            uses[digest]["bundles"].add(job.id)
        for digest in job.model_digests:
            uses[digest]["models"].add(job.id)
    for job_id, digests in initial.items():
        for digest in digests:
            uses[digest]["models"].add(job_id)
    blobs = [_blob(file, uses.get(f"sha256:{file.path.name}", {}), jobs) for file in whole]
    return [*blobs, *(Item(Stored("uploads", one.path.name, one.bytes, one.changed_at), one) for one in unfinished)]


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


def job_item(job: JobUse, size: int = 0) -> Item:
    """Return the item of a job itself, with which all goes that belongs to it. It stays until it has ended.

    ``size``: bytes of its description, plan, state and result.
    """
    return Item(_of_jobs(Stored("jobs", job.id, size, job.ended_at), [job]))


def kind_of_rows(table: str, *, has_job: bool) -> str:
    """Return the kind of a history's rows, with those of a job that exists or of none."""
    return "history" if table == "events" and not has_job else KINDS[table]


def rows_item(use: RowUse, jobs: Mapping[str, JobUse]) -> Item:
    """Return the item of rows of a history. Events and log of a job count from its end, others from their own time."""
    job = jobs.get(use.job)
    kind = kind_of_rows(use.table, has_job=job is not None)
    stored = Stored(kind, f"{use.table}/{use.job}", use.bytes, use.at, count=use.rows)
    if job is None:
        return Item(stored)
    return Item(_of_jobs(stored, [job]) if kind in ("events", "logs") else replace(stored, jobs=(job.id,)))
