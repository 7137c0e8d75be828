"""What regions report of values that tasks log, and of what the workers use."""

from __future__ import annotations

import math
from dataclasses import replace

from control_plane.core import Logged, Partition, Report, ResourceUsage
from control_plane.core._report_events import never_backwards, records_of
from control_plane.service.rpc._wire import report_of
from geofed_pb.bounds import LOGGED_NAME_BYTES, MOST_LOGGED
from geofed_pb.v1 import agent_pb2, common_pb2


def test_digests_of_data_are_bounded_and_no_other_text_is_taken_for_one() -> None:
    good = {"train": f"hmac-sha256:{'0a' * 32}", "test": f"sha256-etags:{'0a' * 32}"}
    bad = {"a": "sha256:0a", "b": "<b>", "c": f"md5:{'0a' * 32}", "d": f"sha256:{'0A' * 32}"}
    assert report_of(agent_pb2.PartitionReport(data=good | bad)).data == good
    many = {str(number): good["train"] for number in range(1000)}
    assert len(report_of(agent_pb2.PartitionReport(data=many)).data) == 100
    assert report_of(agent_pb2.PartitionReport()).data == {}, "an older agent tells none"


def test_what_an_agent_reports_is_bounded() -> None:
    values = {"loss": 1.0, "not finite": math.nan, "x" * 500: 2.0, "bell\x07": 3.0}
    logged = common_pb2.Logged(round=3, values=values)
    usage = common_pb2.Usage(cpu_cores=math.inf, memory_bytes=5)
    report = report_of(agent_pb2.PartitionReport(logged=logged, usage=usage))
    assert set(report.logged.values.values()) == {2.0, 3.0}
    assert all(len(name.encode()) <= LOGGED_NAME_BYTES and name.isprintable() for name in report.logged.values)
    assert report.usage == ResourceUsage(0.0, 5, 0)
    many = common_pb2.Logged(round=1, values={f"n{number}": 1.0 for number in range(MOST_LOGGED + 50)})
    assert len(report_of(agent_pb2.PartitionReport(logged=many)).logged.values) == MOST_LOGGED


def test_a_round_is_told_once_whatever_comes_after_it() -> None:
    part = Partition("oslo", 1)
    report = Report(1, "training", round=4, logged=Logged(3, {"norm": 1.5}), usage=ResourceUsage(0.5, 7))
    part = replace(part, state="training")
    told = records_of(part, report)
    assert [(one.kind, one.data) for one in told] == [
        ("partition.round", {
            "round": 4, "step": 0, "samples": 0, "loss": 0.0, "cpu_cores": 0.5, "memory_bytes": 7,
        }),
        ("partition.logged", {"round": 3, "values": {"norm": 1.5}}),
    ]  # fmt: skip
    after = replace(part, report=report)
    assert records_of(after, report) == []
    # A server that has started again knows nothing of it, and then tells of it once more.
    restarted = never_backwards(Report(1, "training", round=4), report)
    assert restarted.logged == report.logged
    assert records_of(replace(part, report=restarted), report) == []
    assert never_backwards(Report(1, "training"), report).usage == report.usage
