"""The command `region-agent`."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from geofed_pb.errors import Exit, GeofedError
from geofed_pb.files.output import written_out

__all__ = ["app", "main"]

app = typer.Typer(
    name="region-agent",
    help="Run one region of a federation: its workers, its parameter servers, its data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

StateDir = Annotated[
    Path,
    typer.Option("--state-dir", envvar="GEOFED_REGION_STATE", help="Where the agent keeps its identity and state."),
]
DEFAULT_STATE = Path(".geofed/region-agent")
_debug = False


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    """Options of all commands of the region agent."""
    global _debug
    _debug = debug


@app.command(epilog="Example: geofed agent join --token-file home.token")
def join(
    token_file: Annotated[Path, typer.Option("--token-file", help="File with the invitation; - reads standard input.")],
    state_dir: StateDir = DEFAULT_STATE,
    control_plane: Annotated[
        str | None, typer.Option("--control-plane", help="host:port, where the invitation's does not reach it.")
    ] = None,
) -> None:
    """Join a federation with the one-time invitation of `geofed region invite NAME`."""
    from region_agent.link.enrolment import join_federation

    federation = asyncio.run(join_federation(_invitation(token_file), state_dir, control_plane))
    _say(f"region {federation.region} has joined {federation.federation} at {federation.address}")
    _say(f"next: geofed agent run --config REGION.yaml --state-dir {state_dir}")


@app.command(epilog="Example: geofed agent run --config home.yaml")
def run(
    config: Annotated[Path, typer.Option("--config", help="The region's configuration.")],
    state_dir: StateDir = DEFAULT_STATE,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    log_format: Annotated[
        str, typer.Option("--log-format", help="Format of the log, and of the child processes' logs: text or json.")
    ] = "text",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar="GEOFED_TOKEN_FILE",
            help="File with an invitation: where the agent has not joined yet, it joins first.",
        ),
    ] = None,
) -> None:
    """Run the agent until SIGTERM."""
    from geofed_pb.logs import configure_logs

    configure_logs(log_format, log_level)
    # numpy would start threads, which forked processes lack; the agent has no use for them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Objects of modules stay: to collect garbage among them takes a tenth of the time, now and later.
    gc.disable()
    from geofed_pb.fork_server import ForkServer
    from region_agent.config import load_config
    from region_agent.daemon import run as run_daemon
    from region_agent.link.identity import Identity, read_invitation

    gc.freeze()
    gc.enable()
    settings = load_config(config)
    # Before anything here starts a thread or locks a file.
    with ForkServer.fork(("region_agent.gateway.embedded.__main__", "sync.ps.__main__")) as children:
        identity = Identity(state_dir, settings)
        if token_file is not None and not identity.joined:
            from region_agent.link.enrolment import join_federation

            text = _invitation(token_file)
            _check_name("invitation", read_invitation(text).region, settings.name)
            asyncio.run(join_federation(text, state_dir))
        identity.check()
        _check_name("certificate", identity.federation.region, settings.name)
        with _StateLock(state_dir):
            asyncio.run(run_daemon(settings, state_dir, log_format, config, children))


@app.command(epilog="Example: geofed agent status -o json")
def status(
    state_dir: StateDir = DEFAULT_STATE,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Show the state of the agent."""
    path = state_dir / "status.json"
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        # With a full disk the agent writes no status, but sets the file's time.
        alive = max(float(fields["at"]), path.stat().st_mtime)
    except FileNotFoundError:
        raise GeofedError("UNAVAILABLE", f"no agent has been started with {state_dir}") from None
    fields["running"] = _is_running(int(fields["pid"])) and time.time() - alive < 10
    if output == "json":
        print(json.dumps({"schema_version": 1, "status": "ok", "data": fields}))
    else:
        _print_status(fields)
    if not fields["running"]:
        raise GeofedError("UNAVAILABLE", "the agent is not running", hint="start it with `geofed agent run`")


