"""Settings of the exchange, as a plan carries them: numbers by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from geofed_pb.errors import GeofedError
from sync.robust import QUARANTINE_ROUNDS, ROBUST_SETTING, robust_in, robust_rule_named
from sync.secure import FEWEST_REGIONS

__all__ = ["ExchangeSettings"]


@dataclass(frozen=True)
class ExchangeSettings:
    """How parameter servers exchange updates, with any policy. Every field is a number, so that plans can carry it."""

    background: float = 0.0
    """1: workers continue while updates are exchanged; 0: all regions wait for each other at the end of a round."""
    quorum: float = 0.0
    """Number of regions, including this one, whose new updates a merge waits for within the grace time; 0: the updates
    of the round from every region that keeps up. Background exchange only."""
    grace_seconds: float = 0.0
    """Grace time: how long a merge waits for its quorum."""
    lead: float = 0.0
    """Rounds by which a region may be ahead of the last update that it has of any other region that keeps up; 0: any
    number. Only with a quorum."""
    fragments: float = 1.0
    """Number of parts of the model; one is sent in each round, in turn (streaming DiLoCo, arXiv 2501.18512)."""
    significance: float = 0.0
    """Threshold of Gaia's filter: a change of a coordinate by less than this fraction is held back; 0: no filter."""
    damping: float = 0.0
    """1: updates that are more than a round late are divided by their staleness."""
    compensation: float = 0.0
    """Strength of DC-ASGD's delay compensation; 0: none."""
    choose_codec: float = 0.0
    """1: the controller chooses the codec that the links can carry. Background exchange only."""
    choose_interval: float = 0.0
    """1: the controller chooses the interval. Background exchange only."""
    choose_topology: float = 0.0
    """1: the control plane may change the routes of updates while the job runs."""
    guard: float = 100.0
    """Updates are refused whose norm exceeds this multiple of the usual norm of their region; 0: none are."""
    robust: str = ""
    """Robust rule that replaces the mean of the updates; empty: none. In a plan its name is part of the number's name:
    ``robust/NAME``, with the number of regions that may be wrong."""
    secure: float = 0.0
    """Secure aggregation: fewest regions of which a sum may be readable, a whole number; 0: updates are not masked.
    Synchronous exchange only."""
    noise: float = 0.0
    """Differential privacy: standard deviation of the noise as a multiple of `clip`; 0: none. Synchronous exchange
    only."""
    clip: float = 0.0
    """Largest norm of this region's update, or of a sample's gradient."""
    sampled: float = 0.0
    """1: clipped and noisy are the gradients of samples, in the workers; 0: the region's update."""
    measured: float = 0.0
    """1: nothing is trained, and the noise is on the counts of an evaluation's histograms."""
    delta: float = 0.0
    """Delta of the job file."""
    epsilon: float = 0.0
    """What the whole plan costs for this delta, in the region where it is most."""
    byzantine: float = 0.0
    """Number of regions whose updates may be arbitrarily wrong; 0: as many as the rule withstands."""

    quarantine: float = float(QUARANTINE_ROUNDS)
    """With a robust rule: rounds for which updates of a region are not merged that were suspect again and again; 0:
    they always are."""

    @classmethod
    def of(cls, settings: Mapping[str, float]) -> tuple[ExchangeSettings, dict[str, float]]:
        """Split a plan's numbers into the settings of the exchange, and the others, which are the policy's.

        Raises ``GeofedError("CONFIG_INVALID")`` for an invalid number.
        """
        names = {field.name for field in fields(cls)} - {"robust", "byzantine"}
        numbers: dict[str, Any] = {name: float(value) for name, value in settings.items() if name in names}
        rule, wrong = robust_in(settings)
        found = cls(robust=rule, byzantine=float(wrong), **numbers)
        for name in (*names, "byzantine"):
            value = getattr(found, name)
            if not math.isfinite(value) or value < 0:
                raise GeofedError(
                    "CONFIG_INVALID", f"wan setting {name} is {value}; it must be finite and not negative"
                )
        if found.fragments < 1 or found.fragments > 1024:
            raise GeofedError("CONFIG_INVALID", "wan fragments must be 1 to 1024")
        late = ("quorum", "grace_seconds", "lead", "damping", "compensation")
        if found.robust and any(getattr(found, name) for name in late):
            raise GeofedError("CONFIG_INVALID", "a robust rule merges the same round of all regions")
        if found.fragments > 1 and found.robust and robust_rule_named(found.robust).from_last:
            raise GeofedError("CONFIG_INVALID", f"{found.robust} requires updates of the whole model")
        if found.secure and (found.secure < FEWEST_REGIONS or not found.secure.is_integer()):
            text = f"wan setting secure is {found.secure:g}; it must be 0, or a whole number from {FEWEST_REGIONS}"
            raise GeofedError("CONFIG_INVALID", text)
        if found.secure and (found.background or found.robust or found.fragments > 1 or found.significance):
            raise GeofedError("CONFIG_INVALID", "secure aggregation requires the mean of whole synchronous updates")
        if found.noise and not (found.clip > 0 and 0 < found.delta < 1 and found.sampled + found.measured in (0, 1)):
            raise GeofedError("CONFIG_INVALID", "differential privacy requires the settings clip and delta")
        if found.noise and found.background:
            raise GeofedError("CONFIG_INVALID", "differential privacy requires synchronous exchange")
        own = {name: v for name, v in settings.items() if name not in names and not name.startswith(ROBUST_SETTING)}
        return found, own
