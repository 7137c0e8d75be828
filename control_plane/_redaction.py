"""Removes secrets from what is handed to others, such as a support bundle."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["REMOVED", "redacted", "redacted_text"]

REMOVED = "(removed)"
_SECRET_NAME = re.compile(r"token(?!iz)|secret|passw|credential|api_?key|access_?key|private", re.IGNORECASE)
_HIDDEN_MAPPINGS = frozenset({"env"})
"""Mappings whose values are all removed: environment variables are where secrets of tasks are."""
_SECRET_TEXTS = (
    re.compile(r"geofed1\.[\w-]+"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?i)(?<=bearer )[\w.~+/-]+=*"),
    re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"),
    re.compile(r"\b(?:AKIA|ASIA|AKID)[A-Za-z0-9]{12,}"),
    re.compile(
        r"(?i)(?<![\w])[\w-]*(?:token(?!iz)|secret|password|api_?key|access_?key)[\w-]*\s*[=:]\s*[\"']?[^\s\"',;}]+"
    ),
)
"""Invitations, private keys, HTTP tokens, users and passwords in URLs, access keys of clouds, assignments."""


def redacted(value: Any, name: str = "") -> Any:
    """Return a copy of JSON data without the values that look like secrets, by their names or themselves."""
    if isinstance(value, dict):
        hidden = name in _HIDDEN_MAPPINGS
        return {key: REMOVED if hidden else redacted(held, str(key)) for key, held in value.items()}
    if isinstance(value, list):
        return [redacted(held, name) for held in value]
    if isinstance(value, str) and value:
        return REMOVED if _SECRET_NAME.search(name) else redacted_text(value)
    return value


def redacted_text(text: str) -> str:
    """Return a text without what looks like a secret."""
    for pattern in _SECRET_TEXTS:
        text = pattern.sub(REMOVED, text)
    return text
