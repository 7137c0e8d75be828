"""`rotate-ca`: replace the federation's certificate authority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data
from control_plane.cli._connect import ask_control_plane, confirm
from control_plane.cli._options import ContextFile, Output, Yes
from control_plane.cli._output import emit
from control_plane.cli._settings import Format

if TYPE_CHECKING:
    from control_plane.client import ControlClient

_NEXT = {
    "prepared": "A new authority is trusted beside the present one. Give all users the new ca.crt; then rotate again.",
    "switched": "The new authority signs; the former one is still trusted. Rotate again when all regions have renewed.",
    "single": "Only the new authority is trusted.",
}


def rotate_ca(
    force: Annotated[bool, typer.Option("--force", help="Although regions have certificates of before.")] = False,
    yes: Yes = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Take the next of three steps that replace the federation's certificate authority."""
    confirm("Take the next step of replacing the certificate authority?", yes=yes)

    async def ask(client: ControlClient) -> Data:
        reply = await client.rotate_authority(force=force)
        return {"stage": reply.stage, "ca_pem": reply.ca_pem}

    emit(ask_control_plane(context, ask), table=_text, name=lambda data: str(data["stage"]))


def _text(data: Data) -> str:
    return f"{data['stage']}: {_NEXT[data['stage']]}"
