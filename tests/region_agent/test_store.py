"""What an agent must not forget, over a restart and over a full disk."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.small_disk import small_disk

from geofed_pb.errors import GeofedError
from region_agent.state import migrations
from region_agent.state.store import AgentStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "agent.db"


def test_nobody_else_on_the_machine_can_read_it(path: Path) -> None:
    path.parent.mkdir()
    path.touch(mode=0o644)
    path.chmod(0o644)  # as an older agent has left it
    store = AgentStore(path)
    store.took_start(1, "j", b"start", "key")
    files = [*path.parent.glob(f"{path.name}*")]
    assert len(files) > 1, "the log beside it is meant too"
    assert not [file for file in files if file.stat().st_mode & 0o077]
    store.close()


def test_what_is_deleted_is_not_in_the_file_any_more(path: Path) -> None:
    store = AgentStore(path)
    secret = b"patient 4711 "
    store.took_start(1, "j", secret * 1000, "key")
    store.add_report(secret)
    store.clear_log()
    assert secret in path.read_bytes(), "it would be found"
    store.took_stop(2, "j", discard=True)
    store.forget("j")
    store.forget_reports(1)
    store.clear_log()
    assert not [file for file in path.parent.glob(f"{path.name}*") if secret in file.read_bytes()]
    store.close()


def test_a_log_that_another_process_reads_is_cleared_later(path: Path) -> None:
    store = AgentStore(path)
    store.took_start(1, "j", b"start", "key")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin")
        other.execute("select * from partitions").fetchall()
        store.took_start(2, "k", b"start", "key")
        store.clear_log()
        other.execute("rollback")
    store.clear_log()
    assert path.with_name("agent.db-wal").stat().st_size == 0
    assert store.partition("k") is not None
    store.close()


def test_a_partition_is_there_after_a_restart(path: Path) -> None:
    store = AgentStore(path)
    store.took_start(1, "job-1", b"start", "key")
    store.took_peers(2, "job-1", b"peers")
    store.took_publish(3, "job-1")
    store.keep_attempt("job-1", 4)
    store.keep_attempt("job-1", 2)
    store.keep_ports("job-1", 10, 20, 30)
    store.close()
    (row,) = AgentStore(path).open_partitions()
    assert (row.start, row.peers, row.publish, row.attempt) == (b"start", b"peers", True, 4)
    assert (row.worker_port, row.exchange_port, row.bulk_port, row.token_key) == (10, 20, 30, "key")
    assert AgentStore(path).command_cursor() == 3


def test_the_tables_of_an_older_agent_get_their_new_columns(path: Path) -> None:
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.execute(
            "create table partitions (job text primary key, start blob not null, peers blob, attempt integer not null,"
            " publish integer not null, worker_port integer not null, exchange_port integer not null,"
            " token_key text not null, stopped integer not null)"
        )
        old.execute("insert into partitions values ('job-1', x'01', null, 4, 0, 10, 20, 'key', 0)")
        old.execute("create table invocations (id integer primary key, job text not null, begun real not null)")
        old.execute("insert into invocations values (1, 'job-1', 5.0)")
        old.commit()
    store = AgentStore(path)
    row = store.partition("job-1")
    assert row is not None
    assert (row.worker_port, row.exchange_port, row.bulk_port, row.token_key) == (10, 20, 0, "key")
    assert store.open_invocations() == [(1, "job-1", 5.0, False)]
    store.took_start(1, "job-2", b"start", "another key")
    store.keep_ports("job-2", 1, 2, 3)
    assert [row.bulk_port for row in AgentStore(path).open_partitions()] == [0, 3]


def test_partitions_are_found_in_the_order_in_which_they_were_taken_with_the_last_order_they_had(path: Path) -> None:
    store = AgentStore(path)
    for seq, job in enumerate(("job-2", "job-3", "job-1"), start=1):
        store.took_start(seq, job, b"start", "key")
    store.took_scale(4, "job-3", 2, preemptible=True, order=5)
    store.close()
    rows = AgentStore(path).open_partitions()
    assert [(row.job, row.preemptible, row.scale_order) for row in rows] == [
        ("job-2", False, 0),
        ("job-3", True, 5),
        ("job-1", False, 0),
    ]


def test_a_repeated_start_keeps_attempt_key_and_ports(path: Path) -> None:
    store = AgentStore(path)
    store.took_start(1, "job-1", b"old", "key")
    store.keep_attempt("job-1", 4)
    store.took_start(2, "job-1", b"new", "another key")
    row = store.partition("job-1")
    assert row is not None
    assert (row.start, row.attempt, row.token_key) == (b"new", 4, "key")


@pytest.mark.parametrize("command", ["took_start", "took_peers", "took_publish", "took_stop", "took"])
def test_the_cursor_moves_with_the_command_or_not_at_all(path: Path, command: str) -> None:
    store = AgentStore(path)
    store.took_start(1, "job-1", b"start", "key")
    store._db.execute("create trigger broken before insert on facts begin select raise(abort, 'no'); end")

    def take() -> None:
        if command == "took_start":
            store.took_start(2, "job-2", b"x", "key")
        elif command == "took_peers":
            store.took_peers(2, "job-1", b"x")
        elif command == "took_publish":
            store.took_publish(2, "job-1")
        elif command == "took_stop":
            store.took_stop(2, "job-1", discard=True)
        else:
            store.took(2)

    with pytest.raises(sqlite3.DatabaseError, match="no"):
        take()
    store.close()
    again = AgentStore(path)
    (row,) = again.open_partitions()
    assert (row.job, row.peers, row.publish) == ("job-1", None, False)
    assert again.command_cursor() == 1


@pytest.mark.parametrize("discard", [False, True])
def test_a_stop_is_remembered_until_it_is_carried_out(path: Path, discard: bool) -> None:
    store = AgentStore(path)
    store.took_start(1, "job-1", b"start", "key")
    store.took_stop(2, "job-1", discard=discard)
    store.add_to_meters("job-1", {"calls": 1.0})
    store.close()
    again = AgentStore(path)
    assert again.open_partitions() == []
    assert [(row.job, gone) for row, gone in again.stopped_partitions()] == [("job-1", discard)]
    again.forget("job-1")
    assert again.stopped_partitions() == []
    assert again.partition("job-1") is None
    assert again.meters("job-1") == {}


def test_a_partition_that_has_begun_again_is_not_forgotten(path: Path) -> None:
    store = AgentStore(path)
    store.took_start(1, "job-1", b"start", "key")
    store.took_stop(2, "job-1", discard=True)
    store.took_start(3, "job-1", b"again", "key")
    store.add_to_meters("job-1", {"calls": 1.0})
    store.forget("job-1")
    assert [row.start for row in store.open_partitions()] == [b"again"]
    assert store.meters("job-1") == {"calls": 1.0}


def test_reports_keep_their_numbers(path: Path) -> None:
    store = AgentStore(path)
    for text in (b"a", b"b", b"c"):
        assert store.add_report(text)
    store.forget_reports(2)
    store.close()
    again = AgentStore(path)
    assert again.reports_after(0) == [(3, b"c")]
    again.forget_reports(3)
    again.add_report(b"d")
    assert again.reports_after(0) == [(4, b"d")]
    assert again.reports_waiting() == 1
    assert again.reports_after(4) == []


def test_an_agent_that_lost_its_memory_numbers_its_reports_where_the_control_plane_is(path: Path) -> None:
    store = AgentStore(path)
    store.add_report(b"a")
    store.add_report(b"b")
    assert store.resume_reports(7)
    assert store.reports_after(0) == [(8, b"a"), (9, b"b")]
    assert not store.resume_reports(3)
    store.add_report(b"c")
    assert [seq for seq, _ in store.reports_after(0)] == [8, 9, 10]


@settings(deadline=None, max_examples=budget(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 1e6)), max_size=20), st.integers(1, 5))
def test_meters_add_up_over_restarts(
    tmp_path_factory: pytest.TempPathFactory, amounts: list[tuple[str, float]], every: int
) -> None:
    path = tmp_path_factory.mktemp("meters") / "agent.db"
    store = AgentStore(path)
    expected: dict[str, float] = {}
    for number, (name, amount) in enumerate(amounts):
        store.add_to_meters("job", {name: amount})
        expected[name] = expected.get(name, 0.0) + amount
        if number % every == 0:
            store.close()
            store = AgentStore(path)
    assert store.meters("job") == expected
    assert store.meters("other") == {}
    store.close()


def test_an_open_invocation_is_found_after_a_crash_and_charged_once(path: Path) -> None:
    store = AgentStore(path)
    ended, open_ = store.invocation_begun("job-1", 100.0), store.invocation_begun("job-1", 101.0, preemptible=True)
    store.took_start(1, "job-1", b"start", "key")
    store.took_scale(2, "job-1", 2, preemptible=False)
    store.invocation_ended(ended, "job-1", {"calls": 1.0})
    store.alive(105.5)
    store.close()
    again = AgentStore(path)
    assert again.open_invocations() == [(open_, "job-1", 101.0, True)], "the partition has moved since"
    assert again.last_alive() == 105.5
    again.invocation_ended(open_, "job-1", {"calls": 1.0})
    assert again.open_invocations() == []
    assert again.meters("job-1") == {"calls": 2.0}


@pytest.mark.processes
def test_what_happened_while_the_disk_was_full_is_written_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", bytes_=1 << 20) as folder:
        store = AgentStore(folder / "agent.db")
        ballast = folder / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        stored = [store.add_report(b"x" * 4000) for _ in range(30)]
        assert not stored[-1], "the disk was not full"
        store.add_to_meters("job-1", {"calls": 1.0})
        with pytest.raises(GeofedError) as raised:
            store.took_start(1, "job-1", b"y" * 100_000, "key")
        assert raised.value.code == "DISK_FULL"
        assert store.command_cursor() == 0
        ballast.unlink()
        store.took_start(1, "job-1", b"start", "key")
        assert store.reports_waiting() == 30
        assert store.meters("job-1") == {"calls": 1.0}
        store.close()


def test_the_newest_revision_is_the_one_that_starts_without_alembic() -> None:
    folder = Path(migrations.__file__).parent
    config = Config()
    config.set_main_option("script_location", str(folder))
    assert ScriptDirectory.from_config(config).get_current_head() == migrations.HEAD


def test_a_database_of_a_newer_version_or_a_damaged_one_is_refused(path: Path) -> None:
    AgentStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as newer:
        newer.execute("update alembic_version set version_num = 'of next year'")
        newer.commit()
    with pytest.raises(GeofedError, match="another version of geofed") as refused:
        AgentStore(path)
    assert refused.value.code == "STATE_INVALID"
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(GeofedError, match="cannot be read") as refused:
        AgentStore(path)
    assert refused.value.code == "STATE_INVALID"
