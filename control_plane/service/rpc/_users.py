"""Creates, changes and lists users. Only hashes of their tokens are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from control_plane._view import time_text
from control_plane.oidc import same_identity
from control_plane.pki import hash_secret, new_secret
from control_plane.service.rpc._signin import revoked
from control_plane.service.state._callers import ROLES, Caller, sign_ins_of
from control_plane.service.state._draft import OPERATOR
from control_plane.service.state._federation import Federation
from control_plane.store import UserRow
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import control_pb2

__all__ = ["add_user", "change_user", "list_users", "remove_user", "user_message"]

_LONGEST_TOKEN_SECONDS = 10 * 366 * 86400.0
"""Longest time for which a token may be valid: ten years."""
_MOST_IDENTITY_CHARACTERS = 320
"""Limit of an identity's length: that of an e-mail address."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")


async def add_user(federation: Federation, request: control_pb2.AddUserRequest, by: str) -> control_pb2.UserReply:
    """Create a user. ``by``: who wants that, also below.

    Raises ``GeofedError``: CONFIG_INVALID for an invalid name, role or time, ILLEGAL_STATE if the user exists.
    """
    name = request.name
    if not _NAME.fullmatch(name) or name == OPERATOR:
        raise GeofedError(
            "CONFIG_INVALID",
            f"{name!r} is not a valid user name",
            hint=f"use at most 42 lower-case letters, digits and hyphens, and not {OPERATOR}",
        )
    token = new_secret()
    async with federation.change() as draft:
        draft.by = by
        if name in draft.users:
            hint = f"`geofed user change {name}` changes its quota or token"
            raise GeofedError("ILLEGAL_STATE", f"user {name} exists already", hint=hint)
        limit = request.promised_workers if request.HasField("promised_workers") else None
        role, expires_at = _role(request.role or "member"), _expiry(request.token_seconds, draft.at)
        if identity := _identity(request.identity, draft.users, name):
            # Nobody is given the token.
            expires_at = draft.at
        user = UserRow(
            name, hash_secret(token), limit, draft.at, role=role, token_expires_at=expires_at, identity=identity
        )
        draft.put_user(user)
        means = f"the identity {identity}" if identity else f"a token{_expiry_text(expires_at)}"
        draft.record(
            "user.added", f"user {name} was created as {role} with {_quota_text(limit)} and {means}",
            data=_event_data(user),
        )  # fmt: skip
    return control_pb2.UserReply(user=user_message(federation, user), token="" if identity else token)


async def change_user(federation: Federation, request: control_pb2.ChangeUserRequest, by: str) -> control_pb2.UserReply:
    """Change a user's role, quota, token or identity; existing promises stay valid. Another identity ends the token,
    unless there is a new one, and the sign-ins.

    Raises ``GeofedError``: USER_NOT_FOUND; CONFIG_INVALID for an invalid role, time or identity; ILLEGAL_STATE if the
    identity is another user's.
    """
    token = new_secret() if request.new_token else ""
    async with federation.change() as draft:
        draft.by = by
        user, ended = _known(draft.users, request.name), ""
        if request.no_quota:
            user = replace(user, promised_workers=None)
        elif request.HasField("promised_workers"):
            user = replace(user, promised_workers=request.promised_workers)
        if request.role:
            user = replace(user, role=_role(request.role))
        if token:
            expires_at = _expiry(request.token_seconds, draft.at)
            user = replace(user, token_hash=hash_secret(token), token_expires_at=expires_at)
        if request.HasField("identity"):
            # Who signed in was somebody else.
            identity = _identity(request.identity, draft.users, user.name)
            user = replace(user, identity=identity, subject="", sign_ins_json=revoked(user, draft.at))
            if not token and (not user.token_expires_at or user.token_expires_at > draft.at):
                user, ended = replace(user, token_expires_at=draft.at), "; its token has ended"
        if request.new_key:
            user = replace(user, public_key="")
        draft.put_user(user)
        what = f" and a new token{_expiry_text(user.token_expires_at)}" if token else ""
        text = f"user {user.name} now is {user.role} and has {_quota_text(user.promised_workers)}{what}{ended}"
        draft.record("user.changed", text, data=_event_data(user) | {"new_token": bool(token)})
    return control_pb2.UserReply(user=user_message(federation, user), token=token)


