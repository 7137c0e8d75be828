"""Cost of a partition: its meters times the region's prices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from geofed_pb.v1 import common_pb2
from region_agent.config import ChannelPricesConfig, PricesConfig

__all__ = ["LineItem", "bill", "egress", "invocation_amounts", "money_of"]

_MS_PER_S = 1000
"""Milliseconds of a second; function time is billed in started milliseconds."""


@dataclass(frozen=True)
class LineItem:
    """One line of the account."""

    item: str
    quantity: float
    unit: str
    usd: float
    source: str


def invocation_amounts(
    seconds: float, memory_mb: int, *, preemptible: bool = False, devices: int = 0
) -> dict[str, float]:
    """Return the meters of one invocation: GB-seconds, with time rounded up to 1 ms as the clouds do, one call, and the
    seconds of the devices that it holds."""
    billed = math.ceil(seconds * _MS_PER_S) / _MS_PER_S
    kind = "preemptible_gb_seconds" if preemptible else "gb_seconds"
    held = {"device_seconds": billed * devices} if devices else {}
    return {kind: billed * memory_mb / 1024, "calls": 1.0, **held}


def bill(meters: dict[str, float], prices: PricesConfig, channel: ChannelPricesConfig | None = None) -> list[LineItem]:
    """Return the account of a partition, by item; egress by receiving region. ``channel``: None for one that is
    free."""
    lines = [
        ("function-seconds", meters.get("gb_seconds", 0.0), "GB-s", prices.function_usd_per_gb_second),
        ("function-calls", meters.get("calls", 0.0), "1", prices.function_usd_per_request),
        ("parameter-server", meters.get("ps_seconds", 0.0) / 3600, "h", prices.server_usd_per_hour),
    ]
    preemptible = meters.get("preemptible_gb_seconds", 0.0)
    if preemptible or prices.preemptible_usd_per_gb_second is not None:
        price = prices.preemptible_usd_per_gb_second
        # If the region file has no preemptible price any more, the normal price holds: never zero.
        price = prices.function_usd_per_gb_second if price is None else price
        lines.insert(1, ("preemptible-function-seconds", preemptible, "GB-s", price))
    devices = meters.get("device_seconds", 0.0)
    if devices or prices.device_usd_per_second is not None:
        lines.insert(1, ("device-seconds", devices, "s", prices.device_usd_per_second or 0.0))
    items = [LineItem(item, quantity, unit, quantity * price, prices.source) for item, quantity, unit, price in lines]
    return items + egress(meters, prices) + (_bill_channel(meters, channel) if channel is not None else [])


def money_of(items: list[LineItem]) -> list[common_pb2.Money]:
    """Return an account as messages."""
    return [
        common_pb2.Money(item=one.item, quantity=one.quantity, unit=one.unit, usd=one.usd, source=one.source)
        for one in items
    ]


def egress(meters: dict[str, float], prices: PricesConfig) -> list[LineItem]:
    """Return the items for bytes sent to other regions, by region."""
    sent = {name.removeprefix("sent_bytes:"): n for name, n in sorted(meters.items()) if name.startswith("sent_bytes:")}
    return [
        LineItem(
            f"egress to {to}",
            count / 1e9,
            "GB",
            count / 1e9 * prices.egress_to.get(to, prices.egress_usd_per_gb),
            prices.source,
        )
        for to, count in sent.items()
    ]


def _bill_channel(meters: dict[str, float], prices: ChannelPricesConfig) -> list[LineItem]:
    def requests(*kinds: str) -> float:
        return sum(meters.get(f"channel_{kind}", 0.0) for kind in kinds)

    lines = [
        ("channel-server", meters.get("ps_seconds", 0.0) / 3600, "h", prices.usd_per_hour),
        ("channel-puts", requests("puts", "lists"), "1", prices.usd_per_put),
        ("channel-gets", requests("gets", "misses", "looks", "waits"), "1", prices.usd_per_get),
        ("channel-deletes", requests("deletes"), "1", prices.usd_per_delete),
    ]
    return [LineItem(item, quantity, unit, quantity * price, prices.source) for item, quantity, unit, price in lines]
