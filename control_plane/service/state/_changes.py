"""The queue of changes: each builds on those before it, and becomes visible once it is stored.

Changes that arrive while others are being stored are stored together next, in one transaction, so that the time that a
transaction takes limits how soon a change is stored, but hardly how many are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.service.state._index import JobIndex
from control_plane.service.state._sums import JobSums
from control_plane.store import Committed, UserRow
from geofed_pb.errors import GeofedError
from geofed_pb.tasks import awaited

__all__ = ["Changes", "View"]

_MOST_TOGETHER = 200
"""Limit of changes in one transaction: about 0.2 s of the database's time."""
_FIRST_TOGETHER = 20
"""The same of the first one, of which it is not known how long they take."""
_STORE_SECONDS = 0.3
"""Time that a transaction should take at most: the next one, and on PostgreSQL the leader's signs of life, wait for it.
Where 1,000 agents connected on two busy cores, 200 changes took up to 2.1 s."""


@dataclass
class View:
    """State of the federation after some change."""

    jobs: dict[str, JobEntry] = field(default_factory=dict)
    """Jobs that have not ended, in the order in which they came."""
    regions: dict[str, RegionEntry] = field(default_factory=dict)
    users: dict[str, UserRow] = field(default_factory=dict)
    report_cursors: dict[str, int] = field(default_factory=dict)
    """By region: sequence number of the last applied report."""

    def copy(self) -> View:
        """Return a copy that changes do not affect."""
        return View(dict(self.jobs), dict(self.regions), dict(self.users), dict(self.report_cursors))

    def apply(self, draft: Draft) -> None:
        """Apply a change."""
        if draft.renumbered_region:
            self.report_cursors[draft.renumbered_region] = 0
        if draft.report_cursor:
            self.report_cursors[draft.report_cursor[0]] = draft.report_cursor[1]
        for name, region in draft.changed_regions.items():
            self.regions[name] = _with_later_contact(region, self.regions.get(name), draft.at)
        self.regions.pop(draft.removed_region, None)
        for job_id, job in draft.changed_jobs.items():
            if job.state.terminal:
                self.jobs.pop(job_id, None)
            else:
                self.jobs[job_id] = job
        for name, user in draft.changed_users.items():
            self.users.pop(name, None)
            if user is not None:
                self.users[name] = user

    def contact(self, entry: RegionEntry) -> None:
        """Take over the lease of a region; everything else stays."""
        name, state = entry.row.name, entry.state
        if (known := self.regions.get(name)) is not None and known.state.session == state.session:
            renewed = replace(known.state, last_contact=state.last_contact, lease_ends=state.lease_ends)
            self.regions[name] = replace(known, state=renewed)


def _with_later_contact(entry: RegionEntry, known: RegionEntry | None, at: float) -> RegionEntry:
    """Keep a lease that was renewed while a change was made."""
    if known is None or known.state.last_contact <= at or known.state.session != entry.state.session:
        return entry
    if entry.state.phase != "live":
        return entry
    renewed = replace(entry.state, last_contact=known.state.last_contact, lease_ends=known.state.lease_ends)
    return replace(entry, state=renewed)


@dataclass(frozen=True)
class _Waiting:
    draft: Draft
    done: asyncio.Future[None]


