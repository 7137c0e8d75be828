"""When and what parameter servers exchange."""

from collections.abc import Mapping

from sync.wan._contract import Contribution, Outer, Policy
from sync.wan._controller import Bounds, LinkSample, Observation, initial, observe
from sync.wan._diloco import DiLoCo
from sync.wan._gradient_sum import GradientSum
from sync.wan._guard import Guard
from sync.wan._model_average import ModelAverage
from sync.wan._settings import ExchangeSettings
from sync.wan._significance import significant
from sync.wan._staleness import Damped, DelayCompensated
from sync.wan._state import StateAveraged

__all__ = [
    "Bounds",
    "Contribution",
    "Damped",
    "DelayCompensated",
    "DiLoCo",
    "ExchangeSettings",
    "GradientSum",
    "Guard",
    "LinkSample",
    "ModelAverage",
    "Observation",
    "Outer",
    "Policy",
    "StateAveraged",
    "initial",
    "observe",
    "policy_named",
    "significant",
]


def policy_named(name: str, settings: Mapping[str, float] | None = None) -> Policy:
    """The policy that a plan names, with its treatment of stale updates; ``settings`` may hold the exchange's as well.

    Raises ``GeofedError("CONFIG_INVALID")`` for one that is not known.
    """
    exchange, own = ExchangeSettings.of(settings or {})
    policy = _plain(name, own)
    if exchange.damping:
        policy = Damped(policy)
    if exchange.compensation:
        policy = DelayCompensated(policy, exchange.compensation)
    return policy


def _plain(name: str, settings: Mapping[str, float]) -> Policy:
    match name:
        case "ma" | "bsp":
            return ModelAverage()
        case "asgd" | "asgd-ga" | "asp":
            return GradientSum()
        case "diloco":
            return DiLoCo(**settings)
    from geofed_pb.errors import GeofedError

    raise GeofedError(
        "CONFIG_INVALID", f"unknown WAN policy {name!r}", hint="known: asgd, asgd-ga, asp, bsp, diloco, ma"
    )
