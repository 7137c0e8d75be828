"""An identity provider: its endpoints, its keys, and the requests that are sent to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
import jwt

from control_plane.oidc._verifying import Key, key_id, verified
from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError

__all__ = ["SCOPE", "OidcConfig", "OpenIdProvider", "require_secure"]

SCOPE = "openid email profile"
"""Scopes that a sign-in asks for."""
_TIMEOUT_SECONDS = 10.0
"""Timeout of a request to the provider."""
_MOST_BYTES = 256 << 10
"""Limit of an answer's size."""
_KEEP_SECONDS = 300.0
"""Time for which endpoints and keys are kept before they are read again."""
_AGAIN_SECONDS = 10.0
"""Least time between two reads, however many tokens name unknown keys, and after a failure."""


@dataclass(frozen=True)
class OidcConfig:
    """How people sign in."""

    issuer: str
    """URL of the identity provider, as its ID tokens state it."""
    client_id: str
    """Client that the federation is registered as there."""
    client_secret_file: Path | None = None
    """Secret of that client, for the dashboard's sign-in; None: a public client."""
    claim: str = "email"
    """Claim of the ID token that names a user's identity."""
    dashboard_url: str = ""
    """Where browsers reach the dashboard; empty: at the host that they name."""

    def __post_init__(self) -> None:
        """Raise ``GeofedError("CONFIG_INVALID")`` for an address over which others could read tokens."""
        require_secure(self.issuer, "the identity provider")
        if self.dashboard_url:
            require_secure(self.dashboard_url, "the dashboard")
        if not self.client_id or not self.claim:
            raise GeofedError("CONFIG_INVALID", "an identity provider needs a client ID and the name of a claim")


