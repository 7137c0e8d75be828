"""A region's catalogue as its agent sends it: read, and checked against bounds, before anything plans with it.

The catalogue is the region's own word, and other users' plans are computed from it. So a value that no real region has
makes the region `misconfigured`: its agent stays connected and its jobs continue, but no job is planned with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import date

from pydantic import TypeAdapter, ValidationError

from geofed_pb.bounds import SECRET_NAME, clean
from geofed_pb.errors import GeofedError
from scheduler import Region as Catalogue
from sync.channel import channel_kinds

__all__ = ["fault_of", "read_catalogue"]

_CATALOGUE = TypeAdapter(Catalogue)
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_MOST_ENTRIES = 1000
"""Most datasets, links, or prices by destination: more than regions of a federation or datasets of a region."""
_MOST_SPLITS = 16
"""Most splits of a dataset; tasks know two or three."""
_TEXT = 200
"""Most characters of a name or of a price's source."""
_MOST_WORKERS = 1024
"""Most workers, as in the region file."""
_MOST_MEMORY_MB = 32 << 20
"""Most memory of a function: 32 TiB, more than any machine that is rented out has."""
_MOST_SLICE_SECONDS = 86_400.0
"""Longest slice of a platform that ends functions: a day, more than any function service gives."""
_MOST_CORES = 1 << 16
"""Most cores that functions share; a machine has hundreds."""
_MOST_SAMPLES_PER_SECOND = 1e9
"""Highest speed of a worker: a gigabyte per second of samples of one byte."""
_MOST_SAMPLES = 10**12
"""Most samples of a split; the largest public data sets have some 10^10."""
_MOST_BYTES = 10**16
"""Largest split: 10 petabytes, which no WAN transfers within a job."""
MOST_RTT_MS = 60_000.0
"""Longest round-trip time: above a minute every connection times out."""
MOST_MBPS = 1e7
"""Highest rate of a link: 10 Tbit/s, above that of a submarine cable's fibre pair."""
_MOST_USD = {
    "function_usd_per_gb_second": 1.0,
    "function_usd_per_request": 1.0,
    "server_usd_per_hour": 1000.0,
    "egress_usd_per_gb": 100.0,
    "device_usd_per_second": 1.0,
}
"""Highest prices in USD. Each is above a hundred times the dearest list price of a cloud."""


def read_catalogue(region: str, text: str) -> Catalogue:
    """Parse and check a catalogue. Raises ``GeofedError("CONFIG_INVALID")`` with the first fault."""
    try:
        catalogue = _CATALOGUE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        fault = f"{where}: {first['msg']}" if where else first["msg"]
        raise GeofedError("CONFIG_INVALID", clean(f"the catalogue of region {region}: {fault}")) from None
    if fault := fault_of(region, catalogue):
        raise GeofedError("CONFIG_INVALID", clean(f"the catalogue of region {region}: {fault}"))
    return catalogue


def fault_of(region: str, catalogue: Catalogue) -> str:
    """Return the first fault of a catalogue; empty: it has none."""
    return next(_faults(region, catalogue), "")


def _faults(region: str, catalogue: Catalogue) -> Iterator[str]:
    if catalogue.name != region:
        yield f"the certificate is of region {region}, the catalogue of {catalogue.name}"
    if not 0 < len(catalogue.cloud) <= 64:
        yield "cloud: the name has no character or more than 64"
    if catalogue.channel not in channel_kinds():
        yield f"channel: {catalogue.channel!r} is unknown to the control plane"
    yield from _capacity_faults(catalogue)
    yield from _price_faults(catalogue)
    yield from _dataset_faults(catalogue)
    yield from _secret_faults(catalogue)
    if len(catalogue.links) > _MOST_ENTRIES:
        yield f"links: more than {_MOST_ENTRIES}"
    for link in catalogue.links:
        where = f"links.{link.destination}"
        if link.source != region or not _NAME.fullmatch(link.destination):
            yield f"{where}: not a link from {region} to another region"
        yield from _outside(f"{where}.rtt_ms", link.rtt_ms, 0, MOST_RTT_MS)
        yield from _outside(f"{where}.mbps", link.mbps, 0, MOST_MBPS)


def _secret_faults(catalogue: Catalogue) -> Iterator[str]:
    if len(catalogue.secrets) > _MOST_ENTRIES:
        yield f"secrets: more than {_MOST_ENTRIES}"
    if not all(re.fullmatch(SECRET_NAME, name) for name in catalogue.secrets):
        yield "secrets: a name is not of lower-case letters, digits and hyphens"


