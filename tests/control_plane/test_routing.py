"""A running job's updates are led around links that have become slow: not at once, not for nothing, not to and fro."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.core import LinkReport, Report, Speed, WanExchange
from control_plane.service.planning._planning import first_state
from control_plane.service.planning._routing import FIRST_REST_SECONDS, REVIEW_SECONDS, Routing
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry
from control_plane.spec import load, to_demand
from control_plane.store import JobRow
from geofed_pb.v1 import agent_pb2
from scheduler import Link, Plan, Region, Snapshot, plan
from tests.control_plane.fake_agent import catalogue

NOW = datetime(2030, 1, 1, tzinfo=UTC)
ROW = JobRow("j", "j", "r", "sha256:c", "sha256:b", "sha256:t", "{}", "{}", "{}", "running", 0.0)
UPDATE = 5_000_000
FAST, SLOW = 100.0, 12.0
"""Mbit/s between the hub a and the others, and among those."""


def regions(stated: bool = True) -> tuple[Region, ...]:
    found = []
    for name in "abcd":
        links = [Link(name, to, 30.0, FAST if "a" in (name, to) else SLOW) for to in "abcd" if to != name]
        found.append(replace(catalogue(name), links=tuple(links) if stated or name == "a" else ()))
    return tuple(found)


class Watched:
    """A job over four regions, looked at every second; its links carry what they are told to."""

    def __init__(self, job_file: Path, *settings: str) -> None:
        spec = load(job_file, ["wan.codec=fp32", "wan.exchange=synchronous", "wan.interval=1", *settings]).spec
        chosen = plan(Snapshot(regions(), model_bytes=UPDATE), to_demand(spec, "j", NOW))
        assert isinstance(chosen, Plan), chosen
        held: Any = {
            name: SimpleNamespace(state=SimpleNamespace(phase="live", address="", features=()), planned=region)
            for name, region in zip("abcd", regions(), strict=True)
        }
        self.regions = held
        state = replace(first_state("j", 0.0, spec, chosen, held, None), phase="running")
        self.entry = JobEntry(ROW, state, spec, chosen)
        self.mbps = {(a, b): FAST if "a" in (a, b) else SLOW for a in "abcd" for b in "abcd" if a != b}
        self.down: set[tuple[str, str]] = set()
        self.routing, self.at, self.speed = Routing(), 0.0, 1e6
        self.told: list[tuple[str, str, Any]] = []
        self.sent: list[agent_pb2.Peers] = []

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return self.entry.state.neighbours or self.entry.plan.neighbours

    def pass_time(self, seconds: float, *, knowing: bool = True) -> None:
        for _ in range(int(seconds)):
            self.at += 1.0
            self._report(knowing)
            draft = Draft(self.at, {"j": self.entry}, self.regions)
            self.routing.review(draft)
            self.entry = draft.changed_jobs.get("j", self.entry)
            self.told += [(event.kind, event.text, event.data_json) for event in draft.events]
            self.sent += [agent_pb2.ToAgent.FromString(command.payload).peers for command in draft.commands]

    def _report(self, knowing: bool) -> None:
        """Each region tells of the links that its updates take; ``knowing``: and that it knows the present ways."""
        state, parts = self.entry.state, []
        for part in state.partitions:
            links = {to for pair in self.pairs for to in pair if part.region in pair} - {part.region}
            report = Report(
                1,
                "training",
                links={
                    to: LinkReport(rtt_ms=30.0, mbps=self.mbps[part.region, to], down=(part.region, to) in self.down)
                    for to in links
                },
                speed=Speed(round_samples_per_second=self.speed),
                exchange=WanExchange(interval=1, update_bytes=UPDATE, routes=state.routes if knowing else 0),
            )
            address = f"{part.region}:1"
            parts.append(replace(part, state="training", link="live", address=address, report=report))
        known = knowing and state.former
        ways = {"former": (), "routes": state.routes + 1} if known else {}
        self.entry = replace(self.entry, state=replace(state, partitions=tuple(parts), **ways))  # type: ignore[arg-type]

    def slow_down(self, a: str, b: str, mbps: float) -> None:
        self.mbps |= {(a, b): mbps, (b, a): mbps}


@pytest.fixture
def star(job_file: Path) -> Iterator[Watched]:
    watched = Watched(job_file)
    assert watched.entry.plan.topology == "star via a"
    return watched  # type: ignore[return-value]


def test_good_links_change_nothing(star: Watched) -> None:
    star.pass_time(300)
    assert not star.told


def test_a_link_that_has_become_slow_is_gone_round(star: Watched) -> None:
    star.pass_time(20)
    star.slow_down("a", "b", 1.0)
    star.pass_time(2 * REVIEW_SECONDS)
    assert not star.told, "it may be over in a moment"
    star.pass_time(REVIEW_SECONDS)
    ((kind, text, data),) = star.told
    assert kind == "wan.rerouted"
    assert ("a", "b") not in star.pairs
    assert "a>b carries 1.1 Mbit/s, not 100" in text, text
    assert '"round_seconds_before"' in data
    assert len(star.sent) == 4
    assert {peers.routes for peers in star.sent} == {1}
    assert {tuple((pair.a, pair.b) for pair in peers.former) for peers in star.sent} == {star.entry.plan.neighbours}
    star.pass_time(300)
    assert len(star.told) == 1, "it stays as it is while the links do"


def test_a_link_that_is_cut_is_gone_round(star: Watched) -> None:
    star.down |= {("a", "c"), ("c", "a")}
    star.pass_time(3 * REVIEW_SECONDS + 1)
    ((_, text, data),) = star.told
    assert ("a", "c") not in star.pairs
    assert "a>c is down" in text
    assert "instead of forever" in text
    assert '"round_seconds_before": null' in data


@pytest.mark.slow
def test_a_short_disturbance_changes_nothing(star: Watched) -> None:
    for _ in range(20):
        star.slow_down("a", "b", 1.0)
        star.pass_time(2 * REVIEW_SECONDS)
        star.slow_down("a", "b", FAST)
        star.pass_time(REVIEW_SECONDS)
    assert not star.told


def test_there_is_no_second_change_before_all_know_the_first(star: Watched) -> None:
    star.slow_down("a", "b", 1.0)
    star.pass_time(60, knowing=False)
    star.slow_down("a", "d", 1.0)
    star.pass_time(10 * FIRST_REST_SECONDS, knowing=False)
    assert len(star.told) == 1


@pytest.mark.slow
def test_links_that_come_and_go_are_followed_ever_more_slowly(star: Watched) -> None:
    """One of the links in use always is slow, and good again once it is given up."""
    for _ in range(3600):
        for pair in [(a, b) for a in "abcd" for b in "abcd" if a < b]:
            star.slow_down(*pair, 1.0 if pair == star.pairs[0] else FAST)
        star.pass_time(1)
    assert 1 < len(star.told) < 8


@pytest.mark.slow
def test_a_link_that_healed_is_tried_again(star: Watched) -> None:
    star.slow_down("a", "b", 1.0)
    star.pass_time(60)
    assert ("a", "b") not in star.pairs
    star.slow_down("a", "b", FAST)
    star.pass_time(1200)
    assert ("a", "b") in star.pairs
    assert len(star.told) == 2


def test_a_kind_that_the_job_file_fixes_stays(job_file: Path) -> None:
    watched = Watched(job_file, "wan.topology=star")
    watched.slow_down("a", "b", 1.0)
    watched.pass_time(120)
    assert not watched.told


def test_what_compute_hides_is_no_reason(job_file: Path) -> None:
    watched = Watched(job_file, "wan.exchange=background")
    watched.speed = 0.05
    watched.slow_down("a", "b", 1.0)
    watched.pass_time(120)
    assert not watched.told
