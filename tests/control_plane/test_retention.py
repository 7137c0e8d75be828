"""What the control plane removes by its retention rules, with a clock of the test."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import small_job

from control_plane.blobs import BlobStore
from control_plane.cli.commands.server.serve import _rules
from control_plane.core import JobState
from control_plane.service import KEEP, Federation, Sweeper
from control_plane.service.state._entries import JobEntry
from control_plane.service.storage import _sweeper
from control_plane.service.storage._inventory import Item, file_items
from control_plane.spec import load
from control_plane.store import Change, Deletion, EventRow, JobRow, JobUse, LogRow, RunRow, Store, WeightRow, open_store
from geofed_pb.errors import GeofedError
from geofed_pb.storage import Found, Keep, due
from geofed_pb.v1 import common_pb2
from tests.control_plane.fake_agent import digest_of

DAY = 86_400.0
NOW = 1_000 * DAY
JOB = JobRow("active", "n", "r", "c", "b", "t", "{}", "{}", "{}", "running", 0.0)


@dataclass
class Place:
    """A control plane's state, without a server."""

    store: Store
    blobs: BlobStore
    federation: Federation
    sweeper: Sweeper

    def put(self, content: bytes, days: float) -> str:
        """A blob that was last used so many days ago."""
        digest = digest_of(content)
        self.blobs.path(digest).write_bytes(content)
        os.utime(self.blobs.path(digest), (NOW - days * DAY, NOW - days * DAY))
        return digest

    def upload(self, name: str, days: float) -> Path:
        path = self.blobs.folder / "partial" / name
        path.write_bytes(b"begun")
        os.utime(path, (NOW - days * DAY, NOW - days * DAY))
        return path

    def job(self, name: str, ended_days: float, bundle: str = "", model: str = "") -> JobRow:
        ended = NOW - ended_days * DAY
        row = JobRow(name, name, name, "c", bundle, "t", "{}", "{}", "{}", "succeeded", ended - 60, "{}")
        row = replace(row, ended_at=ended, model_digests=(model,) if model else ())
        event, line = EventRow(ended, name, "", "job.succeeded", "t"), LogRow(ended, name, "a", "s", "t")
        self.store.commit(Change(jobs=(row,), events=(event,), logs=(line,)))
        return row

    def has(self, digest: str) -> bool:
        return self.blobs.path(digest).exists()


@asynccontextmanager
async def place_in(folder: Path, keep: Keep = KEEP, url: str = "") -> AsyncIterator[Place]:
    with open_store(url or f"sqlite:///{folder}/state.db") as store:
        blobs = BlobStore(folder / "blobs")
        federation = Federation(store, blobs, lambda: NOW, timedelta(seconds=30), "test")
        await federation.load()
        yield Place(store, blobs, federation, Sweeper(federation, keep))
        await federation.close()


def run(folder: Path, scenario: Callable[[Place], Awaitable[None]], keep: Keep = KEEP) -> None:
    async def whole() -> None:
        async with place_in(folder, keep) as place:
            await scenario(place)

    asyncio.run(whole())


