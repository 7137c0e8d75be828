"""A shard whose owner allows it is processed in another region; one whose owner does not never leaves."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.lasting import Lasting
from support.running import (
    PRICES,
    Federation,
    Running,
    check_succeeded,
    digits_sites,
    eventually,
    paths_under,
    supported_emulator,
)

from deploy.emulator import Emulator, load_profile
from deploy.local import RegionSite
from sync.tcp_streams.partial_file import PartialFile

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BALLAST_MIB = 300
RESIDENCY = {"lent": ["oslo"], "heavy": ["oslo"], "kept": "region", "called-back": ["oslo"]}
"""By dataset: all have the same samples, and a heavy one has a large file besides."""


def _federation(folder: Path) -> Federation:
    """Frankfurt has data and no worker, Oslo workers and no data, Virginia both."""
    frankfurt, virginia = digits_sites(folder, ["frankfurt", "virginia"])
    for site in (frankfurt, virginia):
        digits = site.config["datasets"].pop("digits")
        site.config["datasets"].update({name: copy.deepcopy(digits) for name in RESIDENCY})
    frankfurt.config["capacity"] = {"workers": 0}
    for name, residency in RESIDENCY.items():
        frankfurt.config["datasets"][name]["residency"] = residency
    _add_ballast(frankfurt.config["datasets"]["heavy"]["splits"]["test"], BALLAST_MIB)
    oslo = {
        "cloud": "test",
        "capacity": {"workers": 2, "memoryMb": 1024},
        "prices": PRICES,
        "channel": {"kind": "file", "path": str(folder / "channels" / "oslo")},
    }
    return Federation(folder / "federation", [frankfurt, RegionSite("oslo", oslo), virginia])


def _add_ballast(split: dict[str, Any], mib: int) -> None:
    """A file beside the split's, with an array more, at which the task does not look."""
    held = Path(split["uri"])
    split["uri"] = str(held.with_name(f"heavy-{held.name}"))
    with np.load(held) as arrays:
        np.savez(split["uri"], ballast=np.arange(mib << 17), **arrays)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    with Lasting(_federation, tmp_path_factory) as federation:
        yield federation


