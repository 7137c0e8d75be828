"""Traces of jobs with deadlines, in the formats in which they were published. The input is lines; no file is opened
here."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from scheduler.deadline import SpeedCurve, curve_from_table

Tables = Mapping[tuple[str, int], Mapping[int, float]]
"""Steps a second by devices, by model and global batch."""

_HEADERS = {
    "job": ("job_id",),
    "submit": ("submission_time", "submit_time"),
    "work": ("num_iteration", "iteration", "iterations"),
    "model": ("model_name",),
    "deadline": ("deadline", "ddl"),
    "batch": ("batch_size",),
    "devices": ("num_gpu",),
    "duration": ("duration",),
}
_CHRONUS = ("user", "expect_time_list", "expect_value_list", "job_type")


class TraceError(ValueError):
    """A file with invalid content; the message begins with file and line."""


@dataclass(frozen=True)
class TraceJob:
    """One job of a trace."""

    name: str
    submit_s: float
    work: float
    """Steps."""
    deadlines: tuple[tuple[float, float], ...]
    """(instant, value of ending by then), ascending; empty: best effort."""
    devices: int
    """Devices that its user asked for: the share under schedulers that do not scale."""
    duration_s: float
    """Seconds with these devices, alone."""
    curve: SpeedCurve
    """Its real speed: the Pareto levels."""
    table: Mapping[int, float]
    """Its real speed on every measured level, also on those that do not pay."""
    model: str = ""
    user: str = ""

    @property
    def deadline_s(self) -> float:
        """Its first deadline; infinite for best effort."""
        return self.deadlines[0][0] if self.deadlines else math.inf

    def value_at(self, end_s: float) -> float:
        """Return the value of ending at an instant."""
        return next((value for deadline_s, value in self.deadlines if end_s <= deadline_s + 1e-6), 0.0)


def read_table(lines: Iterable[str], model: str, source: str) -> dict[tuple[str, int], dict[int, float]]:
    """Read the speeds of one model: a row for each global batch, a column for each number of devices; blank, nan, 0:
    missing.

    Raises ``TraceError``.
    """
    rows = csv.reader(lines)
    head = next(rows, [])
    if not head or head[0] != "global_batch_size" or not all(cell.isdigit() for cell in head[1:]):
        raise TraceError(f"{source}:1: expected global_batch_size and numbers of devices as the heads")
    found: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        if not row:
            continue
        rates = {
            int(devices): _number(cell, source, rows.line_num, f"{devices} devices")
            for devices, cell in zip(head[1:], row[1:], strict=False)
            if cell.strip() and cell.strip() != "nan"
        }
        batch = int(_number(row[0], source, rows.line_num, "global_batch_size"))
        found[model, batch] = {devices: rate for devices, rate in rates.items() if rate > 0}
    return found


def read_trace(lines: Iterable[str], tables: Tables, source: str) -> list[TraceJob]:
    """Return the jobs by submission. Reads both headers of ElasticFlow's traces, and Chronus'.

    Chronus' jobs have no curve: theirs has one level, what they asked for, at the speed of their duration; those that
    asked for no device are omitted. Raises ``TraceError`` where a column or a value is missing or invalid, or a model
    has no table.
    """
    rows = csv.DictReader(lines)
    heads = list(rows.fieldnames or ())
    columns = {what: next((name for name in names if name in heads), "") for what, names in _HEADERS.items()}
    chronus = all(name in heads for name in _CHRONUS)
    lacking = [what for what, name in columns.items() if not name and not (chronus and what in ("deadline", "batch"))]
    if lacking:
        raise TraceError(
            f"{source}:1: no column for {', '.join(lacking)}; there are {', '.join(heads) or 'no columns at all'}"
        )
    jobs = list(_chronus(rows, columns, source) if chronus else _elasticflow(rows, columns, tables, source))
    if len({job.name for job in jobs}) < len(jobs):
        raise TraceError(f"{source}: two jobs have one job_id")
    return sorted(jobs, key=lambda job: job.submit_s)


def _elasticflow(
    rows: csv.DictReader[str], columns: Mapping[str, str], tables: Tables, source: str
) -> Iterator[TraceJob]:
    for row in rows:
        line = rows.line_num
        value = {
            what: _number(row[columns[what]], source, line, columns[what])
            for what in ("submit", "work", "deadline", "batch", "devices", "duration")
        }
        model, batch = row[columns["model"]], int(value["batch"])
        table = tables.get((model, batch))
        if table is None:
            known = ", ".join(sorted({name for name, _ in tables})) or "none"
            raise TraceError(f"{source}:{line}: no speeds for {model} with batch {batch}; models with speeds: {known}")
        curve = curve_from_table(table)
        if curve is None or value["work"] <= 0:
            raise TraceError(f"{source}:{line}: {model} has no measured speed, or the job no work")
        best_effort = (row.get("best_effort") or "0").strip() == "1"
        deadlines = () if best_effort else ((value["deadline"], 1.0),)
        yield TraceJob(
            row[columns["job"]], value["submit"], value["work"], deadlines,
            int(value["devices"]), value["duration"], curve, table, model,
        )  # fmt: skip


def _chronus(rows: csv.DictReader[str], columns: Mapping[str, str], source: str) -> Iterator[TraceJob]:
    for row in rows:
        line = rows.line_num
        value = {
            what: _number(row[columns[what]], source, line, columns[what])
            for what in ("submit", "work", "devices", "duration")
        }
        if value["devices"] == 0:
            continue  # some ran on processors only
        if value["work"] <= 0 or value["duration"] <= 0:
            raise TraceError(f"{source}:{line}: iterations and duration must be above zero")
        times = [_number(cell, source, line, "expect_time_list") for cell in row["expect_time_list"].split("-")]
        values = [_number(cell, source, line, "expect_value_list") for cell in row["expect_value_list"].split("-")]
        if len(times) != len(values) or times != sorted(times):
            raise TraceError(f"{source}:{line}: expect_time_list must ascend, with one value for each")
        best_effort = row["job_type"] == "best" or (row.get("best_effort") or "0").strip() == "1"
        rate = value["work"] / value["duration"]
        devices = int(value["devices"])
        deadlines = tuple((value["submit"] + at, worth) for at, worth in zip(times, values, strict=True))
        yield TraceJob(
            row[columns["job"]], value["submit"], value["work"], () if best_effort else deadlines,
            devices, value["duration"], SpeedCurve((devices,), (rate,)), {devices: rate},
            row[columns["model"]], row["user"],
        )  # fmt: skip


def _number(text: str | None, source: str, line: int, column: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        raise TraceError(f"{source}:{line}: {column} is {text!r}, not a number") from None
    if not math.isfinite(number) or number < 0:
        raise TraceError(f"{source}:{line}: {column} is {text!r}, not a number from zero on")
    return number