def test_what_belongs_to_a_job_stays_and_the_rest_goes_when_its_time_is_over(tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        code, model = place.put(b"code", 400), place.put(b"model", 400)
        place.job("old", 400, code, model)
        old, new = place.put(b"of nobody", 8), place.put(b"of nobody yet", 6)
        stale, fresh = place.upload("aa-1", 1.1), place.upload("bb-2", 0.9)
        await place.sweeper.sweep()
        assert place.has(code)
        assert place.has(model)
        assert (place.has(old), place.has(new)) == (False, True)
        assert (stale.exists(), fresh.exists()) == (False, True)
        assert sorted(path.name for path in fresh.parent.iterdir()) == [fresh.name]

    run(tmp_path, scenario)


def test_models_go_by_a_rule_unless_an_active_job_needs_them(tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        shared, old, young = place.put(b"shared", 50), place.put(b"old", 50), place.put(b"young", 50)
        place.job("first", 40, model=shared)
        place.job("second", 20, model=shared)
        place.job("third", 40, model=old)
        place.job("fourth", 20, model=young)
        await place.sweeper.sweep()
        assert (place.has(shared), place.has(old), place.has(young)) == (True, False, True)
        assert place.store.job("third") is not None, "only its model is gone"

    run(tmp_path, scenario, {"models": 30 * DAY})


def test_histories_of_ended_jobs_go_and_of_others_what_is_old(tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        place.job("old", 91)
        place.job("young", 89)
        of_active = EventRow(1.0, "active", "", "k", "t"), LogRow(1.0, "active", "a", "s", "t")
        federation = tuple(EventRow(NOW - days * DAY, "", "a", "region.live", str(days)) for days in (380, 366, 364))
        lost = EventRow(NOW - 366 * DAY, "unknown", "", "k", "t"), LogRow(NOW - 91 * DAY, "unknown", "a", "s", "t")
        runs = tuple(RunRow(name, "a", "t", NOW - days * DAY, 1, 1, 1) for name, days in (("p1", 366), ("p2", 364)))
        weights = tuple(WeightRow(key, "a", NOW - days * DAY, 1, 1) for key, days in (("w1", 366), ("w2", 364)))
        gone = tuple(Deletion(name, "", "operator", NOW - days * DAY, 0, 0) for name, days in (("d1", 366), ("d2", 9)))
        events = (of_active[0], *federation, lost[0])
        place.store.commit(Change(jobs=(JOB,), events=events, logs=(of_active[1], lost[1]), runs=runs, weights=weights))
        place.store.commit(Change(deletions=gone))
        await place.sweeper.sweep()
        kept = [(event.job, event.kind, event.text) for event in place.store.events_after(0)]
        assert kept == [("young", "job.succeeded", "t"), ("active", "k", "t"), ("", "region.live", "364")]
        assert [bool(place.store.logs_after(job, 0)) for job in ("old", "young", "active", "unknown")] == [
            False, True, True, False,
        ]  # fmt: skip
        assert [run.job for run in place.store.runs("t")] == ["p2"]
        assert (place.store.weight("w1"), place.store.weight("w2")) == (None, weights[1])
        assert (place.store.deletion("d1"), place.store.deletion("d2")) == (None, gone[1])
        assert place.store.job("old") is not None

    run(tmp_path, scenario)


def test_a_job_keeps_its_newest_events_and_others_keep_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sweeper, "_MAX_JOB_EVENTS", 5)
    monkeypatch.setattr(_sweeper, "_ROWS_AT_ONCE", 2)

    async def scenario(place: Place) -> None:
        many = tuple(EventRow(NOW, "flooded", "a", "k", str(number)) for number in range(12))
        others = tuple(EventRow(NOW, job, "a", "k", str(number)) for job in ("", "calm") for number in range(5))
        place.store.commit(Change(events=(*many, *others, *many[:1])))
        await place.sweeper.sweep()
        kept = [event.text for event in place.store.events_after(0, job="flooded")]
        assert kept == ["8", "9", "10", "11", "0"]
        assert len(place.store.events_after(0)) == 15

    run(tmp_path, scenario)


def test_what_a_request_or_an_upload_under_way_needs_is_not_removed(tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        digest, other = place.put(b"to be submitted", 30), place.put(b"asked for", 30)
        with place.blobs.held(digest):
            place.blobs.stat(other, "user ann")
            await place.sweeper.sweep()
            assert place.has(digest)
            assert place.has(other), "who asks is about to submit it"
        await place.sweeper.sweep()
        assert (place.has(digest), place.has(other)) == (False, True)

        content, arrived = b"a slow upload", asyncio.Event()

        async def chunks() -> AsyncIterator[common_pb2.BlobChunk]:
            head = {"digest": digest_of(content), "total_bytes": len(content)}
            yield common_pb2.BlobChunk(**head, data=content[:5])
            partial = place.blobs._partial_of(digest_of(content), "ann")
            os.utime(partial, (0, 0))
            await place.sweeper.sweep()
            arrived.set()
            yield common_pb2.BlobChunk(**head, offset=5, data=content[5:])

        assert (await place.blobs.receive(chunks(), limit_bytes=100, uploader="ann")).complete
        assert arrived.is_set()

    run(tmp_path, scenario)


def test_what_a_job_needs_that_comes_while_files_are_looked_at_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is still active, or has ended already, or only asked."""

    async def scenario(place: Place) -> None:
        code, ended, asked, other = (place.put(name, 8) for name in (b"code", b"ended", b"asked", b"other"))
        (tmp_path / "job.yaml").write_text(small_job.JOB)
        (tmp_path / "task.py").write_text(small_job.TASK)
        plan: Any = SimpleNamespace(partitions=(), wan_settings={})
        spec = load(tmp_path / "job.yaml").spec
        active = JobEntry(replace(JOB, bundle_digest=code), JobState("active", 30.0, NOW), spec, plan)
        looked = place.sweeper._files

        async def late() -> tuple[list[Item], dict[str, JobUse]]:
            found = await looked()
            monkeypatch.setattr(place.sweeper, "_files", looked)
            async with place.federation.change() as draft:
                draft.add_job(active)
            place.job("ended", 0, model=ended)
            place.blobs.stat(asked, "user ann")
            return found

        monkeypatch.setattr(place.sweeper, "_files", late)
        await place.sweeper.sweep()
        assert [place.has(digest) for digest in (code, ended, asked, other)] == [True, True, True, False]

    run(tmp_path, scenario)


def test_a_blob_that_cannot_be_removed_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(place: Place) -> None:
        stuck, vanishing, other = (place.put(name, 8) for name in (b"stuck", b"vanishing", b"other"))
        upload = place.upload("aa-1", 2)
        unlink, rename = Path.unlink, Path.rename

        def failing(self: Path, missing_ok: bool = False) -> None:
            if stuck.removeprefix("sha256:") in self.name:
                raise OSError(5, "the disk has failed")
            unlink(self, missing_ok)

        def late(self: Path, target: Path) -> Path:
            if vanishing.removeprefix("sha256:") in self.name:
                unlink(self)
            return rename(self, target)

        with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
            patch.setattr(Path, "unlink", failing)
            patch.setattr(Path, "rename", late)
            await place.sweeper.sweep()
        assert not any(map(place.has, (stuck, vanishing, other)))
        assert not upload.exists()
        left = [path.name for path in upload.parent.iterdir()]
        assert left == [f"removed-{stuck.removeprefix('sha256:')}"], "which the next sweep tries again"
        await place.sweeper.sweep()
        assert list(upload.parent.iterdir()) == []

    run(tmp_path, scenario)


FILES = st.lists(st.builds(Found, st.sampled_from("abcdef").map(Path), st.just(1), st.floats(0, 1000)), unique_by=str)
DIGESTS = st.sampled_from([f"sha256:{name}" for name in "abcdef"])
JOBS = st.lists(
    st.builds(
        JobUse, st.text(min_size=1, max_size=2), st.just(""), st.sampled_from(["running", "queued", "failed"]),
        st.floats(0, 1000), DIGESTS, st.lists(DIGESTS).map(tuple),
    ),
    unique_by=lambda job: job.id,
)  # fmt: skip


PARTS = st.dictionaries(DIGESTS, st.lists(DIGESTS, max_size=3))


@given(FILES, JOBS, st.dictionaries(st.text(min_size=1, max_size=2), DIGESTS), PARTS, st.floats(0, 2000))
def test_no_rule_removes_what_an_active_job_needs(
    files: list[Found], jobs: list[JobUse], initial: dict[str, str], parts: dict[str, list[str]], now: float
) -> None:
    """By the shortest rules there are."""
    by_id = {job.id: job for job in jobs}
    active = {job.id for job in jobs if job.phase != "failed"}
    initial = {name: digest for name, digest in initial.items() if name in active}
    items = file_items(files, (), by_id, initial, parts)
    assert len(items) == len(files)
    gone = {item.name for item in due([item.stored for item in items], dict.fromkeys(KEEP, 0.0), now)}
    needed = {digest for job in jobs if job.id in active for digest in (job.bundle_digest, *job.model_digests)}
    needed |= {digest for job in jobs if job.id in active for digest in parts.get(job.bundle_digest, ())}
    assert not gone & (needed | set(initial.values()))
    kept = {item.name for item in due([item.stored for item in items], KEEP, 1e12)}
    assert not kept & {digest for job in jobs for digest in (job.bundle_digest, *job.model_digests)}


def test_rules_are_read_and_faults_told() -> None:
    assert _rules(["models=30d", "logs=1h30m", "events=forever"]) == {"models": 30 * DAY, "logs": 5400, "events": None}
    for rule, fault in (
        ("model=3d", "there is no kind"), ("models", "not a valid duration"), ("logs=3 days", "not a valid duration"),
        ("uploads=59m", "at least 1h"), ("unused=1s", "at least 1h"), ("jobs=5m", "at least 1h"),
    ):  # fmt: skip
        with pytest.raises(GeofedError, match=fault) as caught:
            _rules([rule])
        assert caught.value.code == "CONFIG_INVALID"
