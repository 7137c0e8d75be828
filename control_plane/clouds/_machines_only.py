"""What adapters share that know the prices of machines, and no others."""

from __future__ import annotations

from abc import ABC, abstractmethod

from control_plane.clouds._contract import FunctionPrices, Price, ShardList, StorePrices, not_told
from geofed_pb.errors import GeofedError


class MachinesOnly(ABC):
    """Answers the rest of the contract by saying that it is not told."""

    name: str
    """Of the cloud."""

    @property
    @abstractmethod
    def asked(self) -> str:
        """Who answers, for messages."""

    def function_prices(self, region: str) -> FunctionPrices:
        raise not_told(self.asked, f"what functions cost in {region}")

    def store_prices(self, region: str) -> StorePrices:
        raise not_told(self.asked, f"what requests to an object store cost in {region}")

    def egress_price(self, region: str, destination: str | None = None) -> Price:
        raise not_told(self.asked, f"what traffic from {region} costs")

    def shards(self, bucket: str, prefix: str) -> ShardList:
        hint = "stores that speak S3 are asked with --cloud aws and --endpoint-url"
        raise GeofedError("USAGE", f"no object store of {self.name} is asked for shards", hint=hint)
