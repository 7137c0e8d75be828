"""Tokens of functions in containers: these serve only calls that state it, since others may reach their ports, too."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from email.message import Message

__all__ = ["CallToken"]

_HEADER = "X-Geofed-Token"
_VARIABLE = "GEOFED_CALL_TOKEN"
_PURPOSE = b"calls of functions"
"""Separates these tokens from others that are made of the same key."""


@dataclass(frozen=True)
class CallToken:
    """Token of the functions of one job, or of one profile."""

    value: str = field(default="", repr=False)
    """Empty: none is asked for."""

    @classmethod
    def new(cls) -> CallToken:
        """Return a random token."""
        return cls(secrets.token_hex(32))

    @classmethod
    def derived(cls, key: str) -> CallToken:
        """Return the token that belongs to a secret key."""
        return cls(hmac.digest(key.encode(), _PURPOSE, hashlib.sha256).hex())

    @classmethod
    def taken(cls) -> CallToken:
        """Remove this container's token from the environment, which the handler inherits, and return it."""
        return cls(os.environ.pop(_VARIABLE, ""))

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the function."""
        return {_VARIABLE: self.value} if self.value else {}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a call."""
        return {_HEADER: self.value} if self.value else {}

    def allows(self, headers: Message[str, str]) -> bool:
        """Whether a call with these headers may be served."""
        given = headers.get(_HEADER, "")
        return not self.value or hmac.compare_digest(given.encode(errors="replace"), self.value.encode())
