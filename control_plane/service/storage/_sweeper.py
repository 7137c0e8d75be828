"""Measures what the control plane keeps, and removes what its retention rules no longer keep."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial

import structlog

from control_plane.service.state._federation import Federation
from control_plane.service.storage._inventory import KEEP, Inventory, Item, inventory_of
from control_plane.store import Store
from geofed_pb.errors import GeofedError
from geofed_pb.storage import Keep, Stored, due, left_after, log_removed, remove

__all__ = ["Sweeper"]

_log = structlog.get_logger("geofed.storage")
_FIRST_SECONDS = 60.0
"""Time from the start to the first sweep; until then agents connect and jobs continue."""
_INTERVAL_SECONDS = 3600.0
"""Time between two sweeps. The shortest default rule is a day."""
_ROWS_AT_ONCE = 2000
"""Rows that are removed by one transaction, so that other changes hardly wait."""


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

    async def items(self, *, rows: bool = True, job: str = "") -> list[Item]:
        """Return what is kept.

        Args:
            rows: also the rows of histories.
            job: only what belongs to this job; empty: everything.
        """
        federation = self._federation
        whole = await asyncio.to_thread(federation.blobs.whole)
        unfinished = await asyncio.to_thread(federation.blobs.unfinished)
        measured = await federation.read(partial(Store.row_uses, job=job)) if rows else []
        jobs = {use.id: use for use in await federation.read(Store.job_uses)}
        initial = {
            name: entry.state.initial_model.digest
            for name, entry in federation.jobs.items()
            if entry.state.initial_model is not None
        }
        items = inventory_of(Inventory(jobs, initial, whole, unfinished, measured))
        return [item for item in items if not job or job in item.stored.jobs]

    async def sweep(self) -> None:
        """Remove what the rules no longer keep. What cannot be removed is logged, and tried again by the next sweep."""
        now = self._federation.clock()
        await self._remove_files(lambda stored: bool(due([stored], self.keep, now)))
        gone = [item for item in await self.items() if item.rows is not None and due([item.stored], self.keep, now)]
        for item in gone:
            await self._remove_rows(item)
        log_removed(item.stored for item in gone)

    async def remove_unused(self, digests: set[str]) -> None:
        """Remove those of the blobs that no job needs any more."""
        await self._remove_files(lambda stored: stored.kind == "unused" and stored.name in digests)

    async def _remove_files(self, wanted: Callable[[Stored], bool]) -> None:
        remaining = {}
        # While a change is open, no job is stored that needs one of them.
        async with self._federation.change() as draft:
            draft.void = True
            for item in await self.items(rows=False):
                if item.file is None or not wanted(item.stored):
                    continue
                try:
                    if (file := self._federation.blobs.take_away(item.file.path)) is not None:
                        remaining[item.stored] = file
                except FileNotFoundError:
                    continue
                except OSError as error:
                    _log.warning("cannot be removed yet", name=item.stored.name, error=str(error))
        await asyncio.to_thread(left_after, list(remaining), lambda stored: remove(remaining[stored]))

    async def _remove_rows(self, item: Item) -> None:
        assert item.rows is not None
        table, job = item.rows.table, item.rows.job
        # Of an ended job everything goes; of others what is as old as what was measured.
        until = math.inf if item.stored.jobs else item.stored.since
        query = partial(Store.remove_rows, table=table, job=job, until=until, limit=_ROWS_AT_ONCE)
        while await self._federation.write(query) >= _ROWS_AT_ONCE:
            pass
