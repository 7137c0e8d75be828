"""Differential privacy of a region's updates: each is paid for in the region's ledger before it can leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from geofed_pb.errors import GeofedError
from sync.layout import Layout, Vector
from sync.private import PrivacyLedger, noisy_update, standard_deviation
from sync.wan import ExchangeSettings

__all__ = ["Releases"]

_LARGEST_SUM = 32.0
"""Range of the fixed-point numbers of secure aggregation (`sync.secure`), which the updates of all regions share."""
_SMALLEST_NOISE = 1e-5
"""Least standard deviation of a region's part of the noise there: 670 steps of the fixed-point numbers. The sum of so
finely rounded Gaussian numbers differs from a rounded Gaussian number by less than can be noticed (Kairouz et al. 2021,
arXiv 2102.06387, for the discrete Gaussian)."""
_TAILS = 8.0
"""Standard deviations that noise practically never exceeds."""


@dataclass(frozen=True)
class Releases:
    """Makes the updates of one job private."""

    ledger: PrivacyLedger
    job: str
    clip: float
    """Largest norm of an update."""
    std: float
    """Standard deviation of its noise; 0: the workers have added noise to the steps."""
    count: int
    """Releases in an update: 1, or its steps."""

    @classmethod
    def of(
        cls,
        folder: Path | None,
        job: str,
        region: str,
        settings: ExchangeSettings,
        shares: Mapping[str, float],
        steps: int,
    ) -> Releases | None:
        """Return what the settings of a plan ask for; None: no noise. ``steps``: in a round.

        Raises ``GeofedError("CONFIG_INVALID")`` if there is no ledger, or secure aggregation cannot hold the noise.
        """
        if not settings.noise:
            return None
        if folder is None:
            raise GeofedError("CONFIG_INVALID", "differential privacy without a ledger")
        if settings.sampled:
            return cls(PrivacyLedger(folder), job, settings.clip, 0.0, steps)
        std = standard_deviation(settings.noise, settings.clip, region, shares, int(settings.secure))
        if settings.secure and settings.clip + _TAILS * std > _LARGEST_SUM:
            text = f"an update of norm {settings.clip:g} with noise of {std:.3g} exceeds what secure aggregation adds"
            raise GeofedError("CONFIG_INVALID", text, hint="use a smaller privacy.differential.clipNorm, or less noise")
        if settings.secure and std * shares[region] < _SMALLEST_NOISE:
            text = f"noise of {std:.3g} is lost in the rounding of secure aggregation"
            raise GeofedError("CONFIG_INVALID", text, hint="use a larger privacy.differential.clipNorm, or more noise")
        return cls(PrivacyLedger(folder), job, settings.clip, std, 1)

    def check(self, layout: Layout | None) -> None:
        """Raise ``GeofedError("TASK_INVALID")`` if the model has state that gradients do not train: it would leave the
        region without noise, and counters of steps would outweigh all parameters in the norm."""
        if layout is not None and layout.trainable_size < layout.size:
            name = layout.slot_at(layout.trainable_size).name
            text = f"{name} is not trained by gradients, and cannot be exchanged with differential privacy"
            raise GeofedError("TASK_INVALID", text, hint="use GroupNorm or LayerNorm instead of BatchNorm")

    def released(self, end: Vector, start: Vector, sequence: int) -> Vector:
        """Return the model that a round is said to have ended with, once it is paid for.

        Raises ``GeofedError``: PRIVACY_EXHAUSTED, STATE_INVALID, DISK_FULL.
        """
        self.ledger.spend(self.job, sequence, self.count)
        return noisy_update(end, start, self.clip, self.std) if self.std else end

    def stored(self, sequence: int) -> None:
        """Note that a round's update is durable, before it may leave: from now on it is never made again.

        Raises ``GeofedError``: STATE_INVALID, DISK_FULL.
        """
        if sequence > 0:
            self.ledger.store(self.job, sequence)
