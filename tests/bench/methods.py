"""The search against published rules that choose workers, each through `submit`: time and money by the meters.

    .venv/bin/python tests/bench/methods.py [--quick] [--json PATH] [--part regions|workers]

Regions: two regions of unequal data, speed and prices, over a WAN of 100 Mbit/s and 50 ms in the emulator. Load-power
matching (Cloudless-Training) and everything that is free (greedy) beside the search, which minimises
time under a budget: two thirds of what load-power matching may cost. All exchange every four steps, the more frequent
of the paper's two intervals.
Workers: one region whose workers merge over an S3 server that is as slow as S3 (`collectives_store.py`), four at most.
LambdaML's set-up (all workers, scatter-reduce) and FasDL's search beside ours, after a profile of the task.

Everything trains the image model on the digits, really; a sleep for each sample stands for the compute. All ways run in
turn. Prices are the regions' own, requests of the channel included.

With `--quick` it takes 3 minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collectives_live import store
from collectives_store import Shape
from report import Bar, Report, options
from support.running import PRICES, TEMPLATES, Running

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile
from deploy.local import LocalFederation, RegionSite
from deploy.shards import read_digits

REPEATS = 3
WORKERS = 4
BATCH = 16
REGIONS = {"east": (2 / 3, 4.0, 1.0), "west": (1 / 3, 2.0, 3.0)}
"""By region: part of the samples, milliseconds of a sample, and price of functions, against the first one."""
ALONE_MS = 2.0
"""Of a sample, in the single region."""
EPOCHS, QUICK_EPOCHS, QUICK_EPOCHS_ALONE = 12, 5, 3
WIDTH, INTERVAL = 32, 4
"""Of the model over two regions, 0.34 MB, and steps between exchanges."""
SHARE = 0.67
"""Of load-power matching's upper bound of cost: the search's budget."""
S3 = Shape(1, put_seconds=0.1, get_seconds=0.02, list_seconds=0.03, bytes_per_second=1e8, jitter=0.15)
CHANNEL_PRICES = {"source": "S3, us-east-1", "asOf": "2026-01", "usdPerHour": 0, "usdPerPut": 5e-6, "usdPerGet": 4e-7}
THROTTLED = """

_loss, _dataset, _region = loss, dataset, ""


def dataset(uri, split, config):
    global _region
    _region = uri.split("/")[-2]
    return _dataset(uri, split, config)


def loss(model, batch):
    import time

    time.sleep(len(batch[0]) * MS[_region] / 1e3)
    return _loss(model, batch)
