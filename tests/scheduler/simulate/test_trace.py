"""The published formats are read; what is wrong with a file is said with its line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from scheduler.deadline import SpeedCurve
from scheduler.simulate import TraceError, read_table, read_trace

SPEEDS = ["global_batch_size,1,2,4", "64,1.0,1.8,nan", "128,0.5,,0"]
TABLES = read_table(SPEEDS, "net", "net.csv")
MICROSOFT = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration"
POLLUX = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration,best_effort"
CHRONUS = (
    "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,"
    "best_effort,job_type"
)
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"


def test_a_table_holds_what_was_measured() -> None:
    assert TABLES == {("net", 64): {1: 1.0, 2: 1.8}, ("net", 128): {1: 0.5}}


def test_both_headers_are_read_in_the_order_of_submission() -> None:
    late, early = read_trace([MICROSOFT, "b,20,100,net,90,64,2,70", "a,10,50,net,80,128,1,60"], TABLES, "t"), None
    assert [job.name for job in late] == ["a", "b"]
    assert late[1].curve == SpeedCurve((1, 2), (1.0, 1.8))
    assert (late[1].deadline_s, late[1].work, late[1].devices) == (90.0, 100.0, 2)
    early = read_trace([POLLUX, "a,10,50,net,80,128,1,60,1", "b,10,50,net,80,128,1,60,0"], TABLES, "t")
    assert [math.isinf(job.deadline_s) for job in early] == [True, False]


def test_steps_of_soft_deadlines_are_read() -> None:
    rows = [
        "1,u,1,100,50,net,25,5,30-60,10-4,0,soft",
        "2,v,2,101,50,net,25,5,30,10,1,best",
        "3,v,0,9,5,net,5,5,3,1,0,x",
    ]
    soft, best = read_trace([CHRONUS, *rows], {}, "t")
    assert soft.deadlines == ((130.0, 10.0), (160.0, 4.0))
    assert soft.curve == SpeedCurve((1,), (2.0,))
    assert [soft.value_at(at) for at in (130.0, 131.0, 161.0, math.inf)] == [10.0, 4.0, 0.0, 0.0]
    assert best.deadlines == ()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["job_id,submit_time", "1,2"], "t.csv:1: no column for work, model"),
        ([], "t.csv:1: no column for job"),
        (
            [MICROSOFT, "a,10,50,net,80,64,1,60", "b,x,50,net,80,64,1,60"],
            "t.csv:3: submission_time is 'x', not a number",
        ),
        ([MICROSOFT, "a,10,50,net,80,64,1"], "t.csv:2: duration is None"),
        ([MICROSOFT, "a,-1,50,net,80,64,1,60"], "t.csv:2: submission_time is '-1'"),
        ([MICROSOFT, "a,10,50,bert,80,64,1,60"], "t.csv:2: no speeds for bert with batch 64; models with speeds: net"),
        ([MICROSOFT, "a,10,0,net,80,64,1,60"], "t.csv:2: net has no measured speed, or the job no work"),
        ([MICROSOFT, "a,1,5,net,8,64,1,6", "a,1,5,net,8,64,1,6"], "t.csv: two jobs have one job_id"),
        ([CHRONUS, "1,u,1,100,50,net,25,5,30-20,10-4,0,soft"], "t.csv:2: expect_time_list must ascend"),
        ([CHRONUS, "1,u,1,100,50,net,0,5,30,10,0,soft"], "t.csv:2: iterations and duration"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError) as failure:
        read_trace(lines, TABLES, "t.csv")
    assert str(failure.value).startswith(message)


def test_a_table_without_heads_is_refused() -> None:
    with pytest.raises(TraceError, match=r"net\.csv:1: expected global_batch_size"):
        read_table(["batch,one"], "net", "net.csv")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not on this machine")
def test_the_published_traces_are_read() -> None:
    tables: dict[tuple[str, int], dict[int, float]] = {}
    for path in (SHARED / "throughputs_A100").glob("*.csv"):
        tables |= read_table(path.read_text().splitlines(), path.stem, path.name)
    for name, count in (("195job", 195), ("philly_103959", 876), ("cluster01", 1595), ("resnet_cifar_trace", 5)):
        lines = (SHARED / "elasticflow" / f"{name}.csv").read_text().splitlines()
        assert len(read_trace(lines, tables, name)) == count
