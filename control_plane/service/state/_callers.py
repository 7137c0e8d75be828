"""Who calls, and what the caller may do: by its role, and by whose a job is."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control_plane._view import time_text
from control_plane.pki import hash_secret
from control_plane.service.state._draft import OPERATOR
from control_plane.store import JobRow, UserRow
from geofed_pb.errors import GeofedError

__all__ = ["ROLES", "Caller", "SignIn", "caller_named", "caller_of", "caller_with", "sign_ins_json", "sign_ins_of"]

ROLES = ("viewer", "member", "auditor", "operator")
"""What users can be. A viewer reads what is shared with it; a member also submits jobs; an auditor reads the audit log
and what all jobs are, but only shared logs and models; an operator may do everything."""


@dataclass(frozen=True)
class Caller:
    """Authenticated caller of a method."""

    user: str = ""
    """Name of the user; empty: the holder of the federation's own token, who is an operator."""
    role: str = OPERATOR
    """One of `ROLES`."""

    @property
    def may_all(self) -> bool:
        """Whether the caller may do everything with every job."""
        return self.role == OPERATOR

    @property
    def may_submit(self) -> bool:
        """Whether the caller may plan and submit jobs."""
        return self.role in ("member", OPERATOR)

    @property
    def may_read_all(self) -> bool:
        """Whether the caller may see what every job is."""
        return self.role in ("auditor", OPERATOR)

    @property
    def reads_of(self) -> str:
        """User whose jobs, and those shared with it, are what the caller may read; empty: all jobs."""
        return "" if self.may_read_all else self.user

    def may_read(self, row: JobRow) -> bool:
        """Whether the caller may see a job's specification, plan and events."""
        return self.may_read_all or self._shares(row)

    def may_change(self, row: JobRow) -> bool:
        """Whether the caller may cancel, scale, share or delete a job."""
        return self.may_all or (self.role == "member" and self.user == row.user)

    def _shares(self, row: JobRow) -> bool:
        return self.user in (row.user, *row.shared_with)

    def require(self, right: str, row: JobRow) -> None:
        """Raise ``GeofedError("FORBIDDEN")`` unless the caller may do that with a job.

        ``right``: "read": what it is; "contents": its code, logs and models; "change".
        A member may change its own jobs. Everybody may read those and the ones that are shared with them.
        """
        if not self.may_read(row) or (right == "contents" and not (self.may_all or self._shares(row))):
            hint = f"its user can share it: `geofed share {row.id} {self.user}`"
            raise GeofedError("FORBIDDEN", f"{row.id} is another user's job", hint=hint)
        if right == "change" and not self.may_change(row):
            whose = f"the job of {row.user or f'the {OPERATOR}'}"
            raise GeofedError("FORBIDDEN", f"{row.id} is {whose}; {self.user} may only read it")


@dataclass(frozen=True)
class SignIn:
    """A token that a user has got from the identity provider's word."""

    token_hash: str
    """Empty: it has ended, and only its ID token is remembered until that has, too."""
    expires_at: float
    """Unix seconds."""
    id_token_hash: str = ""
    """Hash of the ID token that it was exchanged for."""


def sign_ins_of(user: UserRow) -> list[SignIn]:
    """Return the sign-ins of a user, the oldest first."""
    return [SignIn(*one) for one in json.loads(user.sign_ins_json)] if user.sign_ins_json else []


def sign_ins_json(sign_ins: Iterable[SignIn]) -> str:
    """Return sign-ins as `UserRow.sign_ins_json`."""
    found = [[one.token_hash, one.expires_at, one.id_token_hash] for one in sign_ins]
    return json.dumps(found) if found else ""


def caller_of(authorization: str, operator_hash: str, users: Iterable[UserRow], at: float) -> Caller:
    """Return the caller with an authorization header, "Bearer TOKEN", in Unix seconds ``at``. Raises
    ``GeofedError("UNAUTHENTICATED")``."""
    kind, _, token = authorization.partition(" ")
    if kind != "Bearer" or not token:
        raise GeofedError("UNAUTHENTICATED", "the call has no token")
    return caller_with(hash_secret(token), operator_hash, users, at)


def caller_with(token_hash: str, operator_hash: str, users: Iterable[UserRow], at: float) -> Caller:
    """Return the caller whose token has a hash, in Unix seconds ``at``. Raises ``GeofedError("UNAUTHENTICATED")``."""
    if hmac.compare_digest(token_hash, operator_hash):
        return Caller()
    for user in users:
        if hmac.compare_digest(token_hash, user.token_hash):
            if 0 < user.token_expires_at <= at:
                text = f"the token of {user.name} expired on {time_text(user.token_expires_at)}"
                hint = f"an operator makes a new one: `geofed user change {user.name} --new-token --expires 90d`"
                raise GeofedError("UNAUTHENTICATED", text, hint=hint)
            return Caller(user.name, user.role)
        # Most users have no such token, and reading the sign-ins of all of them takes long.
        for one in sign_ins_of(user) if token_hash in user.sign_ins_json else ():
            if hmac.compare_digest(token_hash, one.token_hash):
                if one.expires_at <= at:
                    text = f"the sign-in of {user.name} expired on {time_text(one.expires_at)}"
                    raise GeofedError("UNAUTHENTICATED", text, hint="sign in again: `geofed login`")
                return Caller(user.name, user.role)
    raise GeofedError("UNAUTHENTICATED", "the token is unknown in this federation")


def caller_named(users: Mapping[str, UserRow], user: str) -> Caller:
    """Return the caller with a user's name, of all ``users`` by name; empty: the holder of the federation's own
    token."""
    known = users.get(user)
    return Caller(user, known.role if known is not None else ("member" if user else OPERATOR))
