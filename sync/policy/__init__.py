"""How updates between regions become the next model: a WAN policy is a module of this package, which says all that
there is to say of it."""

from collections.abc import Mapping

from geofed_pb.errors import GeofedError
from sync.policy._contract import Contribution, Outer, Policy, WanPolicy
from sync.policy._staleness import Damped, DelayCompensated
from sync.policy._state import StateAveraged
from sync.policy.asgd import GradientSum
from sync.policy.diloco import DiLoCo
from sync.policy.ma import ModelAverage
from sync.registry import Registry

__all__ = [
    "DEFAULT",
    "Contribution",
    "Damped",
    "DelayCompensated",
    "DiLoCo",
    "GradientSum",
    "ModelAverage",
    "Outer",
    "Policy",
    "StateAveraged",
    "WanPolicy",
    "made",
    "policies",
    "policy_named",
]

DEFAULT = "ma"
"""What `auto` is."""


def _check(policy: WanPolicy) -> str:
    return "" if isinstance(policy, WanPolicy) else f"it is a {type(policy).__name__}, no WanPolicy"


_REGISTRY: Registry[WanPolicy] = Registry("WAN policy", "sync.policy", "geofed.wan_policies", _check)


def policies() -> tuple[str, ...]:
    """Names of all, sorted."""
    return tuple(sorted(_REGISTRY.all))


def policy_named(name: str) -> WanPolicy:
    """Raises ``GeofedError("CONFIG_INVALID")`` for one that is not known."""
    return _REGISTRY.named(name)


def made(name: str, settings: Mapping[str, float]) -> Policy:
    """A policy with these settings of its own; raises ``GeofedError("CONFIG_INVALID")`` for a name or setting that
    cannot be."""
    policy = policy_named(name)
    if unknown := sorted(set(settings) - set(policy.settings)):
        known = ", ".join(policy.settings) or "none"
        raise GeofedError("CONFIG_INVALID", f"WAN policy {name} has no setting {unknown[0]}", hint=f"it has: {known}")
    return policy.make(**{**policy.settings, **settings})
