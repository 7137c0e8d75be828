"""Three regions with background exchange over the emulated WAN while links and processes fail: no update may be lost.

    .venv/bin/python tests/bench/wan_resilience.py [--quick] [--json PATH] [--only SCRIPT] [--codec NAME] [--turns N]
        [--waiting NAME=VALUE,...]

Each region is a real parameter server and a worker whose compute is sleep, 50 ms a step and 10 steps a round. A script
of faults and the same time without any are run in turn, in the first three quarters of a job: in the last one all
regions wait for each other (docs/wan.md), so that a fault there takes from all what it takes from one. What counts as
lost, or as merged twice, is read from the servers' own logs and checkpoints, and from the model that every region ends
with. A region has rejoined when it holds all that the others had made when the fault was over, and they all that it
had.

With `--quick` it takes 3 minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import Bar, Report, options, waiting_option
from wan_resilience_faults import Window, strike
from wan_resilience_federation import REGIONS, Federation, Shape, profile
from wan_resilience_site import serve

from deploy.emulator import Emulator

SIZE, STEPS_PER_ROUND, STEP_SECONDS = 1_000_000, 10, 0.05
WARM_ROUNDS, USUAL_SECONDS, MARGIN_SECONDS, QUICK_CALM_SECONDS = 3, 3.0, 2.0, 8.0
FIRST_QUARTERS = 0.75
"""Of a job, in which faults are struck."""
PATIENCE_SECONDS, QUICK_PATIENCE_SECONDS = 60.0, 20.0
"""A rejoin that takes longer is not followed to its end."""
LEAST_SPAN_SECONDS = 4.0
"""Speeds are not told of less."""
AGREE, SLOW_DOWN_PERCENT, REJOIN_SECONDS, GOODPUT = 1e-5, 2.0, 5.0, 0.88
MODEL_OFF = {"int8": 1e-5, "topk": 1e-2}
"""Relative. What `topk` has held back goes with a region's last update as int8, which leaves a rest."""


@dataclass(frozen=True)
class Step:
    """Of a script."""

    fault: str
    victim: str
    seconds: float
    rest: float = 6.0


@dataclass(frozen=True)
class Script:
    """Faults, one after the other."""

    name: str
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        return sum(step.seconds + step.rest for step in self.steps)


CHURN = Script(
    "churn",
    (
        Step("partition", "west", 8),
        Step("killed server", "north", 1),
        Step("flapping", "east", 8),
        Step("stopped worker", "west", 3),
        Step("one way", "north", 6),
        Step("stopped server", "east", 3),
        Step("loss", "west", 6),
        Step("killed server", "west", 1),
    ),
)
SCRIPTS = (
    Script("partition", (Step("partition", "west", 60, 15),)),
    Script("one way", (Step("one way", "west", 30, 10),)),
    Script("flapping", (Step("flapping", "west", 30, 10),)),
    Script("loss", (Step("loss", "west", 30, 10),)),
    Script("killed server", tuple(Step("killed server", victim, 1, 8) for victim in REGIONS)),
    Script("stopped server", (Step("stopped server", "west", 10, 10),)),
    Script("stopped worker", (Step("stopped worker", "west", 10, 10),)),
    CHURN,
)
QUICK = {
    "topk": Script(
        "churn",
        (
            Step("partition", "west", 15, 5),
            Step("killed server", "north", 1, 4),
            Step("flapping", "east", 4, 3),
            Step("stopped server", "west", 3, 3),
            Step("loss", "north", 3, 2),
        ),
    ),
    "int8": Script("partition", (Step("partition", "west", 15, 5),)),
}


def main() -> int:
    given = options(__doc__, more=_more)
    report = Report("wan_resilience", given.quick)
    codecs = [given.codec] if given.codec else ["topk", "int8"]
    with tempfile.TemporaryDirectory() as folder, Emulator(profile()) as emulator:
        _calibrate(emulator, report, "before", given.quick)
        for codec in codecs:
            scripts = (QUICK[codec],) if given.quick and not given.only else SCRIPTS
            for script in scripts:
                if given.only in (None, script.name):
                    place = Path(folder) / codec / script.name
                    _compare(emulator, place, script, codec, given, report)
        _calibrate(emulator, report, "after", given.quick)
    return report.close(given.json)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="SCRIPT", choices=[script.name for script in SCRIPTS], help="one script")
    parser.add_argument("--codec", choices=["topk", "int8"], help="one codec")
    waiting_option(parser)
    parser.add_argument("--turns", type=int, default=0, help="undisturbed and disturbed runs of each; default 2, or 1")


def _calibrate(emulator: Emulator, report: Report, when: str, quick: bool) -> None:
    links = [("west", "east")] if quick else None
    calibration = emulator.calibrate(seconds=1.0 if quick else 2.0, links=links)
    report.runs.append({"calibration": when, **calibration.as_dict()})
    report.details["backend"] = calibration.backend
    told = [f"{link.measured_mbps:.1f} Mbit/s, {link.measured_rtt_ms:.1f} ms" for link in calibration.links]
    print(f"{calibration.backend}, {when}: {'; '.join(told)}{'' if calibration.ok else '  OFF'}")


