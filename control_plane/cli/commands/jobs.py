"""`status`, `list`, `describe`, `wait`, `scale`, `replan`, `finish`, `cancel`, `resume`, `share` and `unshare`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane._view import (
    Data,
    bytes_text,
    job_summary,
    job_view,
    kept_if_cancelled,
    region_view,
    seconds_text,
    usd_text,
)
from control_plane.cli._completion import complete_job, complete_region_workers, complete_user
from control_plane.cli._connect import ask_control_plane, confirm
from control_plane.cli._options import ContextFile, NoInput, Output, Yes
from control_plane.cli._output import columns, emit, fields, say
from control_plane.cli._settings import Format, can_ask, settings
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from geofed_pb.v1 import control_pb2

JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="ID of the job, or its name.", show_default=False, autocompletion=complete_job),
]


Labels = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        "-l",
        metavar="NAME=VALUE",
        help="Only jobs with this label of `metadata.labels`; may be repeated.",
        show_default=False,
    ),
]


def labels_of(given: list[str] | None) -> dict[str, str]:
    """Return the labels that `--label` names. Raises ``GeofedError("USAGE")``."""
    labels = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise GeofedError("USAGE", f"--label {text!r} is not of the form NAME=VALUE", hint="write team=vision")
        labels[name] = value
    return labels


def status(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="ID or name; default: the whole federation.",
            show_default=False,
            autocompletion=complete_job,
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the job until it has ended.")] = False,
    no_input: NoInput = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Show the state of a job, or of the federation."""
    if job is None:
        if watch:
            raise GeofedError("USAGE", "--watch needs a job", hint="`geofed list` shows the jobs")
        emit(
            ask_control_plane(context, federation_view),
            table=federation_text,
            name=lambda data: str(data["federation"]),
        )
    elif watch:
        finish_with_job(context, job, shown=True)
    else:
        view = ask_control_plane(context, _view_of(job))
        emit(_without_spec_and_plan(view), table=lambda _: _status_text(view), name=_id_of)


