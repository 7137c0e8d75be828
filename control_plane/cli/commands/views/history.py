"""`events`, `logs` and `history`: show the events, the log lines and the rounds of a job, in order."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._figures import metric_text
from control_plane._view import SO_FAR, USAGE, Data, clock, event_view, log_view, round_rows
from control_plane.cli._completion import complete_region
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._options import ContextFile, Output
from control_plane.cli._output import after, columns, emit, emit_line, fitted, say
from control_plane.cli._settings import Format, settings, stdout_is_terminal
from control_plane.cli.commands.jobs import JobArgument
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.cli._follow import Outage
    from control_plane.client import ControlClient

    Stream = Callable[[ControlClient, Outage], AsyncIterator[Data]]

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")]
After = Annotated[int, typer.Option("--after", metavar="CURSOR", help="Only entries after this cursor.", min=0)]


def events(
    job: JobArgument,
    follow: Follow = False,
    after: After = 0,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Show the events of a job."""

    async def stream(client: ControlClient, outage: Outage) -> AsyncIterator[Data]:
        async for event in client.watch(job, cursor=after, follow=follow, on_break=outage.call_failed):
            outage.call_succeeded()
            yield event_view(event)

    _show(context, stream, _event_line, follow=follow, again=f"geofed events {job} --follow")


def logs(
    job: JobArgument,
    region: Annotated[str, typer.Option(help="Only lines of this region.", autocompletion=complete_region)] = "",
    tail: Annotated[int, typer.Option(help="Only the last N lines.", min=0)] = 0,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="10m|TIME",
            help="Only lines of this last while, or since a time such as 2026-11-27T18:00:00Z.",
            show_default=False,
        ),
    ] = None,
    follow: Follow = False,
    after: After = 0,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Show the logs of a job's workers, parameter servers and agents."""
    begin = 0.0 if since is None else _begin(since)

    async def stream(client: ControlClient, outage: Outage) -> AsyncIterator[Data]:
        async for line in client.logs(
            job, region=region, cursor=after, tail=tail, follow=follow, on_break=outage.call_failed
        ):
            outage.call_succeeded()
            if line.at >= begin:
                yield log_view(line)

    if not _show(context, stream, _log_line, follow=follow, again=f"geofed logs {job} --follow"):
        say("no lines")


def history(job: JobArgument, context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """Show the rounds of a job: loss and metrics of each region, as the regions have reported them."""

    async def ask(client: ControlClient) -> list[Data]:
        return round_rows([event_view(event) async for event in client.watch(job, follow=False)])

    rows = ask_control_plane(context, ask)
    emit(rows, table=_rounds_table, name=lambda row: f"{row['round']} {row['region']}")
    if not rows:
        say("no round has been reported")


def _rounds_table(rows: list[Data]) -> str:
    known = ("round", "region", "at", "step", "samples", "loss", "test_loss", *USAGE, *SO_FAR)
    metrics = sorted({name for row in rows for name in row} - set(known))
    named = [name.upper() for name in metrics]
    heads = ["ROUND", "REGION", "TIME", "STEP", "SAMPLES", "LOSS", "TEST LOSS", *named]

    def cells(row: Data) -> list[str]:
        figures = [
            metric_text(row[name]) if row.get(name) is not None else "" for name in ("loss", "test_loss", *metrics)
        ]
        step, samples = (f"{row[name]:,}" if name in row else "" for name in ("step", "samples"))
        return [str(row["round"]), row["region"], clock(row.get("at")), step, samples, *figures]

    table = [cells(row) for row in rows]
    if stdout_is_terminal():
        shown = shutil.get_terminal_size().columns
        heads, table = fitted(heads, table, ("SAMPLES", "TIME", "STEP", *reversed(named)), shown)
        if hidden := [head for head in named if head not in heads]:
            say(f"no room for {', '.join(hidden)}: a wider terminal shows them, and -o json")
    return columns(heads, table)


def _begin(since: str) -> float:
    """Return the time, in Unix seconds, that `--since` means. Raises ``GeofedError("USAGE")``."""
    import time

    from control_plane._durations import parse_since

    try:
        return parse_since(since, time.time())
    except ValueError as error:
        raise GeofedError("USAGE", f"--since: {error}") from None


def _show(context: Path | None, stream: Stream, line_of: Callable[[Data], str], *, follow: bool, again: str) -> int:
    """Write the items of a stream; return their number."""
    if follow and settings.format in (Format.JSON, Format.YAML):
        raise GeofedError("USAGE", f"--follow writes a stream; {settings.format} is one document", hint="use -o jsonl")
    collected: list[Data] = []
    count = 0

    async def collect(client: ControlClient) -> None:
        from control_plane.cli._follow import Outage

        nonlocal count
        async for item in stream(client, Outage(say)):
            count += 1
            if settings.format in (Format.JSON, Format.YAML):
                collected.append(item)
            elif settings.format is Format.JSONL:
                emit_line(item)
            else:
                emit([item], table=lambda items: line_of(items[0]), name=_cursor_of)

    ask_control_plane(context, collect, detach=f"detached; the job continues. Follow it again: {again}")
    if settings.format in (Format.JSON, Format.YAML):
        emit(collected, table=str, name=_cursor_of)
    return count


def _event_line(event: Data) -> str:
    return after(f"{event['cursor']:>6}  {clock(event['at'])}  {event['kind']:<20}  ", event["text"])


def _log_line(line: Data) -> str:
    return f"{clock(line['at'])}  {line['region']:<12}  {line['source']:<10}  {line['text']}"


def _cursor_of(item: Data) -> str:
    return str(item["cursor"])
