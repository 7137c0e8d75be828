"""What another region's manifest may state: checked in one place, before anything is done with it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from geofed_pb.errors import GeofedError
from sync.file_transfer.manifest import Manifest

__all__ = ["ManifestLimits"]

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_STRETCH = 64
"""Largest multiple of the planned interval that a region may ask for."""
_MAX_ROUND_SECONDS = 30 * 86400.0
"""Longest duration of a round; no job has longer ones."""
_MAX_EPOCH = 1 << 31
"""Largest epoch; each restart of a partition adds one."""
_SHARE_TOLERANCE = 1.01
"""Samples of a round, as a multiple of the planned ones, that are still the region's share: the samples of a round in
which the number of workers changes are rounded for each worker."""
_FRAME_BYTES = 64 << 10
"""Bytes of an update beyond its values: names, sizes and alignment of tensors, and scales of short blocks."""
_FLOAT_BYTES = 4
"""Bytes of a float32, in which models are exchanged."""


@dataclass(frozen=True)
class ManifestLimits:
    """Limits of the manifests in one job."""

    regions: tuple[str, ...]
    rounds: int
    """Rounds of the job as planned; none has more."""
    size_factor: float
    """Bytes of the largest update, as a multiple of the model's in float32."""
    most_bytes: int
    """Largest update while the model's layout is not known."""
    round_samples: Mapping[str, float] = field(default_factory=dict)
    """Samples of one round of each region, as planned; a region that is missing has no limit."""
    background: bool = False
    """Whether exchange is in the background: rounds may be longer than planned then, and the planned shares count in a
    merge instead of the samples."""

    def most_bytes_of(self, sequence: int, elements: int | None, layout_bytes: int) -> int:
        """Return the largest size of an update of a round; the initial model (0) holds its layout as well.

        ``elements``: size of the model; None: it is not known yet.
        """
        if elements is None:
            return self.most_bytes
        extra = _FRAME_BYTES + (4 * layout_bytes if sequence == 0 else 0)
        return int(self.size_factor * _FLOAT_BYTES * elements) + extra

    def check(self, manifest: Manifest, most_bytes: int) -> None:
        """Check everything that a manifest states. Raises ``GeofedError``: FRAME_INVALID, or LIMIT_EXCEEDED for a size
        or a weight beyond the region's share."""
        what = f"update {manifest.sequence} of {manifest.region} states"
        if not 0 < manifest.total_bytes <= most_bytes:
            text = f"{what} {manifest.total_bytes} bytes, of at most {most_bytes}"
            raise GeofedError("LIMIT_EXCEEDED" if manifest.total_bytes else "FRAME_INVALID", text)
        if not _DIGEST.fullmatch(manifest.digest):
            raise GeofedError("FRAME_INVALID", f"{what} an invalid digest")
        self._check_weight(manifest)
        if reason := self._fault(manifest):
            raise GeofedError("FRAME_INVALID", f"{what} {reason}")

    def _check_weight(self, manifest: Manifest) -> None:
        weight = manifest.weight
        if not (math.isfinite(weight) and weight > 0):
            text = f"update {manifest.sequence} of {manifest.region} states {weight} samples"
            raise GeofedError("FRAME_INVALID", text)
        planned = self.round_samples.get(manifest.region)
        if planned is None or manifest.sequence == 0:
            return
        longest = _MAX_STRETCH if self.background else 1
        if weight > (share := planned * longest * manifest.rounds * _SHARE_TOLERANCE):
            text = f"update {manifest.sequence} of {manifest.region} states {weight:g} samples, beyond its {share:g}"
            raise GeofedError("LIMIT_EXCEEDED", text)

    def _fault(self, manifest: Manifest) -> str:
        """Return the first statement that cannot be true; "": there is none."""
        most = self.rounds
        numbers = {
            "epoch": (manifest.epoch, _MAX_EPOCH),
            "round": (manifest.sequence, most),
            "stretch": (manifest.stretch, _MAX_STRETCH),
            "settled": (manifest.settled, manifest.sequence + 1),
            "ends": (manifest.ends, most),
            **{f"seen {region[:64]}": (sequence, most) for region, sequence in manifest.seen},
        }
        for name, (value, limit) in numbers.items():
            if not 0 <= value <= limit:
                return f"{name} {value}, of at most {limit}"
        if manifest.first and not 0 < manifest.first <= manifest.sequence:
            return f"a sum of rounds {manifest.first} to {manifest.sequence}"
        if manifest.ends and manifest.ends < manifest.sequence:
            return f"that the job ended with round {manifest.ends}"
        if not 0 <= manifest.round_seconds <= _MAX_ROUND_SECONDS:
            return f"a round of {manifest.round_seconds} s"
        if any(region not in self.regions or region == manifest.region for region, _ in manifest.seen):
            return "that it has seen updates of regions that are not in the job"
        return ""
