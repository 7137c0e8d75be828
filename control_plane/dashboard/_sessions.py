"""Sessions of browsers that have signed in with a token. They are in memory: a restart ends them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from control_plane.pki import hash_secret, new_secret

__all__ = ["LIFE_SECONDS", "Sessions"]

LIFE_SECONDS = 12 * 3600
"""Time after which a browser must sign in again."""
_MOST = 20
"""Limit of the sessions of one token; beyond it the oldest ones end."""


@dataclass(frozen=True)
class _Session:
    token_hash: str
    ends: float
    owns_token: bool
    """Whether nothing else has the token."""


class Sessions:
    """Remembers by hashes: neither the browser's secret nor the token is kept."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds."""
        self._clock = clock
        self._open: OrderedDict[str, _Session] = OrderedDict()

    def open(self, token: str, *, owns_token: bool = False) -> str:
        """Begin a session with a token that was checked; return the secret for the browser's cookie. ``owns_token``:
        nothing else has the token."""
        secret, own = new_secret(), hash_secret(token)
        self._open = OrderedDict((key, one) for key, one in self._open.items() if one.ends >= self._clock())
        same = [key for key, one in self._open.items() if one.token_hash == own]
        for key in same[: max(0, len(same) + 1 - _MOST)]:
            del self._open[key]
        self._open[hash_secret(secret)] = _Session(own, self._clock() + LIFE_SECONDS, owns_token)
        return secret

    def token_hash(self, secret: str) -> str | None:
        """Return the hash of the token that a session began with; None if it has ended."""
        key = hash_secret(secret)
        session = self._open.get(key)
        if session is None or session.ends < self._clock():
            self._open.pop(key, None)
            return None
        return session.token_hash

    def close(self, secret: str) -> str | None:
        """End a session; return the hash of the token that only this session has had; None: it had none."""
        closed = self._open.pop(hash_secret(secret), None)
        return closed.token_hash if closed is not None and closed.owns_token else None
