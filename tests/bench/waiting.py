"""What each rule of the waiting policy is worth: the same jobs with it and without it.

    .venv/bin/python tests/bench/waiting.py [--quick] [--json PATH] [--rules NAME,...] [--scenarios TEXT]
        [--live FOLDER]

Jobs run in virtual time (`waiting_simulation.py`): real state machines of three regions, simulated workers, links and
faults, so that figures are exact and the same on any machine. Each rule is switched off by a setting
(`sync.ps.core.waiting_settings`). A change counts if it is beyond the range of the seeds with all rules. With
``--live``, `wan_resilience.py --quick` and `wan_speed.py --quick` run with each rule off as well, every third time with
all rules, and their JSON is put into the folder; that takes five minutes a rule.

With `--quick` it takes 2 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from report import Bar, Report, options
from waiting_simulation import Fault, Outcome, Scenario, simulated

from sync.ps.core.waiting_settings import WaitingSettings

SEEDS = 3
OFF: dict[str, float] = {
    "first_rounds_together": 0, "final_fraction_together": 0, "merge_waits": 0, "merge_follows_lag": 0,
    "max_lag_rounds": 1, "max_rejoin_lag_rounds": 0, "max_probation_rounds": 1, "far_ahead_rounds": 1e6,
    "max_waiting_updates": 1e6, "late_after_gaps": 1e6, "min_late_seconds": 0, "max_hold_gaps": 1e9,
    "due_after_gaps": 0, "heard_elsewhere_is_on_time": 0, "max_budget_rounds": 1e9,
    "min_budget_seconds": 0, "grace_rounds": 0, "alone_seconds": 0, "slower_factor": 1e9, "max_in_step_rounds": 1e9,
    "alone_gap_fraction": 0,
}  # fmt: skip
"""What switches each rule off."""
SCENARIOS = (
    Scenario("calm"),
    Scenario("late model", late_model_seconds=5.0),
    Scenario("slower region", factors={"west": 1.5}),
    Scenario("cut off", faults=(Fault("cut", "west", 15.0, 15.0),)),
    Scenario("all cut off", faults=(Fault("cut", "west", 15.0, 8.0), Fault("cut", "north", 15.0, 8.0))),
    Scenario("flapping", faults=(Fault("flapping", "west", 12.0, 20.0),)),
    Scenario("cut off again and again", faults=tuple(Fault("cut", "west", 8.0 + 7.0 * n, 3.5) for n in range(4))),
    Scenario("one way", faults=(Fault("one way", "west", 15.0, 15.0),)),
    Scenario("lossy link", faults=(Fault("lossy", "west", 15.0, 15.0),)),
    Scenario("stopped server", faults=(Fault("server", "west", 15.0, 3.0),)),
    Scenario("stopped worker", faults=(Fault("worker", "west", 15.0, 5.0),)),
    Scenario("short rounds, cut off", 300, 0.012, faults=(Fault("cut", "west", 6.0, 10.0),)),
    Scenario(
        "short rounds, unstable link", 500, 0.004, update_bytes=25_000,
        faults=tuple(Fault("cut", "west", 2.0 + 1.5 * n, 0.3 + 0.2 * n) for n in range(6)),
    ),
    Scenario(
        "short rounds, pauses", 500, 0.004, update_bytes=25_000,
        faults=tuple(Fault("server", "west", 2.0 + 0.7 * n, 0.15) for n in range(16)),
    ),
    Scenario("slower region, cut off", factors={"west": 1.5}, faults=(Fault("cut", "west", 15.0, 10.0),)),
)  # fmt: skip
FIGURES = {
    "end_seconds": (1, 0.1),
    "others_slower_percent": (2, 0.1),
    "rejoin_seconds": (1, 0.1),
    "distance_rounds": (2, 0.05),
}
"""Digits that are shown, and the least change that counts."""


def main() -> int:
    given = options(__doc__, more=_more)
    report = Report("waiting", given.quick)
    rules = given.rules.split(",") if given.rules else list(OFF)
    seeds = range(1 if given.quick else SEEDS)
    scenarios = [scenario for scenario in SCENARIOS[:: 3 if given.quick else 1] if given.scenarios in scenario.name]
    usual = _outcomes("all rules", {}, scenarios, seeds, report)
    worth: dict[str, list[str]] = {}
    for rule in rules:
        worth[rule] = _changes(usual, _outcomes(rule, {rule: OFF[rule]}, scenarios, seeds, report))
        print(f"{rule} off: {'; '.join(worth[rule]) or 'nothing changes'}", flush=True)
    report.details["worth"] = worth
    if given.live:
        _live(given.live, rules)
    for name in ("calm", "cut off", "flapping"):
        if name in usual:
            slower = max(outcome.others_slower_percent for outcome in usual[name])
            report.bars.append(Bar.at_most(f"{name}: the others slower by", slower, "%", 0.5))
    return report.close(given.json)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rules", metavar="NAME,...", help="these only")
    parser.add_argument("--scenarios", metavar="TEXT", default="", help="only those whose names contain this")
    parser.add_argument("--live", type=Path, metavar="FOLDER", help="run the live benchmarks too; put their JSON here")


def _outcomes(
    name: str, changed: dict[str, float], scenarios: Sequence[Scenario], seeds: range, report: Report
) -> dict[str, list[Outcome]]:
    waiting, found = WaitingSettings.of(changed), {}
    for scenario in scenarios:
        found[scenario.name] = [simulated(scenario, waiting, seed) for seed in seeds]
        for seed, outcome in zip(seeds, found[scenario.name], strict=True):
            report.runs.append({"off": name, "scenario": scenario.name, "seed": seed, **asdict(outcome)})
    return found


def _changes(usual: dict[str, list[Outcome]], without: dict[str, list[Outcome]]) -> list[str]:
    """Figures that differ by more than the seeds do."""
    found = []
    for scenario, outcomes in usual.items():
        for figure in (field.name for field in fields(Outcome)):
            digits, least = FIGURES[figure]
            before = [getattr(outcome, figure) for outcome in outcomes]
            after = [getattr(outcome, figure) for outcome in without[scenario]]
            change = statistics.mean(after) - statistics.mean(before)
            if abs(change) > max(least, max(before) - min(before)):
                name = figure.replace("_", " ")
                told = f"{statistics.mean(before):.{digits}f} to {statistics.mean(after):.{digits}f}"
                found.append(f"{scenario}, {name}: {told}")
    return found


def _live(folder: Path, rules: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[tuple[str, str]] = []
    for number, rule in enumerate(rules):
        if number % 2 == 0:
            runs.append((f"all-{number}", ""))
        runs.append((rule, f"{rule}={OFF[rule]:g}"))
    runs.append(("all-last", ""))
    for name, setting in runs:
        for bench, more in (("wan_resilience", []), ("wan_speed", ["--only", "bound,auto"])):
            argv = [sys.executable, str(Path(__file__).with_name(f"{bench}.py")), "--quick", *more]
            argv += ["--json", str(folder / f"{name}-{bench}.json"), *(["--waiting", setting] if setting else [])]
            subprocess.run(argv, check=False)


if __name__ == "__main__":
    sys.exit(main())