@pytest.fixture
def running(lasting: Lasting, request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    return lasting.running(request, tmp_path)


def _on(dataset: str) -> tuple[str, str]:
    return (f"data.dataset={dataset}", "data.residency=anywhere")


def test_a_shard_without_workers_is_trained_on_where_there_are_some(running: Running) -> None:
    job = running.submit("train.end.epochs=15", *_on("lent"))
    described = running.wait_end(job)
    check_succeeded(described, accuracy=0.9)
    plan, result = described["plan"], described["result"]
    assert [part["region"] for part in plan["partitions"]] == ["oslo", "virginia"]
    assert "is processed in oslo (rule: oslo)" in plan["residency"]["frankfurt"]
    assert plan["residency"]["virginia"] == "stays in virginia (rule: region)"
    (copy,) = result["shards"]
    (planned,) = plan["copies"]
    assert (copy["source"], copy["destination"], copy["bytes"]) == ("frankfurt", "oslo", planned["bytes"])
    # Frames, offers and the list of files come on top of the shard; nothing is sent twice where nothing breaks.
    assert planned["bytes"] < copy["sent_bytes"] < planned["bytes"] * 1.1 + 10_000
    assert result["wan_bytes"]["frankfurt>oslo"] == copy["sent_bytes"]
    assert not [link for link in result["wan_bytes"] if link.startswith("frankfurt>") and link != "frankfurt>oslo"]
    (egress,) = [line for line in result["money"] if line["region"] == "frankfurt"]
    assert egress["item"] == "egress to oslo"
    assert egress["usd"] == pytest.approx(copy["sent_bytes"] / 1e9 * PRICES["egressUsdPerGb"])
    assert result["predicted"]["link_bytes"]["frankfurt>oslo"] == pytest.approx(copy["sent_bytes"], rel=0.15)
    # Its test samples count as well.
    assert {region["name"] for region in result["regions"]} == {"oslo", "virginia"}
    kinds = [(event["kind"], event["region"]) for event in running.events(job)]
    for kind in (("shard.moves", "frankfurt"), ("shard.sent", "frankfurt"), ("shard.received", "oslo")):
        assert kind in kinds
    left = running.federation.region_state("oslo") / "state" / "shards"
    eventually(lambda: not list(left.iterdir()), "the copy goes with the job")
    assert running.descendants("oslo", "--preload torch")
    assert not running.descendants("frankfurt", "--preload"), "nothing is loaded for workers that there are not"


def _arrived_bytes(running: Running) -> int:
    """Of the large file on its way, as the record beside it tells."""
    folder = running.federation.region_state("oslo") / "state" / "shards"
    told = 0
    for record in [path for path in paths_under(folder) if path.suffix == ".have"]:
        with contextlib.suppress(OSError, ValueError):
            part = record.with_suffix(".part")
            told = max(told, sum(end - begin for begin, end in PartialFile(part, part.stat().st_size).have))
    return told


def _stop_in_the_middle(running: Running, seen: int) -> int:
    """Let the source run for moments, until more has arrived than was seen, and leave it stopped; return what has
    arrived. A source that ran on could end the copy before a test on busy cores looks again."""
    source = running.federation.processes["frankfurt"]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        source.send_signal(signal.SIGSTOP)
        if (arrived := _arrived_bytes(running)) > seen:
            return arrived
        source.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    raise AssertionError("the copy does not continue")


def test_a_copy_goes_on_where_a_killed_agent_left_it(running: Running) -> None:
    job = running.submit("train.end.epochs=3", *_on("heavy"))
    size, arrived = BALLAST_MIB << 20, 0
    for victim in ("oslo", "frankfurt"):
        arrived = _stop_in_the_middle(running, arrived)
        assert arrived < size, "it was in the middle"
        running.federation.kill(victim)
        running.federation.start_agent(victim)
        running.federation.processes["frankfurt"].send_signal(signal.SIGCONT)
    described = running.wait_end(job)
    assert described["state"] == "succeeded", described["error"]
    (copy,) = described["result"]["shards"]
    # What a killed source had sent in its last second is in no account; what had arrived is not sent again.
    assert copy["sent_bytes"] < size * 1.5
    assert described["result"]["wan_bytes"]["frankfurt>oslo"] == copy["sent_bytes"]


@pytest.mark.netns
def test_over_a_wan_it_takes_its_own_link_and_no_other(tmp_path: Path) -> None:
    if (reason := supported_emulator()) is not None:
        pytest.skip(reason)
    frankfurt, shanghai, virginia = digits_sites(tmp_path, ["frankfurt", "shanghai", "virginia"])
    frankfurt.config["capacity"] = {"workers": 0}
    frankfurt.config["datasets"]["digits"]["residency"] = ["virginia"]
    _add_ballast(frankfurt.config["datasets"]["digits"]["splits"]["test"], 32)
    frankfurt.config["links"] = {"virginia": {"rttMs": 90, "mbps": 300}}
    with (
        Emulator(load_profile("china-eu-us-3"), state_dir=tmp_path / "emulator") as emulator,
        Federation(tmp_path / "federation", [frankfurt, shanghai, virginia], emulator=emulator) as federation,
    ):
        running = Running(federation, tmp_path)
        job = running.submit("train.end.epochs=1", "train.evaluateEvery=0", "data.residency=anywhere")
        described = running.wait_end(job)
        check_succeeded(described, accuracy=0.0)
        events = {event["kind"]: event for event in running.events(job)}
        sent = emulator.bytes()
    (planned,) = described["plan"]["copies"]
    took = events["shard.sent"]["data"]["seconds"]
    print(f"{emulator.backend}: {planned['bytes']} bytes, planned {planned['seconds']:.2f} s, took {took:.2f} s")
    metered = described["result"]["wan_bytes"]
    assert planned["bytes"] < metered["frankfurt>virginia"] < planned["bytes"] * 1.1
    for source, destination in permutations(("frankfurt", "shanghai", "virginia"), 2):
        payload, back = metered.get(f"{source}>{destination}", 0), metered.get(f"{destination}>{source}", 0)
        # What goes the other way is acknowledged.
        most = payload * 1.3 + back * 0.03 + 60_000
        assert sent[source, destination] < most, f"{source}>{destination}: more than the meters know"
    others = {link: count for link, count in sent.items() if link[0] == "frankfurt" and link[1] != "virginia"}
    assert max(others.values()) < planned["bytes"] / 10, "nothing of the shard goes another way"


def test_what_stays_by_its_owners_word_stays(running: Running) -> None:
    settings = [part for setting in _on("kept") for part in ("--set", setting)]
    job = str(running.job_folder() / "job.yaml")
    asked = running.federation.control_plane("explain", job, *settings, "-o", "json", check=False)
    assert asked.returncode == 9, asked.stdout
    assert "it only holds data" in asked.stdout + asked.stderr


def test_an_agent_refuses_what_its_own_file_does_not_allow(running: Running) -> None:
    """The control plane plans by a catalogue that says more than the file does, as if it wanted to break the rule."""
    folder = running.federation.region_state("frankfurt")
    running.federation.kill("frankfurt")
    config = json.loads((folder / "region.yaml").read_text())
    config["datasets"]["called-back"]["residency"] = "region"
    (folder / "region.yaml").write_text(json.dumps(config))
    # Within its lease it counts as live, with the catalogue that it told before.
    job = running.submit("train.end.epochs=15", *_on("called-back"))
    running.federation.start_agent("frankfurt")
    described = running.wait_end(job)
    assert described["state"] == "failed"
    assert described["error"]["code"] == "RESIDENCY_VIOLATION", described["error"]
    assert "frankfurt" in described["error"]["message"]
    assert described["result"]["wan_bytes"].get("frankfurt>oslo", 0) == 0
