"""Measures what the control plane keeps, and removes what its retention rules no longer keep."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from control_plane.core import models_of
from control_plane.service.state._callers import Caller
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._federation import Federation
from control_plane.service.storage._deletion import BY_RULE, delete_job
from control_plane.service.storage._inventory import KEEP, KINDS, Item, file_items, job_item, kind_of_rows, rows_item
from control_plane.store import HISTORIES, JobUse, RowUse, Store
from geofed_pb.errors import GeofedError
from geofed_pb.storage import Found, Keep, Stored, due, left_after, remove
from geofed_pb.v1 import control_pb2

__all__ = ["Sweeper"]

_log = structlog.get_logger("geofed.storage")
_FIRST_SECONDS = 60.0
"""Time from the start to the first sweep; until then agents connect and jobs continue."""
_INTERVAL_SECONDS = 3600.0
"""Time between two sweeps. The shortest default rule is a day."""
_ROWS_AT_ONCE = 2000
"""Rows that are removed by one transaction, so that other changes hardly wait."""
_AT_ONCE = 200
"""Jobs that are read at once, or files whose jobs are looked up: a few milliseconds of Python's lock."""
_PAUSE_SECONDS = 0.02
"""Time between two pages of them, in which other threads have Python's lock, so that calls hardly slow down."""
_CLOCK_STEP_SECONDS = 60.0
"""How far the clock may be set back while files are looked at."""
_MAX_JOB_EVENTS = 50_000
"""Events that a job keeps, the newest, since its regions' reports cause them; a long job has thousands."""


