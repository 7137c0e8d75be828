"""`simulate`: run a trace of jobs with deadlines under several scheduling policies."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data, seconds_text
from control_plane.cli._options import Output
from control_plane.cli._output import columns, emit, say, unwritable
from control_plane.cli._settings import Format, is_interactive
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from scheduler.simulate import SimulationRun, Tables, TraceJob

_CLUSTER = re.compile(r"([1-9]\d*)x([1-9]\d*)")
_MAX_DEVICES = 1 << 16
"""Limit of NODES times DEVICES; it bounds the simulation's memory."""
_LINE_SECONDS = 10.0
"""Time between two lines of progress where stderr is no terminal."""
_DEFAULT_POLICIES = ["geofed", "elasticflow"]


_TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="CSV file with the columns of ElasticFlow's or Chronus' traces.", show_default=False
    ),
]
_SpeedsFolder = Annotated[
    Path | None,
    typer.Option(
        "--speeds", metavar="DIR", help="Folder with speeds as MODEL.csv, instead of --device.", show_default=False
    ),
]
_CsvFile = Annotated[
    Path | None,
    typer.Option("--csv", metavar="FILE", help="Write a row for each job and policy to this file.", show_default=False),
]


@dataclass(frozen=True)
class _Scenario:
    """A trace, a cluster, and what goes wrong there: the same for all policies."""

    jobs: Sequence[TraceJob]
    nodes: int
    per_node: int
    slot_s: float
    own_pauses: bool
    """A change of allocation pauses only the jobs that it changes."""
    curve_error: float
    failures: float
    """Node failures per 1,000 device hours."""
    seed: int

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def run(self, policy: str) -> SimulationRun:
        """Run the trace under a policy."""
        from scheduler.lab.policies import policy_named
        from scheduler.simulate import Incidents
        from scheduler.simulate import simulate as run_trace

        chosen, pauses = policy_named(
            policy, self.devices, self.slot_s, everyone=not self.own_pauses, curve_error=self.curve_error
        )
        incidents = Incidents(self.failures / 1000, seed=self.seed)
        with _progress(policy, len(self.jobs)) as report:
            return run_trace(
                self.jobs, chosen, self.nodes, self.per_node, pauses, incidents, self.curve_error, self.seed, report
            )


