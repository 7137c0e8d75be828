"""Base class of adapters that provide only prices of machines."""

from __future__ import annotations

from abc import ABC, abstractmethod

from control_plane.clouds._contract import FunctionPrices, Price, ShardList, StorePrices, price_unknown
from geofed_pb.errors import GeofedError


class MachinesOnly(ABC):
    """Implements the other methods of `Cloud` by raising the error for an unknown price."""

    name: str
    """Name of the cloud."""

    @property
    @abstractmethod
    def asked(self) -> str:
        """Name of the source, for messages."""

    def function_prices(self, region: str) -> FunctionPrices:
        """Raise ``GeofedError("PRICE_UNKNOWN")``."""
        raise price_unknown(self.asked, f"what functions cost in {region}")

    def store_prices(self, region: str) -> StorePrices:
        """Raise ``GeofedError("PRICE_UNKNOWN")``."""
        raise price_unknown(self.asked, f"what requests to an object store cost in {region}")

    def egress_price(self, region: str, destination: str | None = None) -> Price:
        """Raise ``GeofedError("PRICE_UNKNOWN")``."""
        raise price_unknown(self.asked, f"what traffic from {region} costs")

    def shards(self, bucket: str, prefix: str) -> ShardList:
        """Raise ``GeofedError("USAGE")``."""
        hint = "for S3-compatible stores, use --cloud aws with --endpoint-url"
        raise GeofedError("USAGE", f"shards in an object store of {self.name} are not supported", hint=hint)
