"""Clipping, and Gaussian noise that nobody can predict."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from geofed_pb.errors import GeofedError
from sync.layout import Vector

__all__ = ["check_masked_noise", "clipped", "gaussian_noise", "noisy_update", "standard_deviation"]

Wide = npt.NDArray[np.float64]

_BLOCK = 1 << 16
"""Coordinates that are processed together, so that intermediate results stay in the CPU's cache. Even."""
_INSIDE = 1.0 - 2.0**-40
"""Part of the bound that a clipped vector has, so that what is rounded does not exceed it."""
_LARGEST_SUM = 32.0
"""Range of the fixed-point numbers of secure aggregation (`sync.secure`), which the updates of all regions share."""
_SMALLEST_NOISE = 1e-5
"""Least standard deviation of a region's part of the noise there: 670 steps of the fixed-point numbers. The sum of so
finely rounded Gaussian numbers differs from a rounded Gaussian number by less than can be noticed (Kairouz et al. 2021,
arXiv 2102.06387, for the discrete Gaussian)."""
_TAILS = 8.0
"""Standard deviations that noise practically never exceeds."""


def standard_deviation(noise: float, clip: float, region: str, shares: Mapping[str, float], fewest: int) -> float:
    """Return the standard deviation of the noise that a region adds to its update, before its share in the mean.

    ``noise``: as a multiple of ``clip``. ``fewest``: with secure aggregation, fewest regions of which a sum may be
    readable; 0: without. There each region adds a part of the variance, so that the noise of any ``fewest - 1`` regions
    together is enough for the region with the largest share: whoever sees the sum may know the noise of one region, its
    own, and up to ``len(shares) - fewest`` further ones may add none, or tell theirs.
    """
    if not fewest:
        return noise * clip
    return noise * clip * max(shares.values()) / (shares[region] * math.sqrt(fewest - 1))


def check_masked_noise(clip: float, std: float, share: float) -> None:
    """Raise ``GeofedError("CONFIG_INVALID")`` unless secure aggregation can add up updates of a norm with noise.

    ``std``: standard deviation of the noise of a region, see `standard_deviation`; ``share``: the region's part of the
    mean.
    """
    if clip + _TAILS * std > _LARGEST_SUM:
        text = f"an update of norm {clip:g} with noise of {std:.3g} exceeds what secure aggregation adds"
        raise GeofedError("CONFIG_INVALID", text, hint="use a smaller privacy.differential.clipNorm, or less noise")
    if std * share < _SMALLEST_NOISE:
        text = f"noise of {std:.3g} is lost in the rounding of secure aggregation"
        raise GeofedError("CONFIG_INVALID", text, hint="use a larger privacy.differential.clipNorm, or more noise")


def gaussian_noise(size: int, std: float) -> Wide:
    """Return independent Gaussian numbers, shape (size,), of mean 0 and a standard deviation.

    They are made from a key of the operating system's random generator (AES-256 in counter mode; Box and Muller 1958).
    """
    out = np.empty(size)
    stream = _uniform()
    for begin in range(0, size, _BLOCK):
        part = out[begin : begin + _BLOCK]
        half = -(-part.size // 2)
        words = next(stream)
        # In (0, 1], so that the logarithm is finite.
        radius = ((words[:half] >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53
        angle = (words[half : 2 * half] >> np.uint64(11)).astype(np.float64) * (2.0 * math.pi * 2.0**-53)
        np.log(radius, out=radius)
        radius *= -2.0 * std * std
        np.sqrt(radius, out=radius)
        part[:half] = radius * np.cos(angle)
        part[half:] = (radius * np.sin(angle))[: part.size - half]
    return out


def _uniform() -> Iterator[npt.NDArray[np.uint64]]:
    """Yield arrays of `_BLOCK` random words."""
    encryptor = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(8 * _BLOCK)
    while True:
        yield np.frombuffer(encryptor.update(zeros), np.uint64)


def clipped(change: Wide, clip: float) -> float:
    """Scale a vector of float32's range in place to a norm of at most ``clip``; returns the factor."""
    norm = math.sqrt(float(np.dot(change, change)))
    factor = 1.0 if norm <= clip else clip / norm * _INSIDE
    if factor < 1.0:
        change *= factor
    return factor


def noisy_update(end: Vector, start: Vector, clip: float, std: float) -> Vector:
    """Return the model, shape (n,), that a round is said to have ended with: its change is clipped, and has noise."""
    change = end.astype(np.float64)
    change -= start
    clipped(change, clip)
    change += gaussian_noise(change.size, std)
    change += start
    return change.astype(np.float32)
