"""`audit`: the log, and statements of where models come from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data, time_text
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._options import ContextFile, Output
from control_plane.cli._output import emit, fields, say, unwritable
from control_plane.cli._settings import Format
from control_plane.cli.commands.jobs import JobArgument
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from geofed_pb.security.attestation import Provenance
    from geofed_pb.security.audit import Verified

app = typer.Typer(
    name="audit", help="The audit log: who submitted, read and changed what, unalterably.", no_args_is_help=True
)
AuditFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of the log, JSON lines.", show_default=False)]


@app.command(epilog="Example: geofed audit export audit.jsonl")
def export(file: AuditFile, context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """Write the audit log with its signed head to a file, and verify it."""

    async def ask(client: ControlClient) -> None:
        temporary = file.with_name(f".{file.name}.partial")
        try:
            with temporary.open("w", encoding="utf-8") as into:
                async for line in client.audit():
                    into.write(f"{line}\n")
            temporary.replace(file)
        except OSError as error:
            raise unwritable(file, error) from None
        finally:
            temporary.unlink(missing_ok=True)

    from geofed_pb.security.audit_files import verified

    ask_control_plane(context, ask)
    _show(file, verified(file))


@app.command(epilog="Example: geofed audit verify audit.jsonl")
def verify(
    file: AuditFile,
    witness: Annotated[
        list[Path] | None,
        typer.Option(
            help="Heads that others have received: what a region prints (`geofed agent audit`) or, for the log of a "
            "region, the control plane's log; may be repeated.",
            show_default=False,
        ),
    ] = None,
    public_key: Annotated[
        str, typer.Option(help="Key that must have signed the head, in hexadecimal. Default: the file's own.")
    ] = "",
    region: Annotated[
        str, typer.Option(help="Region whose log it must be. Default: whoever's FILE says that it is.")
    ] = "",
    output: Output = Format.TABLE,
) -> None:
    """Check, without a control plane, that a log is what was recorded: nothing changed, dropped or put elsewhere."""
    from geofed_pb.security.audit_files import remarks, verified

    found = verified(file, public_key=public_key.lower(), witness_files=witness or (), region=region)
    _show(file, found)
    for remark in remarks(found, witnessed=bool(witness)):
        say(remark)


@app.command(epilog="Example: geofed audit attest digits-3fa1 digits.intoto.json")
def attest(
    job: JobArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.", show_default=False)],
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Write where an ended job's models come from, signed: an in-toto statement with SLSA provenance, in an envelope of
    DSSE.
    """

    async def ask(client: ControlClient) -> str:
        return await client.attestation(job)

    text = ask_control_plane(context, ask)
    found = _provenance(text, file, "")
    try:
        file.write_text(f"{text}\n")
    except OSError as error:
        raise unwritable(file, error) from None
    _show_provenance(file, found)


