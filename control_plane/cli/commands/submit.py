"""`submit`, `explain` and `validate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane._view import Data, job_summary, job_view
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._job_file import JobFile, read_job
from control_plane.cli._options import ContextFile, Output, Overrides
from control_plane.cli._output import emit, fields, say, unwritable
from control_plane.cli._settings import Format
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from control_plane.spec import LoadedSpec

JobName = Annotated[str | None, typer.Option("--name", help="Call the job so, whatever the file says.")]


def submit(
    job_file: JobFile,
    overrides: Overrides = None,
    name: JobName = None,
    request_id: Annotated[
        str | None,
        typer.Option(
            help="Submissions with one id make one job; give it again to retry safely. Default: a random one."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan with its price; run nothing.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Measure the task first, unless its plan rests on measurements already.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the job until it has ended.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Submit a job, or with --dry-run show what it would take."""
    loaded, bundle = read_job(job_file, overrides, name)
    if profile:
        _measure_unless_known(context, loaded, bundle, request_id)
    if dry_run:
        _show_plan(ask_control_plane(context, lambda client: _planned(client, loaded, bundle)))
        return
    order = _Order(loaded, bundle, request_id or _random_id())
    view = ask_control_plane(context, order.send)
    if not (watch or wait):
        emit(job_summary(view), table=_submitted_text, name=_id_of)
        say(f"watch it: control-plane status {view['id']} --watch")
        return
    from control_plane.cli.commands.jobs import see_to_the_end

    see_to_the_end(context, view["id"], shown=watch)


def _measure_unless_known(
    context: Path | None, loaded: LoadedSpec, bundle: tuple[bytes, str], request_id: str | None
) -> None:
    from control_plane.cli.commands.profile import measured

    plan = json.loads(ask_control_plane(context, lambda client: client.plan(loaded.json, loaded.code_digest)).plan_json)
    if plan.get("estimate", {}).get("basis") == "measured":
        return
    mark = f"{request_id or _random_id()}-profile"
    try:
        result = ask_control_plane(context, lambda client: measured(client, loaded, bundle, mark))
    except GeofedError as error:
        if error.code != "INADMISSIBLE":
            raise
        say(f"it is not measured now: {error.message}")
        return
    for region, failed in result["failed"].items():
        say(f"{region} could not be measured: {failed['code']}: {failed['message']}")


def explain(
    job_file: JobFile,
    overrides: Overrides = None,
    name: JobName = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw regions and links there too.")
    ] = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Show where a job would run, what it would take and cost, and why; run nothing."""
    loaded, bundle = read_job(job_file, overrides, name)
    plan = _show_plan(ask_control_plane(context, lambda client: _planned(client, loaded, bundle)))
    if plot is not None:
        from control_plane.cli._picture import plan_picture

        try:
            plot.write_text(plan_picture(plan))
        except OSError as error:
            raise unwritable(plot, error) from None
        say(f"drawn in {plot}")


def validate(
    job_file: JobFile, overrides: Overrides = None, name: JobName = None, output: Output = Format.TABLE
) -> None:
    """Check a job file and its task module, without a control plane."""
    loaded, (content, digest) = read_job(job_file, overrides, name)
    facts = {
        "name": loaded.spec.metadata.name,
        "file": str(job_file),
        "spec": json.loads(loaded.json),
        "spec_digest": loaded.digest,
        "code_digest": digest,
        "code_bytes": len(content),
    }
    emit(facts, table=lambda data: f"{data['file']} is valid", name=lambda data: str(data["name"]))


@dataclass(frozen=True)
class _Order:
    """A submission; sent twice it makes one job."""

    loaded: LoadedSpec
    bundle: tuple[bytes, str]
    request_id: str

    async def send(self, client: ControlClient) -> Data:
        """Have the job run."""
        content, digest = self.bundle
        try:
            await client.put_bundle(content, digest)
            reply = await client.submit(self.loaded.json, digest, self.request_id)
        except GeofedError as error:
            if error.code != "UNAVAILABLE":
                raise
            hint = f"{error.hint}; a retry with --request-id {self.request_id} makes one job at most"
            raise GeofedError("UNAVAILABLE", error.message, hint=hint) from None
        if not reply.created:
            say(f"request id {self.request_id} has made this job before; it is the same one")
        return job_view(reply.job) | {"created": reply.created, "request_id": self.request_id}


async def _planned(client: ControlClient, loaded: LoadedSpec, bundle: tuple[bytes, str]) -> Any:
    """What would be done with a job; its code goes along, in case that nobody knows it."""
    content, digest = bundle
    await client.put_bundle(content, digest)
    return await client.plan(loaded.json, bundle_digest=digest)


def _show_plan(reply: Any) -> Data:
    from control_plane.cli._report import plan_text

    plan: Data = json.loads(reply.plan_json)
    if not reply.admissible:
        raise _declined(plan["reasons"])
    emit(plan, table=plan_text, name=lambda data: "\n".join(part["region"] for part in data["partitions"]))
    return plan


def _declined(reasons: list[Data]) -> GeofedError:
    codes = {reason["code"] for reason in reasons}
    code = codes.pop() if len(codes) == 1 else "INADMISSIBLE"
    hint = "; ".join(dict.fromkeys(reason["remedy"] for reason in reasons))
    return GeofedError(code, "; ".join(reason["text"] for reason in reasons), hint=hint)


def _submitted_text(view: Data) -> str:
    return fields([("job", view["id"]), ("state", view["state"]), ("condition", view["condition"])])


def _id_of(view: Data) -> str:
    return str(view["id"])


def _random_id() -> str:
    import uuid

    return str(uuid.uuid4())
