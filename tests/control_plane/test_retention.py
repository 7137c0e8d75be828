"""What the control plane removes by its retention rules, with a clock of the test."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import event
from support import small_job

from control_plane.blobs import BlobStore
from control_plane.cli.commands.server.serve import _rules
from control_plane.core import InitialModel, JobState, KeptModel, Models
from control_plane.service import KEEP, Federation, Sweeper
from control_plane.service.state._entries import JobEntry
from control_plane.service.storage import _sweeper
from control_plane.service.storage._inventory import Item, file_items
from control_plane.spec import load
from control_plane.spec._pack import _archive
from control_plane.store import Change, Deletion, EventRow, JobRow, JobUse, LogRow, RunRow, Store, WeightRow, open_store
from geofed_pb.errors import GeofedError
from geofed_pb.files.task_folder import Part
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


def entry_of(folder: Path, row: JobRow, **state: Any) -> JobEntry:
    """A job that has not ended, without a plan."""
    (folder / "job.yaml").write_text(small_job.JOB)
    (folder / "task.py").write_text(small_job.TASK)
    plan: Any = SimpleNamespace(partitions=(), wan_settings={})
    return JobEntry(row, JobState(row.id, 30.0, NOW, **state), load(folder / "job.yaml").spec, plan)


def test_what_a_job_needs_that_comes_while_files_are_looked_at_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is still active, or has ended already, or its end is being stored, or it only asked; also the model
    that an active job gets."""

    async def scenario(place: Place) -> None:
        names = "code", "model", "ended", "ending", "asked", "other"
        code, model, ended, ending, asked, other = (place.put(name.encode(), 8) for name in names)
        active, before, short = (
            entry_of(tmp_path, replace(JOB, id=name, request_id=name, bundle_digest=digest))
            for name, digest in (("active", code), ("before", "b"), ("short", ending))
        )
        stored, looked, commit_all = threading.Event(), place.sweeper._due, Store.commit_all

        async def change(entry: JobEntry, **state: Any) -> None:
            async with place.federation.change() as draft:
                draft.changed_jobs[entry.row.id] = replace(entry, state=replace(entry.state, **state))
                draft.record("k", "t")

        def slow(store: Store, changes: Any) -> Any:
            stored.wait(10)
            return commit_all(store, changes)

        async def late(*given: Any) -> list[Item]:
            found = await looked(*given)
            monkeypatch.setattr(place.sweeper, "_due", looked)
            place.job("ended", 0, model=ended)
            await change(active)
            await change(before, blob_digest=model)
            await change(short)
            place.blobs.stat(asked, "user ann")
            monkeypatch.setattr(Store, "commit_all", slow)
            asyncio.get_running_loop().call_later(0.2, stored.set)
            end.append(asyncio.create_task(change(short, phase="failed", finished_at=NOW)))
            await asyncio.sleep(0)
            return found

        end = list[asyncio.Task[None]]()
        await change(before)
        monkeypatch.setattr(place.sweeper, "_due", late)
        await place.sweeper._remove_files(place.blobs.whole, KEEP)
        assert not stored.is_set(), "the end was being stored"
        await end[0]
        kept = [place.has(digest) for digest in (code, model, ended, ending, asked, other)]
        assert kept == [True, True, True, True, True, False]

    run(tmp_path, scenario)


def test_where_nothing_is_old_no_job_is_read_and_no_change_waits(tmp_path: Path) -> None:
    async def scenario(place: Place) -> None:
        young, at_age = place.put(b"young", 6.999), place.put(b"at age", 7)
        place.job("ended", 1, model=young)
        place.store.commit(Change(events=tuple(EventRow(NOW - days * DAY, "", "", "k", "t") for days in (1, 366))))
        told = list[str]()
        event.listen(place.store.engine, "before_cursor_execute", lambda *given: told.append(given[2]))
        await place.sweeper.sweep()
        assert (place.has(young), place.has(at_age)) == (True, False)
        assert any("model_digests" in one for one in told)
        assert any("DELETE FROM" in one for one in told)
        told.clear()
        await place.sweeper.sweep()
        assert told
        assert not any("model_digests" in one or "UPDATE leadership" in one or "DELETE FROM" in one for one in told)

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


HEX = [name * 64 for name in "abc"]
FULL = [f"sha256:{name}" for name in HEX]
AGES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0])
"""In days, so that some are just at the age of a rule."""
RULES = st.fixed_dictionaries(
    {kind: st.sampled_from([None, 0.0, 1 * DAY, 2 * DAY, 3 * DAY]) for kind in ("models", "bundles", "unused")}
)


def _rule(bundles: float | None, unused: float) -> Keep:
    return {"models": None, "bundles": bundles, "unused": unused}


