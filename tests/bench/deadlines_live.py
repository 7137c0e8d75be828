"""Deadlines live: bursts of jobs that really train on three regions in the WAN emulator.

    .venv/bin/python tests/bench/deadlines_live.py [--quick] [--json PATH]

Eight small image jobs with mixed deadlines over the digits; a sleep for each sample stands for the compute, so that the
machine's cores are not what is scheduled. The same arrivals are run three times, in turn, by the same daemons:

- "geofed": each job is submitted with its deadline when it comes; the control plane promises or declines, and shares
  workers out while the jobs train. One without a deadline, best effort, is among them.
- "fcfs": jobs get all workers, one after the other, as they came.
- "edf": the same, the earliest deadline of those that wait next; who runs is not stopped.

A deadline is met where the model is there by then; a job that was declined has missed it. Each job is also trained
alone: the models must be as accurate.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import Bar, Report, options

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.running import PRICES, TEMPLATES, Running

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile
from deploy.local import LocalFederation, RegionSite
from deploy.shards import read_digits

REGIONS = ("east", "north", "west")
WORKERS = 4
"""That each region has."""
SAMPLE_MS = 8.0
BATCH = 8
PATIENCE_SECONDS = 400.0
SLEEPS = f"""

_loss = loss


def loss(model, batch):
    import time

    time.sleep(len(batch[0]) * {SAMPLE_MS} / 1e3)
    return _loss(model, batch)