class Changes:
    """Applies drafts in order, and stores them."""

    def __init__(
        self,
        store: Callable[[Sequence[Draft]], Awaitable[Sequence[Committed]]],
        publish: Callable[[Draft, Committed], None],
    ) -> None:
        """
        Args:
            store: stores drafts in one transaction; raises ``GeofedError`` if none was stored.
            publish: called for each draft once it is stored and visible.
        """
        self.visible = View()
        """What is stored: what users are told."""
        self.latest = View()
        """With the changes that are being stored: what the next change builds on."""
        self.index = JobIndex()
        """Index of the latest jobs."""
        self.sums = JobSums()
        """Sums over the visible jobs."""
        self.ended: dict[str, JobEntry] = {}
        """Jobs whose ends are being stored."""
        self.new: dict[str, asyncio.Future[None]] = {}
        """New jobs that are being stored, by ID; each is done once it is stored, or cannot be."""
        self._store, self._publish = store, publish
        self._queue: list[_Waiting] = []
        self._storing: asyncio.Task[None] | None = None
        self._together = _FIRST_TOGETHER
        """Number of changes in the next transaction."""

    def loaded(self) -> None:
        """Take over what was loaded into the visible view."""
        self.latest = self.visible.copy()
        self.index = JobIndex(self.latest.jobs.values())
        self.sums = JobSums(self.visible.jobs.values())
        self.ended.clear()
        self.new.clear()

    def draft(self, at: float) -> Draft:
        """Return an empty draft on the latest state."""
        latest = self.latest
        return Draft(at, latest.jobs, latest.regions, latest.users, index=self.index)

    def add(self, draft: Draft) -> asyncio.Future[None] | None:
        """Apply a draft of the latest state; return what is done once it is stored and visible, None: it is visible.

        The result raises ``GeofedError``, and nothing is applied: what the store raises; UNAVAILABLE if a change that
        it builds on could not be stored.
        """
        if draft.jobs is not self.latest.jobs:
            raise _lost()
        self.latest.apply(draft)
        self._note(draft)
        if not draft.is_stored and self._storing is None:
            self._make_visible(draft, Committed())
            return None
        waiting = _Waiting(draft, asyncio.get_running_loop().create_future())
        # Whoever asked may have been cancelled.
        waiting.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._queue.append(waiting)
        self.new |= {
            job_id: waiting.done
            for job_id, entry in draft.changed_jobs.items()
            if job_id not in self.visible.jobs and job_id not in self.new and not entry.state.terminal
        }
        if self._storing is None:
            self._storing = awaited(self._store_all())
        return waiting.done

    def contact(self, entry: RegionEntry) -> None:
        """Renew the lease of a region, which is not stored."""
        self.latest.contact(entry)
        self.visible.contact(entry)

    async def drain(self) -> None:
        """Wait until all changes are stored."""
        while self._storing is not None:
            await asyncio.wait({self._storing})

    def _note(self, draft: Draft) -> None:
        self.index.touched |= dict.fromkeys(draft.stored_regions)
        for job_id, entry in draft.changed_jobs.items():
            self.index.put(entry)
            if entry.state.terminal:
                self.ended[job_id] = entry

    async def _store_all(self) -> None:
        try:
            while self._queue:
                batch, self._queue = self._queue[: self._together], self._queue[self._together :]
                begun = time.monotonic()
                if (failure := await self._stored(batch)) is not None:
                    # The others build on what is not stored.
                    self._drop([*batch, *self._queue], failure)
                self._together = _together_next(self._together, len(batch), time.monotonic() - begun)
        finally:
            self._storing = None

    async def _stored(self, batch: Sequence[_Waiting]) -> GeofedError | None:
        """Store some changes in order; return the error that the others end with, or None if all are stored."""
        drafts = [waiting.draft for waiting in batch if waiting.draft.is_stored]
        try:
            stored = iter(await self._store(drafts) if drafts else ())
        except GeofedError as error:
            if error.retryable:
                return error
            if len(batch) == 1:
                batch[0].done.set_exception(error)
                return _lost()
            # One of them can never be stored; those before it can.
            for waiting in batch:
                if (failure := await self._stored([waiting])) is not None:
                    return failure
            return None
        except Exception as error:  # noqa: BLE001 - whoever waits must be told, whatever a database's driver raises
            for waiting in batch:
                waiting.done.set_exception(error)
            return _lost()
        for waiting in batch:
            self._make_visible(waiting.draft, next(stored) if waiting.draft.is_stored else Committed())
            waiting.done.set_result(None)
        return None

    def _make_visible(self, draft: Draft, committed: Committed) -> None:
        before = {job_id: self.visible.jobs.get(job_id) for job_id in draft.changed_jobs}
        self.visible.apply(draft)
        for job_id, entry in draft.changed_jobs.items():
            self.sums.replace(before[job_id], self.visible.jobs.get(job_id))
            self.new.pop(job_id, None)
            # The end itself may be in a change that is stored later.
            if self.ended.get(job_id) is entry:
                del self.ended[job_id]
        self._publish(draft, committed)

    def _drop(self, waiting: Sequence[_Waiting], error: GeofedError) -> None:
        self._queue = []
        for one in waiting:
            if not one.done.done():
                one.done.set_exception(error)
        self.loaded()


def _together_next(limit: int, stored: int, seconds: float) -> int:
    """Return how many changes the next transaction may have, after one of so many that took so long."""
    if seconds > _STORE_SECONDS:
        return max(1, int(stored * _STORE_SECONDS / seconds))
    return min(_MOST_TOGETHER, 2 * limit) if stored == limit else limit


def _lost() -> GeofedError:
    return GeofedError("UNAVAILABLE", "a change before this one could not be stored; nothing was changed")
