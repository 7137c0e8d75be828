"""Write figures and the trace of a job into files and to other tools. To write a job again continues or replaces it."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from control_plane.tracking._points import Point, points_of
from control_plane.tracking._spans import Span, Spans
from geofed_pb.errors import GeofedError, install_hint
from geofed_pb.tracing import span_of, trace_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

_COLUMNS = ["job", *(field.name for field in fields(Point))]
_EXPERIMENT = "geofed"
"""Experiment of MLflow that the runs are in."""
_MLFLOW_REFUSES = re.compile(r"[^\w./: -]")
"""Characters that MLflow takes in no name."""
_LONGEST_PARAMETER = 500
"""Characters that MLflow takes for the value of a parameter."""
_TRACES_PATH = "/v1/traces"
"""Path of a collector's URL that names none, as OpenTelemetry's protocol has it."""
_SEND_SECONDS = 5.0
"""Time between two deliveries of spans to a collector, also while it takes none."""
_MOST_SENT = 512
"""Spans of a request, as OpenTelemetry's own processor has it."""
_MOST_UNSENT = 20_000
"""Spans that wait for a collector that takes none: some 20 MB, hours of rounds of a second in two regions."""
_STATES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
"""MLflow's states of a run."""


class Sink(Protocol):
    """Where the figures or the course of a job are written."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Write what the view of an event has for this place; events come in their order."""

    def close(self, view: dict[str, Any]) -> None:
        """End with the view of the job, which may still run."""


class _Figures(ABC):
    """A place for figures."""

    def write(self, event: Mapping[str, Any]) -> None:
        for point in points_of(event):
            self._figure(point)

    @abstractmethod
    def _figure(self, point: Point) -> None:
        """Write a figure."""


class _File(_Figures):
    """One line for each figure, as CSV or JSON."""

    def __init__(self, path: Path, job: str, *, as_csv: bool) -> None:
        self._job = job
        self._file: IO[str] = _opened(path, ",".join(_COLUMNS) if as_csv else '{"job": ')
        self._csv = csv.DictWriter(self._file, _COLUMNS, lineterminator="\n") if as_csv else None
        if self._csv is not None:
            self._csv.writeheader()

    def _figure(self, point: Point) -> None:
        row = {"job": self._job, **asdict(point)}
        if self._csv is not None:
            self._csv.writerow(row)
        else:
            self._file.write(json.dumps(row) + "\n")
        # Other tools read the file while the job runs.
        self._file.flush()

    def close(self, view: dict[str, Any]) -> None:
        self._file.close()


def _opened(path: Path, beginning: str) -> IO[str]:
    """Open a file of an earlier run of this command, or a new one, to replace it."""
    try:
        if path.exists() and path.stat().st_size and not path.read_text().startswith(beginning):
            raise GeofedError("USAGE", f"{path} is another file", hint="name one that does not exist yet")
        return path.open("w", newline="")
    except (OSError, UnicodeDecodeError) as error:
        raise GeofedError("USAGE", f"cannot write {path}: {error}", hint="write to another path") from None