"""


DECLINED = 9
"""Exit status of a submission that cannot be promised what it asks for."""


class Declined(Exception):
    """A job is not admitted."""


@dataclass(frozen=True)
class Arrival:
    """One job of the stream."""

    at_s: float
    epochs: int
    deadline_s: float | None
    """From its arrival."""


ARRIVALS = (
    Arrival(0.0, 24, None),
    Arrival(4.0, 8, 75.0),
    Arrival(4.0, 4, 30.0),
    Arrival(4.0, 4, 120.0),
    Arrival(40.0, 8, 60.0),
    Arrival(40.0, 4, 25.0),
    Arrival(40.0, 6, 150.0),
    Arrival(70.0, 4, 40.0),
)
QUICK = (0, 2, 3, 1)


def main() -> int:
    given = options(__doc__)
    report = Report("deadlines_live", given.quick)
    arrivals = [ARRIVALS[n] for n in QUICK] if given.quick else list(ARRIVALS)
    link = EmulatedLink(rate_mbps=100.0, delay_ms=25.0)
    sites = (CONTROL, *REGIONS)
    links = {(a, b): EmulatedLink() if CONTROL in (a, b) else link for a in sites for b in sites if a != b}
    profile = WanProfile("three", "Three regions, 100 Mbit/s and 50 ms", "a measurement's own", REGIONS, links)
    with tempfile.TemporaryDirectory() as place, Emulator(profile, state_dir=Path(place) / "emulator") as emulator:
        folder = Path(place)
        with LocalFederation(folder / "federation", _sites(folder), emulator=emulator) as federation:
            running = Running(federation, folder)
            report.details["backend"] = getattr(emulator, "backend", "")
            # Teaches the planner the speeds and the size of the model; its task is the others'.
            _end(running, _submit(running, Arrival(0.0, 3, None)))
            alone = {epochs: _accuracy(running, epochs) for epochs in sorted({a.epochs for a in arrivals})}
            for policy in ("geofed", "fcfs", "edf"):
                report.runs += _play(running, policy, arrivals, alone)
    _print(report.runs)
    report.bars += _bars(report.runs)
    return report.close(given.json)


def _sites(folder: Path) -> list[RegionSite]:
    digits = read_digits(1)
    order = np.random.default_rng(1).permutation(len(digits.train.y))
    made = []
    for number, name in enumerate(REGIONS):
        place = folder / "data" / name
        place.mkdir(parents=True)
        splits = {}
        mine, tests = order[number :: len(REGIONS)], np.arange(number, len(digits.test.y), len(REGIONS))
        for split, part in (("train", digits.train.take(mine)), ("test", digits.test.take(tests))):
            np.savez(place / f"{split}.npz", x=part.x, y=part.y)
            splits[split] = {"uri": str(place / f"{split}.npz"), "samples": len(part.y)}
        config = {
            "cloud": "test",
            "capacity": {"workers": WORKERS, "memoryMb": 1024},
            "prices": PRICES,
            "datasets": {"digits": {"splits": splits}},
            "channel": {"kind": "file", "path": str(folder / "channels" / name)},
        }
        made.append(RegionSite(name, config))
    return made


def _submit(running: Running, job: Arrival, *settings: str) -> str:
    """The id; raises ``Declined``."""
    task = (TEMPLATES / "image-classification" / "task.py").read_text() + SLEEPS
    common = (f"train.batch={BATCH}", "train.evaluateEvery=0", "wan.interval=10", "objective.minimise=time")
    config = 'task.config={"width": 4, "lr": 0.05}'
    wanted = (*common, config, f"train.end.epochs={job.epochs}", *settings)
    arguments = [part for setting in wanted for part in ("--set", setting)]
    file = running.job_folder(task) / "job.yaml"
    told = running.federation.control_plane("submit", str(file), *arguments, "-o", "name", check=False)
    if told.returncode == DECLINED:
        raise Declined(told.stderr)
    if told.returncode:
        raise SystemExit(told.stderr)
    return told.stdout.strip()


def _end(running: Running, job: str) -> dict[str, Any]:
    ended = running.wait_end(job, seconds=PATIENCE_SECONDS)
    if ended["state"] != "succeeded":
        raise SystemExit(f"job {job} has {ended['state']}: {ended['error']}")
    return ended


def _accuracy(running: Running, epochs: int) -> float:
    job = _submit(running, Arrival(0.0, epochs, None))
    return float(_end(running, job)["result"]["metrics"]["accuracy"])


def _play(running: Running, policy: str, arrivals: list[Arrival], alone: dict[int, float]) -> list[dict[str, Any]]:
    """One pass over the arrivals; what became of each job."""
    begun = time.time()
    coming = sorted(enumerate(arrivals), key=lambda item: item[1].at_s)
    waiting: list[tuple[int, Arrival]] = []
    there: dict[int, str] = {}
    submitted: dict[int, float] = {}
    declined: dict[int, str] = {}
    current = ""
    while coming or waiting:
        while coming and time.time() - begun >= coming[0][1].at_s:
            number, job = coming.pop(0)
            if policy != "geofed":
                waiting.append((number, job))
                continue
            submitted[number] = time.time() - begun
            wanted = [] if job.deadline_s is None else [f"objective.deadline={job.deadline_s:.0f}s"]
            try:
                there[number] = _submit(running, job, *wanted)
            except Declined as error:
                declined[number] = str(error)
        if waiting and (not current or running.describe(current)["state"] in ("succeeded", "failed")):
            key = (lambda item: item[1].at_s) if policy == "fcfs" else _due
            number, job = min(waiting, key=key)
            waiting.remove((number, job))
            submitted[number] = time.time() - begun
            current = there[number] = _submit(running, job, f"train.workers={WORKERS}")
        time.sleep(0.2)
    rows = []
    for number, job in enumerate(arrivals):
        row: dict[str, Any] = {"policy": policy, "job": number, "epochs": job.epochs, "deadline_s": job.deadline_s}
        if number in declined:
            rows.append(row | {"declined": declined[number][-300:], "met": False})
            continue
        ended = _end(running, there[number])
        took = submitted[number] - job.at_s + ended["result"]["seconds"]
        kinds = [event["kind"] for event in running.events(there[number])]
        rows.append(
            row
            | {
                "took_s": took,
                "met": job.deadline_s is None or took <= job.deadline_s,
                "changes": kinds.count("partition.scaled"),
                "usd": ended["result"]["usd"],
                "accuracy": ended["result"]["metrics"]["accuracy"],
                "alone": alone[job.epochs],
            }
        )
    return rows


def _due(item: tuple[int, Arrival]) -> float:
    job = item[1]
    return float("inf") if job.deadline_s is None else job.at_s + job.deadline_s


def _met(runs: list[dict[str, Any]], policy: str) -> int:
    return sum(run["met"] for run in runs if run["policy"] == policy and run["deadline_s"] is not None)


def _print(runs: list[dict[str, Any]]) -> None:
    print(f"{'policy':<8}{'job':>4}{'epochs':>7}{'deadline s':>11}", end="")
    print(f"{'took s':>8}{'met':>5}{'changes':>8}{'accuracy':>9}{'alone':>7}")
    for run in runs:
        due = "-" if run["deadline_s"] is None else f"{run['deadline_s']:.0f}"
        head = f"{run['policy']:<8}{run['job']:>4}{run['epochs']:>7}{due:>11}"
        if "declined" in run:
            print(f"{head}  declined")
            continue
        met = "-" if run["deadline_s"] is None else "yes" if run["met"] else "no"
        tail = f"{run['changes']:>8}{run['accuracy']:>9.3f}{run['alone']:>7.3f}"
        print(f"{head}{run['took_s']:>8.1f}{met:>5}{tail}")


def _bars(runs: list[dict[str, Any]]) -> list[Bar]:
    ours = [run for run in runs if run["policy"] == "geofed" and "declined" not in run]
    broken = sum(not run["met"] for run in ours)
    others = max(_met(runs, "fcfs"), _met(runs, "edf"))
    lost = max(run["alone"] - run["accuracy"] for run in ours)
    return [
        Bar.at_most("promises broken", broken, "", 0),
        Bar.at_least("deadlines met beyond first come first served and EDF", _met(runs, "geofed") - others, "", 1),
        Bar.at_most("accuracy lost against alone, worst", 100 * lost, "points", 1.0),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
