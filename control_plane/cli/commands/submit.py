"""`submit`, `explain` and `validate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane._advanced import as_written
from control_plane._view import Data, bytes_text, job_summary, job_view
from control_plane.cli._completion import complete_job
from control_plane.cli._connect import ask_control_plane, confirm
from control_plane.cli._job_file import JobFile, put_task, read_job
from control_plane.cli._options import ContextFile, NoInput, Output, Overrides, Yes
from control_plane.cli._output import emit, fields, say, unwritable
from control_plane.cli._settings import Format, can_ask
from geofed_pb.errors import OUTAGE, GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from control_plane.spec import LoadedSpec, PackedTask
    from geofed_pb.v1 import control_pb2

JobName = Annotated[str | None, typer.Option("--name", help="Name of the job, instead of the job file's.")]

Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="load-power|fasdl|greedy",
        help="Choose the workers by a published rule, for comparison, as with `objective.method`.",
        show_default=False,
    ),
]


def submit(
    job_file: JobFile,
    overrides: Overrides = None,
    name: JobName = None,
    request_id: Annotated[
        str | None,
        typer.Option(help="Repeat the ID to retry safely: submissions with one ID make one job. Default: random."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="JOB|FILE",
            help="Start from the model of an ended job, or from a .safetensors file, as with `train.initialModel`.",
            show_default=False,
            autocompletion=complete_job,
        ),
    ] = None,
    method: Method = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan with its cost; run nothing.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile the task first, unless it has been measured already.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the job until it has ended.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    yes: Yes = False,
    no_input: NoInput = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Submit a job, or with --dry-run show its plan. On a terminal the plan is shown first, and confirmed by you."""
    if start is not None:
        overrides = [starting_from(start), *(overrides or [])]
    overrides = _by_method(method, overrides)
    loaded, bundle = read_job(job_file, overrides, name)
    if profile:
        _profile_unless_measured(context, loaded, bundle, request_id)
    if dry_run:
        _show_plan(ask_control_plane(context, lambda client: planned(client, loaded, bundle)))
        return
    if not yes and can_ask():
        _confirm_plan(ask_control_plane(context, lambda client: planned(client, loaded, bundle)))
    submission = Submission(loaded, bundle, request_id or random_id())
    view = ask_control_plane(context, submission.send)
    if not (watch or wait):
        emit(job_summary(view), table=_submitted_text, name=_id_of)
        say(f"watch it: geofed status {view['id']} --watch")
        return
    from control_plane.cli.commands.jobs import finish_with_job

    finish_with_job(context, view["id"], shown=watch)


def _by_method(method: str | None, overrides: list[str] | None) -> list[str] | None:
    """Return the overrides with that of `--method`."""
    return overrides if method is None else [*(overrides or []), f"objective.method={method}"]


def starting_from(start: str) -> str:
    """Return the override that starts from a job or a file, as `submit --from`: an existing file with the ending of
    safetensors is a file, and anything else a job."""
    path = Path(start)
    is_file = path.suffix == ".safetensors" and path.is_file()
    return f"train.initialModel={json.dumps({'file': str(path.absolute())} if is_file else {'job': start})}"


async def _put_weights(client: ControlClient, loaded: LoadedSpec) -> None:
    """Upload the files that a job starts from, if there are any."""
    for digest, path in loaded.weights.items():

        def begun(left: int, name: str = path.name) -> None:
            say(f"uploading {bytes_text(left)} of {name}")

        await client.put_weights(path, digest, begun)


def _profile_unless_measured(
    context: Path | None, loaded: LoadedSpec, bundle: PackedTask, request_id: str | None
) -> None:
    from control_plane.cli.commands.profile import run_profile

    plan = json.loads(ask_control_plane(context, lambda client: client.plan(loaded.json, loaded.code_digest)).plan_json)
    if plan.get("estimate", {}).get("basis") in ("measured", "profiled"):
        return
    profile_id = f"{request_id or random_id()}-profile"
    try:
        result = ask_control_plane(context, lambda client: run_profile(client, loaded, bundle, profile_id))
    except GeofedError as error:
        if error.code != "INADMISSIBLE":
            raise
        say(f"the task is not profiled: {error.message}")
        return
    for region, failed in result["failed"].items():
        say(f"{region} could not be measured: {failed['code']}: {failed['message']}")


def _confirm_plan(reply: Any) -> None:
    """Show the plan on stderr and ask; raise ``GeofedError`` if it is declined, by the scheduler or by the user."""
    from control_plane.cli._plan import plan_summary

    plan: Data = json.loads(reply.plan_json)
    if not reply.admissible:
        raise declined(plan["reasons"])
    say(plan_summary(plan) + "\n")
    confirm("Submit this job?", yes=False)


