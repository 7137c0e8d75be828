"""Secure aggregation: regions send masked updates, of which only the sum over all regions can be read.

Each pair of regions has a secret that no other party knows. From it both derive the same mask for each round, which the
one adds to its update and the other subtracts, in integers modulo a power of two (`PairMasks`). In the sum over all
regions the masks cancel exactly (Bonawitz et al. 2017, section 4.0.1, for regions that all take part in every round).
`SharedScale` turns updates into such integers, with scales that all regions know.
"""

from sync.secure._masks import MaskKey, PairMasks
from sync.secure._scale import FEWEST_REGIONS, SharedScale, check_masked, first_codec, hiding_regions

__all__ = [
    "FEWEST_REGIONS",
    "MaskKey",
    "PairMasks",
    "SharedScale",
    "check_masked",
    "first_codec",
    "hiding_regions",
]
