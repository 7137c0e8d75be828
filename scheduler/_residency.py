"""Where a shard may be processed, by the rules of its owner and of the job."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["may_be", "rule_text"]


def may_be(rule: str | Collection[str], home: str, other: str, *, same_cloud: bool) -> bool:
    """Return whether a region may process a shard. ``rule``: "region", "cloud", "anywhere", or the names of regions;
    its own always may."""
    if home == other or rule == "anywhere":
        return True
    if isinstance(rule, str):
        return rule == "cloud" and same_cloud
    return other in rule


def rule_text(rule: str | Collection[str]) -> str:
    """Return a residency rule as text for users."""
    return rule if isinstance(rule, str) else ", ".join(sorted(rule))