@app.command("verify-model", epilog="Example: geofed audit verify-model digits.safetensors digits.intoto.json")
def verify_model(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Exported model.", show_default=False)],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `audit attest` wrote.", show_default=False)],
    public_key: Annotated[
        str, typer.Option(help="Key that must have signed, in hexadecimal. Default: the one that FILE names.")
    ] = "",
    log: Annotated[
        Path | None, typer.Option(help="Audit log, in which the model must be the job's.", show_default=False)
    ] = None,
    region_log: Annotated[
        list[Path] | None,
        typer.Option(
            help="A region's own log (`geofed agent audit export`), which must tell the same data; may be repeated.",
            show_default=False,
        ),
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Check, without a control plane, that a model is the one that a statement is about."""
    found = _provenance(_text_of(file), file, public_key.lower())
    try:
        with model.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise GeofedError("USAGE", f"cannot read {model}: {error}") from None
    if digest not in found.models:
        raise GeofedError("AUDIT_BROKEN", f"{file} is not about {model}, whose SHA-256 is {digest}")
    if log is not None:
        _check_in_log(log, found, digest)
    for one in region_log or ():
        _check_in_region_log(one, found)
    _show_provenance(file, found, digest)
    if not public_key:
        say(f"without --public-key, anybody may have signed {'this' if log is None else 'this, and have made the log'}")
    if found.state != "succeeded":
        say(f"warning: job {found.job} has not succeeded, it was {found.state}")


def _text_of(file: Path) -> str:
    from geofed_pb.security.attestation import MOST_BYTES

    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise GeofedError("USAGE", f"cannot read {file}: {error}") from None


def _provenance(text: str, file: Path, public_key: str) -> Provenance:
    from geofed_pb.security.attestation import AttestationBroken, opened

    try:
        return opened(text, public_key)
    except AttestationBroken as error:
        raise GeofedError("AUDIT_BROKEN", f"{file}: {error}") from None


def _check_in_log(log: Path, found: Provenance, digest: str) -> None:
    """Check that a log continues the one that a statement was made with, and that the job has the model there."""
    import json

    from geofed_pb.security.audit import AuditBroken, Head
    from geofed_pb.security.audit_files import lines_of, verified

    try:
        head = Head.read(found.head)
    except AuditBroken as error:
        raise GeofedError("AUDIT_BROKEN", f"the statement's head of the audit log: {error}") from None
    named = verified(log, public_key=found.public_key, witnesses=[head]).federation
    if named != found.federation:
        raise GeofedError("AUDIT_BROKEN", f"{log} is of federation {named}, {found.job} of {found.federation}")
    entries = (json.loads(text) for line in lines_of(log) if (text := json.loads(line).get("entry")) is not None)
    of_job = {entry["kind"]: entry for entry in entries if entry.get("job") == found.job}
    submitted, ended = of_job.get("job.submitted", {}), of_job.get("job.ended", {})
    if (submitted.get("code"), ended.get("state")) != (f"sha256:{found.code}", found.state):
        raise GeofedError("AUDIT_BROKEN", f"{log} states another code or end of job {found.job}")
    if (ended["model"] or {}).get("digest") != f"sha256:{digest}":
        raise GeofedError("AUDIT_BROKEN", f"{log} has no end of job {found.job} with this model, as its last one")


def _check_in_region_log(log: Path, found: Provenance) -> None:
    """Check that a region's own log continues the one whose head a statement has, and tells the same data and code."""
    import json

    from geofed_pb.security.audit import AuditBroken, Head
    from geofed_pb.security.audit_files import lines_of, verified

    region = verified(log).region
    if not found.region_heads.get(region):
        text = f"{found.job} has no head of the log of region {region}" if region else f"{log} is of no region"
        raise GeofedError("AUDIT_BROKEN", text)
    try:
        head = Head.read(found.region_heads[region])
    except AuditBroken as error:
        raise GeofedError("AUDIT_BROKEN", f"the statement's head of region {region}: {error}") from None
    named = verified(log, public_key=head.public_key, witnesses=[head], region=region).federation
    if named != found.federation:
        raise GeofedError("AUDIT_BROKEN", f"{log} is of federation {named}, {found.job} of {found.federation}")
    entries = (json.loads(text) for line in lines_of(log) if (text := json.loads(line).get("entry")) is not None)
    of_job = {entry["kind"]: entry for entry in entries if entry.get("job") == found.job}
    started, ended = of_job.get("job.started", {}), of_job.get("job.ended", {})
    if started.get("code") != f"sha256:{found.code}":
        raise GeofedError("AUDIT_BROKEN", f"{log} states another code of job {found.job}")
    if ended.get("data", {}) != found.data.get(region, {}):
        raise GeofedError("AUDIT_BROKEN", f"{log} states other data of job {found.job}")


def _show_provenance(file: Path, found: Provenance, digest: str = "") -> None:
    data: Data = {
        "file": str(file),
        "federation": found.federation,
        "job": found.job,
        "state": found.state,
        "finished_at": found.finished_at,
        "models": {name: digest for digest, name in found.models.items()},
        "made_of": list(found.made_of),
        "data": found.data,
        "without_region_head": sorted(name for name, head in found.region_heads.items() if not head),
        "public_key": found.public_key,
        "verified": found.models.get(digest),
    }
    emit(data, table=_provenance_text, name=lambda data: str(data["file"]))


def _provenance_text(data: Data) -> str:
    return fields([
        ("statement", data["file"]), ("federation", data["federation"]), ("job", data["job"]),
        ("ended", f"{data['state']}, {data['finished_at']}"), ("models", ", ".join(data["models"])),
        ("made of", ", ".join(data["made_of"])),
        *([("without head", ", ".join(data["without_region_head"]))] if data["without_region_head"] else []),
        ("signed by", data["public_key"]), *([("this model", data["verified"])] if data["verified"] else []),
    ])  # fmt: skip


def _show(file: Path, found: Verified) -> None:
    head = found.head
    data: Data = {
        "file": str(file),
        "federation": found.federation,
        "region": found.region or None,
        "entries": head.seq,
        "kinds": found.kinds,
        "head": head.hash,
        "signed_at": time_text(head.at),
        "public_key": head.public_key,
        "witnessed": found.witnessed,
        "witnessed_entries": found.witnessed_seq,
        "other_keys": found.other_keys,
        "without_head": found.without_head,
    }
    emit(data, table=_text, name=lambda data: str(data["head"]))


def _text(data: Data) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(data["kinds"].items()))
    witnessed = f"{data['witnessed']} heads, up to entry {data['witnessed_entries']}" if data["witnessed"] else "none"
    return fields([
        ("federation", data["federation"]), *([("region", data["region"])] if data["region"] else []),
        ("entries", data["entries"]), ("of them", kinds or "none"),
        ("head", data["head"]), ("signed", data["signed_at"]), ("by the key", data["public_key"]),
        ("witnesses", witnessed),
    ])  # fmt: skip