async def remove_user(federation: Federation, name: str, by: str) -> control_pb2.User:
    """Remove a user; the user's jobs continue. Raises ``GeofedError("USER_NOT_FOUND")``."""
    async with federation.change() as draft:
        draft.by = by
        user = _known(draft.users, name)
        removed = user_message(federation, user)
        draft.remove_user(name)
        draft.record("user.removed", f"user {name} was removed", data={"user": name})
    return removed


def list_users(federation: Federation, caller: Caller) -> control_pb2.ListUsersReply:
    """Return all users to operators and auditors, and to others only themselves."""
    shown = [user for name, user in sorted(federation.users.items()) if caller.may_read_all or caller.user == name]
    promised = federation.promised_workers() if shown else {}
    return control_pb2.ListUsersReply(users=[_message(federation, user, promised) for user in shown])


def user_message(federation: Federation, user: UserRow) -> control_pb2.User:
    """Return a user as messages show it."""
    return _message(federation, user, federation.promised_workers())


def _known(users: dict[str, UserRow], name: str) -> UserRow:
    if name not in users:
        raise GeofedError("USER_NOT_FOUND", f"user {name} not found")
    return users[name]


def _message(federation: Federation, user: UserRow, promised: Mapping[str, int]) -> control_pb2.User:
    return control_pb2.User(
        name=user.name,
        promised_workers=user.promised_workers,
        promised_now=promised.get(user.name, 0),
        jobs=sum(entry.row.user == user.name for entry in federation.jobs.values()),
        created_at=user.created_at,
        public_key=user.public_key,
        role=user.role,
        token_expires_at=user.token_expires_at,
        identity=user.identity,
        sign_ins=sum(bool(one.token_hash) and one.expires_at > federation.clock() for one in sign_ins_of(user)),
    )


def _identity(given: str, users: Mapping[str, UserRow], name: str) -> str:
    identity = given.strip()
    if (given and not identity) or len(identity) > _MOST_IDENTITY_CHARACTERS or not identity.isprintable():
        hint = f"use at most {_MOST_IDENTITY_CHARACTERS} printable characters, such as an e-mail address"
        raise GeofedError("CONFIG_INVALID", f"{given[:40]!r} cannot be an identity", hint=hint)
    for user in users.values():
        if identity and user.identity and same_identity(user.identity, identity) and user.name != name:
            hint = f"an identity is of one user: `geofed user change {user.name} --identity ''` takes it from that one"
            raise GeofedError("ILLEGAL_STATE", f"{identity} is the identity of user {user.name}", hint=hint)
    return identity


def _role(name: str) -> str:
    if name not in ROLES:
        raise GeofedError("CONFIG_INVALID", f"{name!r} is not a role", hint=f"roles: {', '.join(ROLES)}")
    return name


def _expiry(seconds: float, at: float) -> float:
    if not 0 <= seconds <= _LONGEST_TOKEN_SECONDS:
        raise GeofedError("CONFIG_INVALID", f"a token cannot be valid for {seconds:g} s", hint="at most 10 years")
    return at + seconds if seconds else 0.0


def _expiry_text(expires_at: float) -> str:
    return f", valid until {time_text(expires_at)}" if expires_at else ""


def _quota_text(limit: int | None) -> str:
    return "no quota" if limit is None else f"a quota of {limit} promised workers"


def _event_data(user: UserRow) -> dict[str, object]:
    return {
        "user": user.name,
        "promised_workers": user.promised_workers,
        "role": user.role,
        "token_expires_at": user.token_expires_at or None,
        "identity": user.identity or None,
    }
