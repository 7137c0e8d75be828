"""Checks of an ID token. Pure: the keys and the time are given."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError

__all__ = ["FRESH_SECONDS", "LEEWAY_SECONDS", "Key", "identity_of", "key_id", "same_identity", "verified"]

FRESH_SECONDS = 600.0
"""Age at which an ID token is no longer taken: it is exchanged right after it was issued."""
LEEWAY_SECONDS = 60.0
"""Difference of the clocks of the identity provider and the control plane that is tolerated."""
_MOST_CHARACTERS = 16 << 10
"""Limit of an ID token's length; those with many groups have some 4,000 characters."""
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with a public key. A shared secret or none at all would let others make tokens."""
_TYPES = (None, "JWT", "jwt")
"""Types in the header of an ID token. Access and logout tokens have others (RFC 9068, OpenID Back-Channel Logout)."""


@dataclass(frozen=True)
class Key:
    """A public key of the provider."""

    key: jwt.PyJWK
    algorithm: str = ""
    """The only one that it is for; empty: all of its type."""


def key_id(token: str) -> str:
    """Return which key an ID token says that it is signed with; empty: it does not say. Raises
    ``GeofedError("UNAUTHENTICATED")`` for what is no token."""
    if len(token) > _MOST_CHARACTERS:
        raise _refused(f"it is longer than {_MOST_CHARACTERS} characters")
    try:
        header = jwt.get_unverified_header(token)
    except jwt.PyJWTError as error:
        raise _refused(str(error)) from None
    if header.get("alg") not in _ALGORITHMS:
        raise _refused(f"its algorithm {clean(str(header.get('alg')), 40)!r} is not one of {', '.join(_ALGORITHMS)}")
    if header.get("typ") not in _TYPES:
        raise _refused(f"it is a token of type {clean(str(header.get('typ')), 40)!r}")
    return str(header.get("kid", ""))


def verified(
    token: str, keys: Sequence[Key], *, issuer: str, client_id: str, at: float, nonce: str | None = None
) -> dict[str, Any]:
    """Return the claims of an ID token (OpenID Connect Core 1.0, section 3.1.3.7).

    Args:
        keys: the public keys that it may be signed with.
        at: present time, in Unix seconds.
        nonce: what the token must repeat; None: nothing was asked for, and it must have none.

    Raises ``GeofedError("UNAUTHENTICATED")``.
    """
    claims = _signed(token, keys, issuer, client_id)
    try:
        expires, issued, begins = (float(claims.get(name, at)) for name in ("exp", "iat", "nbf"))
    except (TypeError, ValueError):
        raise _refused("its times are no numbers") from None
    timely = max(issued, begins) - LEEWAY_SECONDS <= at < expires + LEEWAY_SECONDS
    if not timely or not at - issued <= FRESH_SECONDS + LEEWAY_SECONDS:
        raise _refused("it has expired, or the clocks of the identity provider and the control plane differ")
    audiences = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
    if (len(audiences) > 1 or "azp" in claims) and claims.get("azp") != client_id:
        raise _refused("it was issued to another client")
    if "events" in claims or claims.get("typ", "ID") != "ID":
        raise _refused("it is another kind of token")
    told = str(claims.get("nonce", ""))
    if not hmac.compare_digest(told.encode(errors="replace"), (nonce or "").encode()):
        raise _refused("it does not belong to this sign-in")
    return claims


def _signed(token: str, keys: Sequence[Key], issuer: str, client_id: str) -> dict[str, Any]:
    """Return the claims of a token that one of the keys has signed, for this client by this issuer."""
    algorithm = jwt.get_unverified_header(token)["alg"]
    # The clock is ours, so that the time of a test counts, too.
    options: Any = {"require": ["exp", "iat", "iss", "aud", "sub"]}
    options |= dict.fromkeys(("verify_exp", "verify_iat", "verify_nbf"), False)
    reason = "its key is not one of the issuer's for this algorithm"
    for key in keys:
        if key.algorithm not in ("", algorithm):
            continue
        try:
            return jwt.decode(
                token, key.key.key, algorithms=[algorithm], audience=client_id, issuer=issuer, options=options
            )
        except (jwt.PyJWTError, TypeError, ValueError) as error:
            reason = str(error)
    raise _refused(reason)


def identity_of(claims: Mapping[str, Any], claim: str) -> str:
    """Return who signs in: the value of a claim.

    Raises ``GeofedError("UNAUTHENTICATED")`` if it is missing, or an address that the provider has not verified.
    """
    value = claims.get(claim)
    if not isinstance(value, str) or not value:
        hint = "ask for another scope, or start the control plane with another --oidc-claim"
        raise GeofedError("UNAUTHENTICATED", f"the identity provider gives no {claim!r}", hint=hint)
    if claim == "email" and claims.get("email_verified") is not True:
        hint = "verify it there, or start the control plane with another --oidc-claim"
        text = f"the identity provider has not verified the address {clean(value, 320)}"
        raise GeofedError("UNAUTHENTICATED", text, hint=hint)
    return value


def same_identity(one: str, other: str, claim: str = "email") -> bool:
    """Whether two values of a claim are of one person: e-mail addresses differ in the case of ASCII letters only."""
    return one == other or (claim == "email" and one.isascii() and other.isascii() and one.lower() == other.lower())


def _refused(reason: str) -> GeofedError:
    return GeofedError("UNAUTHENTICATED", f"the ID token is not valid: {reason}", hint="sign in again")
