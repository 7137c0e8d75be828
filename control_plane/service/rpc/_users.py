"""Users and their permissions: the operator may do everything, a user may change only its own jobs.

Only hashes of tokens are stored.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from control_plane.pki import hash_secret, new_secret
from control_plane.service.state._draft import OPERATOR
from control_plane.service.state._federation import Federation
from control_plane.store import JobRow, UserRow
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import control_pb2

__all__ = ["Caller", "add_user", "caller_of", "caller_with", "change_user", "list_users", "remove_user"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")


@dataclass(frozen=True)
class Caller:
    """Authenticated caller of a method."""

    user: str = ""
    """Name of the user; empty: the operator."""

    def may_read(self, row: JobRow) -> bool:
        """Whether the caller may see a job's specification, plan, events, log and model."""
        return self.user in ("", row.user, *row.shared_with)

    def require(self, right: str, row: JobRow) -> None:
        """Raise ``GeofedError("FORBIDDEN")`` unless the caller may "read" or "change" a job.

        A user may change its own jobs, and read those and the ones that are shared with it.
        """
        if not self.may_read(row):
            hint = f"its user can share it: `geofed share {row.id} {self.user}`"
            raise GeofedError("FORBIDDEN", f"{row.id} is another user's job", hint=hint)
        if right == "change" and self.user not in ("", row.user):
            whose = f"the job of {row.user or f'the {OPERATOR}'}"
            raise GeofedError("FORBIDDEN", f"{row.id} is {whose}; {self.user} may only read it")


def caller_of(authorization: str, operator_hash: str, users: Iterable[UserRow]) -> Caller:
    """Return the caller with an authorization header, "Bearer TOKEN". Raises ``GeofedError("UNAUTHENTICATED")``."""
    kind, _, token = authorization.partition(" ")
    if kind != "Bearer" or not token:
        raise GeofedError("UNAUTHENTICATED", "the call has no token")
    return caller_with(hash_secret(token), operator_hash, users)


def caller_with(token_hash: str, operator_hash: str, users: Iterable[UserRow]) -> Caller:
    """Return the caller whose token has a hash. Raises ``GeofedError("UNAUTHENTICATED")``."""
    if hmac.compare_digest(token_hash, operator_hash):
        return Caller()
    for user in users:
        if hmac.compare_digest(token_hash, user.token_hash):
            return Caller(user.name)
    raise GeofedError("UNAUTHENTICATED", "the token is unknown in this federation")


async def add_user(federation: Federation, request: control_pb2.AddUserRequest) -> control_pb2.UserReply:
    """Create a user. Raises ``GeofedError``: CONFIG_INVALID for an invalid name, ILLEGAL_STATE if the user exists."""
    name = request.name
    if not _NAME.fullmatch(name) or name == OPERATOR:
        raise GeofedError(
            "CONFIG_INVALID",
            f"{name!r} is not a valid user name",
            hint=f"use at most 42 lower-case letters, digits and hyphens, and not {OPERATOR}",
        )
    token = new_secret()
    async with federation.change() as draft:
        if name in draft.users:
            hint = f"`geofed user change {name}` changes its quota or token"
            raise GeofedError("ILLEGAL_STATE", f"user {name} exists already", hint=hint)
        limit = request.promised_workers if request.HasField("promised_workers") else None
        user = UserRow(name, hash_secret(token), limit, draft.at)
        draft.put_user(user)
        draft.record("user.added", f"user {name} was created with {_quota_text(limit)}", data=_event_data(user))
    return control_pb2.UserReply(user=_message(federation, user, federation.promised_workers()), token=token)


async def change_user(federation: Federation, request: control_pb2.ChangeUserRequest) -> control_pb2.UserReply:
    """Change a user's quota or token; existing promises stay valid. Raises ``GeofedError("USER_NOT_FOUND")``."""
    token = new_secret() if request.new_token else ""
    async with federation.change() as draft:
        user = _known(draft.users, request.name)
        if request.no_quota:
            user = replace(user, promised_workers=None)
        elif request.HasField("promised_workers"):
            user = replace(user, promised_workers=request.promised_workers)
        if token:
            user = replace(user, token_hash=hash_secret(token))
        if request.new_key:
            user = replace(user, public_key="")
        draft.put_user(user)
        what = " and a new token" if token else ""
        text = f"user {user.name} now has {_quota_text(user.promised_workers)}{what}"
        draft.record("user.changed", text, data=_event_data(user) | {"new_token": bool(token)})
    return control_pb2.UserReply(user=_message(federation, user, federation.promised_workers()), token=token)


async def remove_user(federation: Federation, name: str) -> control_pb2.User:
    """Remove a user; the user's jobs continue. Raises ``GeofedError("USER_NOT_FOUND")``."""
    async with federation.change() as draft:
        user = _known(draft.users, name)
        removed = _message(federation, user, federation.promised_workers())
        draft.remove_user(name)
        draft.record("user.removed", f"user {name} was removed", data={"user": name})
    return removed


def list_users(federation: Federation, caller: Caller) -> control_pb2.ListUsersReply:
    """Return all users to the operator, and to a user only itself."""
    shown = [user for name, user in sorted(federation.users.items()) if caller.user in ("", name)]
    promised = federation.promised_workers() if shown else {}
    return control_pb2.ListUsersReply(users=[_message(federation, user, promised) for user in shown])


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
    )


def _quota_text(limit: int | None) -> str:
    return "no quota" if limit is None else f"a quota of {limit} promised workers"


def _event_data(user: UserRow) -> dict[str, object]:
    return {"user": user.name, "promised_workers": user.promised_workers}