def _capacity_faults(catalogue: Catalogue) -> Iterator[str]:
    capacity = catalogue.capacity
    yield from _outside("capacity.workers", capacity.workers, 0, _MOST_WORKERS)
    yield from _outside("capacity.preemptible", capacity.preemptible, 0, _MOST_WORKERS)
    yield from _outside("capacity.memory_mb", capacity.memory_mb, 1, _MOST_MEMORY_MB)
    yield from _outside("capacity.cores", capacity.cores, 0, _MOST_CORES)
    yield from _outside("capacity.least_memory_mb", capacity.least_memory_mb, 1, capacity.memory_mb)
    yield from _outside("capacity.memory_step_mb", capacity.memory_step_mb, 1, capacity.memory_mb)
    if capacity.memory_mb % max(1, capacity.memory_step_mb):
        yield "capacity.memory_mb: no multiple of capacity.memory_step_mb"
    if capacity.slice_seconds is not None:
        yield from _outside("capacity.slice_seconds", capacity.slice_seconds, 0, _MOST_SLICE_SECONDS)
    if (devices := capacity.devices) is not None:
        yield from _outside("capacity.devices.count", devices.count, 1, _MOST_WORKERS)
        if devices.of_function is not None:
            yield from _outside("capacity.devices.of_function", devices.of_function, 1, devices.count)
        if devices.kept is not None:
            yield from _outside("capacity.devices.kept", devices.kept, 0, devices.count)
        if devices.memory_mb is not None:
            yield from _outside("capacity.devices.memory_mb", devices.memory_mb, 1, _MOST_MEMORY_MB)
        if not 0 < len(devices.kind) <= _TEXT:
            yield f"capacity.devices.kind: no character, or more than {_TEXT}"
    if (rate := capacity.samples_per_second) is not None:
        yield from _outside("capacity.samples_per_second", rate, 1e-6, _MOST_SAMPLES_PER_SECOND)


def _price_faults(catalogue: Catalogue) -> Iterator[str]:
    prices = catalogue.prices
    if prices is None:
        return
    for name, most in _MOST_USD.items():
        yield from _outside(f"prices.{name}", getattr(prices, name), 0, most)
    if len(prices.egress_to) > _MOST_ENTRIES:
        yield f"prices.egress_to: more than {_MOST_ENTRIES} regions"
    for region, usd in prices.egress_to.items():
        yield from _outside(f"prices.egress_to.{region}", usd, 0, _MOST_USD["egress_usd_per_gb"])
    if len(prices.source) > _TEXT:
        yield f"prices.source: more than {_TEXT} characters"
    if not _is_date(prices.as_of):
        yield f"prices.as_of: {prices.as_of!r} is not a date"


def _dataset_faults(catalogue: Catalogue) -> Iterator[str]:
    if len(catalogue.datasets) > _MOST_ENTRIES:
        yield f"datasets: more than {_MOST_ENTRIES}"
    names = [held.name for held in catalogue.datasets]
    if len(set(names)) < len(names):
        yield "datasets: one is listed twice"
    for held in catalogue.datasets:
        where = f"datasets.{held.name}"
        if not 0 < len(held.name) <= _TEXT or len(held.splits) > _MOST_SPLITS:
            yield f"{where}: the name has no character or more than {_TEXT}, or there are over {_MOST_SPLITS} splits"
        if len(held.schema) > _TEXT:
            yield f"{where}.schema: more than {_TEXT} characters"
        if isinstance(held.residency, str) and held.residency not in ("region", "cloud", "anywhere"):
            yield f"{where}.residency: {held.residency!r} is unknown"
        for split, part in held.splits.items():
            yield from _outside(f"{where}.splits.{split}.samples", part.samples, 0, _MOST_SAMPLES)
            if part.clients is not None:
                yield from _outside(f"{where}.splits.{split}.clients", part.clients, 1, max(1, part.samples))
            if part.bytes is not None:
                yield from _outside(f"{where}.splits.{split}.bytes", part.bytes, 0, _MOST_BYTES)


def _outside(where: str, value: float, least: float, most: float) -> Iterator[str]:
    """Yield a fault if a value is not a number within the bounds."""
    if not (math.isfinite(value) and least <= value <= most):
        yield f"{where}: {value!r} is not between {least:g} and {most:g}"


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text if len(text) > len("2026-01") else f"{text}-01")
    except ValueError:
        return False
    return True
