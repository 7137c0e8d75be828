"""WAN policies: how updates between regions become the next model. Each policy is a module of this package."""

from collections.abc import Mapping

from geofed_pb.errors import GeofedError
from sync.policy._clients import clients_of_round
from sync.policy._contract import (
    HIDDEN_FRACTION,
    HIDING_MARGIN,
    LONGEST_ROUNDS,
    MAX_CODEC_RATIO,
    Contribution,
    Outer,
    Policy,
    Values,
    WanPolicy,
)
from sync.policy._staleness import Damped, DelayCompensated
from sync.policy._state import StateAveraged
from sync.policy.asgd import GradientSum
from sync.policy.diloco import DiLoCo
from sync.policy.ma import ModelAverage
from sync.registry import Registry

__all__ = [
    "DEFAULT",
    "HIDDEN_FRACTION",
    "HIDING_MARGIN",
    "LONGEST_ROUNDS",
    "MAX_CODEC_RATIO",
    "Contribution",
    "Damped",
    "DelayCompensated",
    "DiLoCo",
    "GradientSum",
    "ModelAverage",
    "Outer",
    "Policy",
    "StateAveraged",
    "Values",
    "WanPolicy",
    "clients_of_round",
    "make_policy",
    "policies",
    "policy_named",
]

DEFAULT = "ma"
"""The policy that ``auto`` stands for."""


def _check(policy: WanPolicy, _: Mapping[str, WanPolicy]) -> str:
    return "" if isinstance(policy, WanPolicy) else f"it is a {type(policy).__name__}, not a WanPolicy"


_REGISTRY: Registry[WanPolicy] = Registry("WAN policy", "sync.policy", "geofed.wan_policies", _check)


def policies() -> tuple[str, ...]:
    """Return the names of all WAN policies, sorted."""
    return tuple(sorted(_REGISTRY.all))


def policy_named(name: str) -> WanPolicy:
    """Return the WAN policy of that name. Raises ``GeofedError("CONFIG_INVALID")`` if there is none."""
    return _REGISTRY.named(name)


def make_policy(name: str, settings: Mapping[str, float]) -> Policy:
    """Create a policy with these settings of its own. Raises ``GeofedError("CONFIG_INVALID")`` if the name or a setting
    is unknown or invalid."""
    policy = policy_named(name)
    if unknown := sorted(set(settings) - set(policy.settings)):
        known = ", ".join(policy.settings) or "none"
        raise GeofedError("CONFIG_INVALID", f"WAN policy {name} has no setting {unknown[0]}", hint=f"it has: {known}")
    return policy.make(**{**policy.settings, **settings})
