"""The topology's way: from the job file over the plan and the store to the agents, and to people."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from control_plane._view import usd_text
from control_plane.cli._report import plan_text
from control_plane.core import SendStart
from control_plane.dashboard._pages import Pages
from control_plane.dashboard._submission import SubmissionForm
from control_plane.service import Caller
from control_plane.service.planning._planning import declined_error, plan_json
from control_plane.service.rpc._wire import command_of
from control_plane.spec import JobSpec, load, to_demand
from control_plane.store import JobRow
from geofed_pb.errors import GeofedError
from scheduler import Declined, Link, Plan, Snapshot, plan
from tests.control_plane.fake_agent import catalogue

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ROW = JobRow("j", "j", "r", "sha256:c", "sha256:b", "sha256:t", "{}", "{}", "{}", "planned", 0.0)

FEDERATION = SimpleNamespace(name="test", regions={})
DRAFT = SubmissionForm("image-classification", "text")


def snapshot(*apart: str) -> Snapshot:
    """Regions a, b, c; the links that are named ("a>c") are not there."""
    regions = []
    for name in "abc":
        links = [Link(name, other[-1], 50.0, 0.0) for other in apart if other[0] == name]
        regions.append(replace(catalogue(name), links=tuple(links)))
    return Snapshot(tuple(regions), model_bytes=5_000_000)


def spec_of(job_file: Path, topology: str, *more: str) -> JobSpec:
    return load(job_file, [f"wan.topology={topology}", *more]).spec


def planned(job_file: Path, topology: str, *apart: str) -> Plan:
    answer = plan(snapshot(*apart), to_demand(spec_of(job_file, topology), "j", NOW))
    assert isinstance(answer, Plan), answer
    return answer


def test_a_kind_is_one_of_those_that_there_are(job_file: Path) -> None:
    assert to_demand(spec_of(job_file, "two-level"), "j", NOW).topology == "two-level"
    assert to_demand(spec_of(job_file, "auto"), "j", NOW).topology is None
    with pytest.raises(GeofedError, match=r"wan\.topology"):
        spec_of(job_file, "bus")


def test_the_agents_are_told_all_pairs_of_neighbours(job_file: Path) -> None:
    chosen = planned(job_file, "star", "a>c")
    assert chosen.topology == "star via b"
    stored = TypeAdapter(Plan).validate_json(plan_json(chosen))
    assert stored == chosen
    for region in "abc":
        start = command_of(SendStart(region, 1), ROW, spec_of(job_file, "star"), stored, pytest.fail).start
        assert [(pair.a, pair.b) for pair in start.plan.neighbours] == [("a", "b"), ("b", "c")]
        assert start.plan.topology == "star via b"


def test_a_plan_of_before_is_of_a_mesh(job_file: Path) -> None:
    old = json.loads(plan_json(planned(job_file, "mesh")))
    del old["neighbours"], old["exchange_seconds"]
    stored = TypeAdapter(Plan).validate_json(json.dumps(old))
    assert not stored.neighbours
    assert not command_of(SendStart("b", 1), ROW, spec_of(job_file, "auto"), stored, pytest.fail).start.plan.neighbours
    assert "exchange" in plan_text(old)


def test_people_see_the_topology_its_time_and_what_else_was_evaluated(job_file: Path) -> None:
    text = plan_text(json.loads(plan_json(planned(job_file, "auto", "a>c"))))
    line = next(line for line in text.splitlines() if line.startswith("exchange"))
    assert " s a round (a-b, b-c)" in line
    waits = plan(snapshot(), to_demand(spec_of(job_file, "auto", "wan.exchange=synchronous"), "j", NOW))
    assert isinstance(waits, Plan)
    assert "synchronous: all regions wait; mesh" in plan_text(json.loads(plan_json(waits)))
    other = json.loads(plan_json(replace(waits, wan_settings={"background": 1.0})))
    assert "in the background, while training continues; mesh" in plan_text(other)
    assert re.search(r"mesh +a and c have no direct path", text)


@pytest.mark.parametrize(
    ("k", "told"), [("0", "isp (each to all others)"), ("2", "isp (K = 2)"), ("auto", "isp; between regions")]
)
def test_people_see_how_many_merge(job_file: Path, k: str, told: str) -> None:
    spec = spec_of(job_file, "mesh", "advanced.collective=isp", f"advanced.k={k}")
    answer = plan(snapshot(), to_demand(spec, "j", NOW))
    assert isinstance(answer, Plan)
    assert f"within a region by {told}" in plan_text(json.loads(plan_json(answer)))


def test_a_kind_that_cannot_be_is_declined_before_anything_starts(job_file: Path) -> None:
    answer = plan(snapshot("a>c"), to_demand(spec_of(job_file, "mesh"), "j", NOW))
    assert isinstance(answer, Declined)
    error = declined_error(answer)
    assert error.code == "INADMISSIBLE"
    assert "wan.topology" in error.hint


CLIENTS = {"clients": 1200, "clients_per_round": 120}


def test_the_dashboard_shows_of_a_plan_what_the_commands_show(job_file: Path) -> None:
    shown = json.loads(plan_json(planned(job_file, "mesh")))
    shown["wan_settings"] = {"background": 1.0, "secure": 1.0}
    shown["promise"] = {
        "deadline_asked": True, "deadline_at": "2030-01-01T02:00:00Z", "deadline_step": 0, "budget_usd": 5.0,
    }  # fmt: skip
    shown["partitions"] = [part | CLIENTS for part in shown["partitions"]]
    text = " ".join(plan_text(shown).split())
    page = unescape(Pages(FEDERATION, "").submit(Caller(), DRAFT, plan=shown, request_id="r"))  # type: ignore[arg-type]
    facts = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)
    for name, value in facts:
        assert f"{name} {value}" in text
    told = dict(facts)
    assert told["rounds"] == f"{shown['rounds']}, each of {shown['interval']} rounds of clients"
    assert told["clients"].startswith("120 of 1,200 in a, 120 of 1,200 in b")
    assert told["exchange"].startswith("in the background, while training continues; mesh")
    assert told["privacy"].startswith("secure aggregation")
    assert told["deadline"].startswith("2030-01-01T02:00:00Z is promised; training takes ")
    assert told["budget"].startswith("$5.00 is kept: ")
    assert told["based on"] == "the speeds that the regions' operators state"
    assert {"time", "WAN bytes", "cost", "merge", "learning"} <= told.keys()
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><td>.*?</tr>", page)]
    usd = {part["region"]: 0.0 for part in shown["partitions"]}
    for item in shown["estimate"]["items"]:
        usd[item["region"]] += item["usd"]
    for part in shown["partitions"]:
        region, most = part["region"], f"{part['memory_mb']} MB"
        assert [region, str(part["samples"]), str(part["workers"]), most, usd_text(usd[region])] in rows