def require_secure(url: str, what: str) -> None:
    """Raise ``GeofedError("CONFIG_INVALID")`` unless a URL is of HTTPS, or of this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        raise GeofedError("CONFIG_INVALID", f"{clean(url, 200)!r} is not a URL") from None
    local = host == "localhost"
    with contextlib.suppress(ValueError):
        local = local or ip_address(host).is_loopback
    if not host or (parts.scheme != "https" and not (parts.scheme == "http" and local)):
        raise GeofedError("CONFIG_INVALID", f"the address of {what} is not one of https: {clean(url, 200)!r}")


class _Kept:
    """An answer of the provider, or its failure, which is kept for a while, too."""

    def __init__(self, value: Any = None, error: GeofedError | None = None) -> None:
        self._value, self._error, self._at = value, error, time.monotonic()

    def is_older(self, seconds: float) -> bool:
        """Whether it was read more than so many seconds ago."""
        return time.monotonic() - self._at > seconds

    @property
    def is_due(self) -> bool:
        """Whether it is to be read again."""
        return self.is_older(_AGAIN_SECONDS if self._error is not None else _KEEP_SECONDS)

    def value(self) -> Any:
        """Return the answer, or raise the error that there was instead."""
        if self._error is not None:
            raise self._error
        return self._value


class OpenIdProvider:
    """Reads endpoints and keys when they are first needed, and keeps them for a while."""

    def __init__(self, issuer: str, client_id: str) -> None:
        """Raise ``GeofedError("CONFIG_INVALID")`` for an address over which others could read tokens."""
        require_secure(issuer, "the identity provider")
        self.issuer, self.client_id = issuer, client_id
        self._endpoints: _Kept | None = None
        self._keys: _Kept | None = None
        self._reading = asyncio.Lock()

    async def endpoint(self, name: str) -> str:
        """Return the URL of an endpoint by its name in OpenID Connect Discovery.

        Raises ``GeofedError``: UNAVAILABLE if the provider does not answer, CONFIG_INVALID if it has no such endpoint
        or another issuer's name.
        """
        if self._endpoints is None or self._endpoints.is_due:
            async with self._reading:
                # Others that waited for the same answer take it, and do not ask once more.
                if self._endpoints is None or self._endpoints.is_due:
                    self._endpoints = await self._kept(self._discovered())
        url = self._endpoints.value().get(name)
        if not isinstance(url, str):
            raise GeofedError("CONFIG_INVALID", f"{self.issuer} has no {name}")
        require_secure(url, f"its {name}")
        return url

    async def verify(self, token: str, at: float, nonce: str | None = None) -> dict[str, Any]:
        """Return the claims of an ID token; see `verified`. Raises ``GeofedError``: UNAUTHENTICATED, UNAVAILABLE,
        CONFIG_INVALID."""
        keys = await self._keys_named(key_id(token))
        return verified(token, keys, issuer=self.issuer, client_id=self.client_id, at=at, nonce=nonce)

    async def _keys_named(self, name: str) -> list[Key]:
        """Return the key with a name, or all of them for a token that names none."""

        def is_due() -> bool:
            kept = self._keys
            if kept is None or kept.is_due:
                return True
            return bool(name) and kept.is_older(_AGAIN_SECONDS) and name not in kept.value()

        if is_due():
            url = await self.endpoint("jwks_uri")
            async with self._reading:
                if is_due():
                    self._keys = await self._kept(self._read_keys(url))
        assert self._keys is not None
        found: dict[str, Key] = self._keys.value()
        if name and name not in found:
            text = f"the ID token is not valid: {self.issuer} has no key {clean(name, 80)!r}"
            raise GeofedError("UNAUTHENTICATED", text, hint="sign in again")
        return [found[name]] if name else list(found.values())

    @staticmethod
    async def _kept(reading: Coroutine[Any, Any, Any]) -> _Kept:
        try:
            return _Kept(await reading)
        except GeofedError as error:
            return _Kept(error=error)

    async def _discovered(self) -> dict[str, Any]:
        found = await self._json("GET", f"{self.issuer.rstrip('/')}/.well-known/openid-configuration")
        if found.get("issuer") != self.issuer:
            text = f"{self.issuer} calls itself {clean(str(found.get('issuer')), 200)!r}"
            raise GeofedError("CONFIG_INVALID", text, hint="the names must be equal, to the last slash")
        return found

    async def _read_keys(self, url: str) -> dict[str, Key]:
        """Return the keys by their names, of those without one by their places. Unusable ones are left out."""
        answer = (await self._json("GET", url)).get("keys")
        found: dict[str, Key] = {}
        for number, raw in enumerate(answer if isinstance(answer, list) else []):
            # Keys without a purpose are for signatures, too (RFC 7517, section 4.2).
            if isinstance(raw, dict) and raw.get("use", "sig") == "sig":
                name, algorithm = raw.get("kid"), raw.get("alg")
                with contextlib.suppress(jwt.PyJWTError, TypeError, ValueError, AttributeError):
                    key = Key(jwt.PyJWK(raw), algorithm if isinstance(algorithm, str) else "")
                    found[name if isinstance(name, str) and name else f"#{number}"] = key
        if not found:
            raise _unavailable(f"{self.issuer} has no usable key")
        return found

    async def tokens(self, form: Mapping[str, str], secret: str = "") -> dict[str, Any]:
        """Ask the token endpoint; return its answer, also if that is an error of OAuth (RFC 6749, section 5.2).

        ``secret``: of a confidential client, sent by HTTP basic authentication.
        """
        url = await self.endpoint("token_endpoint")
        basic = (quote(self.client_id, safe=""), quote(secret, safe="")) if secret else None
        return await self._json("POST", url, form={**form, "client_id": self.client_id}, basic=basic, refusals=True)

    async def device_code(self) -> dict[str, Any]:
        """Begin a sign-in on another device (RFC 8628, section 3.1). Raises ``GeofedError``."""
        url = await self.endpoint("device_authorization_endpoint")
        return await self._json("POST", url, form={"client_id": self.client_id, "scope": SCOPE})

    async def _json(
        self,
        method: str,
        url: str,
        *,
        form: Mapping[str, str] | None = None,
        basic: tuple[str, str] | None = None,
        refusals: bool = False,
    ) -> dict[str, Any]:
        """``refusals``: return the object of an answer with status 400 or 401, too."""
        try:
            async with (
                asyncio.timeout(2 * _TIMEOUT_SECONDS),
                httpx2.AsyncClient(timeout=_TIMEOUT_SECONDS) as client,
                client.stream(method, url, data=form, auth=basic, headers={"Accept": "application/json"}) as answer,
            ):
                status, body = answer.status_code, await _bounded(answer.aiter_bytes(), url)
        except (httpx2.HTTPError, httpx2.StreamError, TimeoutError, OSError) as error:
            raise _unavailable(f"{url} does not answer: {error or type(error).__name__}") from None
        if status != 200 and not (refusals and status in (400, 401)):
            raise _unavailable(f"{url} answers with status {status}: {clean(body.decode(errors='replace'), 200)}")
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _unavailable(f"{url} does not answer with a JSON object")
        return found


async def _bounded(chunks: AsyncIterator[bytes], url: str) -> bytes:
    body = b""
    async for chunk in chunks:
        body += chunk
        if len(body) > _MOST_BYTES:
            raise _unavailable(f"{url} answers with more than {_MOST_BYTES >> 10} KiB")
    return body


def _unavailable(text: str) -> GeofedError:
    return GeofedError("UNAVAILABLE", text, hint="see that the identity provider runs, at this address")
