"""The codecs of secure aggregation: what a masked update looks like. What they hold is made, and read, by
`sync.secure`: a single masked update cannot be decoded.
"""

from __future__ import annotations

from geofed_pb.errors import GeofedError
from sync.codec._contract import Automatic, Codec, Tensors
from sync.layout import Vector

__all__ = ["METHODS", "MaskedIntegers"]


class MaskedIntegers(Codec):
    """Integers modulo 2^bits, to which the masks of all pairs of regions are added (`sync.secure`).

    The sum of all regions must fit into the modulus, so with n regions each has 1/n of its range. What that rounds off
    stays in the region's residual.
    """

    lossy, offered = True, False

    def __init__(self, name: str, mark: int, bits: int, bytes_per_second: float, automatic: Automatic) -> None:
        self.name, self.mark, self.bits = name, mark, bits
        self.size_factor = bits / 32 + 0.002
        self.first_size_factor = 1.002
        self.bytes_per_second, self.automatic = bytes_per_second, automatic

    @property
    def most_regions(self) -> int:
        """Number of regions up to which each has at least three steps on either side of zero."""
        return 1 << (self.bits - 3)

    def encode(self, vector: Vector) -> Tensors:
        """Raise ``TypeError``: without masks nothing may be sent."""
        raise TypeError("updates are masked by sync.secure")

    def decode(self, tensors: Tensors, size: int) -> Vector:
        """Raise ``GeofedError("FRAME_INVALID")``: only the sum of all regions can be read."""
        raise GeofedError("FRAME_INVALID", "a masked update in a job without secure aggregation")


METHODS = (
    MaskedIntegers("fp32-masked", 10, 32, 150e6, Automatic.ALWAYS),
    MaskedIntegers("bf16-masked", 9, 16, 150e6, Automatic.NEVER),
    MaskedIntegers("int8-masked", 8, 8, 150e6, Automatic.ALWAYS),
)