class Sweeper:
    """What one control plane keeps. ``keep``: its rules, by kind, where they differ from the default."""

    def __init__(self, federation: Federation, keep: Keep = KEEP) -> None:
        self._federation, self.keep = federation, {**KEEP, **keep}

    async def run(self) -> None:
        """Sweep at an interval until cancelled."""
        await asyncio.sleep(_FIRST_SECONDS)
        while True:
            try:
                await self.sweep()
            except GeofedError as error:
                _log.warning("not everything was swept", code=error.code, error=error.message)
            except Exception:  # noqa: BLE001 - this task must not end, since the disk would fill
                _log.exception("not everything was swept")
            await asyncio.sleep(_INTERVAL_SECONDS)

    async def items(self, job: str = "") -> tuple[list[Item], dict[str, JobUse]]:
        """Return what is kept, and what each job keeps; ``job``: only what belongs to this job."""
        measured: list[RowUse] = []
        for table in HISTORIES:
            measured += await self._federation.read(partial(Store.row_uses, table=table, job=job))
        blobs = self._federation.blobs
        whole, unfinished = await asyncio.to_thread(blobs.whole), await asyncio.to_thread(blobs.unfinished)
        # Read after the files, so that every file's job is known.
        jobs = await self._jobs()
        sizes = await self._federation.read(Store.job_bytes)
        active = list(self._federation.jobs.values())

        def items() -> list[Item]:
            models = ((entry.row.id, entry.state.initial_model) for entry in active)
            initial = {name: model.uploaded for name, model in models if model is not None}
            parts = self._parts({use.bundle_digest for use in jobs.values()})
            found = [job_item(use, sizes.get(use.id, 0)) for use in jobs.values()]
            found += file_items(whole, unfinished, jobs, initial, parts)
            found += [rows_item(use, jobs) for use in measured]
            return [item for item in found if not job or job in item.stored.jobs]

        # In a thread, since many jobs take long.
        return await asyncio.to_thread(items), jobs

    async def _jobs(self) -> dict[str, JobUse]:
        found: dict[str, JobUse] = {}
        page = await self._federation.read(partial(Store.job_uses, limit=_AT_ONCE))
        while page:
            found |= {use.id: use for use in page}
            await asyncio.sleep(_PAUSE_SECONDS)
            page = await self._federation.read(partial(Store.job_uses, limit=_AT_ONCE, after=page[-1].id))
        return found

    async def sweep(self) -> None:
        """Remove what the rules no longer keep. What cannot be removed is logged, and tried again by the next sweep."""
        now = self._federation.clock()
        await self._delete_jobs(now)
        uploads = await asyncio.to_thread(self._federation.blobs.unfinished)
        unfinished = [item for item in file_items((), uploads, {}, {}, {}) if due([item.stored], self.keep, now)]
        old = partial(self._federation.blobs.whole, until=now - _shortest(self.keep))
        await self._remove_files(old, self.keep, unfinished)
        for table in HISTORIES:
            if count := await self._sweep_rows(table, now):
                _log.info("rows were removed", table=table, rows=count)
        for job in await self._federation.read(lambda store: store.jobs_with_events_beyond(_MAX_JOB_EVENTS)):
            surplus = partial(Store.remove_events_beyond, most=_MAX_JOB_EVENTS, job=job, limit=_ROWS_AT_ONCE)
            count = await self._remove_all(surplus)
            _log.warning("a job had more events than are kept; the oldest were removed", job=job, rows=count)
        await self._federation.read(Store.clear_log)

    async def _delete_jobs(self, now: float) -> None:
        """Delete the jobs that the rule no longer keeps, as a user's command does."""
        if (kept := self.keep["jobs"]) is None:
            return
        digests = set[str]()
        for use in await self._federation.read(partial(Store.uses_of_ended, until=now - kept)):
            try:
                _, needed = await delete_job(self._federation, use.id, BY_RULE)
            except GeofedError as error:
                _log.info("a job is not deleted yet", job=use.id, code=error.code, error=error.message)
            else:
                digests |= needed
                _log.info("a job was deleted", job=use.id, ended_at=use.ended_at)
        if digests:
            await self.remove_unused(digests)

    async def delete_job(self, name: str, caller: Caller) -> control_pb2.DeleteReply:
        """Delete a job with all that belongs to it, as `delete_job` says."""
        reply, digests = await delete_job(self._federation, name, caller)
        if digests:
            await self.remove_unused(set(digests))
        await self._federation.read(Store.clear_log)
        return reply

    async def _sweep_rows(self, table: str, now: float) -> int:
        """Remove the rows of a history: of an ended job together, of others what is old."""
        kept, of_no_job = self.keep[KINDS[table]], self.keep[kind_of_rows(table, has_job=False)]
        if table not in ("events", "logs"):
            return await self._remove_rows(table, None, now - kept) if kept is not None else 0
        count = 0
        if kept is not None:
            ended = partial(Store.ended_jobs_with_rows, table=table, until=now - kept)
            for job in await self._federation.read(ended):
                count += await self._remove_rows(table, job, math.inf)
        if of_no_job is not None:
            for job in await self._federation.read(partial(Store.unknown_jobs_with_rows, table=table)):
                count += await self._remove_rows(table, job, now - of_no_job)
        return count

    async def _remove_rows(self, table: str, job: str | None, until: float) -> int:
        # Most often there are none, and a removal waits for all changes before it while no other one can begin.
        if not await self._federation.read(partial(Store.has_rows, table=table, until=until, job=job)):
            return 0
        query = partial(Store.remove_rows, table=table, until=until, job=job, limit=_ROWS_AT_ONCE)
        return await self._remove_all(query)

    async def _remove_all(self, query: Callable[[Store], int]) -> int:
        """Repeat a removal of up to `_ROWS_AT_ONCE` rows until none remain; return how many were removed."""
        count = removed = await self._federation.write(query)
        while removed >= _ROWS_AT_ONCE:
            count += (removed := await self._federation.write(query))
        return count

    async def _due(self, blobs: Callable[[], list[Found]], keep: Keep, active: Mapping[str, JobEntry]) -> list[Item]:
        """Return those of the blobs that the rules do not keep. ``active``: the jobs that have not ended."""
        now = self._federation.clock()

        def free() -> list[Found]:
            found = blobs()
            needed = self._needed(active.values(), ()) if found else set()
            return [blob for blob in found if _digest_of(blob) not in needed]

        # A file that no job names may belong to an archive, and is then kept like it: whether it does is only looked up
        # where it is old enough, since archives have to be read.
        first = {**keep, "unused": _shortest(keep)}
        left = await self._due_by(first, {}, await asyncio.to_thread(free), now)
        blobs_left = [item.file for item in left if item.file is not None]
        parts = await self._listing({_digest_of(blob) for blob in blobs_left}) if blobs_left else {}
        return await self._due_by(keep, parts, blobs_left, now)

    async def _due_by(
        self, keep: Keep, parts: Mapping[str, frozenset[str]], blobs: list[Found], now: float
    ) -> list[Item]:
        """Return those of the blobs that the rules do not keep. Empties the list, of which many are freed in parts."""

        def due_of(store: Store, page: Sequence[Found]) -> list[Item]:
            digests = {_digest_of(blob) for blob in page}
            listing = {bundle: held for bundle, held in parts.items() if not held.isdisjoint(digests)}
            jobs = {use.id: use for use in store.uses_of_blobs([*digests, *listing])}
            return [item for item in file_items(page, (), jobs, {}, listing) if due([item.stored], keep, now)]

        found: list[Item] = []
        while blobs:
            page = blobs[-_AT_ONCE:]
            del blobs[-_AT_ONCE:]
            found += await self._federation.read(partial(due_of, page=page))
            await asyncio.sleep(_PAUSE_SECONDS)
        return found

    async def _listing(self, digests: set[str]) -> dict[str, frozenset[str]]:
        """Return the archives of jobs that list any of these files, each with those that it lists."""
        found: dict[str, frozenset[str]] = {}
        bundles = await self._federation.read(Store.bundles)
        for begin in range(0, len(bundles), _AT_ONCE):
            parts = await asyncio.to_thread(self._parts, bundles[begin : begin + _AT_ONCE])
            found |= {bundle: held & digests for bundle, held in parts.items() if not held.isdisjoint(digests)}
            await asyncio.sleep(_PAUSE_SECONDS)
        return found

    def _parts(self, bundles: Iterable[str]) -> dict[str, frozenset[str]]:
        """Return the digests of the files that belong to archives, where there are any."""
        found = {}
        for bundle in bundles:
            with suppress(FileNotFoundError):
                if parts := self._federation.blobs.parts(bundle):
                    found[bundle] = parts
        return found

    def _needed(self, active: Iterable[JobEntry], ended: Iterable[JobUse]) -> set[str]:
        """Return the digests of the blobs that these jobs need."""
        bundles, models = set[str](), set[str]()
        for use in ended:
            bundles.add(use.bundle_digest)
            models.update(use.model_digests)
        for entry in active:
            bundles.add(entry.row.bundle_digest)
            models.update(model.digest for model in models_of(entry.state))
            models.update(entry.state.initial_model.uploaded if entry.state.initial_model is not None else ())
        return bundles.union(models, *self._parts(bundles).values())

    async def remove_unused(self, digests: set[str]) -> None:
        """Remove those of the blobs that no job needs any more."""
        blobs = partial(self._federation.blobs.whole, digests=digests)
        await self._remove_files(blobs, {"unused": -math.inf})

    async def _remove_files(
        self, blobs: Callable[[], list[Found]], keep: Keep, unfinished: Collection[Item] = ()
    ) -> None:
        """Remove those of the blobs that the rules do not keep, and what is unfinished."""
        begun_at = self._federation.clock()
        # Before the database is asked, so that a job that ends meanwhile is in one of both.
        active = dict(self._federation.jobs)
        # Without holding up any change, since to look at many files takes seconds.
        found = [*await self._due(blobs, keep, active), *unfinished]
        while found:
            page = found[-_AT_ONCE:]
            del found[-_AT_ONCE:]
            await self._remove_unless_needed(page, active, begun_at)

    async def _remove_unless_needed(self, items: Sequence[Item], active: Mapping[str, JobEntry], since: float) -> None:
        """Remove those of the files that no job needs that has come, has changed or has ended since a time, at which
        these jobs were active."""
        remaining: dict[Stored, Path] = {}
        # While a change is open, no job is stored that needs one of them.
        async with self._federation.change() as draft:
            draft.void = True
            changed = [entry for name, entry in draft.jobs.items() if active.get(name) is not entry]
            # Also before the database is asked.
            changed += self._federation.changes.ended.values()
            ended_since = partial(Store.uses_of_ended, since=since - _CLOCK_STEP_SECONDS)
            ended = await self._federation.read(ended_since)
            needed = await asyncio.to_thread(self._needed, changed, ended)
            for stored, held in ((item.stored, item.file) for item in items if item.file is not None):
                try:
                    # A file that was used again meanwhile stays.
                    if stored.name in needed or held.path.stat().st_mtime > held.changed_at:
                        continue
                    if (file := self._federation.blobs.take_away(held.path)) is not None:
                        remaining[stored] = file
                except FileNotFoundError:
                    continue
                except OSError as error:
                    _log.warning("cannot be removed yet", name=stored.name, error=str(error))
        await asyncio.to_thread(left_after, list(remaining), lambda stored: remove(remaining[stored]))


def _digest_of(blob: Found) -> str:
    return f"sha256:{blob.path.name}"


def _shortest(keep: Keep) -> float:
    """Return the shortest time for which a blob is kept, whatever needs it; infinity: without a limit."""
    kinds = ("models", "bundles", "unused")
    return min((seconds for kind in kinds if (seconds := keep.get(kind)) is not None), default=math.inf)
