"""When and what parameter servers exchange."""

from collections.abc import Mapping

from sync.wan._contract import Contribution, Outer, Policy
from sync.wan._diloco import DiLoCo
from sync.wan._model_average import ModelAverage

__all__ = ["Contribution", "DiLoCo", "ModelAverage", "Outer", "Policy", "policy_named"]


def policy_named(name: str, settings: Mapping[str, float] | None = None) -> Policy:
    """The policy that a plan names; raises ``GeofedError("CONFIG_INVALID")`` for one that is not known."""
    if name == "ma":
        return ModelAverage()
    if name == "diloco":
        return DiLoCo(**(settings or {}))
    from geofed_pb.errors import GeofedError

    raise GeofedError("CONFIG_INVALID", f"unknown WAN policy {name!r}", hint="known: ma, diloco")