KEPT = st.lists(
    st.tuples(
        st.one_of(st.none(), AGES), st.sampled_from(FULL), st.lists(st.sampled_from(FULL), max_size=2),
        st.sampled_from([None, *FULL]),
    ),
    max_size=5,
)  # fmt: skip
"""Jobs: days since the end or none, code, models, what it has started from."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Store]]:
    folder = tmp_path_factory.mktemp("sweeps")
    with open_store(f"sqlite:///{folder}/state.db") as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sweeper, "_AT_ONCE", 2)
        patch.setattr(_sweeper, "_PAUSE_SECONDS", 0.0)
        yield folder, store


@given(
    st.dictionaries(st.sampled_from(HEX), AGES),
    st.dictionaries(st.sampled_from(HEX), st.lists(st.sampled_from(HEX), max_size=3)),
    KEPT, RULES, st.one_of(st.none(), st.sets(st.sampled_from(FULL))),
)  # fmt: skip
# A part of the code of an ended job, and of one that ended later, by a rule that is shorter or longer than of no job.
@example(dict.fromkeys(HEX, 5.0), {HEX[0]: HEX[1:2]}, [(3.0, FULL[0], [], None)], _rule(None, 3 * DAY), None)
@example(dict.fromkeys(HEX, 2.0), {HEX[0]: HEX[1:2]}, [(2.0, FULL[0], [], None)], _rule(DAY, 3 * DAY), None)
@example(dict.fromkeys(HEX, 5.0), {HEX[0]: HEX[1:2]}, [(3.0, FULL[0], [], None)], _rule(None, 3 * DAY), {*FULL})
@example(dict.fromkeys(HEX, 5.0), {}, [(n, FULL[0], [], None) for n in (1.0, 3.0)], _rule(2 * DAY, DAY), None)
@example(dict.fromkeys(HEX, 5.0), {}, [(n, FULL[0], [], None) for n in (3.0, 2.0)], _rule(2 * DAY, DAY), None)
def test_a_sweep_removes_what_the_rule_says_of_all_jobs(
    stage: tuple[Path, Store],
    ages: dict[str, float],
    archives: dict[str, list[str]],
    jobs: list[tuple[float | None, str, list[str], str | None]],
    keep: Keep,
    named: set[str] | None,
) -> None:
    """Although it looks up few of them. ``named``: what was used by a job that was deleted, instead of a sweep."""
    folder, store = stage
    with tempfile.TemporaryDirectory(dir=folder) as place:
        blobs = BlobStore(Path(place))
        for name, days in ages.items():
            parts = tuple(Part(str(number), f"sha256:{one}", 1) for number, one in enumerate(archives.get(name, ())))
            (blobs.folder / name).write_bytes(_archive({}, parts) if parts else b"")
            os.utime(blobs.folder / name, (NOW - days * DAY, NOW - days * DAY))
        with store.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM jobs")
            connection.exec_driver_sql("DELETE FROM job_models")
        uses, active = {}, {}
        for number, (days, code, models, initial) in enumerate(jobs):
            ended_at = 0.0 if days is None else NOW - days * DAY
            row = replace(
                JOB, id=str(number), request_id=str(number), phase="running" if days is None else "failed",
                ended_at=ended_at, bundle_digest=code, model_digests=tuple(models),
            )  # fmt: skip
            store.commit(Change(jobs=(row,)))
            uses[row.id] = JobUse(row.id, "", row.phase, ended_at, code, row.model_digests)
            if days is None:
                began = InitialModel("", initial, 1) if initial is not None else None
                kept = Models(kept=tuple(KeptModel(1, {}, one, 1) for one in models))
                active[row.id] = entry_of(folder, row, initial_model=began, models=kept)
        began_from = {name: one.state.initial_model.uploaded for name, one in active.items() if one.state.initial_model}
        listed = {code: blobs.parts(code) for _, code, _, _ in jobs}
        items = [item.stored for item in file_items(blobs.whole(), (), uses, began_from, listed)]
        gone = due(items, keep, NOW) if named is None else [one for one in items if one.kind == "unused"]
        expected = set(ages) - {
            one.name.removeprefix("sha256:") for one in gone if named is None or one.name in named
        }  # fmt: skip

        async def swept() -> None:
            federation = Federation(store, blobs, lambda: NOW, timedelta(seconds=30), "test")
            federation.jobs.update(active)
            federation.changes.loaded()
            sweeper = Sweeper(federation, keep)
            await (sweeper.sweep() if named is None else sweeper.remove_unused(named))
            await federation.close()

        asyncio.run(swept())
        assert {one.path.name for one in blobs.whole()} == expected


def test_rules_are_read_and_faults_told() -> None:
    assert _rules(["models=30d", "logs=1h30m", "events=forever"]) == {"models": 30 * DAY, "logs": 5400, "events": None}
    for rule, fault in (
        ("model=3d", "there is no kind"), ("models", "not a valid duration"), ("logs=3 days", "not a valid duration"),
        ("uploads=59m", "at least 1h"), ("unused=1s", "at least 1h"), ("jobs=5m", "at least 1h"),
    ):  # fmt: skip
        with pytest.raises(GeofedError, match=fault) as caught:
            _rules([rule])
        assert caught.value.code == "CONFIG_INVALID"
