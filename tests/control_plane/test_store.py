"""One contract, held by SQLite and by PostgreSQL."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event
from support.postgres import Postgres

from control_plane.core import (
    Charge,
    Evaluation,
    LinkReport,
    MeterTotals,
    Report,
    Speed,
    WanExchange,
    job_state_from_json,
)
from control_plane.store import (
    HISTORIES,
    Change,
    CommandRow,
    Cursors,
    Deletion,
    EventRow,
    InvitationRow,
    JobProgress,
    JobRow,
    LogRow,
    RegionRow,
    RunRow,
    Store,
    UserRow,
    _open,
    _queries,
    copy_rows,
    open_store,
)
from control_plane.store._schema import metadata
from geofed_pb.errors import GeofedError

JOB = JobRow("j1", "digits", "r1", "c", "b", "t", "{}", "{}", "{}", "running", 1.0)
REGION = RegionRow("a", "cloud", "1", "{}", "{}", ("1", "2"), 9.0)


JOBS, REGIONS = ("j1", "j2", "j3"), ("a", "b")


def _changes() -> st.SearchStrategy[Change]:
    """Draw changes to a few jobs and regions, most of them as reports of agents make them."""
    job, region, number = st.sampled_from(JOBS), st.sampled_from(REGIONS), st.integers(0, 5)
    progress = st.builds(lambda job, n: JobProgress(job, f'{{"n": {n}}}', "running", (f"d{n}",)), job, number)
    whole = st.builds(lambda job, n: replace(JOB, id=job, request_id=job, state_json=f'{{"w": {n}}}'), job, number)
    rows = st.builds(lambda job, at: EventRow(float(at), job, "a", "k", "t"), job, number)
    seen = st.none() | st.tuples(region, number)
    report = st.builds(
        lambda progress, events, told, taken: Change(
            progress=tuple(progress), events=tuple(events), report_cursor=told, command_cursor=taken
        ),
        st.lists(progress, max_size=2), st.lists(rows, max_size=2), seen, seen,
    )  # fmt: skip
    other = st.one_of(
        st.builds(lambda row: Change(jobs=(row,), events=(EventRow(1.0, row.id, "", "k", "t"),)), whole),
        st.builds(lambda job: Change(deletions=(Deletion(job, "", "ann", 1.0, 1.0, 0.0),)), job),
        st.builds(lambda region: Change(commands=(CommandRow(region, "j1", b"x"),)), region),
        st.builds(lambda region: Change(renumbered_region=region), region),
        st.builds(lambda region, seq: Change(met=(region, seq)), region, number),
        st.builds(lambda n: Change(audit=({"at": float(n), "kind": "k"},)), number),
    )
    return st.one_of(report, report, report, other)


def _rows_after(changes: list[Change], together: int) -> tuple[list[object], list[object]]:
    """Return what commits told, and all rows, when so many changes are stored at a time."""
    with open_store("sqlite://") as store:
        first = tuple(replace(JOB, id=name, request_id=name) for name in JOBS)
        store.commit(Change(jobs=first, regions=tuple(replace(REGION, name=name) for name in REGIONS)))
        told: list[object] = []
        for begin in range(0, len(changes), together):
            told += store.commit_all(changes[begin : begin + together])
        rows = [line for line in copy_rows(store) if isinstance(line, str) or line[0] != "leadership"]
        return told, rows


@given(st.lists(_changes(), min_size=1, max_size=12), st.integers(2, 12))
def test_what_is_stored_does_not_depend_on_how_many_changes_share_a_transaction(
    changes: list[Change], together: int
) -> None:
    assert _rows_after(changes, together) == _rows_after(changes, 1)


class Contract:
    """What every store does."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        with open_store(url, max_log_lines=5) as store:
            yield store

    def test_a_sample_of_events_has_every_nth_of_each_region_to_the_last(self, store: Store) -> None:
        events = [
            EventRow(float(n), job, region, kind, f"{region}{n}")
            for n in range(1, 11)
            for job in ("j1", "j2")
            for region in ("a", "b")
            for kind in ("round", "logged")
        ]
        store.commit(Change(events=tuple(events)))
        found = [row.text for row in store.sampled_events(job="j1", kind="round", most=8)]
        assert found == [f"{region}{n}" for n in (1, 4, 7, 10) for region in ("a", "b")]
        assert len(store.sampled_events(job="j1", kind="round", most=20)) == 20
        assert store.sampled_events(job="j3", kind="round", most=20) == []

    def test_the_newest_events_of_a_slow_region_are_found_behind_those_of_others(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow = [EventRow(float(n), "j1", "b", "round", f"b{n}") for n in (1, 2, 3)]
        fast = [EventRow(float(n), "j1", "a", "round", f"a{n}") for n in range(10, 40)]
        others = [EventRow(50.0, "j1", "a", "logged", "a"), EventRow(51.0, "j2", "b", "round", "b")]
        store.commit(Change(events=(*slow, *fast, *others)))
        found = store.newest_of_regions(job="j1", kind="round", each=2)
        assert [row.text for row in found] == ["b2", "b3", "a38", "a39"]
        assert found == [row for row in store.newest_events(job="j1") if row in found]
        monkeypatch.setattr(_queries, "_RECENT_EVENTS", 31)
        assert [row.text for row in store.newest_of_regions(job="j1", kind="round", each=2)] == ["b3", "a38", "a39"]

    def test_rows_come_back(self, store: Store) -> None:
        store.commit(Change(jobs=(JOB,), regions=(REGION,), invitations=(InvitationRow("h", "a", 5.0),)))
        store.commit(Change(runs=(RunRow("j1", "a", "t", 1.0, 50.0, 7, 0.5),)))
        assert store.job("j1") == JOB
        assert store.job_of_request("r1") == JOB
        assert store.jobs_named("digits") == [JOB]
        assert store.regions() == [REGION]
        assert store.invitation("h") == InvitationRow("h", "a", 5.0)
        assert [run.model_bytes for run in store.runs("t")] == [7]
        assert (store.job("no"), store.invitation("no"), store.runs("no"), store.meta("no")) == (None, None, [], None)

    def test_rows_are_replaced(self, store: Store) -> None:
        store.commit(Change(jobs=(JOB,), regions=(REGION,)))
        done = replace(JOB, phase="succeeded", result_json="{}")
        store.commit(Change(jobs=(done,), regions=(replace(REGION, cloud="other"),)))
        assert store.jobs(phases=frozenset({"running"})) == []
        assert store.jobs() == [done]
        assert store.regions()[0].cloud == "other"

    def test_progress_changes_nothing_else_of_a_job(self, store: Store) -> None:
        store.commit(Change(jobs=(JOB, replace(JOB, id="j2", request_id="r2"))))
        store.commit(Change(progress=(JobProgress("j1", '{"round": 3}', "finishing", ("d1", "d2")),)))
        expected = replace(JOB, state_json='{"round": 3}', phase="finishing", model_digests=("d1", "d2"))
        assert (store.job("j1"), store.job("j2")) == (expected, replace(JOB, id="j2", request_id="r2"))

    def test_reports_of_one_transaction_take_as_many_statements_as_one_report(self, store: Store) -> None:
        regions = tuple(replace(REGION, name=name) for name in "abc")
        jobs = tuple(replace(JOB, id=f"j{n}", request_id=f"r{n}") for n in range(3))
        store.commit(Change(jobs=jobs, regions=regions))
        reports = [
            Change(
                progress=(JobProgress(f"j{n}", json.dumps({"at": n}), "running"),),
                events=(EventRow(float(n), f"j{n}", "a", "round", f"{n}"), EventRow(float(n), "", "", "k", "t")),
                report_cursor=("abc"[n], n + 1),
            )
            for n in range(3)
        ]
        statements: list[str] = []
        event.listen(store.engine, "before_cursor_execute", lambda c, cursor, text, *rest: statements.append(text))
        store.commit(reports[0])
        one = set(statements)
        committed = store.commit_all(reports)
        # SQLite, which is not waited for, numbers events one by one.
        counted = [text for text in statements if store.shared or "INTO events" not in text]
        assert len(counted) == 2 * len([text for text in one if text in counted])
        assert [[row.text for row in each.events] for each in committed] == [["0", "t"], ["1", "t"], ["2", "t"]]
        assert [row.cursor for row in store.events_after(0)][2:] == [row.cursor for c in committed for row in c.events]
        assert [store.cursors(name).report_cursor for name in "abc"] == [1, 2, 3]
        assert [store.job(job.id) for job in jobs] == [
            replace(job, state_json=json.dumps({"at": n})) for n, job in enumerate(jobs)
        ]

    def test_users_come_change_and_go(self, store: Store) -> None:
        ann, bob = UserRow("ann", "h1", 4, 1.0), UserRow("bob", "h2", None, 2.0)
        store.commit(Change(users=(bob, ann)))
        assert store.users() == [ann, bob]
        store.commit(Change(users=(replace(ann, promised_workers=None, token_hash="h3"),)))
        assert store.users()[0] == UserRow("ann", "h3", None, 1.0)
        with pytest.raises(GeofedError, match="REQUEST_CONFLICT"):
            store.commit(Change(users=(UserRow("eve", "h2", None, 3.0),)))
        store.commit(Change(removed_users=("bob", "nobody")))
        assert [user.name for user in store.users()] == ["ann"]

    def test_what_jobs_without_a_promise_have_had_is_summed_by_user(self, store: Store) -> None:
        def job(name: str, user: str, at: float, seconds: float) -> JobRow:
            return replace(JOB, id=name, request_id=name, user=user, created_at=at, unpromised_worker_seconds=seconds)

        jobs = (job("a", "ann", 5.0, 2.5), job("b", "ann", 6.0, 1.5), job("c", "", 6.0, 1.0), job("d", "ann", 1.0, 9.0))
        store.commit(Change(jobs=jobs))
        assert store.unpromised_worker_seconds(4.0) == {"ann": 4.0, "": 1.0}
        assert store.job("a") == jobs[0]

    def test_lists_and_look_ups_read_no_rows_of_other_jobs(self, store: Store) -> None:
        def job(number: int, phase: str, **more: Any) -> JobRow:
            return replace(JOB, id=f"j{number}", request_id=f"r{number}", created_at=number, phase=phase, **more)

        jobs = [job(n, ("failed", "succeeded", "running")[n % 3], user=("ann", "bob")[n % 2]) for n in range(30)]
        jobs[7] = replace(jobs[7], shared_with=("ann",))
        jobs[9] = replace(jobs[9], secure_aggregation=True)
        store.commit(Change(jobs=tuple(jobs)))
        with store.engine.connect().execution_options(geofed_write=True) as connection, connection.begin():
            connection.exec_driver_sql("ANALYZE")
        statements = list[tuple[str, Any]]()
        event.listen(store.engine, "before_cursor_execute", lambda *told: statements.append((told[2], told[3])))

        def ids(rows: list[JobRow]) -> list[int]:
            return [int(row.id[1:]) for row in rows]

        ended = frozenset({"failed", "succeeded"})
        assert ids(store.jobs(phases=ended, limit=4)) == [28, 27, 25, 24]
        assert ids(store.jobs(phases=ended, limit=4, after="j24")) == [22, 21, 19, 18]
        assert ids(store.jobs(limit=3, after="j24")) == [23, 22, 21]
        assert ids(store.jobs(phases=ended, limit=3, after="j13", reader="ann")) == [12, 10, 7]
        assert ids(store.jobs_that_began(task_key=JOB.task_key, limit=3)) == [29, 28, 27]
        assert ids(store.jobs_that_began(task_key=JOB.task_key, secure=True)) == [9]
        assert store.unpromised_worker_seconds(20) == {"ann": 0.0, "bob": 0.0}
        if not store.shared:
            for statement, parameters in [told for told in statements if "FROM jobs" in told[0]]:
                with store.engine.connect() as connection:
                    found = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
                steps = [row[3] for row in found]
                # Of the last column, the ID, equal ones of the first are sorted.
                allowed = ("USE TEMP B-TREE FOR RIGHT PART OF ORDER BY", "USE TEMP B-TREE FOR LAST TERM OF ORDER BY")
                assert all(
                    "INDEX ix_" in step
                    or "INDEX sqlite_autoindex" in step
                    or "SUBQUERY" in step
                    or step in (*allowed, "USE TEMP B-TREE FOR GROUP BY")
                    for step in steps
                ), (statement, steps)

    def test_cursors_grow_and_resume(self, store: Store) -> None:
        events = tuple(EventRow(float(n), f"j{n % 2}", "a", "kind", "text") for n in range(6))
        first = store.commit(Change(events=events[:3])).events
        second = store.commit(Change(events=events[3:])).events
        cursors = [event.cursor for event in first + second]
        assert cursors == sorted(set(cursors))
        assert store.events_after(first[-1].cursor) == list(second)
        assert [event.at for event in store.events_after(0, job="j1")] == [1.0, 3.0, 5.0]
        assert len(store.events_after(0, limit=2)) == 2

    def test_commands_are_numbered_for_each_region_and_go_when_taken(self, store: Store) -> None:
        store.commit(Change(regions=(REGION, replace(REGION, name="b"))))
        sent = store.commit(Change(commands=tuple(CommandRow(r, "j", r.encode()) for r in ("a", "b", "a")))).commands
        assert [(command.region, command.seq) for command in sent] == [("a", 1), ("b", 1), ("a", 2)]
        assert store.commands_pending() == {"a": 2, "b": 1}
        store.commit(Change(command_cursor=("a", 1)))
        assert [command.seq for command in store.commands_after("a", 0)] == [2]
        assert store.cursors("a") == Cursors(2, 1, 0)

    def test_commands_go_on_behind_what_the_agent_has_taken_of_a_store_that_is_lost(self, store: Store) -> None:
        store.commit(Change(regions=(REGION,), commands=tuple(CommandRow("a", "j", b"old") for _ in range(2))))
        store.begin()
        assert store.cursors("a") == Cursors(2, 0, 0, 2)
        store.commit(Change(commands=tuple(CommandRow("a", "j", bytes([n])) for n in range(3))))
        assert store.cursors("a").older_than(4)
        store.commit(Change(met=("a", 4), commands=(CommandRow("a", "j", b"last"),)))
        after = [(command.seq, command.payload) for command in store.commands_after("a", 0)]
        assert after == [(5, b"\0"), (6, b"\1"), (7, b"\2"), (8, b"last")], "those of before the loss were taken"
        assert store.cursors("a") == Cursors(8, 4, 0)
        store.begin()
        store.commit(Change(met=("a", 6)))
        assert [command.seq for command in store.commands_after("a", 0)] == [7, 8], "acknowledged by the new session"
        assert store.cursors("a") == Cursors(8, 6, 0)

    def test_a_region_that_joins_again_may_number_its_reports_again(self, store: Store) -> None:
        store.commit(Change(regions=(REGION,), commands=(CommandRow("a", "j", b"old"),), report_cursor=("a", 4)))
        store.commit(Change(renumbered_region="a", commands=(CommandRow("a", "j", b"new"),)))
        assert store.cursors("a") == Cursors(2, 0, 0)
        assert [command.payload for command in store.commands_after("a", 0)] == [b"old", b"new"]

    def test_a_change_is_all_or_nothing(self, store: Store) -> None:
        store.commit(Change(jobs=(JOB,), regions=(REGION,)))
        twice = replace(JOB, id="j2")
        with pytest.raises(GeofedError, match="REQUEST_CONFLICT"):
            store.commit(
                Change(regions=(replace(REGION, cloud="x"),), events=(EventRow(1, "j", "", "k", "t"),), jobs=(twice,))
            )
        with pytest.raises(GeofedError, match="REGION_NOT_FOUND"):
            store.commit(Change(events=(EventRow(1, "j", "", "k", "t"),), commands=(CommandRow("no", "j", b""),)))
        assert store.events_after(0) == []
        assert store.regions() == [REGION]

    def test_logs_are_bounded(self, store: Store) -> None:
        store.commit(Change(logs=tuple(LogRow(float(n), "j", "ab"[n % 2], "s", str(n)) for n in range(12))))
        store.commit(Change(logs=(LogRow(1.0, "other", "a", "s", "kept"),)))
        gap = "… 7 lines dropped"
        assert [line.text for line in store.logs_after("j", 0)] == [gap, "7", "8", "9", "10", "11"]
        assert [line.text for line in store.logs_after("j", 0, region="b")] == [gap, "7", "9", "11"]
        store.commit(Change(logs=tuple(LogRow(float(n), "j", "a", "s", str(n)) for n in range(12, 15))))
        gap = "… 10 lines dropped"
        assert [line.text for line in store.logs_after("j", 0)] == [gap, "10", "11", "12", "13", "14"]
        after = store.log_tail_cursor("j", 2)
        assert [line.text for line in store.logs_after("j", after)] == ["13", "14"]
        assert len(store.logs_after("other", 0)) == 1

    def test_rows_are_measured_by_job_and_those_of_no_job_by_day(self, store: Store) -> None:
        day = 86_400.0
        events = (
            EventRow(1.0, "j1", "", "kind", "four"), EventRow(3 * day, "j1", "", "kind", "12345"),
            EventRow(2.1 * day, "", "a", "kind", "x"), EventRow(2.2 * day, "", "a", "kind", "x"),
            EventRow(9.1 * day, "", "a", "kind", "x"),
        )  # fmt: skip
        runs = (RunRow("j1", "a", "t", 5.0, 50.0, 7, 0.5),)
        store.commit(Change(events=events, logs=(LogRow(4.0, "j1", "a", "s", "line"),), runs=runs))
        found = {
            (use.table, use.job, use.at): (use.rows, use.bytes) for table in HISTORIES for use in store.row_uses(table)
        }
        assert found == {
            ("events", "j1", 3 * day): (2, len("four12345{}{}")), ("events", "", 2.2 * day): (2, len("x{}x{}")),
            ("events", "", 9.1 * day): (1, len("x{}")), ("logs", "j1", 4.0): (1, 4), ("runs", "j1", 5.0): (1, 0),
        }  # fmt: skip
        of_job = [use for table in HISTORIES for use in store.row_uses(table, "j1")]
        assert [(use.table, use.job) for use in of_job] == [(name, "j1") for name in ("events", "logs", "runs")]
        assert store.unknown_jobs_with_rows("events") == ["", "j1"]
        assert store.unknown_jobs_with_rows("logs") == ["j1"]
        store.commit(Change(jobs=(JOB,)))
        assert (store.unknown_jobs_with_rows("events"), store.unknown_jobs_with_rows("logs")) == ([""], [])
        assert store.database_bytes() > 10_000

    def test_ended_jobs_are_found_by_their_end_and_all_by_page(self, store: Store) -> None:
        ends = {"j1": 0.0, "j2": 5.0, "j3": 4.0, "j4": 9.0}
        jobs = (replace(JOB, id=name, request_id=name, ended_at=at) for name, at in ends.items())
        events = (EventRow(1.0, name, "", "kind", "t") for name in ("j1", "j2", "j4"))
        store.commit(Change(jobs=tuple(jobs), events=tuple(events), logs=(LogRow(1.0, "j3", "a", "s", "t"),)))
        assert [use.id for use in store.uses_of_ended(until=5.0)] == ["j3", "j2"]
        assert [use.id for use in store.uses_of_ended(since=5.0)] == ["j2", "j4"]
        assert store.ended_jobs_with_rows("events", 5.0) == ["j2"]
        assert store.ended_jobs_with_rows("logs", 5.0) == ["j3"]
        assert [use.id for use in store.job_uses(3)] == ["j1", "j2", "j3"]
        assert [use.id for use in store.job_uses(3, after="j3")] == ["j4"]
        assert store.is_code_shared("b", "j1")
        assert not store.is_code_shared("c", "j1")

    def test_the_jobs_of_a_blob_are_found(self, store: Store) -> None:
        def put(name: str, ended_at: float, code: str, *models: str) -> None:
            job = replace(JOB, id=name, request_id=name, ended_at=ended_at, bundle_digest=code, model_digests=models)
            store.commit(Change(jobs=(job,)))

        def found(*digests: str) -> list[str]:
            return sorted(use.id for use in store.uses_of_blobs(digests))

        put("j1", 0.0, "c1", "of an active job, which is in memory")
        put("j2", 5.0, "c1", "m1", "m2")
        put("j3", 4.0, "c1", "m2")
        put("j4", 0.0, "c4")
        assert [found(one) for one in ("c1", "c4", "m1", "m2")] == [["j2"], ["j4"], ["j2"], ["j2", "j3"]]
        assert found("c1", "c4", "m1", "m1", "none") == ["j2", "j4"]
        assert found() == []
        assert sorted(store.bundles()) == ["c1", "c4"]
        put("j2", 5.0, "c1", "m1", "m2")
        put("j4", 6.0, "c4", "m2")
        store.commit(Change(deletions=(Deletion("j3", "", "operator", 9.0, 1.0, 0.0),)))
        assert found("m2") == ["j2", "j4"]

    def test_the_jobs_of_a_blob_are_looked_up_in_indexes(self, store: Store) -> None:
        told = list[tuple[str, Any]]()
        event.listen(store.engine, "before_cursor_execute", lambda *given: told.append(given[2:4]))
        store.uses_of_blobs(["c1"])
        ((query, values),) = [one for one in told if "job_models" in one[0]]
        with store.engine.begin() as connection:
            if store.shared:
                # It has too few rows here for an index to be worth it.
                connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            how = "EXPLAIN" if store.shared else "EXPLAIN QUERY PLAN"
            plan = "\n".join(str(row[-1]) for row in connection.exec_driver_sql(f"{how} {query}", values))
        assert "ix_jobs_bundle_digest_ended_at" in plan
        assert ("pk_job_models" if store.shared else "sqlite_autoindex_job_models_1") in plan
        assert "Seq Scan on job" not in plan
        assert "SCAN job" not in plan

    def test_rows_are_removed_in_parts_and_only_old_ones(self, store: Store) -> None:
        events = [EventRow(float(n), job, "", "kind", str(n)) for n in range(5) for job in ("", "j1")]
        store.commit(Change(events=tuple(events)))
        assert store.remove_rows("events", 3.0, "", limit=3) == 3
        assert store.remove_rows("events", 3.0, "", limit=3) == 1
        assert store.remove_rows("events", 3.0, "", limit=3) == 0
        assert [event.at for event in store.events_after(0, job="")] == [4.0]
        assert store.remove_rows("events", math.inf, "j1") == 5
        assert [event.at for event in store.events_after(0)] == [4.0]

    def test_a_deleted_job_leaves_only_who_deleted_it(self, store: Store) -> None:
        other = replace(JOB, id="j2", request_id="r2")
        rows = [(job, EventRow(1.0, job, "", "k", "t"), LogRow(1.0, job, "a", "s", "t")) for job in ("j1", "j2")]
        runs = tuple(RunRow(job, "a", "t", 1.0, 50.0, 7, 0.5) for job in ("j1", "j2"))
        jobs = (replace(JOB, user="ann", created_at=6.0, unpromised_worker_seconds=2.5), other)
        events, logs = tuple(event for _, event, _ in rows), tuple(log for _, _, log in rows)
        store.commit(Change(jobs=jobs, regions=(REGION,), events=events, logs=logs, runs=runs))
        gone = Deletion("j1", "ann", "operator", 9.0, 6.0, 2.5)
        deleted = EventRow(9.0, "", "", "job.deleted", "t")
        store.commit(Change(deletions=(gone,), events=(deleted,), commands=(CommandRow("a", "j1", b"delete"),)))
        assert (store.job("j1"), store.job("j2")) == (None, other)
        assert store.job_of_request("r1") is None
        assert [event.kind for event in store.events_after(0)] == ["k", "job.deleted"]
        assert [line.job for line in store.logs_after("j1", 0) + store.logs_after("j2", 0)] == ["j2"]
        assert [run.job for run in store.runs("t")] == ["j2"]
        assert [command.payload for command in store.commands_after("a", 0)] == [b"delete"]
        assert (store.deletion("j1"), store.deletion("j2")) == (gone, None)
        assert store.unpromised_worker_seconds(4.0) == {"ann": 2.5}, "it still counts for the user's place in the queue"
        assert store.existing({"j1", "j2", "j3"}) == {"j2"}
        assert [use.id for use in store.job_uses(9)] == ["j2"]

    def test_state_survives_a_restart(self, url: str) -> None:
        with open_store(url) as store:
            store.commit(Change(regions=(REGION,), report_cursor=("a", 7)))
            store.put_meta("key", "value")
        with open_store(url) as store:
            assert store.cursors("a").report_cursor == 7
            assert store.meta("key") == "value"

    def test_migrations_lead_to_the_schema(self, store: Store) -> None:
        with store.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []

    def test_a_job_of_an_earlier_version_keeps_what_its_regions_reported(self, store: Store, url: str) -> None:
        charge = {"item": "calls", "quantity": 2.0, "unit": "", "usd": 0.5, "source": "file"}
        report = {
            "epoch": 1, "state": "training", "round": 3, "meter": 7, "money": [charge], "sent_bytes": {"b": 9},
            "metrics": {"loss": 0.5}, "metrics_round": 2, "metrics_samples": 10, "merge_seconds": 0.1, "codec": "int8",
            "link_rtt_ms": {"b": 30.0}, "link_mbps": {"b": 80.0}, "links_down": ["c"],
        }  # fmt: skip
        parts = [{"region": "a", "report": report}, {"region": "b", "report": None}]
        copy = {
            "source": "a",
            "destination": "b",
            "bytes": 9,
            "report": {**report, "sent_bytes": {"b": 1}},
        }
        old = {"job": "j1", "lost_limit_seconds": 1.0, "created_at": 0.0, "phase": "running", "partitions": parts}
        old |= {"finished_at": 7.0, "blob_digest": "sha256:1", "models": {"kept": [{"round": 1, "digest": "sha256:0"}]}}
        secure = '{"privacy":{"secureAggregation":true}}'
        store.commit(Change(jobs=(replace(JOB, state_json=json.dumps(old | {"copies": [copy]}), spec_json=secure),)))
        with store.engine.connect().execution_options(geofed_write=True) as connection, connection.begin():
            connection.exec_driver_sql("DROP TABLE leadership")
            connection.exec_driver_sql("DROP TABLE revocations")
            connection.exec_driver_sql("DROP TABLE deletions")
            connection.exec_driver_sql("DROP TABLE audit")
            connection.exec_driver_sql("DROP TABLE job_models")
            indexed = (
                "created_at_user_unpromised_worker_seconds", "phase_created_at", "user_created_at",
                "secure_aggregation_task_key_created_at", "shared", "ended_at", "bundle_digest_ended_at",
            )  # fmt: skip
            for name in indexed:
                connection.exec_driver_sql(f"DROP INDEX ix_jobs_{name}")
            for column in ("phase", "created_at"):
                connection.exec_driver_sql(f"CREATE INDEX ix_jobs_{column} ON jobs ({column})")
            new = ("signature_json", "shared_with", "ended_at", "model_digests", "secure_aggregation")
            probed = (
                ("weights", column) for column in ("held_bytes", "batch_norms_json", "labels_json", "gpu_lacks_json")
            )
            of_users = (
                ("users", column)
                for column in ("public_key", "role", "token_expires_at", "identity", "subject", "sign_ins_json")
            )
            of_runs = (
                ("runs", column)
                for column in (
                    "start_function_seconds",
                    "start_server_seconds",
                    "round_end_seconds",
                    "round_work_seconds",
                    "background_end_seconds",
                    "rest_seconds",
                    "sent_share",
                )
            )
            added = (*of_users, *probed, *of_runs, *(("jobs", column) for column in new))
            for table, column in added:
                connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {column}")
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '2026_11_26_shared'")
        with open_store(url) as upgraded:
            (row,) = upgraded.jobs()
            assert [use.id for use in upgraded.uses_of_blobs(["sha256:0"])] == ["j1"]
        assert (row.ended_at, row.model_digests) == (7.0, ("sha256:0", "sha256:1"))
        assert row.secure_aggregation
        state = job_state_from_json(row.state_json)
        assert state.partitions[1].report is None
        assert state.partitions[0].report == Report(
            1, "training", round=3, meter=7,
            totals=MeterTotals((Charge("calls", 2.0, "", 0.5, "file"),), {"b": 9}),
            evaluation=Evaluation({"loss": 0.5}, 10, 2), speed=Speed(merge_seconds=0.1),
            exchange=WanExchange(codec="int8"),
            links={"b": LinkReport(30.0, 80.0), "c": LinkReport(down=True)},
        )  # fmt: skip
        assert state.copies[0].report is not None
        assert state.copies[0].report.totals.sent_bytes == {"b": 1}

    def test_a_newer_database_is_not_touched(self, store: Store, url: str) -> None:
        with store.engine.connect().execution_options(geofed_write=True) as connection, connection.begin():
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'from_the_future'")
        with pytest.raises(GeofedError, match="STATE_INVALID"):
            open_store(url)


class TestSqlite(Contract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/state.db"

    def test_a_damaged_file_is_said_to_be(self, tmp_path: Path) -> None:
        (tmp_path / "bad.db").write_bytes(b"this is no database, whatever its name says" * 100)
        with pytest.raises(GeofedError, match="STATE_INVALID"):
            open_store(f"sqlite:///{tmp_path}/bad.db")

    def test_it_is_durable(self, store: Store, tmp_path: Path) -> None:
        with store.engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2

    def test_a_full_disk_loses_nothing(self, store: Store) -> None:
        store.commit(Change(regions=(REGION,)))
        with store.engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        with pytest.raises(GeofedError, match="DISK_FULL"):
            store.commit(Change(logs=(LogRow(1.0, "j", "a", "s", "x" * 1_000_000),)))
        assert store.regions() == [REGION]
        assert store.logs_after("j", 0) == []


@pytest.mark.processes
class TestPostgres(Contract):
    @pytest.fixture
    def url(self, postgres: Postgres) -> str:
        return postgres.database()

    def test_a_connection_that_broke_while_it_was_idle_is_replaced(
        self, url: str, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import psycopg

        monkeypatch.setattr(_open, "IDLE_SECONDS", 0.0)
        store.commit(Change(jobs=(JOB,)))
        with psycopg.connect(url, autocommit=True) as other:
            ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            other.execute(f"{ended} AND pid != pg_backend_pid()")
        assert store.job("j1") == JOB


def test_what_is_no_database_url_is_refused() -> None:
    for url in ("mysql://x/y", "nonsense", "oracle+nothing://x"):
        with pytest.raises(GeofedError, match="CONFIG_INVALID"):
            open_store(url)


def test_sqlite_is_new_enough() -> None:
    assert sqlite3.sqlite_version_info >= (3, 35), "RETURNING"
