"""Elastic placement live: cost and time saved compared with using every worker, in Cloudless-Training's setting.

    .venv/bin/python tests/bench/cloudless.py [--quick] [--json PATH]

Two regions in the WAN emulator, with the real daemons, train the image job on the digits, really; a sleep for each
sample stands for the compute, so that one region's workers are slower than the other's. Data and power are uneven
in several ways. Each is run with everything that is free ("greedy"), with load-power matching as published
(arXiv 2303.05330: the slowest region sets the pace, the others shrink to match), both by numbers in the job file, and
with `train.workers: auto`, in turn: with `minimise: time` ("ours"), which is held against greedy's time, and with
`minimise: cost` ("cheap"), which keeps to steps that learn as much from a sample and takes its time. Money is what the
regions' own meters say. The bound is what would be saved if nobody was paid for waiting: the part of greedy's worker
time, priced, in which workers wait for the slower region. Before them runs one short job that teaches the planner the
speeds; what it predicts of the others stands beside what was measured.

With `--quick` it takes 2 minutes. Accuracy has no bar then: after so few steps it differs by points between seeds.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from report import Bar, Report, options

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.running import PRICES, TEMPLATES, Running

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile
from deploy.local import LocalFederation, RegionSite
from deploy.shards import read_digits

REGIONS = ("east", "west")
WORKERS = 4
"""That each region has."""
REPEATS, EPOCHS, QUICK_EPOCHS = 3, 24, 8
BATCH = 16
SLOW_MS = 8.0
"""A sample, on a worker of power 1."""
DEAR = 3.0
"""How many times as dear functions are in the second region, where prices differ."""
PUBLISHED = 9.2
"""Per cent: the least that Cloudless-Training says its placement saves; the most is 24.0."""
THROTTLED = """

_loss, _dataset, _region = loss, dataset, ""


def dataset(uri, split, config):
    global _region
    _region = "east" if "/east" in uri else "west"
    return _dataset(uri, split, config)


def loss(model, batch):
    import time

    time.sleep(len(batch[0]) * MS[_region] / 1e3)
    return _loss(model, batch)
"""


@dataclass(frozen=True)
class Setting:
    """How uneven two regions are."""

    name: str
    data: tuple[float, float]
    """Parts of the samples."""
    power: tuple[float, float]
    """Of one worker."""
    dear: bool = False

    def needs(self) -> tuple[float, float]:
        """Time of a pass over the data with all workers, to a common factor."""
        return self.data[0] / self.power[0], self.data[1] / self.power[1]

    def matched(self) -> tuple[int, ...]:
        """Load-power matching: the fewest workers that keep the slowest region's pace."""
        slowest = max(self.needs())
        return tuple(max(1, math.ceil(WORKERS * need / slowest - 1e-9)) for need in self.needs())

    def prices(self) -> tuple[float, float]:
        return 1.0, DEAR if self.dear else 1.0

    def bound(self) -> float:
        """The part of greedy's worker time, priced, that is waiting."""
        needs, prices = self.needs(), self.prices()
        paid = sum(max(needs) * price for price in prices)
        return 1 - sum(need * price for need, price in zip(needs, prices, strict=True)) / paid


SETTINGS = (
    Setting("even", (0.5, 0.5), (1.0, 1.0)),
    Setting("power 1:2", (0.5, 0.5), (1.0, 2.0)),
    Setting("data 2:1", (2 / 3, 1 / 3), (1.0, 1.0)),
    Setting("data 2:1, power 1:2", (2 / 3, 1 / 3), (1.0, 2.0)),
    Setting("data 2:1, power 1:2, prices 1:3", (2 / 3, 1 / 3), (1.0, 2.0), dear=True),
    Setting("power 1:2, prices 1:3", (0.5, 0.5), (1.0, 2.0), dear=True),
)
QUICK = (4,)


def main() -> int:
    given = options(__doc__)
    report = Report("cloudless", given.quick)
    link = EmulatedLink(rate_mbps=100.0, delay_ms=25.0)
    sites = (CONTROL, *REGIONS)
    links = {(a, b): EmulatedLink() if CONTROL in (a, b) else link for a in sites for b in sites if a != b}
    profile = WanProfile("two", "Two regions, 100 Mbit/s and 50 ms", "a measurement's own", REGIONS, links)
    chosen = [SETTINGS[n] for n in QUICK] if given.quick else SETTINGS
    print(f"{'setting':<34}{'way':<10}{'workers':>8}{'time s':>8}{'USD':>10}{'saved':>8}{'bound':>7}{'accuracy':>10}")
    for setting in chosen:
        with tempfile.TemporaryDirectory() as place, Emulator(profile, state_dir=Path(place) / "emulator") as emulator:
            folder = Path(place)
            with LocalFederation(folder / "federation", _sites(folder, setting), emulator=emulator) as federation:
                runs = _compare(Running(federation, folder), setting, given.quick)
            report.details["backend"] = getattr(emulator, "backend", "")
        report.runs += runs
        _print(setting, runs)
    report.bars += _bars(report.runs, given.quick)
    return report.close(given.json)