def list_jobs(
    ended: Annotated[bool, typer.Option("--all", "-a", help="Include ended jobs.")] = False,
    limit: Annotated[int, typer.Option(help="Maximum number of jobs, newest first.", min=1)] = 100,
    label: Labels = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """List jobs, newest first."""
    wanted = labels_of(label)

    async def ask(client: ControlClient) -> tuple[list[Data], dict[str, int]]:
        jobs, occupied = await client.jobs_and_occupied(ended=ended, limit=limit, labels=wanted)
        return [job_summary(job_view(job)) for job in jobs], occupied

    views, occupied = ask_control_plane(context, ask)
    emit(views, table=_jobs_table, name=_id_of)
    if occupied:
        held = ", ".join(f"{workers} workers in {region}" for region, workers in sorted(occupied.items()))
        say(f"other users' jobs occupy {held}")
    if not views:
        which = "".join(f" with {name}={value}" for name, value in wanted.items())
        say(f"no jobs{which}" if ended else f"no jobs{which} are running; --all shows ended ones")


def describe(job: JobArgument, context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """Show everything about a job: plan, residency, regions, links, costs, result."""
    from control_plane.cli._report import description_text

    emit(ask_control_plane(context, _view_of(job)), table=description_text, name=_id_of)


def wait(
    job: JobArgument,
    until: Annotated[str, typer.Option("--for", metavar="ended|running", help="What to wait for.")] = "ended",
    timeout: Annotated[str | None, typer.Option(help="Stop waiting after this, like 10m; the job continues.")] = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Wait until a job has ended; the exit status reports its outcome."""
    if until not in ("ended", "running"):
        raise GeofedError("USAGE", f"invalid value {until!r} for --for", hint="give ended or running")
    finish_with_job(context, job, shown=False, running=until == "running", seconds=_seconds(timeout))


def cancel(
    job: JobArgument,
    reason: Annotated[str, typer.Option(help="Reason, for the job's history.")] = "",
    yes: Yes = False,
    no_input: NoInput = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Cancel a job. Models of evaluated rounds are kept: `export` writes them, `resume` continues with the last one."""
    kept = f" {ask_control_plane(context, _what_is_kept(job))}" if not yes and can_ask() else ""
    confirm(f"Cancel job {job}?{kept}", yes=yes)
    _request(context, lambda client: client.cancel(job, reason))


def finish(
    job: JobArgument,
    reason: Annotated[str, typer.Option(help="Reason, for the job's history.")] = "",
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """End a running job now and keep its current model."""
    _request(context, lambda client: client.finish(job, reason))


def replan(
    job: JobArgument,
    reason: Annotated[str, typer.Option(help="Reason, for the job's history.")] = "",
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Replan a running job: end it, and continue its model in a new job over the regions that are available now."""
    _request(context, lambda client: client.replan(job, reason))


def _what_is_kept(job: str) -> Any:
    async def request(client: ControlClient) -> str:
        return kept_if_cancelled(job_view(await client.job(job)))

    return request


def resume(
    job: JobArgument,
    request_id: Annotated[
        str | None,
        typer.Option(help="Repeat the ID to retry safely: requests with one ID make one job. Default: random."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the new job until it has ended.")] = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Resume an ended job: a new one trains the rest, with the same code, from the last kept model."""
    import uuid

    from control_plane.cli._report import job_head

    identity = request_id or str(uuid.uuid4())

    async def ask(client: ControlClient) -> Data:
        reply = await client.resume(job, identity)
        return job_summary(job_view(reply.job)) | {"created": reply.created, "request_id": identity}

    view = ask_control_plane(context, ask)
    if watch:
        finish_with_job(context, view["id"], shown=True)
        return
    emit(view, table=job_head, name=_id_of)


def rename(
    job: JobArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.", show_default=False)],
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Give a job another name; its ID stays."""
    _request(context, lambda client: client.rename(job, name))


def share(
    job: JobArgument,
    user: Annotated[str, typer.Argument(metavar="USER", help="Who may read it.", autocompletion=complete_user)],
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Let another user read a job: its state, events, log, code and model."""
    _request(context, lambda client: client.share(job, user))


def unshare(
    job: JobArgument,
    user: Annotated[str, typer.Argument(metavar="USER", help="Whose access ends.", autocompletion=complete_user)],
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Stop sharing a job with a user."""
    _request(context, lambda client: client.share(job, user, end=True))


def _request(context: Path | None, ask: Callable[[ControlClient], Awaitable[control_pb2.Job]]) -> None:
    """Ask for something to be done with a job, and print its head."""
    from control_plane.cli._report import job_head

    async def summary(client: ControlClient) -> Data:
        return job_summary(job_view(await ask(client)))

    emit(ask_control_plane(context, summary), table=job_head, name=_id_of)


def scale(
    job: JobArgument,
    workers: Annotated[
        list[str],
        typer.Argument(
            metavar="REGION=WORKERS...",
            help="Number of workers, by region; 0 pauses the region.",
            show_default=False,
            autocompletion=complete_region_workers,
        ),
    ],
    reason: Annotated[str, typer.Option(help="Reason, for the job's history.")] = "",
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Scale the workers of regions of a running job in or out; what the job computes stays the same."""
    wanted = {}
    for assignment in workers:
        region, equals, count = assignment.partition("=")
        if not (region and equals and count.isascii() and count.isdigit()):
            raise GeofedError(
                "USAGE", f"{assignment!r} is not of the form REGION=WORKERS", hint="write it like frankfurt=4"
            )
        wanted[region] = int(count)

    async def ask(client: ControlClient) -> Data:
        return _without_spec_and_plan(job_view(await client.scale(job, wanted, reason)))

    emit(ask_control_plane(context, ask), table=_status_text, name=_id_of)


def finish_with_job(
    context: Path | None, job: str, *, shown: bool, running: bool = False, seconds: float | None = None
) -> None:
    """Wait until a job has ended or, with `running`, until it trains; write its result; raise if it did not succeed.

    Args:
        shown: show its progress meanwhile.
        seconds: timeout of waiting; None: none.
    """
    import asyncio

    from control_plane.cli._follow import follow_job, raise_unless_succeeded, wait_for_job
    from control_plane.cli._report import status_text

    async def last_view(client: ControlClient) -> Data:
        try:
            async with asyncio.timeout(seconds):
                return await (follow_job(client, job) if shown else wait_for_job(client, job, running=running))
        except TimeoutError:
            state = "is not running yet" if running else "has not ended yet"
            raise GeofedError("WAIT_TIMEOUT", f"timed out after {seconds:g} s; job {job} {state}") from None

    again = f"detached; the job continues. Watch it again: geofed status {job} --watch"
    view = ask_control_plane(context, last_view, detach=again)
    try:
        raise_unless_succeeded(view)
    except GeofedError:
        # In json stdout has one envelope, and that is the error; `describe` shows the result of a failed job.
        if settings.format in (Format.TABLE, Format.NAME):
            emit(view, table=status_text, name=_id_of)
        raise
    emit(_without_spec_and_plan(view), table=status_text, name=_id_of)


def _view_of(job: str) -> Any:
    async def request(client: ControlClient) -> Data:
        return job_view(await client.job(job))

    return request


def _without_spec_and_plan(view: Data) -> Data:
    """Return the job's view without its spec and plan, which only `describe` shows."""
    return {key: value for key, value in view.items() if key not in ("spec", "plan")}


def _seconds(duration: str | None) -> float | None:
    from control_plane._durations import parse_duration

    try:
        return parse_duration(duration).total_seconds() if duration is not None else None
    except ValueError as error:
        raise GeofedError("USAGE", f"--timeout: {error}") from None


async def federation_view(client: ControlClient) -> Data:
    """Return the federation with its regions and active jobs."""
    import asyncio

    about, jobs, regions = await asyncio.gather(client.version(), client.jobs(), client.regions())
    return {
        "federation": about.federation,
        "version": about.version,
        "regions": [region_view(region) for region in regions],
        "jobs": [job_summary(job_view(job)) for job in jobs],
    }


def federation_text(data: Data) -> str:
    """Format the federation with its regions and active jobs."""
    from control_plane.cli.commands.region import regions_table

    parts = [fields([("federation", data["federation"]), ("version", data["version"])])]
    if data["regions"]:
        parts.append(regions_table(data["regions"]))
    if data["jobs"]:
        parts.append(_jobs_table(data["jobs"]))
    return "\n\n".join(parts)


def _jobs_table(views: list[Data]) -> str:
    from control_plane.cli._report import rounds_text

    return columns(
        ["JOB", "USER", "STATE", "ROUND", "REGIONS", "CPU", "MEMORY", "USD", "SUBMITTED", "SLACK", "CONDITION"],
        [
            [
                view["id"],
                view["user"],
                view["state"],
                f"{rounds_text([part['round'] for part in view['partitions']])}/{view['rounds']}",
                ",".join(part["region"] for part in view["partitions"]),
                *_usage_cells([part["usage"] for part in view["partitions"]]),
                usd_text(view["usd"]),
                view["created_at"],
                _slack_cell(view["slack_seconds"]),
                view["condition"],
            ]
            for view in views
        ],
        leave_out=("SUBMITTED", "CPU", "MEMORY", "USER", "SLACK", "CONDITION", "REGIONS", "USD"),
    )


def _slack_cell(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{'-' if seconds < 0 else ''}{seconds_text(abs(seconds))}"


def _usage_cells(usages: list[Data]) -> list[str]:
    """Return the busy cores of all workers, and the memory of the largest one, also on its GPU; "-": not reported."""
    cores = sum(usage["cpu_cores"] for usage in usages)
    memory, on_gpu = (
        max((usage[name] for usage in usages), default=0) for name in ("memory_bytes", "gpu_memory_bytes")
    )
    if not memory:
        return ["-", "-"]
    return [f"{cores:.1f}", bytes_text(memory) + (f" (GPU {bytes_text(on_gpu)})" if on_gpu else "")]


def _status_text(view: Data) -> str:
    from control_plane.cli._report import status_text

    return status_text(view)


def _id_of(view: Data) -> str:
    return str(view["id"])
