"""`login` and `logout`: sign in with the identity provider of a federation."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane._view import Data, time_text
from control_plane.cli._connect import (
    LOCAL_CONTEXT,
    ask_control_plane,
    credentials_folder,
    find_context,
    named_contexts,
)
from control_plane.cli._options import ContextFile, Output
from control_plane.cli._output import emit, fields, say, unwritable
from control_plane.cli._settings import Format
from control_plane.cli.commands.context import require_name, save
from geofed_pb.errors import Exit, GeofedError

if TYPE_CHECKING:
    from control_plane.client import Context, ControlClient
    from control_plane.oidc import OpenIdProvider

_DEVICE = "urn:ietf:params:oauth:grant-type:device_code"
_POLL_SECONDS = (1.0, 5.0, 60.0)
"""Time between two questions whether the user has signed in: least, default, most."""
_LIFE_SECONDS = (30.0, 600.0, 1800.0)
"""Time for which a code is valid: least, default, most."""


def login(
    address: Annotated[
        str | None,
        typer.Argument(help="host:port of the control plane. Default: that of the context.", show_default=False),
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="The control plane's pki/ca.crt, for an ADDRESS.", show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the context. Default: the federation's.", show_default=False),
    ] = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Sign in with your organisation's identity provider; needs no token."""
    known, known_name = _known(address, ca_file, context)
    if name:
        require_name(name)
    try:
        view = asyncio.run(_sign_in(known, known_name, name))
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None
    emit(view, table=_text, name=lambda shown: str(shown["context"]))
    if LOCAL_CONTEXT.is_file():
        say(f"in this folder {LOCAL_CONTEXT} comes first; --context {view['context']} overrides it")


async def _sign_in(known: Context, known_name: str, name: str | None) -> Data:
    """Sign in, and keep the token in a context; return what the command shows.

    Args:
        known_name: the name of the context that is renewed; empty: none.
        name: the one that the user wants; None: any.
    """
    from control_plane.client import ControlClient

    ca_pem = _read(known.ca_file)
    async with ControlClient(known.address, ca_pem, "") as client:
        from control_plane.oidc import OpenIdProvider

        options = await client.sign_in_options()
        if known.federation not in ("", options.federation):
            text = f"{known.address} is of federation {options.federation}, not {known.federation}"
            raise GeofedError("UNAUTHENTICATED", text, hint="give its address and --ca-file to sign in there")
        chosen = name or known_name or options.federation
        require_name(chosen)
        former = _former(chosen, known.address, ca_pem)
        id_token = await _id_token(OpenIdProvider(options.issuer, options.client_id))
        reply = await client.sign_in(id_token)
    async with ControlClient(known.address, ca_pem, reply.token) as client:
        try:
            kept = _keep(chosen, replace(known, federation=options.federation), ca_pem, reply.token)
        except GeofedError:
            await client.sign_out()
            raise
    if former:
        async with ControlClient(known.address, ca_pem, former) as client:
            with contextlib.suppress(GeofedError):
                await client.sign_out()
    return {
        "user": reply.user.name,
        "role": reply.user.role or "member",
        "federation": options.federation,
        "context": chosen,
        "file": str(kept),
        "expires_at": time_text(reply.expires_at),
    }