def _sites(folder: Path, setting: Setting) -> list[RegionSite]:
    digits = read_digits(1)
    order = np.random.default_rng(1).permutation(len(digits.train.y))
    cut = round(len(order) * setting.data[0])
    made = []
    for number, (name, mine) in enumerate(zip(REGIONS, (order[:cut], order[cut:]), strict=True)):
        place = folder / "data" / name
        place.mkdir(parents=True)
        splits = {}
        halves = np.arange(number, len(digits.test.y), 2)
        for split, part in (("train", digits.train.take(mine)), ("test", digits.test.take(halves))):
            np.savez(place / f"{split}.npz", x=part.x, y=part.y)
            splits[split] = {"uri": str(place / f"{split}.npz"), "samples": len(part.y)}
        factor = setting.prices()[number]
        prices = PRICES | {"functionUsdPerGbSecond": PRICES["functionUsdPerGbSecond"] * factor}
        config = {
            "cloud": "test",
            "capacity": {"workers": WORKERS, "memoryMb": 1024},
            "prices": prices,
            "datasets": {"digits": {"splits": splits}},
            "channel": {"kind": "file", "path": str(folder / "channels" / name)},
        }
        made.append(RegionSite(name, config))
    return made


def _compare(running: Running, setting: Setting, quick: bool) -> list[dict[str, Any]]:
    ms = {name: SLOW_MS / power for name, power in zip(REGIONS, setting.power, strict=True)}
    task = (TEMPLATES / "image-classification" / "task.py").read_text() + THROTTLED.replace("MS[", f"{ms}[")
    common = (f"train.batch={BATCH}", "train.evaluateEvery=0", 'task.config={"width": 4, "lr": 0.05}')
    _run(running, task, *common, "train.end.epochs=2")
    ways = {
        "greedy": (_numbers((WORKERS, WORKERS)),),
        "matching": (_numbers(setting.matched()),),
        "ours": ("train.workers=auto", "objective.minimise=time"),
        "cheap": ("train.workers=auto", "objective.minimise=cost"),
    }
    runs = []
    for repeat in range(1 if quick else REPEATS):
        for way, settings in ways.items():
            length = f"train.end.epochs={QUICK_EPOCHS if quick else EPOCHS}"
            ended = _run(running, task, *common, length, f"train.seed={repeat + 1}", *settings)
            result = ended["result"]
            runs.append(
                {
                    "setting": asdict(setting),
                    "bound": setting.bound(),
                    "way": way,
                    "repeat": repeat,
                    "workers": {part["region"]: part["workers"] for part in ended["plan"]["partitions"]},
                    "seconds": result["seconds"],
                    "training_seconds": result["training_seconds"],
                    "usd": result["usd"],
                    "accuracy": result["metrics"]["accuracy"],
                    "predicted": result["predicted"],
                    "samples": sum(region["samples"] for region in result["regions"]),
                }
            )
    return runs


def _numbers(workers: tuple[int, ...]) -> str:
    return "train.workers={" + ", ".join(f"{n}: {w}" for n, w in zip(REGIONS, workers, strict=True)) + "}"


def _run(running: Running, task: str, *settings: str) -> dict[str, Any]:
    ended = running.wait_end(running.submit(*settings, task=task), seconds=300)
    if ended["state"] != "succeeded":
        raise SystemExit(f"the job has {ended['state']}: {ended['error']}")
    return ended


def _of(runs: list[dict[str, Any]], way: str, key: str) -> float:
    return statistics.median(run[key] for run in runs if run["way"] == way)


def _saved(runs: list[dict[str, Any]], way: str) -> float:
    return 1 - _of(runs, way, "usd") / _of(runs, "greedy", "usd")


def _print(setting: Setting, runs: list[dict[str, Any]]) -> None:
    for way in ("greedy", "matching", "ours", "cheap"):
        workers = next("+".join(map(str, run["workers"].values())) for run in runs if run["way"] == way)
        print(
            f"{setting.name:<34}{way:<10}{workers:>8}{_of(runs, way, 'seconds'):>8.1f}{_of(runs, way, 'usd'):>10.5f}"
            f"{_saved(runs, way):>8.1%}{setting.bound():>7.0%}{_of(runs, way, 'accuracy'):>10.3f}",
            flush=True,
        )


def _bars(runs: list[dict[str, Any]], quick: bool) -> list[Bar]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run["setting"]["name"], []).append(run)
    uneven = [group for group in groups.values() if group[0]["bound"] * 100 >= PUBLISHED]
    dear = [group for group in uneven if group[0]["setting"]["dear"]]
    auto = [run for run in runs if run["way"] in ("ours", "cheap")]
    off = {key: [abs(run["predicted"][key]["expected"] / run[key] - 1) for run in auto] for key in ("seconds", "usd")}
    makespan = [_of(group, "ours", "seconds") / _of(group, "greedy", "seconds") for group in groups.values()]
    lost = [
        _of(group, "greedy", "accuracy") - _of(group, way, "accuracy")
        for group in groups.values()
        for way in ("ours", "cheap")
    ]
    learnt = Bar.at_most("accuracy lost against greedy, worst", 100 * max(lost), "points", 1.0)
    return [
        Bar.at_least("matching saves, least of the uneven", 100 * min(_saved(g, "matching") for g in uneven), "%", 9.2),
        Bar.at_least("ours saves, least where prices differ", 100 * min(_saved(g, "ours") for g in dear), "%", 30.0),
        Bar.at_most("makespan of ours over greedy's, worst", max(makespan), "x", 1.05),
        *(() if quick else (learnt,)),
        Bar.at_most("predicted time off by, worst", 100 * max(off["seconds"]), "%", 10.0),
        Bar.at_most("predicted money off by, worst", 100 * max(off["usd"]), "%", 10.0),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
