"""`user add`, `user list`, `user change` and `user remove`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data, time_text
from control_plane.cli._completion import complete_user
from control_plane.cli._connect import ask_control_plane, confirm
from control_plane.cli._options import ContextFile, NoInput, Output, Yes
from control_plane.cli._output import columns, emit, fields, say
from control_plane.cli._settings import Format
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from geofed_pb.v1 import control_pb2

app = typer.Typer(name="user", help="Users of the federation and their roles.", no_args_is_help=True)
_ROLES = ("viewer", "member", "auditor", "operator")
UserName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the user.", show_default=False, autocompletion=complete_user)
]
Quota = Annotated[
    int | None,
    typer.Option(
        min=0, help="Limit of workers reserved for the user's promises at any time, over all regions. Default: none."
    ),
]

UserRole = Annotated[
    str | None,
    typer.Option(
        metavar="ROLE",
        help="viewer: reads what is shared with it. member (default): also submits jobs. auditor: reads the audit log "
        "and what all jobs are. operator: may do everything.",
        autocompletion=lambda: list(_ROLES),
        show_default=False,
    ),
]
Expires = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="The token expires after this time: 12h, 90d. Default: never."),
]
Identity = Annotated[
    str | None,
    typer.Option(
        metavar="IDENTITY",
        help="Who the user is at the identity provider, mostly an e-mail address; the user signs in by `geofed login`.",
        show_default=False,
    ),
]


@app.command(epilog="Example: geofed user add ann --promised-workers 8 --expires 90d")
def add(
    user: UserName,
    promised_workers: Quota = None,
    role: UserRole = None,
    expires: Expires = None,
    identity: Identity = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Create a user and print the token (shown once); a user with an identity signs in instead."""
    if identity is not None and expires is not None:
        raise GeofedError(
            "USAGE", "--expires is for a token, and a user with an identity gets none", hint="leave it out"
        )
    if identity is not None and not identity.strip():
        raise GeofedError("USAGE", "--identity is empty", hint="leave it out for a user with a token")
    seconds, wanted, who = _seconds(expires), role or "", identity or ""
    reply = ask_control_plane(
        context,
        lambda client: client.add_user(user, promised_workers, role=wanted, token_seconds=seconds, identity=who),
    )
    if reply.token:
        _show_token(reply)
    else:
        emit(_user_view(reply.user), table=_user_text, name=_name_of)


