"""Editions of OpenFaaS: their limits, and which one a gateway is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EDITIONS", "Edition", "edition_of"]


@dataclass(frozen=True)
class Edition:
    """Limits of an edition; None: there is no limit."""

    name: str
    """Name in configurations."""
    replicas: int | None = None
    """Most replicas of a function."""
    least_replicas: int = 0
    """Fewest replicas of a function."""
    functions: int | None = None
    """Most functions."""
    scale_from_zero: bool = True
    """Whether a call starts a replica if there is none."""
    bare: bool = False
    """A function is one container without health checks: it counts as available before it listens, one that has ended
    stays down until the next call, and every update restarts it."""
    title: str = ""
    """Name for users."""

    @property
    def workers(self) -> int | None:
        """Most workers of all jobs in a region, if no other function is deployed."""
        return None if self.functions is None or self.replicas is None else self.functions * self.replicas

    def shares(self, workers: int) -> list[int]:
        """Return the replicas of each function that this many workers need."""
        most = self.replicas or max(1, workers)
        return [min(most, workers - begun) for begun in range(0, workers, most)]


EDITIONS = {
    one.name: one
    for one in (
        Edition("none"),
        Edition("pro", title="OpenFaaS Standard or for Enterprises"),
        Edition(
            "ce", replicas=5, least_replicas=1, functions=15, scale_from_zero=False, title="OpenFaaS Community Edition"
        ),
        Edition("faasd", replicas=1, bare=True, title="faasd"),
    )
}
"""By name. `none`: the embedded gateway without the limits of another one."""


def edition_of(provider: Mapping[str, Any], configured: str = "auto") -> Edition:
    """Return the edition of a gateway from the part `provider` of what `GET /system/info` answers.

    A gateway on Kubernetes does not say which edition it is, and counts as the community edition unless the region file
    states another: functions of up to five replicas work on all.
    """
    if configured != "auto":
        return EDITIONS[configured]
    if "profile" in provider:
        return EDITIONS.get(str(provider["profile"]), EDITIONS["none"])
    single = provider.get("orchestration") == "containerd" or str(provider.get("provider", "")).startswith("faasd")
    return EDITIONS["faasd" if single else "ce"]