def simulate(
    trace: _TraceFile,
    cluster: Annotated[str, typer.Option("--cluster", metavar="NODESxDEVICES", help="Size of the cluster, like 16x4.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Policy, or `all`; may be repeated. Default: geofed, elasticflow."),
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", help="Device whose speeds to use: ../throughputs_DEVICE next to the trace's folder."),
    ] = "T4",
    speeds: _SpeedsFolder = None,
    slot: Annotated[float, typer.Option("--slot", min=1, help="Seconds between decisions of slotted policies.")] = 60.0,
    own_pauses: Annotated[
        bool, typer.Option("--own-pauses", help="A change of allocation pauses only the jobs that it changes, not all.")
    ] = False,
    curve_error: Annotated[
        float, typer.Option("--curve-error", min=0, max=0.5, help="Relative error of the speeds that policies see.")
    ] = 0.0,
    failures: Annotated[float, typer.Option("--failures", min=0, help="Node failures per 1,000 device hours.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of errors and failures.")] = 1,
    bound: Annotated[bool, typer.Option("--ceiling", help="Also compute an upper bound for any scheduler.")] = False,
    csv_file: _CsvFile = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the results as SVG to this file.", show_default=False),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Simulate a trace of jobs with deadlines under several scheduling policies."""
    from scheduler.lab.policies import ceiling

    nodes, per_node = _cluster(cluster)
    names = _policies(policy or _DEFAULT_POLICIES)
    jobs = _jobs(trace, speeds or trace.resolve().parent.parent / f"throughputs_{device}")
    scenario = _Scenario(jobs, nodes, per_node, slot, own_pauses, curve_error, failures, seed)
    runs = [scenario.run(name) for name in names]
    if csv_file is not None:
        _write_csv(csv_file, runs)
    if plot is not None:
        _write_plot(plot, runs)
    if bound:
        say("computing the upper bound for any scheduler")
    most = ceiling(jobs, scenario.devices) if bound else None
    data = [_view(run, None if most is None else most.met) for run in runs]
    emit(data, table=_table, name=lambda view: str(view["policy"]))


def _cluster(text: str) -> tuple[int, int]:
    match = _CLUSTER.fullmatch(text)
    if match is None or int(match[1]) * int(match[2]) > _MAX_DEVICES:
        raise GeofedError(
            "USAGE", f"{text!r} is not a valid cluster", hint=f"write it like 16x4, with at most {_MAX_DEVICES} devices"
        )
    return int(match[1]), int(match[2])


def _policies(names: Sequence[str]) -> list[str]:
    from scheduler.lab.policies import POLICIES

    if "all" in names:
        return list(POLICIES)
    for name in names:
        if name not in POLICIES:
            raise GeofedError("USAGE", f"unknown policy {name}", hint=f"known policies: {', '.join(POLICIES)}, or all")
    return list(dict.fromkeys(names))


def _jobs(trace: Path, speeds: Path) -> list[TraceJob]:
    from scheduler.simulate import TraceError, read_trace

    try:
        with trace.open(encoding="utf-8", newline="") as lines:
            jobs = read_trace(lines, _tables(speeds), str(trace))
    except TraceError as error:
        hint = "correct the file; its columns are in docs/deadlines.md, `The trace`"
        if "no speeds for" in str(error):
            hint = f"name the folder with MODEL.csv by --speeds; it was {speeds}"
        raise GeofedError("CONFIG_INVALID", str(error), hint=hint) from None
    except UnicodeDecodeError:
        raise GeofedError("CONFIG_INVALID", f"{trace} is not UTF-8 text", hint="name a CSV file") from None
    except OSError as error:
        raise GeofedError(
            "USAGE", f"cannot read {error.filename or trace}: {error.strerror}", hint="name a file"
        ) from None
    if not jobs:
        raise GeofedError("CONFIG_INVALID", f"{trace} has no jobs", hint="a trace has a row for each job")
    return jobs


def _tables(folder: Path) -> Tables:
    """Read the speeds in a folder; empty if it does not exist, since some traces need none."""
    from scheduler.simulate import read_table

    found: dict[tuple[str, int], dict[int, float]] = {}
    for file in sorted(folder.glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            found |= read_table(lines, file.stem, str(file))
    return found


class _Bar:
    """A progress bar on stderr."""

    def __init__(self, name: str, jobs: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(name, total=jobs)

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        return lambda done, jobs: self._progress.update(self._task, completed=done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class PlainProgress:
    """Writes a line to stderr every ten seconds, with an estimate of the time left."""

    def __init__(
        self, name: str, now: Callable[[], float] = time.monotonic, write: Callable[[str], None] = say
    ) -> None:
        self._name, self._now, self._write = name, now, write
        self._begun = self._said = now()

    def __call__(self, done: int, jobs: int) -> None:
        """Report that so many jobs of the trace have ended."""
        now = self._now()
        if now - self._said < _LINE_SECONDS or not done:
            return
        self._said = now
        left = (now - self._begun) / done * (jobs - done)
        self._write(f"{self._name}: {done:,} of {jobs:,} jobs, about {seconds_text(left)} left")


def _progress(name: str, jobs: int) -> AbstractContextManager[Callable[[int, int], None]]:
    return _Bar(name, jobs) if is_interactive() else nullcontext(PlainProgress(name))


def _write_csv(path: Path, runs: Sequence[SimulationRun]) -> None:
    from scheduler.simulate import outcome_rows

    rows = [row for number, run in enumerate(runs) for row in outcome_rows(run)[bool(number) :]]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)
    except OSError as error:
        raise unwritable(path, error) from None
    say(f"wrote {path}")


def _write_plot(path: Path, runs: Sequence[SimulationRun]) -> None:
    from scheduler.simulate import chart

    try:
        path.write_text(chart(runs), encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from None
    say(f"wrote {path}")


def _view(run: SimulationRun, most: float | None) -> Data:
    view: Data = {
        "policy": run.policy,
        "jobs": len(run.outcomes),
        "with_deadline": sum(not job.best_effort for job in run.outcomes),
        "met": run.met,
        "ratio": run.ratio,
        "promised": run.promised,
        "broken": run.broken,
        "declined": sum(job.declined for job in run.outcomes),
        "value": sum(job.value for job in run.outcomes),
        "device_hours": sum(job.device_s for job in run.outcomes) / 3600,
        "changes": run.changes,
        "moved": run.moved,
        "failures": run.failures,
    }
    if most is not None:
        view["ceiling"] = most
    return view


def _table(views: Sequence[Data]) -> str:
    heads = ["POLICY", "MET", "JOBS", "RATIO", "PROMISED", "BROKEN", "DECLINED", "VALUE", "DEVICE HOURS"]
    rows = [
        [
            view["policy"], view["met"], view["with_deadline"], f"{100 * view['ratio']:.1f}", view["promised"],
            view["broken"], view["declined"], f"{view['value']:.0f}", f"{view['device_hours']:.0f}",
        ]
        for view in views
    ]  # fmt: skip
    if views and "ceiling" in views[0]:
        heads.append("CEILING")
        for row, view in zip(rows, views, strict=True):
            row.append(f"{view['ceiling']:.1f}")
    return columns(heads, rows)