@app.command(epilog="Example: geofed agent preemptible 4")
def preemptible(
    workers: Annotated[int, typer.Argument(help="How many are left, or there again.", min=0, show_default=False)],
    state_dir: StateDir = DEFAULT_STATE,
) -> None:
    """Set how many preemptible workers there are: for hooks of the cloud that takes them away or brings them back."""
    from region_agent.capacity import set_preemptible_workers

    if not state_dir.is_dir():
        raise GeofedError("UNAVAILABLE", f"no agent has been started with {state_dir}")
    set_preemptible_workers(state_dir, workers)
    _say(f"{workers} preemptible workers from now on; the jobs that had more continue with what is left")


@app.command(epilog="Example: geofed agent pending")
def pending(
    state_dir: StateDir = DEFAULT_STATE,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """List what waits for your approval, by `policy.approve` of the region file."""
    from dataclasses import asdict

    from region_agent.approvals import Approvals

    found = list(Approvals(state_dir).pending())
    if output == "json":
        print(json.dumps({"schema_version": 1, "status": "ok", "data": [asdict(one) for one in found]}))
        return
    for one in found:
        since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(one.since))
        secrets = f", secrets {' '.join(one.secrets)}" if one.secrets else ""
        image = f", image {one.image}" if one.image else ""
        print(f"{one.job}  user {one.user}, code {one.code[:19]}, dataset {one.dataset}{secrets}{image}, since {since}")
    if not found:
        _say("nothing waits for approval")


@app.command(epilog="Example: geofed agent approve JOB")
def approve(
    job: Annotated[str, typer.Argument(metavar="JOB", help="ID from `geofed agent pending`.", show_default=False)],
    state_dir: StateDir = DEFAULT_STATE,
    approver: Annotated[
        str, typer.Option("--as", help="Who approves, for the audit log. Default: the user of this machine.")
    ] = "",
) -> None:
    """Approve a job, profile or probe, so that it runs on this region's data."""
    from region_agent.approvals import Approvals

    found = Approvals(state_dir).approve(job, approver or _machine_user())
    _say(f"{found.job} of user {found.user} may run on {found.dataset}")


def _machine_user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in a container
        return f"uid {os.getuid()}"


audits = typer.Typer(name="audit", help="The region's own audit log, and heads of the control plane's.")
app.add_typer(audits)


@audits.callback(invoke_without_command=True)
def audit(context: typer.Context, state_dir: StateDir = DEFAULT_STATE) -> None:
    """Print the heads of the control plane's audit log that this region has: for `geofed audit verify --witness`."""
    from region_agent.link.audit_heads import AUDIT_HEADS
    from region_agent.link.identity import Identity

    if (command := context.invoked_subcommand) is not None:
        source = context.get_parameter_source("state_dir")
        if source is not None and source.name == "COMMANDLINE":
            raise GeofedError("USAGE", f"--state-dir is an option of {command}", hint=f"write it after {command}")
        return
    try:
        print((Identity(state_dir).folder / AUDIT_HEADS).read_text(), end="")
    except FileNotFoundError:
        raise GeofedError("UNAVAILABLE", f"no agent with {state_dir} has been connected yet") from None


@audits.command(epilog="Example: geofed agent audit export home-audit.jsonl")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.", show_default=False)],
    state_dir: StateDir = DEFAULT_STATE,
) -> None:
    """Write the region's own audit log, with its signed head: what ran here on which data, and what left the region."""
    from geofed_pb.files.durable import write_durably
    from geofed_pb.security.audit_files import verified
    from region_agent.link.identity import Identity
    from region_agent.state.audit_log import exported

    federation = Identity(state_dir).federation
    lines = list(exported(state_dir, federation.federation, federation.region))
    try:
        write_durably(file, [f"{line}\n".encode() for line in lines], mode=0o600)
    except OSError as error:
        raise GeofedError("USAGE", f"cannot write {file}: {error.strerror}") from None
    _say(f"{verified(file).head.seq} entries in {file}")


@audits.command(epilog="Example: geofed agent audit verify home-audit.jsonl --witness audit.jsonl --region home")
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.", show_default=False)],
    witness: Annotated[
        list[Path] | None,
        typer.Option(help="The control plane's log, from `geofed audit export`; may be repeated.", show_default=False),
    ] = None,
    region: Annotated[str, typer.Option(help="Region whose log it must be. Default: the one that FILE names.")] = "",
) -> None:
    """Check, offline, that a log of this region is what was recorded; the same as `geofed audit verify`."""
    from geofed_pb.security.audit_files import remarks, verified

    found = verified(file, witness_files=witness or (), region=region)
    print(f"region {found.region}: {found.head.seq} entries, {found.witnessed} heads that the control plane has agree")
    for remark in remarks(found, witnessed=bool(witness)):
        _say(remark)


