"""The region's ledger: what is granted is not exceeded, what is spent survives, what is damaged is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from geofed_pb.errors import GeofedError
from sync.privacy import LedgerRow, PrivacyLedger


def row(job: str = "job-1", granted: int = 5, **more: object) -> LedgerRow:
    facts = {"dataset": "digits", "level": "region", "noise": 2.0, "rate": 1.0, "delta": 1e-5, "planned": granted}
    return LedgerRow(job, granted=granted, **{**facts, **more})  # type: ignore[arg-type]


@pytest.fixture
def ledger(tmp_path: Path) -> PrivacyLedger:
    made = PrivacyLedger(tmp_path / "ledger")
    made.change(lambda rows: [*rows, row()])
    return made


def refusal(ledger: PrivacyLedger, *arguments: object) -> GeofedError:
    with pytest.raises(GeofedError) as told:
        ledger.spend(*arguments)  # type: ignore[arg-type]
    return told.value


def test_an_empty_ledger_has_no_rows(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path / "ledger")
    assert ledger.rows() == ()
    ledger.close("job-1")
    assert not (tmp_path / "ledger").exists(), "a region without such jobs keeps none"


def test_no_more_is_spent_than_granted(ledger: PrivacyLedger) -> None:
    for sequence in range(1, 5):
        ledger.spend("job-1", sequence, 1)
    assert refusal(ledger, "job-1", 5, 2).code == "PRIVACY_EXHAUSTED"
    ledger.spend("job-1", 5, 1)
    assert refusal(ledger, "job-1", 6, 1).message == "job-1 has made 5 releases of digits, and may make 5"
    assert ledger.rows()[0].spent == 5


def test_a_round_that_is_made_again_before_it_left_is_paid_for_once(ledger: PrivacyLedger) -> None:
    ledger.spend("job-1", 2, 1)
    ledger.spend("job-1", 2, 1)
    assert ledger.rows()[0].spent == 1
    assert refusal(ledger, "job-1", 1, 1).code == "STATE_INVALID", "its state is older than the ledger"


def test_a_round_that_may_have_left_is_not_made_again(ledger: PrivacyLedger) -> None:
    ledger.spend("job-1", 1, 1)
    ledger.store("job-1", 1)
    ledger.store("job-1", 1)
    told = refusal(ledger, "job-1", 1, 1)
    assert told.code == "STATE_INVALID"
    assert "train.initialModel" in str(told.hint)
    ledger.spend("job-1", 2, 1)
    ledger.spend("job-1", 2, 1)
    (row,) = ledger.rows()
    assert (row.spent, row.last, row.stored) == (2, 2, 1)


@pytest.mark.parametrize(("job", "sequence"), [("job-1", 2), ("job-2", 1)])
def test_a_stored_round_that_was_not_paid_for_is_of_another_ledger(
    ledger: PrivacyLedger, job: str, sequence: int
) -> None:
    ledger.spend("job-1", 1, 1)
    with pytest.raises(GeofedError, match=f"has not round {sequence} of {job}") as told:
        ledger.store(job, sequence)
    assert told.value.code == "STATE_INVALID"


def test_an_ended_or_unknown_job_may_release_nothing(ledger: PrivacyLedger) -> None:
    ledger.spend("job-1", 1, 1)
    assert ledger.rows()[0].counted == 5
    ledger.close("job-1")
    assert ledger.rows()[0].counted == 1
    assert refusal(ledger, "job-1", 2, 1).code == "PRIVACY_EXHAUSTED"
    assert refusal(ledger, "job-2", 1, 1).code == "PRIVACY_EXHAUSTED"


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_text(path.read_text().replace('"spent": 1', '"spent": 0')),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text(json.dumps({"version": 2})),
        lambda path: path.unlink(),
    ],
    ids=["empty", "cut", "less spent", "nested", "newer", "lost"],
)
def test_a_damaged_ledger_refuses_everything(ledger: PrivacyLedger, tmp_path: Path, harm: object) -> None:
    ledger.spend("job-1", 1, 1)
    harm(tmp_path / "ledger" / "ledger.json")  # type: ignore[operator]
    assert refusal(ledger, "job-1", 2, 1).code == "STATE_INVALID"
    for refused in (ledger.rows, lambda: ledger.close("job-1"), lambda: ledger.change(lambda rows: rows)):
        with pytest.raises(GeofedError, match=r"cannot be read|is lost"):
            refused()


def test_a_ledger_that_is_lost_with_its_folder_is_not_taken_for_a_new_one(
    ledger: PrivacyLedger, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "ledger")
    for refused in (
        ledger.rows,
        lambda: ledger.close("job-1"),
        lambda: ledger.change(lambda rows: [row("job-2")]),
        lambda: ledger.spend("job-1", 1, 1),
        ledger.rows,
    ):
        with pytest.raises(GeofedError, match="is lost") as told:
            refused()
        assert told.value.code == "STATE_INVALID"


def test_a_ledger_without_its_last_job_is_refused(ledger: PrivacyLedger, tmp_path: Path) -> None:
    copy = (tmp_path / "ledger" / "ledger.json").read_bytes()
    ledger.change(lambda rows: [*rows, row("job-2")])
    (tmp_path / "ledger" / "ledger.json").write_bytes(copy)
    with pytest.raises(GeofedError, match="it has 1 of 2 jobs") as told:
        ledger.rows()
    assert told.value.code == "STATE_INVALID"


def test_a_ledger_from_before_the_end_of_a_job_is_refused(ledger: PrivacyLedger, tmp_path: Path) -> None:
    """A copy with all jobs, in which the last one has spent less."""
    ledger.spend("job-1", 1, 1)
    copy = (tmp_path / "ledger" / "ledger.json").read_bytes()
    ledger.spend("job-1", 2, 1)
    ledger.close("job-1")
    (tmp_path / "ledger" / "ledger.json").write_bytes(copy)
    with pytest.raises(GeofedError, match="it has 1 of 2 releases") as told:
        ledger.rows()
    assert told.value.code == "STATE_INVALID"


def test_a_ledger_is_refused_until_it_has_what_others_have_recorded(ledger: PrivacyLedger, tmp_path: Path) -> None:
    ledger.require(0, 0)
    ledger.require(1, 1)
    with pytest.raises(GeofedError, match="it has 0 of 1 releases"):
        ledger.rows()
    shutil.rmtree(tmp_path / "ledger")
    (tmp_path / "ledger.jobs").unlink()
    ledger.require(1, 1)
    with pytest.raises(GeofedError, match="is lost"):
        ledger.change(lambda rows: [row("job-2")])


def test_the_file_beside_the_ledger_may_be_of_an_earlier_version(ledger: PrivacyLedger, tmp_path: Path) -> None:
    (tmp_path / "ledger.jobs").write_text("1")
    assert len(ledger.rows()) == 1
    (tmp_path / "ledger.jobs").write_text("2")
    with pytest.raises(GeofedError, match="it has 1 of 2 jobs"):
        ledger.rows()


def spending(folder: Path, job: str, until: int) -> subprocess.Popen[str]:
    """A process that spends a release for each round, and tells each round when that is done."""
    code = f"""
