"""What passes with time passes, whatever else goes wrong in the same second."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from pydantic import TypeAdapter
from structlog.testing import capture_logs

from control_plane.blobs import BlobStore
from control_plane.service.state._certificates import unseen_region
from control_plane.service.state._draft import Draft
from control_plane.service.state._federation import Federation
from control_plane.store import Change, open_store
from geofed_pb.v1 import agent_pb2
from scheduler import Region
from tests.control_plane.fake_agent import catalogue

LEASE = timedelta(seconds=30)


def test_leases_end_also_where_a_look_at_the_jobs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = 1000.0
    looked: list[float] = []

    def fails(draft: Draft, **_: object) -> None:
        draft.record("job.promise", "half of what was to be told", region="a")
        draft.jobs[""]

    async def scenario() -> Federation:
        nonlocal at
        store = open_store(f"sqlite:///{tmp_path / 'state.db'}")
        store.commit(Change(regions=(unseen_region("a").row,)))
        federation = Federation(store, BlobStore(tmp_path / "blobs"), lambda: at, LEASE, "test")
        await federation.load()
        told = TypeAdapter(Region).dump_json(catalogue("a")).decode()
        session = await federation.connect("a", agent_pb2.Hello(boot_id="1", catalogue_json=told))
        await federation.renew_lease(session)
        monkeypatch.setattr(federation.allocation, "due", lambda draft: Mock())
        monkeypatch.setattr(federation.allocation, "apply", fails)
        monkeypatch.setattr(federation.routing, "review", lambda draft: looked.append(draft.at))
        for _ in range(int(LEASE.total_seconds()) + 3):
            at += 1.0
            await federation.tick()
        events = await federation.read(lambda store: store.events_after(0))
        assert not [event for event in events if event.kind == "job.promise"], "what was half done counts for nothing"
        await federation.close()
        store.close()
        return federation

    with capture_logs() as logs:
        federation = asyncio.run(scenario())
    assert federation.regions["a"].state.phase == "lost"
    assert len(looked) == LEASE.total_seconds() + 3, "the other look is made"
    failed = [line for line in logs if line["log_level"] == "error"]
    assert [line["review"] for line in failed] == ["allocation"], "it is told, once"
