"""A link that has become slow is gone round: the ways of updates change while the job runs, and no update is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
from support.running import Federation, Running, check_succeeded, digits_sites, eventually, supported_emulator

from deploy.emulator import EmulatedLink, Emulator, WanProfile
from deploy.local import CONTROL_SITE

pytestmark = [pytest.mark.e2e, pytest.mark.netns, pytest.mark.timeout(300)]

HUB = "frankfurt"
REGIONS = (HUB, "shanghai", "tokyo", "virginia")
FAST_MBPS, SLOW_MBPS, DEGRADED_MBPS = 20.0, 3.0, 0.2
DELAY_MS = 10.0


def _mbps(pair: tuple[str, str]) -> float:
    return FAST_MBPS if HUB in pair else SLOW_MBPS


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Four regions, of which one has good links to all others."""
    if (reason := supported_emulator()) is not None:
        pytest.skip(reason)
    sites = (CONTROL_SITE, *REGIONS)
    links = {
        pair: EmulatedLink() if CONTROL_SITE in pair else EmulatedLink(rate_mbps=_mbps(pair), delay_ms=DELAY_MS)
        for pair in permutations(sites, 2)
    }
    profile = WanProfile("one-good-hub", "one region has good links", "made up", REGIONS, links)
    regions = [
        replace(site, config={**site.config, "links": _stated(site.name)}) for site in digits_sites(tmp_path, REGIONS)
    ]
    with (
        Emulator(profile, state_dir=tmp_path / "emulator") as emulator,
        Federation(tmp_path / "federation", regions, emulator=emulator) as federation,
    ):
        yield Running(federation, tmp_path)


def _stated(name: str) -> dict[str, dict[str, float]]:
    return {to: {"rttMs": 2 * DELAY_MS, "mbps": _mbps((name, to))} for to in REGIONS if to != name}


def _rounds(events: list[dict[str, Any]], begin: float, end: float) -> int:
    """Rounds that the region with the slow link completed in a time."""
    told = [e for e in events if e["kind"] == "partition.round" and e["region"] == "shanghai"]
    before = max((e["data"]["round"] for e in told if _at(e) <= begin), default=0)
    return max((e["data"]["round"] for e in told if _at(e) <= end), default=0) - before


def _at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["at"]).timestamp()


def _found(running: Running, job: str, kind: str) -> dict[str, Any] | None:
    return next((event for event in running.events(job) if event["kind"] == kind), None)


SETTINGS = (
    "train.end.epochs=12",
    "train.evaluateEvery=0",
    "wan.interval=4",
    "wan.exchange=synchronous",
    "wan.codec=fp32",
    "task.config.width=16",
    "objective.minimise=time",
)


def test_a_hubs_slow_link_is_gone_round_and_rounds_get_faster(running: Running) -> None:
    emulator = running.federation.emulator
    assert emulator is not None
    job = running.submit(*SETTINGS)
    assert running.describe(job)["plan"]["topology"] == f"star via {HUB}"
    running.wait_round(job, 3)
    slowed = time.time()
    emulator.set_link(HUB, "shanghai", both=True, rate_mbps=DEGRADED_MBPS)
    eventually(lambda: _found(running, job, "wan.settled") is not None, "other ways", 90)
    told, settled = _found(running, job, "wan.rerouted"), _found(running, job, "wan.settled")
    assert told is not None
    assert settled is not None
    assert [HUB, "shanghai"] in told["data"]["before"], told["text"]
    assert [HUB, "shanghai"] not in told["data"]["after"], told["text"]
    # What is queued on a link so slow may have been taken for silence: then a round would never end.
    before, after = told["data"]["round_seconds_before"], told["data"]["round_seconds_after"]
    assert before is None or after < before / 2, told["text"]
    ways = f"{HUB}>shanghai", f"shanghai>{HUB}"
    assert any(f"{way} {how}" in told["text"] for way in ways for how in ("carries", "is down")), told["text"]
    seconds = _at(told) - slowed
    time.sleep(max(0.0, _at(settled) + seconds - time.time()))
    states = {(link["source"], link["destination"]): link["state"] for link in running.describe(job)["links"]}
    if running.describe(job)["state"] == "running":
        assert states[HUB, "shanghai"] == "relayed", states
    events = running.events(job)
    slow, fast = _rounds(events, slowed, _at(told)), _rounds(events, _at(settled), _at(settled) + seconds)
    print(f"{slow} rounds in the {seconds:.0f} s before the change, {fast} in as many after it; {told['text']}")
    assert fast > 2 * slow, f"{fast} rounds after the change, {slow} in the same time before"
    # For the model to be good, over links that no longer matter; it may have come to its end by now.
    for source, destination in combinations(REGIONS, 2):
        emulator.set_link(source, destination, both=True, rate_mbps=FAST_MBPS)
    running.wait_round(job, 24)
    running.federation.control_plane("finish", job, check=False)
    check_succeeded(running.wait_end(job, 200), accuracy=0.8)
