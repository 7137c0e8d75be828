"""A job of three regions whose steps are counted, beside the same steps without communication, for `large_models.py`
and `large_models_gpu.py`.

Steps are counted from the events of the job, of the slowest region: from the first event after which all regions have
ended eight rounds (two with `--quick` of `large_models.py`), to the last one. The job is a long one, as a large model
needs, and is cancelled once enough of it was seen: plans of short ones give up time for learning.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.running import PRICES, Running

from deploy.local import RegionSite

__all__ = ["REGIONS", "alone", "sites", "speed_of"]

REGIONS = ("east", "south", "west")
_SAMPLES = 20_000
"""Of each region, as its file states and the tasks make them."""
_WARM_ROUNDS = 8
"""The interval is adapted in the first ones, and a first model may travel."""
_PATIENCE_SECONDS = 900.0
_POLL_SECONDS = 5.0
"""Between two looks at the job: each is a process."""
_SPENT = ("compute_seconds", "merge_seconds", "exchange_seconds", "wait_seconds", "evaluate_seconds")


def sites(folder: Path, *, memory_mb: int) -> list[RegionSite]:
    """Regions of one worker, whose tasks make their data."""
    made = []
    for name in REGIONS:
        place = folder / "data" / name
        place.mkdir(parents=True)
        (place / "text").write_bytes(b"x")
        config = {
            "cloud": "test",
            "capacity": {"workers": 1, "memoryMb": memory_mb},
            "prices": PRICES,
            "datasets": {"text": {"splits": {"train": {"uri": str(place / "text"), "samples": _SAMPLES}}}},
        }
        made.append(RegionSite(name, config))
    return made


def speed_of(
    running: Running, place: Path, task: str, job: str, seconds: float, *, warm_rounds: int = _WARM_ROUNDS
) -> dict[str, Any]:
    """Submit a job, count its steps for so many seconds once it has made ``warm_rounds``, and cancel it.

    Returns its plan, its steps a second, and where its time went.
    """
    place.mkdir()
    (place / "task.py").write_text(task)
    (place / "job.yaml").write_text(job)
    control_plane = running.federation.control_plane
    name = control_plane("submit", str(place / "job.yaml"), "-o", "name", timeout=300).stdout.strip()
    ends = time.monotonic() + _PATIENCE_SECONDS
    warm_until = 0.0
    while not warm_until or time.monotonic() < warm_until:
        time.sleep(_POLL_SECONDS)
        now = running.describe(name)
        if now["finished_at"] or time.monotonic() > ends:
            raise SystemExit(f"the job is {now['state']}: {now['error']}")
        if not warm_until and min((part["round"] for part in now["partitions"]), default=0) >= warm_rounds:
            warm_until = time.monotonic() + seconds
    told = running.events(name)
    control_plane("cancel", name, "--yes")
    running.wait_end(name)
    rounds = [
        {**event, "at": datetime.fromisoformat(event["at"]).timestamp()}
        for event in told
        if event["kind"] == "partition.round"
    ]
    plan = {key: now["plan"][key] for key in ("interval", "codec", "topology")}
    decisions = [event["text"] for event in told if event["kind"] == "wan.decision"]
    return {"plan": plan, "estimate": now["plan"]["estimate"], "decisions": decisions, **_speed(rounds, warm_rounds)}


def _speed(events: list[dict[str, Any]], warm_rounds: int) -> dict[str, Any]:
    by_region = {name: [event for event in events if event["region"] == name] for name in REGIONS}
    warm = max(next(e["at"] for e in own if e["data"]["round"] >= warm_rounds) for own in by_region.values())
    speeds: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    for name, own in by_region.items():
        counted = [event for event in own if event["at"] >= warm]
        seconds = counted[-1]["at"] - counted[0]["at"]
        speeds[name] = (counted[-1]["data"]["step"] - counted[0]["data"]["step"]) / seconds
        parts[name] = {key: sum(event["data"].get(key) or 0.0 for event in counted[1:]) for key in _SPENT}
        parts[name]["seconds"] = seconds
    return {"steps_per_second": min(speeds.values()), "speeds": speeds, "parts": parts, "rounds": events}


def alone(loop: Callable[..., float], *arguments: Any) -> float:
    """Return the steps a second of the slowest of three processes, one a region, that exchange nothing.

    ``loop``: runs in each, with the arguments, and returns its steps a second.
    """
    context = multiprocessing.get_context("spawn")
    with context.Pool(len(REGIONS)) as pool:
        return min(pool.starmap(loop, [arguments] * len(REGIONS), chunksize=1))
