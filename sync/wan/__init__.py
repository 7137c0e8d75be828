"""Settings and control of the exchange between parameter servers: when they exchange, and what."""

from collections.abc import Mapping

from sync.policy import Damped, DelayCompensated, Policy, make_policy
from sync.wan._asp_filter import significant
from sync.wan._controller import Bounds, LinkSample, Observation, initial, observe
from sync.wan._guard import Guard, norm_of
from sync.wan._overlap import overlapped_steps
from sync.wan._settings import ExchangeSettings

__all__ = [
    "Bounds",
    "ExchangeSettings",
    "Guard",
    "LinkSample",
    "Observation",
    "initial",
    "norm_of",
    "observe",
    "overlapped_steps",
    "policy_of",
    "significant",
]


def policy_of(name: str, settings: Mapping[str, float] | None = None) -> Policy:
    """Create the policy that a plan names, including its treatment of stale updates.

    ``settings`` may contain the settings of the exchange as well. Raises ``GeofedError("CONFIG_INVALID")`` if the name
    or a setting is unknown or invalid.
    """
    exchange, own = ExchangeSettings.of(settings or {})
    policy = make_policy(name, own)
    if exchange.damping:
        policy = Damped(policy)
    if exchange.compensation:
        policy = DelayCompensated(policy, exchange.compensation)
    return policy
