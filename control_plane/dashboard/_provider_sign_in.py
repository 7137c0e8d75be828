"""Sign-in at the dashboard by the identity provider: the authorization code flow with PKCE (RFC 7636)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

from cryptography.fernet import Fernet, InvalidToken

from control_plane.oidc import SCOPE
from control_plane.pki import new_secret
from control_plane.service import SignInService
from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError

__all__ = ["LIFE_SECONDS", "ProviderSignIn"]

LIFE_SECONDS = 600
"""Time that a person has to sign in at the provider."""


class ProviderSignIn:
    """Sends browsers to the provider, and exchanges what they bring back.

    What a sign-in needs meanwhile is in the browser's cookie, encrypted with a key of this process: whoever begins many
    takes nothing from others. A sign-in that is under way while the control plane restarts must be begun again.
    """

    def __init__(self, sign_ins: SignInService) -> None:
        self._sign_ins, self._box = sign_ins, Fernet(Fernet.generate_key())

    @property
    def provider_host(self) -> str:
        """Host of the provider, for the page; empty: there is none."""
        return urlsplit(self._sign_ins.provider.issuer).netloc if self._sign_ins.has_provider else ""

    async def begin(self, redirect_uri: str, then: str) -> tuple[str, str]:
        """Return the provider's URL that the browser is sent to, and the value of its cookie.

        Args:
            redirect_uri: where the provider sends the browser back to; it is registered there.
            then: path of the page that follows.

        Raises ``GeofedError``: ILLEGAL_STATE, UNAVAILABLE, CONFIG_INVALID.
        """
        provider = self._sign_ins.provider
        endpoint = await provider.endpoint("authorization_endpoint")
        state, nonce, verifier = new_secret(), new_secret(), new_secret()
        cookie = self._box.encrypt(json.dumps([state, nonce, verifier, redirect_uri, then]).encode()).decode()
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code", "client_id": provider.client_id, "redirect_uri": redirect_uri, "scope": SCOPE,
            "state": state, "nonce": nonce, "code_challenge": challenge, "code_challenge_method": "S256",
        }  # fmt: skip
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(asked)}", cookie

    async def complete(self, brought: Mapping[str, str], cookie: str) -> tuple[str, str]:
        """Return a token of the user who has signed in, and the path of the page that follows.

        ``brought``: what the provider has put into the URL. Raises ``GeofedError``: UNAUTHENTICATED, FORBIDDEN,
        UNAVAILABLE, CONFIG_INVALID.
        """
        try:
            begun = json.loads(self._box.decrypt(cookie.encode(), ttl=LIFE_SECONDS))
        except (InvalidToken, ValueError):
            text = "this sign-in was not begun in this browser, or has ended"
            raise GeofedError("UNAUTHENTICATED", text, hint="sign in again") from None
        state, nonce, verifier, redirect_uri, then = begun
        if not hmac.compare_digest(brought.get("state", "").encode(), state.encode()):
            raise GeofedError("UNAUTHENTICATED", "this sign-in was not begun in this browser", hint="sign in again")
        if "code" not in brought:
            raise _refused(brought.get("error_description") or brought.get("error", "no code"))
        form = {
            "grant_type": "authorization_code", "code": brought["code"], "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }  # fmt: skip
        answer = await self._sign_ins.provider.tokens(form, self._sign_ins.client_secret)
        if not isinstance(answer.get("id_token"), str):
            raise _refused(str(answer.get("error_description") or answer.get("error") or "no ID token"))
        _, token, _ = await self._sign_ins.sign_in(answer["id_token"], nonce)
        return token, then


def _refused(reason: str) -> GeofedError:
    text = f"the identity provider refuses: {clean(reason, 300)}"
    return GeofedError("UNAUTHENTICATED", text, hint="sign in again")