def logout(context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """Revoke the token of this machine's sign-in, and remove it.

    If the control plane does not answer, the token is removed, too; a copy of it is valid until it expires.
    """
    from control_plane.client import Context

    path = find_context(context)
    found = Context.load(path)
    if not _is_of_sign_in(found):
        hint = "contexts of `geofed login` are in `geofed context list`; name one by --context"
        raise GeofedError("USAGE", f"{path} is not of a sign-in", hint=hint)
    if not found.token_file.exists():
        raise GeofedError("USAGE", f"you are not signed in to {found.federation}", hint="sign in: `geofed login`")

    async def sign_out(client: ControlClient) -> None:
        try:
            await client.sign_out()
        except GeofedError as error:
            # Expired or revoked already.
            if error.code != "UNAUTHENTICATED":
                raise

    try:
        ask_control_plane(context, sign_out)
    except GeofedError as error:
        if not error.retryable:
            raise
        found.token_file.unlink(missing_ok=True)
        text = f"{error.message}. The token is removed from this machine, but not revoked: a copy of it is valid until"
        hint = "where a copy may exist, ask an operator to end your sign-ins: `geofed user change NAME --identity ...`"
        raise GeofedError(error.code, f"{text} it expires, within 12 hours", hint=hint) from None
    found.token_file.unlink(missing_ok=True)
    view = {"federation": found.federation, "address": found.address, "signed_in": False}
    emit(view, table=lambda shown: f"signed out of {shown['federation']}", name=lambda shown: str(shown["federation"]))


def _is_of_sign_in(context: Context) -> bool:
    """Whether a context's token was written by `login`, and not given by an operator."""
    return context.token_file.resolve().parent.parent == credentials_folder().resolve()


def _former(name: str, address: str, ca_pem: bytes) -> str:
    """Return the token of the sign-in that a new one replaces; empty: none.

    Raises ``GeofedError("USAGE")`` if the name is that of another control plane's context, or of another user's.
    """
    from control_plane.client import Context

    path = named_contexts().get(name)
    if path is None:
        return ""
    known = Context.load(path)
    try:
        same = _is_of_sign_in(known) and known.address == address and known.ca_file.read_bytes() == ca_pem
        if same:
            return known.token_file.read_text().strip() if known.token_file.exists() else ""
    except OSError:
        pass
    hint = "choose another one: --name NAME"
    raise GeofedError("USAGE", f"context {name} is not of a sign-in at {address}", hint=hint)


def _known(address: str | None, ca_file: Path | None, given: Path | None) -> tuple[Context, str]:
    """Return where to sign in, with the name of its context; empty: it has none, or is not of a sign-in."""
    from control_plane.client import Context

    if address is not None:
        if ca_file is None:
            raise GeofedError("USAGE", "an address needs --ca-file", hint="ask for the control plane's pki/ca.crt")
        return Context(address, ca_file, Path()), ""
    if ca_file is not None:
        raise GeofedError("USAGE", "--ca-file is for an ADDRESS", hint="geofed login HOST:PORT --ca-file ca.crt")
    path = find_context(given)
    found = Context.load(path)
    names = [name for name, file in named_contexts().items() if file.resolve() == path.resolve()]
    return found, names[0] if names and _is_of_sign_in(found) else ""


async def _id_token(provider: OpenIdProvider) -> str:
    """Have the user sign in at the provider with any browser (RFC 8628). Raises ``GeofedError``."""
    from geofed_pb.bounds import clean

    begun = await provider.device_code()
    code, url = begun.get("device_code"), begun.get("verification_uri_complete") or begun.get("verification_uri")
    if not isinstance(code, str) or not isinstance(url, str):
        hint = "let the client use the device flow at the identity provider"
        raise GeofedError("UNAVAILABLE", f"{provider.issuer} gives no code to sign in with", hint=hint)
    life = _within(begun.get("expires_in"), _LIFE_SECONDS)
    say(f"Open this page in a browser, and sign in within {life / 60:.0f} minutes:")
    say(f"  {clean(url, 500)}")
    say(f"It must show the code {clean(str(begun.get('user_code', '')), 40)}")
    form = {"grant_type": _DEVICE, "device_code": code}
    pause, loop = _within(begun.get("interval"), _POLL_SECONDS), asyncio.get_running_loop()
    ends = loop.time() + life
    while loop.time() < ends:
        await asyncio.sleep(pause)
        try:
            answer = await provider.tokens(form)
        except GeofedError as error:
            if error.code != "UNAVAILABLE":
                raise
            pause = min(2 * pause, _POLL_SECONDS[-1])
            continue
        if isinstance(answer.get("id_token"), str):
            return str(answer["id_token"])
        match answer.get("error"):
            case "authorization_pending":
                pass
            case "slow_down":
                pause += 5.0
            case "access_denied":
                raise GeofedError("FORBIDDEN", "the sign-in was refused at the identity provider")
            case "expired_token":
                break
            case other:
                reason = clean(str(answer.get("error_description") or other), 300)
                raise GeofedError("UNAUTHENTICATED", f"{provider.issuer} issues no ID token: {reason}")
    raise GeofedError("UNAUTHENTICATED", "nobody has signed in with the code in time", hint="run `geofed login` again")


def _within(value: Any, bounds: tuple[float, float, float]) -> float:
    least, default, most = bounds
    return min(max(float(value), least), most) if isinstance(value, int | float) else default


def _read(ca_file: Path) -> bytes:
    try:
        return ca_file.read_bytes()
    except OSError as error:
        raise GeofedError("USAGE", f"cannot read {ca_file}: {error.strerror}") from None


def _keep(name: str, context: Context, ca_pem: bytes, token: str) -> Path:
    """Store the credentials, and the context that names them; it becomes the current one if it is the first."""
    from geofed_pb.files.durable import write_durably

    folder = credentials_folder() / name
    try:
        for each in (folder.parent.parent, folder.parent, folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(folder / "token", [f"{token}\n".encode()], mode=0o600)
        write_durably(folder / "ca.crt", [ca_pem], mode=0o644)
    except OSError as error:
        raise unwritable(folder, error) from None
    return save(
        name,
        replace(
            context,
            ca_file=folder / "ca.crt",
            token_file=folder / "token",
            key_file=context.key_file if context.key_file and _is_of_sign_in(context) else folder / "user.key",
        ),
    )


def _text(view: Data) -> str:
    return fields(
        [
            ("user", f"{view['user']} ({view['role']})"),
            ("federation", view["federation"]),
            ("context", view["context"]),
            ("signed in until", view["expires_at"]),
        ]
    )