class _TensorBoard(_Figures):
    """Scalars `NAME/REGION` by round, in the folder of the job."""

    def __init__(self, folder: Path, job: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise _missing("tensorboard", "tensorboard") from None
        for earlier in (folder / job).glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = SummaryWriter(str(folder / job))

    def _figure(self, point: Point) -> None:
        seconds = datetime.fromisoformat(point.at).timestamp()
        name = f"{point.name}/{point.region}"
        self._writer.add_scalar(name, point.value, point.round, walltime=seconds)

    def close(self, view: dict[str, Any]) -> None:
        self._writer.close()


class _MLflow(_Figures):
    """A run of the job's name with metrics `NAME/REGION` by round, and the job file as parameters."""

    def __init__(self, uri: str, job: str) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError:
            raise _missing("MLflow", "mlflow") from None
        self._client = MlflowClient(uri)
        found = self._client.get_experiment_by_name(_EXPERIMENT)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(_EXPERIMENT)
        runs = self._client.search_runs([experiment], f"tags.\"geofed.job\" = '{job}'")
        run = runs[0] if runs else self._client.create_run(experiment, run_name=job, tags={"geofed.job": job})
        self._run = run.info.run_id
        self._written = int(run.data.tags.get("geofed.cursor", 0))
        """Cursor of the last event that the run has."""
        self._last = self._written

    def _figure(self, point: Point) -> None:
        if point.cursor <= self._written:
            return
        milliseconds = int(datetime.fromisoformat(point.at).timestamp() * 1000)
        name = _MLFLOW_REFUSES.sub("_", f"{point.name}/{point.region}")
        self._client.log_metric(self._run, name, point.value, timestamp=milliseconds, step=point.round)
        self._last = point.cursor

    def close(self, view: dict[str, Any]) -> None:
        for name, value in _flat(view["spec"]).items():
            self._client.log_param(self._run, name, value[:_LONGEST_PARAMETER])
        self._client.set_tag(self._run, "geofed.cursor", str(self._last))
        if view["state"] in _STATES:
            for name, value in (view["result"] or {}).get("metrics", {}).items():
                self._client.log_metric(self._run, _MLFLOW_REFUSES.sub("_", name), value)
            self._client.set_terminated(self._run, _STATES[view["state"]])


class _WandB(_Figures):
    """An offline run of the job's name, with metrics `NAME/REGION` over `round`, and the job file as its config."""

    def __init__(self, folder: Path, job: str) -> None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise _missing("W&B", "wandb") from None
        for earlier in (folder / "wandb").glob(f"offline-run-*-{job}"):
            shutil.rmtree(earlier)
        folder.mkdir(parents=True, exist_ok=True)
        # Nothing about this machine, which is not one that trains.
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_job_creation=True, save_code=False,
            x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
        )  # fmt: skip
        self._run: Any = wandb.init(
            project=_EXPERIMENT, dir=str(folder), id=job, name=job, mode="offline", reinit="create_new",
            settings=settings,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="round")
        self._cursor = 0
        self._figures: dict[str, float] = {}
        """Figures of the present event, which are logged together."""

    def _figure(self, point: Point) -> None:
        if point.cursor != self._cursor:
            self._flush()
        self._cursor = point.cursor
        self._figures |= {
            f"{point.name}/{point.region}": point.value,
            "round": point.round,
            "_timestamp": datetime.fromisoformat(point.at).timestamp(),
        }

    def _flush(self) -> None:
        if self._figures:
            self._run.log(self._figures)
        self._figures = {}

    def close(self, view: dict[str, Any]) -> None:
        self._flush()
        self._run.config.update(view["spec"])
        if view["state"] in _STATES:
            self._run.summary.update((view["result"] or {}).get("metrics", {}))
        self._run.finish(exit_code=1 if view["state"] in ("failed", "cancelled") else 0)