def explain(
    job_file: JobFile,
    overrides: Overrides = None,
    name: JobName = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Also draw the plan's regions and links to this file."),
    ] = None,
    diff: Annotated[
        Path | None,
        typer.Option("--diff", metavar="OTHER.yaml", help="Show what JOB.yaml changes in the plan of this job file."),
    ] = None,
    method: Method = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Show the plan of a job with predicted time and cost, and the alternatives; run nothing."""
    overrides = _by_method(method, overrides)
    loaded, bundle = read_job(job_file, overrides, name)
    if diff is not None:
        _show_diff(context, diff, job_file, (loaded, bundle), overrides)
        return
    plan = _show_plan(ask_control_plane(context, lambda client: planned(client, loaded, bundle)))
    if plot is not None:
        from control_plane.cli._plan_picture import plan_picture

        try:
            plot.write_text(plan_picture(plan))
        except OSError as error:
            raise unwritable(plot, error) from None
        say(f"wrote {plot}")


def validate(
    job_file: JobFile, overrides: Overrides = None, name: JobName = None, output: Output = Format.TABLE
) -> None:
    """Check a job file and its task module, without a control plane."""
    loaded, bundle = read_job(job_file, overrides, name)
    facts = {
        "name": loaded.spec.metadata.name,
        "file": str(job_file),
        "spec": as_written(json.loads(loaded.json)),
        "spec_digest": loaded.digest,
        "code_digest": bundle.digest,
        "code_bytes": bundle.bytes,
    }
    emit(facts, table=lambda data: f"{data['file']} is valid", name=lambda data: str(data["name"]))


@dataclass(frozen=True)
class Submission:
    """A submission of a job; sending it twice creates one job."""

    loaded: LoadedSpec
    bundle: PackedTask
    request_id: str

    async def send(self, client: ControlClient) -> Data:
        """Upload the code and submit the job; return the job's view."""
        try:
            await put_task(client, self.bundle)
            await _put_weights(client, self.loaded)
            reply = await client.submit(self.loaded.json, self.bundle.digest, self.request_id)
        except GeofedError as error:
            if error.code not in OUTAGE:
                raise
            hint = f"{error.hint}; retry with --request-id {self.request_id} to create the job at most once"
            raise GeofedError("UNAVAILABLE", error.message, hint=hint) from None
        if not reply.created:
            say(f"request ID {self.request_id} has created this job before; no new job was created")
        return job_view(reply.job) | {"created": reply.created, "request_id": self.request_id}


async def planned(client: ControlClient, loaded: LoadedSpec, bundle: PackedTask) -> control_pb2.PlanReply:
    """Return the plan of a job; upload its code first, in case a region has to probe the task."""
    await put_task(client, bundle)
    return await client.plan(loaded.json, bundle_digest=bundle.digest)


def _show_plan(reply: Any) -> Data:
    from control_plane.cli._report import plan_text

    plan: Data = json.loads(reply.plan_json)
    if not reply.admissible:
        raise declined(plan["reasons"])
    emit(plan, table=plan_text, name=lambda data: "\n".join(part["region"] for part in data["partitions"]))
    return plan


def _show_diff(
    context: Path | None,
    before: Path,
    after: Path,
    job: tuple[LoadedSpec, PackedTask],
    overrides: list[str] | None,
) -> None:
    """Show what differs between two job files and between their plans."""
    from control_plane.cli._plan import diff_text, plan_diff

    plans, specs = [], []
    for path, (loaded, bundle) in ((before, read_job(before, overrides)), (after, job)):
        reply = ask_control_plane(context, lambda client, one=loaded, code=bundle: planned(client, one, code))  # type: ignore[misc]
        plan: Data = json.loads(reply.plan_json)
        if not reply.admissible:
            error = declined(plan["reasons"])
            raise GeofedError(error.code, f"{path}: {error.message}", hint=error.hint)
        plans.append(plan)
        specs.append(as_written(json.loads(loaded.json)))
    rows = plan_diff(*specs, *plans)
    warnings = {name: plan.get("warnings", []) for name, plan in zip(("before", "after"), plans, strict=True)}
    data = {"before": str(before), "after": str(after), "changes": rows, "warnings": warnings}
    emit(data, table=diff_text, name=lambda shown: "\n".join(row["what"] for row in shown["changes"]))


def declined(reasons: list[Data]) -> GeofedError:
    """Return the error for a plan that is not admissible, with its reasons."""
    codes = {reason["code"] for reason in reasons}
    code = codes.pop() if len(codes) == 1 else "INADMISSIBLE"
    hint = "; ".join(dict.fromkeys(reason["remedy"] for reason in reasons))
    return GeofedError(code, "; ".join(reason["text"] for reason in reasons), hint=hint)


def _submitted_text(view: Data) -> str:
    return fields([("job", view["id"]), ("state", view["state"]), ("condition", view["condition"])])


def _id_of(view: Data) -> str:
    return str(view["id"])


def random_id() -> str:
    """Return a new request ID."""
    import uuid

    return str(uuid.uuid4())
