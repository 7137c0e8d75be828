"""Robust aggregation: merges that withstand regions whose updates are wrong. Each rule is in a module of this package.

A rule replaces the mean of the regions' changes; the WAN policy then makes its step with the result.
"""

from collections.abc import Mapping

from sync.registry import Registry
from sync.robust._contract import Combined, RobustRule
from sync.robust._merge import QUARANTINE_ROUNDS, SUSPECT_ROUNDS, RobustMerge
from sync.robust._numbers import squared_distance

__all__ = [
    "QUARANTINE_ROUNDS",
    "ROBUST_SETTING",
    "SUSPECT_ROUNDS",
    "Combined",
    "RobustMerge",
    "RobustRule",
    "robust_in",
    "robust_rule_named",
    "robust_rules",
    "squared_distance",
]

ROBUST_SETTING = "robust/"
"""Begin of the name of a plan's number that names the rule, and whose value is the number of wrong regions."""


def _check(rule: RobustRule, _: Mapping[str, RobustRule]) -> str:
    return "" if isinstance(rule, RobustRule) else f"it is a {type(rule).__name__}, not a RobustRule"


_REGISTRY: Registry[RobustRule] = Registry("robust rule", "sync.robust", "geofed.robust_rules", _check)


def robust_rules() -> tuple[str, ...]:
    """Return the names of all robust rules, sorted."""
    return tuple(sorted(_REGISTRY.all))


def robust_in(settings: Mapping[str, float]) -> tuple[str, float]:
    """Return the name of the rule in a plan's numbers, "" if there is none, and the number of wrong regions (0: as many
    as the rule withstands)."""
    found = [(name.removeprefix(ROBUST_SETTING), v) for name, v in settings.items() if name.startswith(ROBUST_SETTING)]
    return found[0] if found else ("", 0.0)


def robust_rule_named(name: str) -> RobustRule:
    """Return the robust rule of that name. Raises ``GeofedError("CONFIG_INVALID")`` if there is none."""
    return _REGISTRY.named(name)
