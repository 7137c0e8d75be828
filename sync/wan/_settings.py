"""The settings of an exchange, as a plan carries them: numbers by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from geofed_pb.errors import GeofedError

__all__ = ["ExchangeSettings"]


@dataclass(frozen=True)
class ExchangeSettings:
    """How parameter servers exchange, whatever the policy; every field is a number, so that plans can carry it."""

    background: float = 0.0
    """1: workers continue while updates travel. 0: all wait for all at the end of a round."""
    quorum: float = 0.0
    """Regions, this one included, whose new updates a merge waits for within the grace window; 0: for the round of
    every region that keeps up. Background only."""
    grace_seconds: float = 0.0
    """How long a merge waits for its quorum."""
    lead: float = 0.0
    """Rounds that a region may be ahead of the last update it has of any other that keeps up; 0: any number. Only where
    there is a quorum."""
    fragments: float = 1.0
    """Parts of the model of which one is sent in each round, in turn (streaming DiLoCo, arXiv 2501.18512)."""
    significance: float = 0.0
    """Threshold of Gaia's filter: what changes a coordinate by less than this share waits; 0: no filter."""
    damping: float = 0.0
    """1: stale updates are divided by 1 + staleness."""
    compensation: float = 0.0
    """Strength of DC-ASGD's term; 0: none."""
    choose_codec: float = 0.0
    """1: the codec follows what the links can carry. Background only."""
    choose_interval: float = 0.0
    """1: the interval does. Background only."""
    choose_topology: float = 0.0
    """1: the control plane may choose other ways for updates while the job runs."""
    guard: float = 100.0
    """An update whose norm is more than this many times the median of its region's last ones is refused; 0: none is."""

    @classmethod
    def of(cls, settings: Mapping[str, float]) -> tuple[ExchangeSettings, dict[str, float]]:
        """The settings among a plan's numbers, and the rest, which are the policy's own.

        Raises ``GeofedError("CONFIG_INVALID")`` for a number that cannot be.
        """
        names = {field.name for field in fields(cls)}
        found = cls(**{name: float(value) for name, value in settings.items() if name in names})
        for name in names:
            value = getattr(found, name)
            if not math.isfinite(value) or value < 0:
                raise GeofedError("CONFIG_INVALID", f"wan setting {name} is {value}, it cannot be negative")
        if found.fragments < 1 or found.fragments > 1024:
            raise GeofedError("CONFIG_INVALID", "wan fragments must be 1 to 1024")
        return found, {name: value for name, value in settings.items() if name not in names}
