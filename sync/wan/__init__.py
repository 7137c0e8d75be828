"""When and what parameter servers exchange."""

from collections.abc import Mapping

from sync.policy import Damped, DelayCompensated, Policy, made
from sync.wan._controller import Bounds, LinkSample, Observation, initial, observe
from sync.wan._guard import Guard
from sync.wan._settings import ExchangeSettings
from sync.wan._significance import significant

__all__ = [
    "Bounds",
    "ExchangeSettings",
    "Guard",
    "LinkSample",
    "Observation",
    "initial",
    "observe",
    "policy_of",
    "significant",
]


def policy_of(name: str, settings: Mapping[str, float] | None = None) -> Policy:
    """The policy that a plan names, with its treatment of stale updates; ``settings`` may hold the exchange's as well.

    Raises ``GeofedError("CONFIG_INVALID")`` for one that is not known.
    """
    exchange, own = ExchangeSettings.of(settings or {})
    policy = made(name, own)
    if exchange.damping:
        policy = Damped(policy)
    if exchange.compensation:
        policy = DelayCompensated(policy, exchange.compensation)
    return policy
