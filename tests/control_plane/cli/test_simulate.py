"""`geofed simulate`: a trace in, a row for each policy out."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from control_plane.cli.commands.simulate import PlainProgress
from scheduler.lab.policies import POLICIES
from tests.control_plane.cli.conftest import Run

HEAD = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A trace with the speeds of its model where they are looked for."""
    (tmp_path / "throughputs_T4").mkdir()
    (tmp_path / "throughputs_T4" / "net.csv").write_text("global_batch_size,1,2,4\n64,1.0,1.9,3.5\n")
    (tmp_path / "traces").mkdir()
    path = tmp_path / "traces" / "trace.csv"
    rows = [f"j{i},{60 * i},600,net,{60 * i + 500 + 40 * i},64,1,600" for i in range(12)]
    path.write_text(HEAD + "\n".join([*rows, "never,5,600,net,20,64,1,600"]) + "\n")
    return str(path)


def test_a_row_for_each_policy(run: Run, trace: str) -> None:
    ran = run("simulate", trace, "--cluster", "2x4", "--policy", "geofed", "--policy", "edf", "--ceiling", "-o", "json")
    assert ran.status == 0
    assert ran.err == "computing the upper bound for any scheduler\n"
    ours, edf = ran.data
    assert (ours["policy"], edf["policy"]) == ("geofed", "edf")
    assert ours["jobs"] == ours["with_deadline"] == 13
    assert ours["promised"] == ours["met"] >= edf["met"]
    assert ours["met"] <= ours["ceiling"] <= 12
    assert ours["declined"] == 13 - ours["promised"]
    assert ours["ratio"] == pytest.approx(ours["met"] / 13)
    table = run("simulate", trace, "--cluster", "2x4", "--policy", "all").out.splitlines()
    assert table[0].split()[:3] == ["POLICY", "MET", "JOBS"]
    assert len(table) == len(POLICIES) + 1
    assert run("simulate", trace, "--cluster", "2x4", "-o", "name").out.split() == ["geofed", "elasticflow"]


def test_rows_of_jobs_and_a_picture_are_written(run: Run, trace: str, tmp_path: Path) -> None:
    rows, picture = tmp_path / "jobs.csv", tmp_path / "picture.svg"
    ran = run("simulate", trace, "--cluster", "1x4", "--csv", str(rows), "--plot", str(picture), "-o", "json")
    with rows.open() as lines:
        jobs = list(csv.DictReader(lines))
    assert len(jobs) == 2 * 13
    for view in ran.data:
        assert sum(int(job["met"]) for job in jobs if job["policy"] == view["policy"]) == view["met"]
    assert xml.parse(picture).getroot().tag.endswith("svg")
    assert ran.err.splitlines() == [f"wrote {rows}", f"wrote {picture}"]


def test_errors_and_failures_can_be_asked_for(run: Run, trace: str) -> None:
    ran = run(
        "simulate", trace, "--cluster", "2x4", "--policy", "geofed", "--failures", "2000", "--curve-error", "0.1",
        "--own-pauses", "--seed", "3", "-o", "json",
    )  # fmt: skip
    assert ran.data[0]["failures"] > 0


@pytest.mark.parametrize(
    ("arguments", "status", "code", "message"),
    [
        ("TRACE --cluster 16", 2, "USAGE", "'16' is not a valid cluster"),
        ("TRACE --cluster 0x4", 2, "USAGE", "'0x4' is not a valid cluster"),
        ("TRACE --cluster 2x4 --policy best", 2, "USAGE", "unknown policy best"),
        ("missing.csv --cluster 2x4", 2, "USAGE", "cannot read missing.csv"),
        ("BROKEN --cluster 2x4", 2, "CONFIG_INVALID", "broken.csv:3: submit_time is 'soon', not a number"),
        ("TRACE --cluster 2x4 --device A100", 2, "CONFIG_INVALID", "no speeds for net with batch 64"),
        ("EMPTY --cluster 2x4", 2, "CONFIG_INVALID", "empty.csv has no jobs"),
        ("TRACE --cluster 2x4 --csv /nowhere/x.csv", 2, "USAGE", "cannot write /nowhere/x.csv"),
    ],
)
def test_what_is_wrong_is_said(
    run: Run, trace: str, tmp_path: Path, arguments: str, status: int, code: str, message: str
) -> None:
    folder = Path(trace).parent
    (folder / "broken.csv").write_text(HEAD + "a,1,600,net,900,64,1,600\nb,soon,600,net,900,64,1,600\n")
    (folder / "empty.csv").write_text(HEAD)
    words = arguments.replace("TRACE", trace)
    words = words.replace("BROKEN", str(folder / "broken.csv")).replace("EMPTY", str(folder / "empty.csv"))
    ran = run("simulate", *words.split(), "-o", "json")
    assert (ran.status, ran.error["code"]) == (status, code)
    assert message in ran.error["message"]
    assert ran.error["hint"]


def test_a_long_simulation_says_how_far_it_is() -> None:
    times, said = iter([0.0, 5.0, 10.0, 12.0, 20.0]), list[str]()
    progress = PlainProgress("geofed", lambda: next(times), said.append)
    for done in (100, 250, 300, 500):
        progress(done, 1000)
    assert said == [
        "geofed: 250 of 1,000 jobs, about 30.0 s left",
        "geofed: 500 of 1,000 jobs, about 20.0 s left",
    ]
