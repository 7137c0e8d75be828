"""Prices from a CSV file, through the interface of the cloud adapters."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

from control_plane.clouds._contract import (
    CloudRegion,
    Confidence,
    Price,
    PriceSource,
    Purchase,
    Unit,
    region_unknown,
)
from control_plane.clouds._machines_only import MachinesOnly
from geofed_pb.errors import GeofedError

COLUMNS = ("cloud", "region", "instance_type", "purchase", "usd_per_hour")
_PURCHASES = {
    "on_demand": Purchase.ON_DEMAND,
    "preemptible": Purchase.PREEMPTIBLE,
    "low_priority": Purchase.PREEMPTIBLE,
    "spot": Purchase.PREEMPTIBLE,
}


@dataclass(frozen=True)
class PriceFile(MachinesOnly):
    """Machine prices of one cloud from a file."""

    name: str
    """Name of the cloud."""
    source: str
    as_of: str
    usd_per_hour: dict[tuple[str, str, Purchase], float]
    """Prices by region, machine type and purchase."""

    @classmethod
    def load(cls, path: Path, cloud: str, as_of: str) -> PriceFile:
        """Read the rows of one cloud; see ``open_price_file``."""
        if not re.fullmatch(r"\d{4}-\d{2}(-\d{2})?", as_of):
            raise GeofedError("USAGE", f"{as_of!r} is not a date", hint="write it like 2026-11-21 or 2026-11")
        clouds: set[str] = set()
        prices: dict[tuple[str, str, Purchase], float] = {}
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = csv.DictReader(file)
                missing = [column for column in COLUMNS if column not in (rows.fieldnames or ())]
                if missing:
                    raise GeofedError("CONFIG_INVALID", f"{path}:1: missing column {', '.join(missing)}")
                for row in rows:
                    where = f"{path}:{rows.line_num}"
                    key, usd = _read(row, where)
                    clouds.add(row["cloud"])
                    if row["cloud"] != cloud:
                        continue
                    if prices.setdefault(key, usd) != usd:
                        raise GeofedError("CONFIG_INVALID", f"{where}: another price than above for {' '.join(key)}")
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise GeofedError("CONFIG_INVALID", f"cannot read {path}: {error}", hint="give a file of prices") from None
        if cloud not in clouds:
            hint = f"it holds {', '.join(sorted(clouds))}" if clouds else "it holds no prices"
            raise GeofedError("USAGE", f"{path} holds no prices of {cloud}", hint=hint)
        return cls(cloud, path.name, as_of, prices)

    @property
    def asked(self) -> str:
        """Name of the file, for messages."""
        return self.source

    def regions(self) -> tuple[CloudRegion, ...]:
        """List the regions that the file has prices of."""
        return tuple(CloudRegion(name) for name in sorted({region for region, _, _ in self.usd_per_hour}))

    def machine_price(self, region: str, machine_type: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price:
        """Price of a machine by the hour. Raises ``GeofedError`` with ``CLOUD_REGION_UNKNOWN`` or ``PRICE_UNKNOWN``."""
        usd = self.usd_per_hour.get((region, machine_type, purchase))
        if usd is None:
            if all(held.name != region for held in self.regions()):
                raise self._no_region(region)
            text = f"{self.source} has no price for {machine_type} ({purchase}) in {region}"
            raise GeofedError("PRICE_UNKNOWN", text, hint="check the type's name in the file")
        source = f"{self.source}, {self.name}, {machine_type} ({purchase}), {region}"
        return Price(usd, Unit.HOUR, PriceSource(source, self.as_of, Confidence.LIST))

    def _no_region(self, region: str) -> GeofedError:
        hint = f"it has {', '.join(held.name for held in self.regions())}"
        return GeofedError("CLOUD_REGION_UNKNOWN", region_unknown(self.source, region).message, hint=hint)


def _read(row: dict[str, str], where: str) -> tuple[tuple[str, str, Purchase], float]:
    """Return a row's key and price.

    A price of zero, which lists use for unknown prices, is accepted here and is an error once it is queried.
    """
    purchase = _PURCHASES.get(row["purchase"] or "")
    if purchase is None:
        text = f"{where}: purchase is {row['purchase']!r}, not one of {', '.join(_PURCHASES)}"
        raise GeofedError("CONFIG_INVALID", text)
    try:
        usd = float(row["usd_per_hour"])
    except (TypeError, ValueError):
        usd = math.nan
    if not (math.isfinite(usd) and usd >= 0):
        raise GeofedError("CONFIG_INVALID", f"{where}: usd_per_hour is not a price: {row['usd_per_hour']!r}")
    return (row["region"], row["instance_type"], purchase), usd
