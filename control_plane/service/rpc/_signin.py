"""Signs users in by an identity provider: an ID token is exchanged for a token of the user with an end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from control_plane.oidc import FRESH_SECONDS, LEEWAY_SECONDS, OidcConfig, OpenIdProvider, identity_of, same_identity
from control_plane.pki import hash_secret, new_secret
from control_plane.service.state._callers import SignIn, sign_ins_json, sign_ins_of
from control_plane.service.state._federation import Federation
from control_plane.store import UserRow
from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError

__all__ = ["SIGN_IN_SECONDS", "SignInService", "revoked"]

SIGN_IN_SECONDS = 12 * 3600.0
"""Time for which a sign-in is valid: a working day."""
_MOST = 10
"""Limit of a user's sign-ins; beyond it the oldest one ends."""
_MOST_KNOWN = 60
"""Limit of a user's sign-ins with those that ended a few minutes ago: nobody signs in so often."""


class SignInService:
    """The federation's side of a sign-in."""

    def __init__(self, federation: Federation, config: OidcConfig | None) -> None:
        self._federation, self._config = federation, config
        self._provider = None if config is None else OpenIdProvider(config.issuer, config.client_id)

    @property
    def provider(self) -> OpenIdProvider:
        """The identity provider. Raises ``GeofedError("ILLEGAL_STATE")`` if there is none."""
        if self._provider is None:
            hint = "ask an operator for a token: `geofed user add NAME`"
            raise GeofedError("ILLEGAL_STATE", "this federation has no identity provider", hint=hint)
        return self._provider

    @property
    def has_provider(self) -> bool:
        """Whether there is an identity provider."""
        return self._provider is not None

    @property
    def dashboard_url(self) -> str:
        """Where browsers reach the dashboard, without a slash at the end; empty: where they say that they do."""
        return self._config.dashboard_url.rstrip("/") if self._config is not None else ""

    @property
    def client_secret(self) -> str:
        """Secret of the client; empty: a public client. Raises ``GeofedError("CONFIG_INVALID")``."""
        file = self._config.client_secret_file if self._config is not None else None
        try:
            return file.read_text().strip() if file is not None else ""
        except (OSError, ValueError) as error:
            raise GeofedError("CONFIG_INVALID", f"cannot read {file}: {error}") from None

    async def sign_in(self, id_token: str, nonce: str | None = None) -> tuple[UserRow, str, float]:
        """Return the user whose identity an ID token states, a new token, and when that expires, in Unix seconds.

        ``nonce``: what the ID token must repeat; None: nothing.
        Raises ``GeofedError``: UNAUTHENTICATED, FORBIDDEN if no user has the identity; UNAVAILABLE, CONFIG_INVALID,
        ILLEGAL_STATE.
        """
        federation, config = self._federation, self._config
        claims = await self.provider.verify(id_token, federation.clock(), nonce)
        assert config is not None
        identity, token = identity_of(claims, config.claim), new_secret()
        async with federation.change() as draft:
            user = _with_identity(draft.users, identity, config.claim)
            draft.by = user.name
            expires_at = draft.at + SIGN_IN_SECONDS
            user = replace(user, subject=_subject(user, claims))
            known = [one for one in sign_ins_of(user) if one.expires_at > draft.at]
            # Its signature can be spelled in several ways, what is signed cannot.
            new = SignIn(hash_secret(token), expires_at, hash_secret(id_token.rpartition(".")[0]))
            if new.id_token_hash in {one.id_token_hash for one in known}:
                raise GeofedError("UNAUTHENTICATED", "the ID token has been used before", hint="sign in again")
            if len(known) >= _MOST_KNOWN:
                raise GeofedError("LIMIT_EXCEEDED", f"{user.name} has signed in too often", hint="wait 10 minutes")
            live, spent = [one for one in known if one.token_hash], [one for one in known if not one.token_hash]
            spent += [_spent(one, draft.at) for one in live[: 1 - _MOST]]
            kept = [*spent, *live[1 - _MOST :], new]
            user = replace(user, sign_ins_json=sign_ins_json(kept))
            draft.put_user(user)
            data = {"user": user.name, "identity": identity, "token_expires_at": expires_at}
            draft.record("user.signed-in", f"user {user.name} has signed in as {identity}", data=data)
        if len(live) >= _MOST:
            await federation.rights_changed()
        return user, token, expires_at

    async def sign_out(self, token_hash: str) -> None:
        """Revoke the token of a sign-in; another token is left alone."""
        if _signed_in_with(self._federation.users, token_hash) is None:
            return
        async with self._federation.change() as draft:
            user = _signed_in_with(draft.users, token_hash)
            if user is None:
                return
            draft.by = user.name
            kept = [_spent(one, draft.at) if one.token_hash == token_hash else one for one in sign_ins_of(user)]
            draft.put_user(replace(user, sign_ins_json=sign_ins_json(kept)))
            draft.record("user.signed-out", f"user {user.name} has signed out", data={"user": user.name})
        await self._federation.rights_changed()


def revoked(user: UserRow, at: float) -> str:
    """Return the `sign_ins_json` of a user whose sign-ins all end, in Unix seconds ``at``."""
    return sign_ins_json(_spent(one, at) for one in sign_ins_of(user))


def _spent(sign_in: SignIn, at: float) -> SignIn:
    """Return what is kept of a sign-in that has ended: its ID token must not be exchanged again while it is valid."""
    return SignIn("", min(sign_in.expires_at, at + FRESH_SECONDS + 2 * LEEWAY_SECONDS), sign_in.id_token_hash)


def _subject(user: UserRow, claims: Mapping[str, Any]) -> str:
    """Return the account at the provider. An address may be given to another person, an account is not (OpenID Connect
    Core 1.0, section 5.7). Raises ``GeofedError("FORBIDDEN")`` for another account than at the first sign-in."""
    subject = hash_secret(json.dumps([claims["iss"], claims["sub"]]))
    if user.subject not in ("", subject):
        text = f"{user.identity} is not the account of the identity provider that {user.name} signed in with before"
        hint = f"an operator lets the new one in: `geofed user change {user.name} --identity {user.identity}`"
        raise GeofedError("FORBIDDEN", text, hint=hint)
    return subject


def _signed_in_with(users: Mapping[str, UserRow], token_hash: str) -> UserRow | None:
    for user in users.values():
        if token_hash in user.sign_ins_json and token_hash in {one.token_hash for one in sign_ins_of(user)}:
            return user
    return None


def _with_identity(users: Mapping[str, UserRow], identity: str, claim: str) -> UserRow:
    for user in users.values():
        if user.identity and same_identity(user.identity, identity, claim):
            return user
    hint = f"an operator can add it: `geofed user add NAME --identity {clean(identity, 200)}`"
    raise GeofedError("FORBIDDEN", f"no user of this federation has the identity {clean(identity, 320)}", hint=hint)
