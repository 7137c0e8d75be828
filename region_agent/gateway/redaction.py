"""Texts of functions without the values of the secrets that they may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Redaction"]

_SHORTEST = 4
"""Characters below which a line of a secret is not looked for in texts, of which it would be a part by chance."""


@dataclass(frozen=True)
class Redaction:
    """Replaces the values of secrets in texts that leave the region."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Names by what is replaced, the longest first."""

    @classmethod
    def of(cls, secrets: Mapping[str, bytes]) -> Redaction:
        """Redact these secrets, by name: as a whole, and each of their lines."""
        found: dict[str, str] = {}
        for name, value in secrets.items():
            text = value.decode(errors="replace").strip()
            for part in (text, *(line.strip() for line in text.splitlines())):
                if len(part) >= _SHORTEST:
                    found.setdefault(part, name)
        return cls(dict(sorted(found.items(), key=lambda pair: -len(pair[0]))))

    def __call__(self, text: str) -> str:
        """Return a text with the names of secrets in place of their values."""
        for part, name in self.values.items():
            text = text.replace(part, f"[secret {name}]")
        return text
