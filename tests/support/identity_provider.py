"""An identity provider on a loopback port: OpenID Connect with the code flow (PKCE) and the device flow."""

from __future__ import annotations

import base64
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlencode

import jwt
import uvicorn
from cryptography.hazmat.primitives.asymmetric import rsa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

CLIENT = "geofed-tests"
_ANN = {"sub": "248289761001", "email": "Ann@Example.org", "email_verified": True, "preferred_username": "ann"}


def rsa_key() -> rsa.RSAPrivateKey:
    """Return a new key."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@dataclass
class IdentityProvider:
    """What it knows, which a test may change, and what it was asked."""

    url: str = ""
    claims: dict[str, Any] = field(default_factory=lambda: dict(_ANN))
    """Of the person who signs in next."""
    client_secret: str = ""
    """Required of the token endpoint, except in the device flow; empty: a public client."""
    keys: dict[str, rsa.RSAPrivateKey] = field(default_factory=dict)
    pending: int = 1
    """Questions that are answered with "pending" before somebody has confirmed a device's code."""
    device_error: str = ""
    """Answer of the device flow instead of a token."""
    keys_read: int = 0
    broken: bool = False
    """It shows no keys."""
    redirects: list[str] = field(default_factory=list)
    _codes: dict[str, dict[str, str]] = field(default_factory=dict)
    _devices: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the first key."""
        self.new_key("first")

    def new_key(self, name: str) -> None:
        """Sign with a new key from now on, and forget the others."""
        self.keys = {name: rsa_key()}

    def id_token(self, **changed: Any) -> str:
        """Return an ID token; claims that are None are left out."""
        now = time.time()
        claims = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 300, **self.claims}
        # Without it two of one second would be the same.
        claims |= {"jti": secrets.token_urlsafe(8), **changed}
        (name, key) = next(iter(self.keys.items()))
        present = {key: value for key, value in claims.items() if value is not None}
        return jwt.encode(present, key, algorithm="RS256", headers={"kid": name})

    def app(self) -> Starlette:
        """Return the endpoints."""
        return Starlette(
            routes=[
                Route("/.well-known/openid-configuration", self._configuration),
                Route("/keys", self._keys),
                Route("/authorize", self._authorize),
                Route("/device", self._device, methods=["POST"]),
                Route("/token", self._token, methods=["POST"]),
            ]
        )

    async def _configuration(self, request: Request) -> Response:
        names = {
            "authorization_endpoint": "authorize",
            "token_endpoint": "token",
            "device_authorization_endpoint": "device",
            "jwks_uri": "keys",
        }
        return JSONResponse({"issuer": self.url} | {name: f"{self.url}/{path}" for name, path in names.items()})

    async def _keys(self, request: Request) -> Response:
        self.keys_read += 1
        found = []
        for name, key in self.keys.items():
            public = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
            found.append({**public, "kid": name, "use": "sig"})
        return JSONResponse({"keys": [] if self.broken else found})

    async def _authorize(self, request: Request) -> Response:
        asked = dict(request.query_params)
        assert asked["response_type"] == "code"
        assert asked["client_id"] == CLIENT
        assert asked["code_challenge_method"] == "S256"
        assert "openid" in asked["scope"].split()
        self.redirects.append(asked["redirect_uri"])
        code = secrets.token_urlsafe()
        self._codes[code] = asked
        return RedirectResponse(f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}", 302)

    async def _device(self, request: Request) -> Response:
        form = await _form(request)
        assert form["client_id"] == CLIENT
        code = secrets.token_urlsafe()
        self._devices[code] = self.pending
        page = f"{self.url}/activate"
        answer = {"device_code": code, "user_code": "WDJB-MJHT", "verification_uri": page, "expires_in": 600}
        return JSONResponse(answer | {"verification_uri_complete": f"{page}?user_code=WDJB-MJHT", "interval": 1})

    async def _token(self, request: Request) -> Response:
        form = await _form(request)
        if form["grant_type"] == "authorization_code":
            asked = self._codes.pop(form["code"], None)
            challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
            basic = base64.b64encode(f"{CLIENT}:{self.client_secret}".encode()).decode()
            shown = request.headers.get("authorization")
            if self.client_secret and shown != f"Basic {basic}":
                return JSONResponse({"error": "invalid_client"}, 401)
            if asked is None or challenge.decode() != asked["code_challenge"]:
                return JSONResponse({"error": "invalid_grant"}, 400)
            if form["redirect_uri"] != asked["redirect_uri"]:
                return JSONResponse({"error": "invalid_grant"}, 400)
            return JSONResponse({"id_token": self.id_token(nonce=asked["nonce"]), "token_type": "Bearer"})
        code = form["device_code"]
        if code not in self._devices:
            return JSONResponse({"error": "invalid_grant"}, 400)
        if self._devices[code] > 0:
            self._devices[code] -= 1
            return JSONResponse({"error": "authorization_pending"}, 400)
        if self.device_error:
            return JSONResponse({"error": self.device_error}, 400)
        del self._devices[code]
        return JSONResponse({"id_token": self.id_token(), "token_type": "Bearer"})


async def _form(request: Request) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}


@contextmanager
def identity_provider() -> Iterator[IdentityProvider]:
    """Run an identity provider in a thread."""
    provider = IdentityProvider()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        provider.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(provider.app(), log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield provider
        finally:
            server.should_exit = True
            thread.join()
