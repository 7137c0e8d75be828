"""Changes of many messages: stored together, in order, and visible only once they are."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from control_plane.blobs import BlobStore
from control_plane.core import Connected
from control_plane.service import Federation
from control_plane.service.planning._planning import plan_json
from control_plane.service.state import _changes
from control_plane.service.state._certificates import unseen_region
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.store import CommandRow, Committed, JobRow, Store, open_store
from geofed_pb.errors import GeofedError
from tests.control_plane.test_routing import Watched

LEASE = timedelta(seconds=30)


class Place:
    """A federation whose transactions a test holds up."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.at = 1000.0
        self.together: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self.each_seconds = 0.0
        """Time that each change of a transaction takes."""
        self.federation = Federation(store, BlobStore(folder / "blobs"), lambda: self.at, LEASE, "test")
        self._store_changes = self.federation.changes._store
        self.federation.changes._store = self._stored

    async def _stored(self, changes: Sequence[Draft]) -> Sequence[Committed]:
        await self.open.wait()
        self.together.append(len(changes))
        await asyncio.sleep(len(changes) * self.each_seconds)
        return await self._store_changes(changes)

    async def invite(self, name: str) -> None:
        async with self.federation.change() as draft:
            draft.put_region(unseen_region(name))
            draft.record("region.invited", name, region=name)

    async def command_nobody(self) -> None:
        async with self.federation.change() as draft:
            draft.commands.append(CommandRow("nobody", "j", b""))

    async def begin(self, *work: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
        """Start changes in this order, up to where they wait for the store."""
        tasks = []
        for one in work:
            tasks.append(asyncio.create_task(one))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return tasks


def _in(tmp_path: Path, scenario: Any) -> None:
    async def whole() -> None:
        with open_store(f"sqlite:///{tmp_path / 'state.db'}") as store:
            place = Place(store, tmp_path)
            await place.federation.load()
            await scenario(place)
            await place.federation.close()

    asyncio.run(whole())


def test_what_arrives_while_others_are_stored_is_stored_in_one_transaction(tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        place.open.clear()
        changes = await place.begin(*(place.invite(f"r{number}") for number in range(6)))
        assert not place.federation.regions, "what is not stored is not seen"
        assert len(place.federation.changes.latest.regions) == 6, "but the next change builds on it"
        place.open.set()
        await asyncio.gather(*changes)
        assert sorted(place.federation.regions) == [f"r{number}" for number in range(6)]
        assert place.together == [1, 5]
        events = await place.federation.read(lambda store: store.events_after(0))
        assert [event.text for event in events] == [f"r{number}" for number in range(6)]

    _in(tmp_path, scenario)


def test_one_that_can_never_be_stored_fails_those_that_build_on_it_and_no_other(tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        place.open.clear()
        work = (place.invite("a"), place.invite("b"), place.command_nobody(), place.invite("c"))
        changes = await place.begin(*work)
        place.open.set()
        first, second, third, fourth = await asyncio.gather(*changes, return_exceptions=True)
        assert (first, second) == (None, None)
        assert isinstance(third, GeofedError)
        assert third.code == "REGION_NOT_FOUND"
        assert isinstance(fourth, GeofedError)
        assert fourth.code == "UNAVAILABLE", "it may be repeated"
        assert sorted(place.federation.regions) == ["a", "b"]
        await place.invite("c")
        assert sorted(place.federation.changes.latest.regions) == ["a", "b", "c"]

    _in(tmp_path, scenario)


def test_a_change_that_was_begun_before_another_failed_is_refused(tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        place.open.clear()
        (failing,) = await place.begin(place.command_nobody())

        async def late() -> None:
            async with place.federation.change() as draft:
                place.open.set()
                await asyncio.wait({failing})
                draft.put_region(unseen_region("late"))

        with pytest.raises(GeofedError, match="UNAVAILABLE"):
            await late()
        with pytest.raises(GeofedError, match="REGION_NOT_FOUND"):
            await failing
        assert not place.federation.regions

    _in(tmp_path, scenario)


def test_a_lease_is_renewed_while_the_store_is_busy(tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        federation = place.federation

        def known(draft: Draft) -> RegionEntry:
            entry = draft.region("a")
            assert entry is not None
            return entry

        async def rename(cloud: str) -> None:
            async with federation.change() as draft:
                entry = known(draft)
                draft.put_region(
                    RegionEntry(entry.row.__class__(**{**vars(entry.row), "cloud": cloud}), entry.state, None)
                )

        await place.invite("a")
        async with federation.change() as draft:
            draft.apply_to_region("a", Connected(draft.at, "boot", LEASE.total_seconds()))
        session = federation.regions["a"].state.session
        place.open.clear()
        (change,) = await place.begin(rename("moon"))
        place.at += 9.0
        async with asyncio.timeout(30):
            await federation.renew_lease(type("Session", (), {"region": "a", "number": session})())
        assert federation.regions["a"].state.last_contact == place.at
        place.open.set()
        await change
        assert federation.regions["a"].row.cloud == "moon"
        assert federation.regions["a"].state.last_contact == place.at, "a stored change does not take a lease back"

    _in(tmp_path, scenario)


def test_a_job_whose_end_is_being_stored_is_known_all_the_time(tmp_path: Path, job_file: Path) -> None:
    async def scenario(place: Place) -> None:
        federation, turns = place.federation, asyncio.Semaphore(0)
        entry = Watched(job_file).entry
        stored = JobRow("j", "digits", "r", "", "", "", entry.spec.to_json(), plan_json(entry.plan), "", "running", 0.0)
        entry = replace(entry, row=stored)

        async def put(changed: JobEntry) -> None:
            async with federation.change() as draft:
                draft.add_job(changed)

        await put(entry)

        async def one_by_one(changes: Sequence[Draft]) -> Sequence[Committed]:
            await turns.acquire()
            return await place._store_changes(changes)

        federation.changes._store = one_by_one
        ended = replace(entry, state=replace(entry.state, phase="cancelled", finished_at=2000.0))
        renaming, ending = await place.begin(put(replace(entry, row=replace(entry.row, name="other"))), put(ended))
        turns.release()
        await renaming
        known = await federation.lookup.ended_job(entry.row.id)
        assert known is not None, "the change before its end is stored, the end is not yet"
        assert known.state.phase == "cancelled"
        turns.release()
        await ending
        known = await federation.lookup.ended_job(entry.row.id)
        assert known is not None
        assert not federation.changes.ended

    _in(tmp_path, scenario)


def test_a_transaction_that_takes_long_is_followed_by_one_with_fewer_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's signs of life wait for it."""
    monkeypatch.setattr(_changes, "_STORE_SECONDS", 0.05)

    async def scenario(place: Place) -> None:
        place.each_seconds = 0.02
        await asyncio.gather(*await place.begin(*(place.invite(f"r{number}") for number in range(24))))
        assert place.together[:2] == [1, 20]
        assert place.together[2] <= 2
        assert sum(place.together) == 24

    _in(tmp_path, scenario)


@pytest.mark.parametrize(
    ("limit", "stored", "seconds", "then"),
    [(20, 20, 0.1, 40), (200, 200, 0.1, 200), (20, 5, 0.1, 20), (200, 200, 3.0, 20), (20, 1, 5.0, 1)],
)
def test_the_number_of_changes_in_a_transaction_follows_the_time_of_the_last(
    limit: int, stored: int, seconds: float, then: int
) -> None:
    assert _changes._together_next(limit, stored, seconds) == then