@app.command("list", epilog="Example: geofed user list")
def list_users(context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """List the users with their quotas; a user sees only itself."""

    async def ask(client: ControlClient) -> list[Data]:
        return [_user_view(user) for user in await client.users()]

    views = ask_control_plane(context, ask)
    emit(views, table=_users_table, name=_name_of)
    if not views:
        say("no users except the operator; create one: geofed user add NAME")


@app.command(epilog="Example: geofed user change ann --promised-workers 16")
def change(
    user: UserName,
    promised_workers: Quota = None,
    no_quota: Annotated[bool, typer.Option("--no-quota", help="Remove the limit of promised workers.")] = False,
    new_token: Annotated[bool, typer.Option("--new-token", help="Print a new token and revoke the old one.")] = False,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Take the signing key of the user's next submission.")
    ] = False,
    role: UserRole = None,
    expires: Expires = None,
    identity: Identity = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Change a user's role, quota, token, key or identity; existing promises stay valid. --identity ends the token,
    unless there is a --new-token."""
    if no_quota and promised_workers is not None:
        raise GeofedError("USAGE", "--promised-workers and --no-quota contradict each other")
    if expires is not None and not new_token:
        raise GeofedError("USAGE", "--expires is for a new token", hint="add --new-token")
    if not (no_quota or new_token or new_key or promised_workers is not None or role or identity is not None):
        hint = "give --promised-workers N, --no-quota, --role ROLE, --new-token, --new-key or --identity IDENTITY"
        raise GeofedError("USAGE", "nothing to change", hint=hint)
    seconds = _seconds(expires)

    async def ask(client: ControlClient) -> control_pb2.UserReply:
        return await client.change_user(
            user, promised_workers, no_quota=no_quota, new_token=new_token, new_key=new_key, role=role or "",
            token_seconds=seconds, identity=identity,
        )  # fmt: skip

    reply = ask_control_plane(context, ask)
    if reply.token:
        _show_token(reply)
    else:
        emit(_user_view(reply.user), table=_user_text, name=_name_of)


@app.command(epilog="Example: geofed user key")
def key(context: ContextFile = None, output: Output = Format.TABLE) -> None:
    """Print your public key, which regions list in `policy.allowUsers`; it is created when it is used first."""
    from control_plane.cli._connect import find_context
    from control_plane.client import Context
    from geofed_pb.security.signing import Signer

    file = Context.load(find_context(context)).key_file
    if file is None:
        raise GeofedError("CONFIG_INVALID", "the context names no key")
    try:
        data = {"public_key": Signer.load_or_create(file).public_key, "file": str(file)}
    except OSError as error:
        raise GeofedError("CONFIG_INVALID", f"cannot create {file}: {error.strerror}") from None
    emit(data, table=lambda shown: str(shown["public_key"]), name=lambda shown: str(shown["public_key"]))


@app.command(epilog="Example: geofed user remove ann --yes")
def remove(
    user: UserName,
    yes: Yes = False,
    no_input: NoInput = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Remove a user; the user's jobs continue."""
    confirm(f"Remove user {user}?", yes=yes)

    async def ask(client: ControlClient) -> Data:
        return _user_view(await client.remove_user(user))

    view = ask_control_plane(context, ask)
    emit(view, table=_user_text, name=_name_of)
    if view["jobs"]:
        say(f"{view['jobs']} jobs of {user} continue; `geofed list` shows them, `geofed cancel` ends them")


def _seconds(expires: str | None) -> float:
    from control_plane._durations import parse_duration

    if expires is None:
        return 0.0
    try:
        return parse_duration(expires).total_seconds()
    except ValueError as error:
        raise GeofedError("USAGE", f"--expires: {error}") from None


def _show_token(reply: control_pb2.UserReply) -> None:
    data = _user_view(reply.user) | {"token": reply.token}
    # Every output format shows the token, since it cannot be read again.
    emit(data, table=lambda shown: str(shown["token"]), name=lambda shown: str(shown["token"]))
    say(f"The token is shown once. {data['name']} needs it in a file, the control plane's pki/ca.crt, and a copy of")
    say("its context.json in which `token_file` and `ca_file` name these two.")


def _user_view(user: control_pb2.User) -> Data:
    return {
        "name": user.name,
        "promised_workers": user.promised_workers if user.HasField("promised_workers") else None,
        "promised_now": user.promised_now,
        "jobs": user.jobs,
        "created_at": time_text(user.created_at),
        "public_key": user.public_key or None,
        "role": user.role or "member",
        "token_expires_at": time_text(user.token_expires_at) if user.token_expires_at else None,
        "identity": user.identity or None,
        "sign_ins": user.sign_ins,
    }


def _quota_text(view: Data) -> str:
    return "unlimited" if view["promised_workers"] is None else str(view["promised_workers"])


def _users_table(views: list[Data]) -> str:
    return columns(
        ["USER", "ROLE", "QUOTA", "PROMISED", "JOBS", "TOKEN UNTIL"],
        [
            [view["name"], view["role"], _quota_text(view), view["promised_now"], view["jobs"], _until(view)]
            for view in views
        ],
    )


def _until(view: Data) -> str:
    if view["identity"] and view["token_expires_at"] and view["token_expires_at"] <= time_text(time.time()):
        return "signs in"
    return str(view["token_expires_at"] or "always")


def _user_text(view: Data) -> str:
    return fields(
        [
            ("user", view["name"]),
            ("role", view["role"]),
            ("quota", f"promised workers: {_quota_text(view)}"),
            ("promised", f"{view['promised_now']} workers"),
            ("jobs", view["jobs"]),
            ("since", view["created_at"]),
            ("token until", _until(view)),
            ("key", view["public_key"] or "none yet"),
            *([("identity", f"{view['identity']}; valid sign-ins: {view['sign_ins']}")] if view["identity"] else []),
        ]
    )


def _name_of(view: Data) -> str:
    return str(view["name"])
