"""Differential privacy of a region's updates, and of what it counts: each is paid for in the region's ledger before it
can leave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from geofed_pb.errors import GeofedError
from sync.histograms import Histogram
from sync.layout import Layout, Vector
from sync.privacy import PrivacyLedger, check_masked_noise, gaussian_noise, noisy_update, standard_deviation
from sync.ps.core.actions import StoreMetrics
from sync.wan import ExchangeSettings

__all__ = ["CountReleases", "Releases"]


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
    nothing: bool = False
    """Whether nothing is trained, so that no update has anything of the data."""

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
        if settings.measured:
            return cls(PrivacyLedger(folder), job, settings.clip, 0.0, 0, nothing=True)
        if settings.sampled:
            return cls(PrivacyLedger(folder), job, settings.clip, 0.0, steps)
        std = standard_deviation(settings.noise, settings.clip, region, shares, int(settings.secure))
        if settings.secure:
            check_masked_noise(settings.clip, std, shares[region])
        return cls(PrivacyLedger(folder), job, settings.clip, std, 1)

    def check(self, layout: Layout | None) -> None:
        """Raise ``GeofedError("TASK_INVALID")`` if the model has state that gradients do not train: it would leave the
        region without noise, and counters of steps would outweigh all parameters in the norm."""
        if not self.nothing and layout is not None and layout.trainable_size < layout.size:
            name = layout.slot_at(layout.trainable_size).name
            text = f"{name} is not trained by gradients, and cannot be exchanged with differential privacy"
            raise GeofedError("TASK_INVALID", text, hint="use GroupNorm or LayerNorm instead of BatchNorm")

    def released(self, end: Vector, start: Vector, sequence: int) -> Vector:
        """Return the model that a round is said to have ended with, once it is paid for.

        Raises ``GeofedError``: PRIVACY_EXHAUSTED, STATE_INVALID, DISK_FULL.
        """
        if self.nothing:
            # Whatever the workers have made of the data, it does not leave.
            return start
        self.ledger.spend(self.job, sequence, self.count)
        return noisy_update(end, start, self.clip, self.std) if self.std else end

    def stored(self, sequence: int) -> None:
        """Note that a round's update is durable, before it may leave: from now on it is never made again.

        Raises ``GeofedError``: STATE_INVALID, DISK_FULL.
        """
        if sequence > 0 and not self.nothing:
            self.ledger.store(self.job, sequence)


@dataclass(frozen=True)
class CountReleases:
    """Makes the histograms of an evaluation private; its means, which have no noise, stay in the region.

    Each sample is in one bin of each histogram at most. So H histograms together have a sensitivity of sqrt(H) in the
    Euclidean norm, and Gaussian noise of sqrt(H) times the multiplier makes them one release of it (Dwork and Roth
    2014, "The Algorithmic Foundations of Differential Privacy", theorem A.1).
    """

    ledger: PrivacyLedger
    job: str
    noise: float
    """Standard deviation of the noise as a multiple of the sensitivity."""
    stated: Mapping[str, tuple[float | str, ...]]
    """Bin edges or categories by the name of a histogram, as the job's ``task.config`` states them."""

    @classmethod
    def of(
        cls, folder: Path | None, job: str, settings: ExchangeSettings, stated: Mapping[str, tuple[float | str, ...]]
    ) -> CountReleases | None:
        """Return what the settings of a plan ask for; None: no noise on counts."""
        if not (settings.noise and settings.measured and folder is not None):
            return None
        return cls(PrivacyLedger(folder), job, settings.noise, stated)

    def released(self, found: StoreMetrics) -> StoreMetrics:
        """Return an evaluation as it may leave: with noise, once it is paid for. An evaluation that has failed costs
        nothing, and tells nothing.

        Raises ``GeofedError``: TASK_INVALID if bins or categories are not those of ``task.config``, or samples are
        counted more than once; PRIVACY_EXHAUSTED, STATE_INVALID, DISK_FULL.
        """
        bare = replace(found, samples=0.0, metrics={}, histograms={})
        if found.error or not found.histograms:
            return bare
        whole = {name: self._whole(name, one, found.samples) for name, one in found.histograms.items()}
        # Round 0 can be evaluated, too, and the ledger counts rounds from 1.
        self.ledger.spend(self.job, found.sequence + 1, 1)
        std = self.noise * math.sqrt(len(whole))
        return replace(bare, histograms={name: _noisy(one, std) for name, one in whole.items()})

    def stored(self, found: StoreMetrics) -> None:
        """Note that a released evaluation is durable: it is never made again, with other noise.

        Raises ``GeofedError``: STATE_INVALID, DISK_FULL.
        """
        if found.histograms:
            self.ledger.store(self.job, found.sequence + 1)

    def _whole(self, name: str, one: Histogram, samples: float) -> Histogram:
        """Return a histogram with all bins and categories that are stated: which ones have samples is told by no
        more than the counts."""
        stated, left_out = self.stated.get(name, ()), one.withheld
        if one.edges:
            if one.edges != stated:
                raise _unstated(f"the bin edges of {name} are", name)
            counts = one.counts
        else:
            by_name = dict(zip(one.categories, one.counts, strict=True))
            if not stated or not set(by_name) <= set(stated):
                raise _unstated(f"a category of {name} is", name)
            counts = tuple(by_name.get(str(category), 0) for category in stated)
            one = Histogram((), tuple(map(str, stated)), counts)
        if left_out or sum(counts) > samples:
            text = f"the histogram {name} has more counts than there are samples, or has left some out"
            raise GeofedError("TASK_INVALID", text, hint="count each sample in one bin or category at most")
        return one


def _unstated(what: str, name: str) -> GeofedError:
    text = f"{what} not in task.config.{name}, as differential privacy requires"
    return GeofedError("TASK_INVALID", text, hint="state all of them there, as a list under the histogram's name")


def _noisy(one: Histogram, std: float) -> Histogram:
    """Return a histogram with Gaussian noise on its counts, as whole numbers from 0 on."""
    noise = gaussian_noise(len(one.counts), std)
    counts = tuple(max(0, round(count + extra)) for count, extra in zip(one.counts, noise.tolist(), strict=True))
    return replace(one, counts=counts)