@dataclass
class Outcome:
    """Of one run."""

    speeds: dict[str, float]
    """Steps a second of each region, while the script continued."""
    goodput: float
    windows: list[Window]
    fault_speeds: list[dict[str, float]]
    """During each fault."""
    round_seconds: dict[str, float]
    """Median of each region while the script continued; other work on the machine moves it less than a mean."""
    fault_round_seconds: list[dict[str, float]]
    result: dict[str, Any]


def _compare(
    emulator: Emulator, folder: Path, script: Script, codec: str, given: argparse.Namespace, report: Report
) -> None:
    turns = given.turns or (1 if given.quick else 2)
    calm: list[Outcome] = []
    struck: list[Outcome] = []
    for turn in range(turns):
        for disturbed in (False, True):
            place = folder / f"{turn}-{disturbed}"
            outcome = _run(emulator, place, script, codec, disturbed, given.quick, given.waiting)
            (struck if disturbed else calm).append(outcome)
            report.runs.append(
                {
                    "script": script.name, "steps": [asdict(step) for step in script.steps], "codec": codec,
                    "disturbed": disturbed, "speeds": outcome.speeds, "goodput": outcome.goodput,
                    "windows": [window.as_dict() for window in outcome.windows],
                    "fault_speeds": outcome.fault_speeds, "round_seconds": outcome.round_seconds,
                    "fault_round_seconds": outcome.fault_round_seconds, **outcome.result,
                }
            )  # fmt: skip
            _tell(script, codec, disturbed, outcome)
    _judge(script, codec, calm, struck, report)


def _run(
    emulator: Emulator,
    folder: Path,
    script: Script,
    codec: str,
    disturbed: bool,
    quick: bool,
    waiting: dict[str, float],
) -> Outcome:
    seconds = min(script.seconds, QUICK_CALM_SECONDS) if quick and not disturbed else script.seconds
    round_seconds = STEPS_PER_ROUND * STEP_SECONDS
    rounds = round((WARM_ROUNDS + (USUAL_SECONDS + seconds + MARGIN_SECONDS) / round_seconds) / FIRST_QUARTERS)
    federation = Federation(emulator, folder, Shape(codec, SIZE, rounds, STEPS_PER_ROUND, STEP_SECONDS, waiting))
    windows: list[Window] = []
    try:
        federation.until(lambda: min(federation.ended().values()) >= WARM_ROUNDS, 60.0)
        first, at = federation.wire_bytes(), time.monotonic()
        federation.wait(USUAL_SECONDS)
        passed, begun = time.monotonic() - at, time.monotonic()
        usual = {link: (count - first[link]) / passed for link, count in federation.wire_bytes().items()}
        if disturbed:
            for step in script.steps:
                patience = QUICK_PATIENCE_SECONDS if quick else PATIENCE_SECONDS
                windows.append(strike(federation, step.fault, step.victim, step.seconds, step.rest, usual, patience))
        else:
            federation.wait(seconds)
        ended = time.monotonic()
        result = federation.finish()
        events = {name: region.events() for name, region in federation.regions.items()}
    except BaseException:
        _show_logs(folder)
        raise
    finally:
        federation.close()
    result["usual_bytes_per_second"] = usual
    result["logs"] = {name: (folder / name / "server.log").read_text()[-4000:] for name in REGIONS}
    result["load"] = os.getloadavg()[0]
    result["rounds"] = events
    spans = [(window.begun, max(window.healed, window.begun + LEAST_SPAN_SECONDS)) for window in windows]
    # A rejoin may outlast the job: only what the worker had to do counts.
    over = min(ended, *(found[-2]["answered"] for found in events.values() if len(found) > 1))
    made = sum(_steps(found, begun, over) for found in events.values())
    return Outcome(
        {name: _speed(found, begun, over) for name, found in events.items()},
        made * STEP_SECONDS / ((over - begun) * len(REGIONS)),
        windows,
        [{name: _speed(found, *span) for name, found in events.items()} for span in spans],
        {name: _median_round(found, begun, over) for name, found in events.items()},
        [{name: _median_round(found, *span) for name, found in events.items()} for span in spans],
        result,
    )


def _show_logs(folder: Path) -> None:
    for path in sorted(folder.glob("*/*.log")):
        print(f"--- {path}\n{path.read_text()[-2000:]}", file=sys.stderr)


def _steps(events: list[dict[str, Any]], begin: float, end: float) -> float:
    """Made between two moments; of a round that lies across one of them, its share."""
    found = 0.0
    for event in events:
        if "round" in event:
            inside = min(event["answered"], end) - max(event["begun"], begin)
            found += max(0.0, inside) / (event["answered"] - event["begun"]) * STEPS_PER_ROUND
    return found


def _speed(events: list[dict[str, Any]], begin: float, end: float) -> float:
    return _steps(events, begin, end) / (end - begin)


