"""Sections of the region file about what the region has and what it costs: capacity, prices, links."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from region_agent.config._section import Section
from region_agent.config._types import DateText, Int, NotNegative, Positive


class DevicesConfig(Section):
    """Accelerators of the region, such as GPUs."""

    kind: Annotated[str, Field(min_length=1, max_length=100)]
    """What they are, such as `NVIDIA H100`."""
    count: Annotated[Int, Field(ge=1, le=1024)]
    """Number of devices for all functions together."""
    memory_mb: Annotated[Int, Field(ge=1)] | None = None
    """Memory of one device, in MB."""


class CapacityConfig(Section):
    """Capacity of the region for all jobs together."""

    workers: Annotated[Int, Field(ge=0, le=1024)]
    """Number of workers that run at the same time. 0: the region only holds data, which other regions may process if
    its residency allows it."""
    memory_mb: Annotated[Int, Field(ge=128)] = 2048
    """Largest memory of one function, in MB."""
    samples_per_second: Positive | None = None
    """Rate of one worker, if the operator knows it. Default: measured."""
    preemptible: Annotated[Int, Field(ge=0, le=1024)] = 0
    """Number of additional workers that the cloud may take away at any time."""
    cores: NotNegative | None = None
    """Cores that all functions share, for plans of pipelines. 0: each function has its own. Default: the cores of this
    machine with the embedded gateway, otherwise 0."""
    devices: DevicesConfig | None = None
    """Accelerators, of which each worker has its own. Default: none that are billed."""


class PricesConfig(Section):
    """Prices of the region in USD."""

    source: Annotated[str, Field(min_length=1)]
    """Where the prices are from, such as `AWS list, eu-central-1`."""
    as_of: DateText
    """Day or month of the prices: `2026-11-05` or `2026-11`."""
    function_usd_per_gb_second: NotNegative
    """Price of a function's memory; time is rounded up to a millisecond."""
    function_usd_per_request: NotNegative
    """Price of a call of a function."""
    server_usd_per_hour: NotNegative
    """Price of a parameter server while its job runs."""
    egress_usd_per_gb: NotNegative
    """Price of data sent to another region."""
    egress_to: dict[str, NotNegative] = {}
    """Exceptions from `egressUsdPerGb`, by destination region."""
    preemptible_usd_per_gb_second: NotNegative | None = None
    """Price of a function's memory on preemptible capacity; required with `capacity.preemptible`."""
    device_usd_per_second: NotNegative | None = None
    """Price of a device while a function holds it; required with `capacity.devices`."""


class LinkConfig(Section):
    """Link to another region, as the operator knows it."""

    rtt_ms: NotNegative
    """Round-trip time, in milliseconds."""
    mbps: NotNegative
    """Rate, in Mbit/s. 0: there is no direct path, so other regions pass updates on."""