class _Traces:
    """One trace for the job, sent to a collector by OpenTelemetry's protocol over HTTP."""

    def __init__(self, url: str, job: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ModuleNotFoundError:
            raise _missing("OpenTelemetry's exporter", "otlp") from None
        if not url.startswith(("http://", "https://")):
            raise GeofedError("USAGE", f"{url!r} is no URL of a collector", hint="otlp:http://HOST:4318")
        self._url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + _TRACES_PATH
        # Headers, such as a token, and certificates come from OTEL_EXPORTER_OTLP_HEADERS and its like.
        self._exporter = OTLPSpanExporter(endpoint=self._url)
        self._job, self._spans = job, Spans()
        self._unsent: list[Span] = []
        self._sent_at = time.monotonic()

    def write(self, event: Mapping[str, Any]) -> None:
        self._unsent += self._spans.add(event)
        if self._unsent and time.monotonic() > self._sent_at + _SEND_SECONDS:
            self._send()

    def _send(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._sent_at = time.monotonic()
        while self._unsent:
            batch = self._unsent[:_MOST_SENT]
            if self._exporter.export([self._made(span) for span in batch]) != SpanExportResult.SUCCESS:
                break
            del self._unsent[:_MOST_SENT]
        # An outage of a collector is no reason to read the job again: what waits is sent with what comes.
        if len(self._unsent) > _MOST_UNSENT:
            raise GeofedError("UNAVAILABLE", f"no collector takes the spans at {self._url}")

    def _made(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Status, StatusCode

        notes = [Event(note.name, dict(note.attributes), _nanoseconds(note.at)) for note in span.notes]
        return ReadableSpan(
            span.name,
            self._context(span.key),
            None if span.parent is None else self._context(span.parent),
            Resource({"service.name": "geofed"}),
            span.attributes,
            notes,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.end),
        )

    def _context(self, key: str) -> SpanContext:
        """The same IDs each time, so that a job that is sent again has one trace."""
        from opentelemetry.trace import SpanContext, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace_of(self._job), span_of(self._job, key), False, flags)

    def close(self, view: dict[str, Any]) -> None:
        try:
            self._send()
            if self._unsent:
                raise GeofedError("UNAVAILABLE", f"no collector takes the spans at {self._url}")
        finally:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _flat(value: Any, path: str = "") -> dict[str, str]:
    """Return the values of a job file by their dotted keys."""
    if not isinstance(value, dict):
        return {path: str(value)}
    found: dict[str, str] = {}
    for key, below in value.items():
        found |= _flat(below, f"{path}.{key}".removeprefix("."))
    return found


def _missing(tool: str, extra: str) -> GeofedError:
    return GeofedError("USAGE", f"{tool} is not installed", hint=install_hint(extra))


_PACKAGES = {
    "tensorboard": "torch.utils.tensorboard",
    "mlflow": "mlflow.tracking",
    "wandb": "wandb",
    "otlp": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
"""Modules that kinds of sinks need."""
KINDS: dict[str, Callable[[str, str], Sink]] = {
    "csv": lambda target, job: _File(Path(target), job, as_csv=True),
    "jsonl": lambda target, job: _File(Path(target), job, as_csv=False),
    "tensorboard": lambda target, job: _TensorBoard(Path(target), job),
    "mlflow": lambda target, job: _MLflow(target, job),
    "wandb": lambda target, job: _WandB(Path(target), job),
    "otlp": lambda target, job: _Traces(target, job),
}
"""Kinds of sinks."""


def open_sink(text: str, job: str) -> Sink:
    """Open a sink: ``KIND:TARGET``, or a file whose name ends in `.csv` or `.jsonl`.

    Raises ``GeofedError("USAGE")`` if there is no such kind, or if it needs a package that is not installed.
    """
    kind, target = parsed_place(text)
    return KINDS[kind](target, job)


def parsed_place(text: str) -> tuple[str, str]:
    """Return kind and target of ``KIND:TARGET``, or of a file whose name ends in `.csv` or `.jsonl`.

    Raises ``GeofedError("USAGE")`` if there is no such kind.
    """
    kind, colon, target = text.partition(":")
    if not (colon and kind in KINDS):
        kind, target = text.rpartition(".")[2], text
    if kind not in KINDS or not target:
        hint = "FILE.csv, FILE.jsonl, tensorboard:FOLDER, mlflow:URI, wandb:FOLDER or otlp:URL"
        raise GeofedError("USAGE", f"{text!r} is no place for metrics", hint=hint)
    return kind, target


def check_place_of_jobs(text: str) -> None:
    """Check a place that the metrics of many jobs are written to; nothing is written yet.

    Raises ``GeofedError("USAGE")``: there is no such kind; its package is missing; one file for all jobs.
    """
    kind, target = parsed_place(text)
    if kind in ("csv", "jsonl") and "{job}" not in target:
        hint = f"name a file for each job: {target.removesuffix(f'.{kind}')}-{{job}}.{kind}"
        raise GeofedError("USAGE", f"{text!r} is one file for all jobs", hint=hint)
    if kind in _PACKAGES:
        try:
            importlib.import_module(_PACKAGES[kind])
        except ModuleNotFoundError:
            raise _missing(kind, kind) from None
