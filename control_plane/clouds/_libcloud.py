"""Azure, Google Cloud and DigitalOcean, through apache-libcloud.

libcloud's prices of Azure and Google Cloud are from a list that it contains, and that
``libcloud.pricing.download_pricing_file`` renews; their date is the list's. DigitalOcean's API returns its prices.
libcloud has no chain of credentials of its own; the variables read here are those that the clouds' own tools read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import libcloud.pricing
from libcloud.common.exceptions import BaseHTTPError
from libcloud.common.google import GoogleAuthError, ResourceNotFoundError
from libcloud.common.types import InvalidCredsError, LibcloudError
from libcloud.compute.providers import get_driver
from libcloud.compute.types import Provider
from requests import RequestException
from tenacity import Retrying

from control_plane.clouds._contract import (
    Cloud,
    CloudRegion,
    Confidence,
    Price,
    PriceSource,
    Purchase,
    Unit,
    price_unknown,
    region_unknown,
)
from control_plane.clouds._machines_only import MachinesOnly
from control_plane.clouds._retry import retries as default_retries
from geofed_pb.errors import GeofedError

_Answer = TypeVar("_Answer")
_LATER = (429, 500, 502, 503, 504)
_TOO_OFTEN = ("rateLimitExceeded", "userRateLimitExceeded")
"""Reasons with which Google throttles requests, with status 403."""
_SHARED_CORES = ("micro", "small", "medium")
"""Sizes of Google Cloud with a share of a core, which libcloud counts as whole cores."""


def open_libcloud(name: str, retries: Retrying | None = None) -> Cloud:
    """The adapter of a cloud that is asked through libcloud; raises as ``open_cloud`` does."""
    kinds: dict[str, type[Azure | DigitalOcean | GoogleCloud]] = {
        "azure": Azure,
        "digitalocean": DigitalOcean,
        "gcp": GoogleCloud,
    }
    return kinds[name](retries or default_retries())


class _ThroughLibcloud(MachinesOnly):
    def __init__(self, retries: Retrying) -> None:
        self._retries = retries

    @property
    def asked(self) -> str:
        return f"libcloud, asked about {self.name},"

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        def once() -> _Answer:
            with _told(self.name):
                return question()

        return self._retries(once)

    def _on_demand_only(self, region: str, machine_type: str, purchase: Purchase) -> None:
        if purchase is not Purchase.ON_DEMAND:
            raise price_unknown(self.asked, f"what {machine_type} costs in {region} as {purchase}")


class Azure(_ThroughLibcloud):
    """Prices of Azure from libcloud's list alone, without an account: Azure's API for sizes returns no prices."""

    name = "azure"

    def __init__(self, retries: Retrying) -> None:
        super().__init__(retries)
        self._list, self._as_of = _price_list("azure_linux")

    def regions(self) -> tuple[CloudRegion, ...]:
        """List the regions in libcloud's price list."""
        return tuple(CloudRegion(name) for name in sorted({name for prices in self._list.values() for name in prices}))

    def machine_price(self, region: str, machine_type: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price:
        """Linux; preemptible is Azure's low priority. Types as Azure writes them, or as the list does."""
        key = machine_type.lower().replace("_", "").replace("-", "")
        if purchase is Purchase.PREEMPTIBLE:
            key = "lowpriority" + key.removeprefix("standard")
        usd = self._list.get(key, {}).get(region)
        if usd is None:
            if all(held.name != region for held in self.regions()):
                raise region_unknown(self.name, region)
            raise price_unknown(self.asked, f"what {machine_type} costs in {region} ({purchase})")
        return _list_price(float(usd), f"azure, {machine_type} ({purchase}), {region}", self._as_of)


class GoogleCloud(_ThroughLibcloud):
    """Prices of Google Cloud: a type's shape from the API, priced by core and GB with libcloud's list.

    Credentials are the service account's key in the file that ``GOOGLE_APPLICATION_CREDENTIALS`` names.
    """

    name = "gcp"

    def __init__(self, retries: Retrying) -> None:
        super().__init__(retries)
        _, self._as_of = _price_list("gce_instances")
        key = _google_key()
        # The token is kept in memory: libcloud would write it into the home folder.
        self._driver: Any = self._ask(
            lambda: get_driver(Provider.GCE)(
                key["client_email"], key, project=key["project_id"], auth_type="SA", credential_file=os.devnull
            )
        )

    def regions(self) -> tuple[CloudRegion, ...]:
        """List the regions of all zones."""
        return tuple(CloudRegion(name) for name in sorted({zone.rpartition("-")[0] for zone in self._zones()}))

    def machine_price(self, region: str, machine_type: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price:
        """Return the price by the hour, in the first zone of the region that has the type."""
        self._on_demand_only(region, machine_type, purchase)
        zones = [zone for zone in self._zones() if zone.rpartition("-")[0] == region]
        if not zones:
            raise region_unknown(self.name, region)
        family, _, shape = machine_type.partition("-")
        # libcloud takes the first two letters for the family, and so the prices of n2 for n2d.
        if len(family) == 2 and shape not in _SHARED_CORES:
            for zone in zones:
                usd = self._usd(zone, machine_type)
                if usd is not None:
                    return _list_price(usd, f"gcp, {machine_type}, {region}", self._as_of)
        raise price_unknown(self.asked, f"what {machine_type} costs in {region}")

    def _zones(self) -> list[str]:
        return sorted(held.name for held in self._ask(self._driver.list_locations))

    def _usd(self, zone: str, machine_type: str) -> float | None:
        def size() -> float | None:
            try:
                price = self._driver.ex_get_size(machine_type, zone).price
            except ResourceNotFoundError:
                return None
            return None if price is None else float(price)

        return self._ask(size)


class DigitalOcean(_ThroughLibcloud):
    """Sizes with the prices that DigitalOcean names; the token is ``DIGITALOCEAN_ACCESS_TOKEN``."""

    name = "digitalocean"

    def __init__(self, retries: Retrying) -> None:
        super().__init__(retries)
        token = _from_environment(self.name, "DIGITALOCEAN_ACCESS_TOKEN")
        self._driver = get_driver(Provider.DIGITAL_OCEAN)(token)

    def regions(self) -> tuple[CloudRegion, ...]:
        """List DigitalOcean's regions."""
        return tuple(CloudRegion(held.id, held.name) for held in self._locations())

    def machine_price(self, region: str, machine_type: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price:
        """Price of a size by the hour. Raises ``GeofedError`` with ``CLOUD_REGION_UNKNOWN`` or ``PRICE_UNKNOWN``."""
        self._on_demand_only(region, machine_type, purchase)
        place = next((held for held in self._locations() if held.id == region), None)
        if place is None:
            raise region_unknown(self.name, region)
        for size in self._ask(lambda: self._driver.list_sizes(place)):
            if size.id == machine_type:
                source, today = f"DigitalOcean, {machine_type}, {region}", datetime.now(UTC).date().isoformat()
                return Price(float(size.price), Unit.HOUR, PriceSource(source, today, Confidence.LIST))
        raise price_unknown(self.asked, f"what {machine_type} costs in {region}")

    def _locations(self) -> list[Any]:
        return sorted(self._ask(self._driver.list_locations), key=lambda held: str(held.id))


def _list_price(usd: float, what: str, as_of: str) -> Price:
    source = f"price list of apache-libcloud {libcloud.__version__}, {what}"
    return Price(usd, Unit.HOUR, PriceSource(source, as_of, Confidence.LIST))


def _price_list(name: str) -> tuple[Mapping[str, Any], str]:
    """Return the prices of one cloud in libcloud's list, and the ISO date of the list."""
    path = Path(libcloud.pricing.get_pricing_file_path())
    try:
        updated = json.loads(path.read_text(encoding="utf-8"))["updated"]
        prices: Any = libcloud.pricing.get_pricing("compute", name)
    except (OSError, ValueError, KeyError) as error:
        hint = "renew it with libcloud.pricing.download_pricing_file, or remove it"
        raise GeofedError("CONFIG_INVALID", f"{path} is no price list of libcloud: {error}", hint=hint) from error
    return prices, datetime.fromtimestamp(updated, UTC).date().isoformat()


def _google_key() -> dict[str, str]:
    path = Path(_from_environment("gcp", "GOOGLE_APPLICATION_CREDENTIALS"))
    try:
        key: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        if key["type"] != "service_account" or not key["client_email"] or not key["project_id"]:
            raise ValueError("not of a service account")
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "give the key file of a service account"
        raise GeofedError("UNAUTHENTICATED", f"{path} is no key of Google Cloud: {error}", hint=hint) from error
    return key


def _from_environment(cloud: str, variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        hint = f"set {variable}"
        raise GeofedError("UNAUTHENTICATED", f"no credentials for {cloud}", hint=hint)
    return value


@contextmanager
def _told(cloud: str) -> Iterator[None]:
    """Turns what libcloud raises into errors of the catalogue."""
    try:
        yield
    except (InvalidCredsError, GoogleAuthError) as error:
        raise _strangers(cloud, error) from error
    except (RequestException, ConnectionError, TimeoutError) as error:
        raise GeofedError("CLOUD_UNAVAILABLE", f"{cloud} does not answer: {error}") from error
    except (BaseHTTPError, LibcloudError) as error:
        # Google's errors carry the status as `http_code`, and a word as `code`.
        status = getattr(error, "http_code", None) or getattr(error, "code", None)
        if status in _LATER or getattr(error, "code", None) in _TOO_OFTEN:
            raise GeofedError("CLOUD_UNAVAILABLE", f"{cloud} does not answer: {error}") from error
        if status == 401:
            raise _strangers(cloud, error) from error
        if status == 403:
            raise GeofedError("FORBIDDEN", f"{cloud} refused: {error}", hint="let them list zones and types") from error
        raise GeofedError("CLOUD_REFUSED", f"{cloud} refused: {error}") from error


def _strangers(cloud: str, error: Exception) -> GeofedError:
    hint = "correct the credentials"
    return GeofedError("UNAUTHENTICATED", f"{cloud} does not know these credentials: {error}", hint=hint)
