"""Signs of life of the leader, however long the event loop needs for a turn."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from control_plane.service.state import _leadership
from control_plane.service.state._leadership import LeaderState
from geofed_pb.errors import GeofedError


class Database:
    """A database that control planes share, which counts the signs of life."""

    shared = True

    def __init__(self) -> None:
        self.beats = 0
        self.leads = True
        self.beaten = threading.Event()

    def beat(self) -> None:
        if not self.leads:
            raise GeofedError("STANDBY", "another control plane leads now")
        self.beats += 1
        self.beaten.set()

    def interrupt(self) -> None:
        pass


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """About a tenth of the real times."""
    monkeypatch.setattr(_leadership, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(_leadership, "LEADING_SECONDS", 0.5)


def led(scenario: Any) -> None:
    """Run a scenario while signs of life are given."""
    database = Database()
    leading = LeaderState(cast(Any, database))

    async def run() -> None:
        keeping = asyncio.create_task(leading.keep())
        assert await asyncio.to_thread(database.beaten.wait, 5.0)
        await scenario(SimpleNamespace(leading=leading, database=database, keeping=keeping))
        keeping.cancel()
        await asyncio.wait({keeping})

    asyncio.run(run())


def test_a_loop_that_is_busy_for_longer_than_the_leadership_lasts_still_leads() -> None:
    async def scenario(site: Any) -> None:
        before = site.database.beats
        time.sleep(3 * _leadership.LEADING_SECONDS)  # noqa: ASYNC251 - the loop has no turn, as when 1,000 agents connect
        site.leading.check()
        assert site.database.beats > before + 2

    led(scenario)


def test_a_loop_that_hangs_gives_no_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_leadership, "_TURN_SECONDS", 0.3)

    async def scenario(site: Any) -> None:
        time.sleep(0.6)  # noqa: ASYNC251 - the loop hangs
        site.database.beaten.clear()
        assert not site.database.beaten.wait(1.0), "another control plane may take over"
        with pytest.raises(GeofedError, match="no sign of life"):
            site.leading.check()

    led(scenario)


def test_a_leader_that_was_replaced_learns_it_by_its_next_sign_of_life() -> None:
    async def scenario(site: Any) -> None:
        site.database.leads = False
        async with asyncio.timeout(5):
            await site.leading.lost.wait()
        with pytest.raises(GeofedError, match="another control plane leads now"):
            site.leading.check()

    led(scenario)
