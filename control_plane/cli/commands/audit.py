"""`audit export` and `audit verify`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data, time_text
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._options import ContextFile, Output
from control_plane.cli._output import emit, fields, say, unwritable
from control_plane.cli._settings import Format
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from geofed_pb.audit import Head, Verified

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

    ask_control_plane(context, ask)
    _show(file, _verified(file, "", []))


@app.command(epilog="Example: geofed audit verify audit.jsonl")
def verify(
    file: AuditFile,
    witness: Annotated[
        list[Path] | None,
        typer.Option(help="Heads that a region has kept (`geofed agent audit`); may be repeated.", show_default=False),
    ] = None,
    public_key: Annotated[
        str, typer.Option(help="Key that must have signed the head, in hexadecimal. Default: the file's own.")
    ] = "",
    output: Output = Format.TABLE,
) -> None:
    """Check, without a control plane, that a log is what was recorded: nothing changed, dropped or put elsewhere."""
    _show(file, _verified(file, public_key.lower(), [head for path in witness or () for head in _heads(path)]))
    if not witness:
        say("without --witness, a log that the control plane has written anew as a whole is not found out")


def _verified(file: Path, public_key: str, witnesses: list[Head]) -> Verified:
    from geofed_pb.audit import AuditBroken, verify

    try:
        return verify(_lines(file), public_key=public_key, witnesses=witnesses)
    except AuditBroken as error:
        raise GeofedError("AUDIT_BROKEN", f"{file}: {error}") from None


def _heads(path: Path) -> Iterator[Head]:
    import json

    from geofed_pb.audit import AuditBroken, Head

    for number, line in enumerate(_lines(path), start=1):
        try:
            value = json.loads(line)
            # When the region has received it, by its own clock.
            value.pop("received", None)
            yield Head.read(value)
        except (AuditBroken, ValueError, AttributeError) as error:
            hint = "give what `geofed agent audit` prints"
            raise GeofedError("USAGE", f"{path}:{number}: {error}", hint=hint) from None


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield line.rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise GeofedError("USAGE", f"cannot read {path}: {error}") from None


def _show(file: Path, found: Verified) -> None:
    head = found.head
    data: Data = {
        "file": str(file),
        "federation": found.federation,
        "entries": head.seq,
        "kinds": found.kinds,
        "head": head.hash,
        "signed_at": time_text(head.at),
        "public_key": head.public_key,
        "witnessed": found.witnessed,
        "witnessed_entries": found.witnessed_seq,
    }
    emit(data, table=_text, name=lambda data: str(data["head"]))


def _text(data: Data) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(data["kinds"].items()))
    witnessed = f"{data['witnessed']} heads, up to entry {data['witnessed_entries']}" if data["witnessed"] else "none"
    return fields([
        ("federation", data["federation"]), ("entries", data["entries"]), ("of them", kinds or "none"),
        ("head", data["head"]), ("signed", data["signed_at"]), ("by the key", data["public_key"]),
        ("witnesses", witnessed),
    ])  # fmt: skip
