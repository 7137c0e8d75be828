"""Sections of the region file about what the region has: capacity, links."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from region_agent.config._section import Section
from region_agent.config._types import Int, NotNegative, Positive


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


class LinkConfig(Section):
    """Link to another region, as the operator knows it."""

    rtt_ms: NotNegative
    """Round-trip time, in milliseconds."""
    mbps: NotNegative
    """Rate, in Mbit/s. 0: there is no direct path, so other regions pass updates on."""