def _median_round(events: list[dict[str, Any]], begin: float, end: float) -> float:
    took = [e["answered"] - e["begun"] for e in events if "round" in e and e["begun"] < end and e["answered"] > begin]
    return statistics.median(took) if took else math.inf


def _tell(script: Script, codec: str, disturbed: bool, outcome: Outcome) -> None:
    speeds = ", ".join(f"{speed:.2f}" for speed in outcome.speeds.values())
    kind = "disturbed" if disturbed else "calm"
    print(f"{script.name}, {codec}, {kind}: {speeds} steps/s, goodput {outcome.goodput:.3f}")
    for window, found in zip(outcome.windows, outcome.fault_speeds, strict=True):
        took = ", ".join(
            f"{link} {'-' if s is None else f'{s:.1f}'} s, "
            f"{window.rejoin_wire_bytes.get(_link_of(link), 0) / 1e6:.1f} MB"
            for link, s in window.rejoin_seconds.items()
        )
        at = ", ".join(f"{speed:.2f}" for speed in found.values())
        print(f"  {window.fault} of {window.victim}, {window.healed - window.begun:.1f} s ({at} steps/s): {took}")
    for name, found in outcome.result["regions"].items():
        if any(found[key] for key in ("lost", "twice", "applied_off", "marks_off", "failed")):
            print(f"  {name}: { ({key: found[key] for key in found if key != 'status'}) }, {found['status']}")


def _link_of(pair: str) -> str:
    """The directed link that brings what "who<whose" waits for."""
    who, whose = pair.split("<")
    return f"{whose}-{who}"


def _judge(script: Script, codec: str, calm: list[Outcome], struck: list[Outcome], report: Report) -> None:
    at = f"{script.name}, {codec}"
    regions = [found for outcome in (*calm, *struck) for found in outcome.result["regions"].values()]
    refused = sum(sum(found["status"].get("refused", {}).values()) for found in regions)
    lost = refused + sum(max(found["lost"], abs(found["applied_off"]), found["marks_off"]) for found in regions)
    report.bars += [
        Bar.at_most(f"{at}: updates lost", lost, "", 0),
        Bar.at_most(f"{at}: updates applied twice", sum(found["twice"] for found in regions), "", 0),
        Bar.at_most(f"{at}: final models off by", max(found["model_off"] for found in regions), "", MODEL_OFF[codec]),
        Bar.at_most(
            f"{at}: final models differ by", max(outcome.result["differ"] for outcome in (*calm, *struck)), "", AGREE
        ),
        Bar.at_most(f"{at}: the others slower by", _slow_down(calm, struck), "%", SLOW_DOWN_PERCENT),
    ]
    report.details[f"{at}: the others slower by, by median rounds, %"] = _slow_down_of_rounds(calm, struck)
    names = dict.fromkeys(step.fault for step in script.steps)
    for name in names:
        windows = [window for outcome in struck for window in outcome.windows if window.fault == name]
        worst = max(window.worst for window in windows)
        moved = max(window.moved for window in windows)
        copies = moved / (4.0 * SIZE)
        where = at if len(names) == 1 else f"{at}, {name}"
        report.bars += [
            Bar.at_most(f"{where}: rejoined after", worst, "s", REJOIN_SECONDS),
            Bar.at_most(f"{where}: moved for it on a link", copies, "float32 models", 1.0),
        ]
    if script.name == "churn":
        value = statistics.median(outcome.goodput for outcome in struck)
        report.bars.append(Bar.at_least(f"{at}: goodput", value, "", GOODPUT))
        report.details[f"{at}: goodput without faults"] = statistics.median(outcome.goodput for outcome in calm)


def _slow_down(calm: list[Outcome], struck: list[Outcome]) -> float:
    """Per cent by which regions that a fault did not befall were slower during it."""
    usual = {name: statistics.median(outcome.speeds[name] for outcome in calm) for name in REGIONS}
    ratios: list[tuple[float, float]] = []
    for outcome in struck:
        for window, speeds in zip(outcome.windows, outcome.fault_speeds, strict=True):
            seconds = max(window.healed - window.begun, LEAST_SPAN_SECONDS)
            ratios += [(speeds[name] / usual[name], seconds) for name in REGIONS if name != window.victim]
    return 100.0 * (1.0 - sum(r * s for r, s in ratios) / sum(s for _, s in ratios))


def _slow_down_of_rounds(calm: list[Outcome], struck: list[Outcome]) -> float:
    """The same by the median of rounds, the worst of all faults and regions."""
    usual = {name: statistics.median(outcome.round_seconds[name] for outcome in calm) for name in REGIONS}
    return 100.0 * max(
        rounds[name] / usual[name] - 1.0
        for outcome in struck
        for window, rounds in zip(outcome.windows, outcome.fault_round_seconds, strict=True)
        for name in REGIONS
        if name != window.victim
    )


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2]) if sys.argv[1:2] == ["--site"] else main())