@app.command(epilog="Example: geofed agent digest digits --config home.yaml")
def digest(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Name in the region's file.", show_default=False)],
    config: Annotated[Path, typer.Option("--config", help="The region's configuration.")],
    state_dir: StateDir = DEFAULT_STATE,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Print the digests of a dataset's splits as they are now, to compare with those of a model's statement."""
    from region_agent.config import load_config
    from region_agent.shards.digests import DataDigests

    region, digests = load_config(config), DataDigests(state_dir)
    if (held := region.datasets.get(dataset)) is None:
        raise GeofedError("USAGE", f"{config} has no dataset {dataset}")
    found = {rule: digests.of(held, region.stores, rule) for rule in ("keyed", "plain")}
    if output == "json":
        print(json.dumps({"schema_version": 1, "status": "ok", "data": found}))
        return
    for of_rule in found.values():
        for split, text in sorted(of_rule.items()):
            print(f"{split:<8}{text}")


@app.command(epilog="Example: geofed agent privacy --config home.yaml")
def privacy(
    config: Annotated[
        Path | None, typer.Option("--config", help="The region's configuration, which has the budgets.")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Show what jobs have spent of the privacy of the region's data, and what is left of the budgets."""
    from dataclasses import asdict

    from region_agent.config import load_config
    from region_agent.privacy import LEDGER, accounts_of
    from sync.privacy import PrivacyLedger, epsilon_of

    ledger = PrivacyLedger(state_dir / LEDGER)
    rows = ledger.rows(doubted=output != "json")
    accounts = accounts_of(load_config(config) if config is not None else None, rows)
    costs = [epsilon_of([(row.release, row.spent)], row.delta) for row in rows]
    if output == "json":
        jobs = [asdict(row) | {"epsilon": cost} for row, cost in zip(rows, costs, strict=True)]
        data = {"datasets": [asdict(one) for one in accounts], "jobs": jobs}
        print(json.dumps({"schema_version": 1, "status": "ok", "data": data}))
        return
    for one in accounts:
        left = "no budget" if one.budget is None else f"of {one.budget:g} allowed"
        spent = f"epsilon {one.epsilon:.3g} spent, {one.reserved:.3g} with what open jobs may still spend"
        print(f"{one.dataset}  {spent}, {left}, at delta {one.delta:g}")
    for row, cost in zip(rows, costs, strict=True):
        of = f"{row.spent} of {row.granted} releases, open" if row.open else f"{row.spent} releases, ended"
        level, noise = f"level {row.level}", f"epsilon {cost:.3g} at delta {row.delta:g}"
        print(f"  {row.job}  {row.dataset}, {level}: {noise}, by {of}")
    if not rows:
        _say("no job has released anything under differential privacy")
    # Where releases may be missing, the owner sees those that are known before the error.
    ledger.rows()


@app.command(epilog="Example: geofed agent doctor --config home.yaml")
def doctor(
    config: Annotated[Path, typer.Option("--config", help="The region's configuration.")],
    state_dir: StateDir = DEFAULT_STATE,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Check what the agent needs: identity, control plane, gateway, data, disk, clock."""
    from region_agent.config import load_config
    from region_agent.doctor import examine

    findings = asyncio.run(examine(load_config(config), state_dir))
    if output == "json":
        checks = [{"name": f.name, "ok": f.ok, "text": f.text, "hint": f.hint} for f in findings]
        print(json.dumps({"schema_version": 1, "status": "ok", "data": checks}))
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name:<14} {finding.text}")
            if not finding.ok and finding.hint:
                print(f"{'':<22}hint: {finding.hint}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(int(Exit.JOB_ENDED_BADLY))


@app.command(epilog="Example: geofed agent storage --config home.yaml")
def storage(
    config: Annotated[Path, typer.Option("--config", help="The region's configuration.")],
    state_dir: StateDir = DEFAULT_STATE,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Show what the agent keeps of jobs, how long, and what it removes next."""
    import shutil
    import sqlite3
    from dataclasses import asdict

    from region_agent.config import load_config
    from region_agent.storage import RegionStorage

    try:
        found = RegionStorage.of(load_config(config), state_dir.resolve()).totals(time.time())
    except sqlite3.Error as error:
        raise GeofedError("UNAVAILABLE", f"no agent has been started with {state_dir}: {error}") from None
    free = shutil.disk_usage(state_dir).free
    if output == "json":
        data = {"kinds": [asdict(total) for total in found], "free_bytes": free}
        print(json.dumps({"schema_version": 1, "status": "ok", "data": data}))
        return
    for one in found:
        kept = f"{(one.keep_seconds or 0) / 86_400:g} d"
        due = f", of which the next sweep removes {one.due_bytes / 1e6:.1f} MB" if one.due_count else ""
        print(f"{one.kind:<12}{one.count:>6}  {one.bytes / 1e6:>10.1f} MB  unused ones are kept {kept}{due}")
    print(f"{'free':<12}{'':>6}  {free / 1e6:>10.1f} MB")


@app.command(epilog="Example: geofed agent schema > region.schema.json")
def schema() -> None:
    """Print the JSON Schema of the region file."""
    from region_agent.config import json_schema

    print(json.dumps(json_schema(), indent=2))


@app.command(epilog="Example: geofed agent version")
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("geofed"))


def _print_status(fields: dict[str, Any]) -> None:
    link = "connected" if fields["connected"] else "not connected"
    print(f"region         {fields['region']}")
    print(f"agent          {'running' if fields['running'] else 'not running'} (pid {fields['pid']})")
    print(f"control plane  {fields['control_plane']} ({fields['federation']}), {link}")
    if fields["condition"]:
        print(f"condition      {fields['condition']}")
    ends = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(fields["certificate_ends"]))
    print(f"certificate    until {ends}")
    print(f"gateway        {fields['gateway']}")
    if fields.get("channel"):
        print(f"channel        {fields['channel']}")
    for one in fields.get("pending", []):
        print(f"waiting        {one['job']} of user {one['user']}: geofed agent approve {one['job']}")
    # Missing in the status of an older agent.
    print(f"isolation      {fields.get('isolation', 'unknown')}")
    for job, part in fields["partitions"].items():
        print(f"job            {job}: {part['state']}, attempt {part['attempt']}  {part['condition']}".rstrip())
    for job, shard in fields.get("shards", {}).items():
        print(f"shard          for {job} to {shard['to']}: {shard['state']}  {shard['condition']}".rstrip())


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class _StateLock:
    """Lock of a state directory: two agents with the same one would fence each other again and again."""

    def __init__(self, state_dir: Path) -> None:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = state_dir / "agent.lock"
        self._file: Any = None

    def __enter__(self) -> None:
        import fcntl

        self._file = self._path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise GeofedError(
                "ILLEGAL_STATE", f"an agent is already running with {self._path.parent}", hint="stop it first"
            ) from None

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _check_name(what: str, region: str, configured: str) -> None:
    if region != configured:
        raise GeofedError("CONFIG_INVALID", f"the {what} is for region {region}, the configuration for {configured}")


def _invitation(token_file: Path) -> str:
    """Read an invitation. Raises ``GeofedError("TOKEN_INVALID")``."""
    try:
        return sys.stdin.read() if str(token_file) == "-" else token_file.read_text()
    except OSError as error:
        raise GeofedError("TOKEN_INVALID", f"cannot read {token_file}: {error.strerror}") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def main() -> None:
    """Run the command; a failure prints an error and a hint, and sets the exit status."""
    try:
        with written_out():
            app(standalone_mode=True)
    except GeofedError as error:
        if _debug:
            raise
        _say(f"error[{error.code}]: {error.message}")
        if error.hint:
            _say(f"hint: {error.hint}")
        sys.exit(int(error.exit))
    except Exception as error:
        if _debug:
            raise
        _say(f"error[INTERNAL]: {type(error).__name__}: {error}")
        _say("hint: a bug in geofed; run again with --debug and report it")
        sys.exit(int(Exit.BUG))
