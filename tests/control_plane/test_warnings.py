"""Warnings of a plan: old prices, and regions that are away."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from control_plane.service.planning._warnings import warnings_of
from control_plane.service.state._certificates import unseen_region
from control_plane.service.state._entries import RegionEntry
from control_plane.spec import JobSpec
from control_plane.store import RunRow, WeightRow
from scheduler import Demand, Plan, Snapshot, plan
from tests.control_plane.fake_agent import catalogue, profile_of

NOW = datetime(2026, 6, 30, tzinfo=UTC).timestamp()


def job(**regions: list[str]) -> JobSpec:
    told = {
        "apiVersion": "geofed/v1", "kind": "TrainingJob", "metadata": {"name": "j"}, "task": {"module": "task.py"},
        "data": {"dataset": "digits"}, "train": {"batch": 10, "end": {"epochs": 1}}, "regions": regions,
    }  # fmt: skip
    return JobSpec.model_validate(told)


def region(name: str, phase: Any) -> RegionEntry:
    entry = unseen_region(name)
    return replace(entry, state=replace(entry.state, phase=phase), catalogue=catalogue(name))


@pytest.mark.parametrize(
    ("as_of", "days"),
    [("2026-06-01", None), ("2026-04", None), ("2026-03", "91"), ("2025-06-30", "365"), ("last year", None)],
)
def test_prices_older_than_a_quarter_are_told(as_of: str, days: str | None) -> None:
    known = catalogue("a")
    assert known.prices is not None
    known = replace(known, prices=replace(known.prices, as_of=as_of))
    chosen = plan(Snapshot((known,)), Demand("j", "digits", 10, 1.0, None, 1))
    assert isinstance(chosen, Plan)
    told = warnings_of(chosen, job(), {"a": replace(unseen_region("a"), catalogue=known)}, NOW)
    assert [f"{days} days old" in text for text in told] == ([True] if days else [])


def test_data_of_a_region_that_is_away_are_not_left_out_in_silence() -> None:
    there = catalogue("a")
    chosen = plan(Snapshot((there,)), Demand("j", "digits", 10, 1.0, None, 1))
    assert isinstance(chosen, Plan)
    regions = {"a": region("a", "live"), "b": region("b", "lost"), "c": region("c", "invited")}
    samples = there.datasets[0].splits["train"].samples
    told = [text for text in warnings_of(chosen, job(), regions, 0.0) if "region" in text]
    assert told == [f"region b is lost: its {samples:,} samples of digits are left out"]
    for wanted in (job(use=["a"]), job(avoid=["b"])):
        assert not [text for text in warnings_of(chosen, wanted, regions, 0.0) if "region" in text]
    away = warnings_of(chosen, job(), {"a": region("a", "unreachable")}, 0.0)
    assert "region a is unreachable; the job cannot start without it" in away


def test_an_unencrypted_channel_is_told_where_workers_share_it() -> None:
    known = replace(catalogue("a"), channel_plaintext=True)
    for workers in (1, 2):
        chosen = plan(Snapshot((known,)), Demand("j", "digits", 10, 1.0, None, 1, workers=workers))
        assert isinstance(chosen, Plan)
        told = warnings_of(chosen, job(), {"a": replace(region("a", "live"), catalogue=known)}, NOW)
        assert any("unencrypted" in text for text in told) == (workers > 1)


def test_a_region_that_others_cannot_reach_is_told() -> None:
    known = {name: replace(catalogue(name), loopback=name == "a") for name in ("a", "b")}
    chosen = plan(Snapshot(tuple(known.values())), Demand("j", "digits", 10, 1.0, None, 1))
    assert isinstance(chosen, Plan)
    for addresses, wanted in ((("10.0.0.1", "10.0.0.2"), 1), (("127.0.0.1", "127.0.0.1"), 0), (("10.0.0.1", ""), 0)):
        entries = {
            name: replace(
                region(name, "live"),
                catalogue=known[name],
                state=replace(region(name, "live").state, address=address),
            )
            for name, address in zip("ab", addresses, strict=True)
        }
        told = [text for text in warnings_of(chosen, job(), entries, NOW) if "cannot reach" in text]
        assert len(told) == wanted
        assert all("b cannot reach the parameter servers of a" in text for text in told)


@pytest.mark.parametrize(
    ("names", "local", "told"),
    [
        ([], [], None),
        (
            ["1"],
            [],
            "(1), whose",
        ),
        (["bn1", "bn2", "bn3"], [], "(bn1, bn2, …), whose"),
        (["bn1", "bn2", "bn3"], ["bn[12].*"], "(bn3), whose"),
        (["bn1", "bn2", "bn3"], ["bn*.*"], None),
    ],
)
def test_batch_statistics_that_all_regions_share_are_told(names: list[str], local: list[str], told: str | None) -> None:
    spec = job()
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"local": local})})
    weight = WeightRow("t", "a", 1.0, 10, 40, batch_norms_json=json.dumps(names))
    for count in (1, 2):
        known = tuple(catalogue(name) for name in ("a", "b")[:count])
        chosen = plan(Snapshot(known), Demand("j", "digits", 10, 1.0, None, 1))
        assert isinstance(chosen, Plan)
        found = [text for text in warnings_of(chosen, spec, {}, 0.0, weight) if "normalises by batches" in text]
        assert len(found) == (told is not None and count == 2)
        assert all(told is not None and told in text for text in found)


def labelled(region: str, *labels: tuple[int, int]) -> RunRow:
    told = json.dumps(profile_of(region) | {"labels": labels})
    return RunRow("p", region, "t", 1.0, 100.0, 100, 1.0, profile_json=told, batch=10)


SKEWED = (labelled("a", (0, 90), (1, 10)), labelled("b", (0, 10), (1, 90)))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, True),
        ({"train.local": ["head.*"]}, False),
        ({"advanced.wan.policy": "fedprox"}, False),
        ({"advanced.wan.policy": "bsp"}, False),
        ({"advanced.wan.policy": "diloco"}, True),
    ],
)
def test_labels_that_differ_between_regions_are_told_unless_the_job_does_something_about_it(
    changed: dict[str, Any], told: bool
) -> None:
    document = json.loads(job().model_dump_json(by_alias=True, exclude_defaults=True))
    for path, value in changed.items():
        *outer, last = path.split(".")
        inner = document
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    spec = JobSpec.model_validate(document)
    chosen = plan(Snapshot((catalogue("a"), catalogue("b"))), Demand("j", "digits", 10, 5.0, None, 1, interval=5))
    assert isinstance(chosen, Plan)
    assert chosen.interval > 1
    found = [text for text in warnings_of(chosen, spec, {}, 0.0, runs=SKEWED) if "labels differ" in text]
    assert len(found) == told
    for text in found:
        assert "40 % of those of a would" in text
        assert "above 20 %" in text
        assert "`train.local`" in text
        assert "GroupNorm" not in text
        weight = WeightRow("t", "a", 1.0, 10, 40, batch_norms_json='["bn"]')
        assert any("GroupNorm in place" in text for text in warnings_of(chosen, spec, {}, 0.0, weight, SKEWED))
    often = replace(chosen, interval=1)
    assert not [text for text in warnings_of(often, spec, {}, 0.0, runs=SKEWED) if "labels differ" in text]
    alike = (SKEWED[0], labelled("b", (0, 80), (1, 20)))
    for runs in ((), SKEWED[:1], alike):
        assert not [text for text in warnings_of(chosen, spec, {}, 0.0, runs=runs) if "labels differ" in text]
