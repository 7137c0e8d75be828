"""When and what parameter servers exchange."""

from sync.wan._contract import Contribution, Policy
from sync.wan._model_average import ModelAverage

__all__ = ["Contribution", "ModelAverage", "Policy", "policy_named"]

_POLICIES: dict[str, type[Policy]] = {"ma": ModelAverage}


def policy_named(name: str) -> Policy:
    """The policy that a plan names; raises ``GeofedError("CONFIG_INVALID")`` for one that is not known."""
    if name not in _POLICIES:
        from geofed_pb.errors import GeofedError

        raise GeofedError("CONFIG_INVALID", f"unknown WAN policy {name!r}", hint=f"known: {', '.join(_POLICIES)}")
    return _POLICIES[name]()