"""


def _site(folder: Path, name: str, mine: Any, price: float, channel: dict[str, Any]) -> RegionSite:
    digits = read_digits(1)
    place = folder / "data" / name
    place.mkdir(parents=True)
    splits = {}
    for split, part in (("train", digits.train.take(mine)), ("test", digits.test)):
        np.savez(place / f"{split}.npz", x=part.x, y=part.y)
        splits[split] = {"uri": str(place / f"{split}.npz"), "samples": len(part.y)}
    function = PRICES["functionUsdPerGbSecond"] * price  # type: ignore[operator]
    return RegionSite(
        name,
        {
            "cloud": "test",
            "capacity": {"workers": WORKERS, "memoryMb": 1024},
            "prices": PRICES | {"functionUsdPerGbSecond": function},
            "datasets": {"digits": {"splits": splits}},
            "channel": channel,
        },
    )


def _task(ms: dict[str, float]) -> str:
    return (TEMPLATES / "image-classification" / "task.py").read_text() + THROTTLED.replace("MS[", f"{ms}[")


def _run(running: Running, way: str, task: str, *settings: str) -> dict[str, Any]:
    ended = running.wait_end(running.submit(*settings, task=task), seconds=400)
    if ended["state"] != "succeeded":
        raise SystemExit(f"{way}: the job has {ended['state']}: {ended['error']}")
    result, plan = ended["result"], ended["plan"]
    found = {
        "way": way,
        "seconds": result["seconds"],
        "training_seconds": result["training_seconds"],
        "usd": result["usd"],
        "wan_bytes": sum(result["wan_bytes"].values()),
        "accuracy": result["metrics"]["accuracy"],
        "predicted": {key: result["predicted"][key] for key in ("seconds", "usd")},
        "workers": {part["region"]: part["workers"] for part in plan["partitions"]},
        "plan": {key: plan[key] for key in ("interval", "codec", "collective", "topology")},
    }
    print(
        f"{way:<12}{found['seconds']:>8.1f} s{found['training_seconds']:>8.1f} s{found['usd']:>11.6f} USD"
        f"{found['wan_bytes'] / 1e6:>8.2f} MB  {found['accuracy']:.3f}  {found['workers']}  {found['plan']}",
        flush=True,
    )
    return found


@contextmanager
def _two_regions(folder: Path) -> Iterator[tuple[Running, Emulator]]:
    link, sites = EmulatedLink(rate_mbps=100.0, delay_ms=25.0), (CONTROL, *REGIONS)
    links = {(a, b): EmulatedLink() if CONTROL in (a, b) else link for a in sites for b in sites if a != b}
    profile = WanProfile("two", "Two regions, 100 Mbit/s and 50 ms", "a measurement's own", tuple(REGIONS), links)
    order = np.random.default_rng(1).permutation(len(read_digits(1).train.y))
    cuts = np.cumsum([round(len(order) * part) for part, _, _ in REGIONS.values()])[:-1]
    regions = [
        _site(folder, name, mine, price, {"kind": "file", "path": str(folder / "channels" / name)})
        for (name, (_, _, price)), mine in zip(REGIONS.items(), np.split(order, cuts), strict=True)
    ]
    with (
        Emulator(profile, state_dir=folder / "emulator") as emulator,
        LocalFederation(folder / "federation", regions, emulator=emulator) as federation,
    ):
        yield Running(federation, folder), emulator


def regions(report: Report) -> None:
    """Compare with load-power matching, live, where prices differ."""
    epochs, task = QUICK_EPOCHS if report.quick else EPOCHS, _task({name: ms for name, (_, ms, _) in REGIONS.items()})
    config = f'task.config={{"width": {WIDTH}, "lr": 0.05}}'
    common = (f"train.batch={BATCH}", "train.evaluateEvery=0", f"wan.interval={INTERVAL}", config)
    runs = []
    with tempfile.TemporaryDirectory() as place, _two_regions(Path(place)) as (running, emulator):
        report.details["backend"] = getattr(emulator, "backend", "")
        _run(running, "teaches", task, *common, "train.end.epochs=2")
        for _ in range(1 if report.quick else REPEATS):
            for way in ("greedy", "load-power", "auto"):
                settings = [f"train.end.epochs={epochs}", f"objective.method={way}"]
                if way == "auto":
                    most = SHARE * runs[-1]["predicted"]["usd"]["high"]
                    settings += ["objective.minimise=time", f"objective.budget={most:.9f}"]
                runs.append(_run(running, way, task, *common, *settings) | {"part": "regions"})
    report.runs += runs
    theirs, ours = (_medians(runs, way) for way in ("load-power", "auto"))
    saved = 100 * (1 - ours["usd"] / theirs["usd"])
    report.bars.append(Bar.at_least("cheaper than load-power matching, prices that differ", saved, "%", 30.0))
    ratio = ours["seconds"] / theirs["seconds"]
    report.bars.append(Bar.at_most("makespan, of load-power matching's", ratio, "", 1.0))


@contextmanager
def _one_region(folder: Path) -> Iterator[Running]:
    credentials = folder / "credentials"
    credentials.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    os.environ |= {"AWS_SHARED_CREDENTIALS_FILE": str(credentials)}
    with store(S3) as ports:
        channel = {
            "kind": "s3", "bucket": "bench", "endpointUrl": f"http://127.0.0.1:{ports[1]}", "region": "us-east-1",
            "pathStyle": True, "workerCredentialsFile": str(credentials), "prices": CHANNEL_PRICES,
        }  # fmt: skip
        site = _site(folder, "alone", np.arange(len(read_digits(1).train.y)), 1.0, channel)
        with LocalFederation(folder / "federation", [site]) as federation:
            yield Running(federation, folder)


def workers(report: Report) -> None:
    """Compare with LambdaML's set-up and FasDL's search in one region."""
    epochs, task = QUICK_EPOCHS_ALONE if report.quick else EPOCHS, _task({"alone": ALONE_MS})
    common = (f"train.batch={BATCH}", "train.evaluateEvery=0", 'task.config={"width": 8, "lr": 0.05}')
    ways = {
        "LambdaML": (f"train.workers={WORKERS}", "collective=scatter-reduce", "function.memoryMb=1024"),
        "FasDL": ("objective.method=fasdl",),
        "auto": (),
    }
    runs = []
    with tempfile.TemporaryDirectory() as place, _one_region(Path(place)) as running:
        job = running.job_folder(task) / "job.yaml"
        given = [part for setting in (*common, f"train.end.epochs={epochs}") for part in ("--set", setting)]
        running.federation.control_plane("profile", str(job), *given, timeout=300)
        for _ in range(1 if report.quick else REPEATS):
            for way, settings in ways.items():
                run = _run(running, way, task, *common, f"train.end.epochs={epochs}", *settings)
                runs.append(run | {"part": "workers"})
    report.runs += runs
    lambdaml, fasdl, ours = (_medians(runs, way) for way in ways)
    for key, what, least in (("training_seconds", "faster", 30.0), ("usd", "cheaper", 45.0)):
        gain = 100 * (1 - ours[key] / lambdaml[key])
        report.bars.append(Bar.at_least(f"{what} than LambdaML's scatter-reduce", gain, "%", least))
    report.bars.append(Bar.at_most("cost, of FasDL's", ours["usd"] / fasdl["usd"], "", 1.0))


def _medians(runs: list[dict[str, Any]], way: str) -> dict[str, float]:
    mine = [run for run in runs if run["way"] == way]
    return {key: statistics.median(run[key] for run in mine) for key in ("seconds", "training_seconds", "usd")}


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=("all", "regions", "workers"), default="all")


def main() -> int:
    """Run both parts."""
    given = options(__doc__, more=_more)
    report = Report("methods", given.quick)
    report.details["load"] = os.getloadavg()
    if given.part in ("all", "workers"):
        workers(report)
    if given.part in ("all", "regions"):
        regions(report)
    report.details["load_after"] = os.getloadavg()
    print(f"load: {report.details['load'][0]:.1f} before, {report.details['load_after'][0]:.1f} after")
    return report.close(given.json)


if __name__ == "__main__":
    raise SystemExit(main())