from pathlib import Path
from sync.privacy import PrivacyLedger
ledger = PrivacyLedger(Path({str(folder)!r}))
for sequence in range(1, {until} + 1):
    ledger.spend({job!r}, sequence, 1)
    print(sequence, flush=True)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.processes
def test_servers_of_several_jobs_spend_at_the_same_time(tmp_path: Path) -> None:
    jobs = [f"job-{number}" for number in range(3)]
    PrivacyLedger(tmp_path).change(lambda rows: [row(job, granted=30) for job in jobs])
    processes = [spending(tmp_path, job, 30) for job in jobs]
    assert [process.communicate(timeout=60)[0].split()[-1] for process in processes] == ["30"] * 3
    assert [one.spent for one in PrivacyLedger(tmp_path).rows()] == [30, 30, 30]


@pytest.mark.processes
def test_what_was_told_to_be_spent_is_there_after_a_kill(tmp_path: Path) -> None:
    for _ in range(3):
        PrivacyLedger(tmp_path).change(lambda rows: [row(granted=100_000)])
        with spending(tmp_path, "job-1", 100_000) as process:
            assert process.stdout is not None
            told = [int(process.stdout.readline()) for _ in range(40)]
            process.kill()
            told += [int(line) for line in process.stdout.read().split()]
        assert PrivacyLedger(tmp_path).rows()[0].spent >= told[-1]
