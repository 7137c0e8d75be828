"""Training speed of three regions over an emulated WAN: steps per second of the slowest, and bytes between them per
step.

    .venv/bin/python tests/bench/wan_speed.py [--quick] [--json PATH] [--only NAME,...] [--repetitions N]
        [--rate-mbps R] [--rtt-ms R] [--compute-ms T] [--peers-dir DIR] [--waiting NAME=VALUE,...]

The tensors are those of ResNet-18 for CIFAR (62, 11.17 M coordinates, 44.7 MB); a step's compute is a calibrated sleep;
methods with local steps exchange every 20. Each rival runs by its own published package in the same namespaces, its
virtual environment made on first use. All contenders run in turn, as often as asked; medians are compared.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import contenders_peers
import peer_environments
from contender import REGIONS, Contender, Run, Setting, measure
from report import Report, options, waiting_option
from wan_bars import BOUND, FAT, LOCAL, WAN, bars, medians

from deploy.emulator import Emulator

REPETITIONS = 2
ATTEMPTS = 2
"""For each run: a start that fails, as hivemind's does now and then on a busy machine, is recorded and repeated."""


def main() -> int:
    given = options(__doc__, more=_more)
    reason = Emulator.supported()
    if reason is not None:
        print(f"the emulator cannot run here: {reason}", file=sys.stderr)
        return 2
    contenders = _contenders(given)
    report = Report("wan_speed", given.quick)
    missing = report.details["not_run"] = {}
    usable = []
    for contender in contenders:
        try:
            contender.prepare()
        except (RuntimeError, OSError) as error:
            missing[contender.name] = str(error)
            print(f"{contender.name} is left out: {error}")
        else:
            usable.append(contender)
    report.details["versions"] = {contender.name: contender.versions() for contender in usable}
    calibrations = report.details["calibrations"] = []
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="geofed-bench-") as scratch:
        numbers = itertools.count()
        for setting in _settings(given):
            chosen = [one for one in usable if setting != FAT or one.kind != "rival" or given.only]
            for repetition in range(given.repetitions or (1 if given.quick else REPETITIONS)):
                with Emulator(setting.profile()) as emulator:
                    report.details["backend"] = emulator.backend
                    calibrations.append(_calibrate(emulator, setting, given.quick))
                    for contender in chosen:
                        for _ in range(ATTEMPTS):
                            folder = Path(scratch) / f"{next(numbers)}-{contender.name}"
                            patience_s = 10.0 if given.quick else 60.0
                            runs.append(measure(contender, emulator, setting, folder, repetition, patience_s))
                            _progress(runs[-1])
                            if not runs[-1].failure:
                                break
                    if not given.quick:
                        calibrations.append(_calibrate(emulator, setting, given.quick))
            _table(setting, [run for run in runs if Setting(**run.setting) == setting])
    report.runs = [asdict(run) for run in runs]
    report.bars = bars(runs)
    done = {(run.contender, Setting(**run.setting)) for run in runs if not run.failure}
    never = [run for run in runs if (run.contender, Setting(**run.setting)) not in done]
    return 1 if report.close(given.json) or never else 0


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="NAME,...", help="these contenders, in this order")
    parser.add_argument("--repetitions", type=int, metavar="N", help=f"runs of each ({REPETITIONS}; 1 with --quick)")
    parser.add_argument("--rate-mbps", type=float, metavar="R", help="one setting only: its rate, 0 for unshaped (100)")
    parser.add_argument("--rtt-ms", type=float, metavar="R", help="one setting only: its round trip (30)")
    parser.add_argument("--compute-ms", type=float, metavar="T", help="one setting only: a step's compute (50)")
    waiting_option(parser)
    parser.add_argument(
        "--peers-dir", type=Path, metavar="DIR", default=peer_environments.default_folder(), help="environments' folder"
    )


def _settings(given: argparse.Namespace) -> list[Setting]:
    if given.rate_mbps is None and given.rtt_ms is None and given.compute_ms is None:
        return [WAN[50.0]] if given.quick else [WAN[500.0], WAN[50.0], FAT, LOCAL]
    rate_mbps = 100.0 if given.rate_mbps is None else given.rate_mbps or None
    rtt_ms = (30.0 if rate_mbps else 0.0) if given.rtt_ms is None else given.rtt_ms
    return [Setting(rate_mbps, rtt_ms, 50.0 if given.compute_ms is None else given.compute_ms)]


def _contenders(given: argparse.Namespace) -> list[Contender]:
    found = [contenders_peers.bound(), *contenders_peers.rivals(given.peers_dir)]
    if importlib.util.find_spec("contenders_geofed") is not None:
        found += importlib.import_module("contenders_geofed").geofed_contenders(given)
    if given.only:
        by_name = {contender.name: contender for contender in found}
        unknown = [name for name in given.only.split(",") if name not in by_name]
        if unknown:
            sys.exit(f"no contender {unknown[0]!r}; there are: {', '.join(by_name)}")
        return [by_name[name] for name in given.only.split(",")]
    return [contender for contender in found if contender.quick or not given.quick]


def _calibrate(emulator: Emulator, setting: Setting, quick: bool) -> dict[str, Any]:
    """Links against the setting, recorded; a link that is off is told and kept in the file."""
    ring = [(REGIONS[index - 1], REGIONS[index]) for index in range(len(REGIONS))]
    began = time.monotonic()
    result = emulator.calibrate(seconds=1.0, links=ring if quick else None)
    for link in result.links:
        for fault in link.faults:
            print(f"calibration, {setting.name}: {link.src} to {link.dst}: {fault}")
    return {**result.as_dict(), "setting": asdict(setting), "took_s": round(time.monotonic() - began, 1)}


def _progress(run: Run) -> None:
    if run.failure:
        print(f"  {run.contender}: failed: {run.failure}", flush=True)
        return
    print(
        f"  {run.contender:<18} {run.steps_per_s:7.3f} steps/s  busy before {run.cores_busy_before:.2f}, "
        f"during {run.cores_busy:.2f} of cores, load {run.load:.1f}",
        flush=True,
    )


def _table(setting: Setting, runs: Sequence[Run]) -> None:
    rows = medians(runs).get(setting, {})
    bound = rows.get(BOUND)
    print(f"\n{setting.name}; {len(REGIONS)} regions, medians of the slowest region")
    print(f"{'':<18} {'steps/s':>8} {'range':>15} {'of bound':>9} {'exchange ms/step':>17} {'WAN MB/step':>12}")
    for name, speed in rows.items():
        own = [run for run in runs if run.contender == name and not run.failure]
        speeds = [run.steps_per_s for run in own]
        share = f"{speed / bound:9.3f}" if bound else f"{'':>9}"
        exchange = statistics.median(run.phase_ms("exchange") for run in own)
        moved = statistics.median(run.wan_bytes_per_step for run in own) / 1e6
        extent = f"{min(speeds):.3f}-{max(speeds):.3f}"
        print(f"{name:<18} {speed:8.3f} {extent:>15} {share} {exchange:17.1f} {moved:12.3f}")
    for name in dict.fromkeys(run.contender for run in runs if run.failure):
        print(f"{name:<18} {sum(bool(run.failure) for run in runs if run.contender == name)} run(s) failed")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
