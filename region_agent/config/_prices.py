"""Section of the region file about prices. None has a default: without the section, a region takes no part in jobs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from region_agent.config._section import Section
from region_agent.config._types import DateText, NotNegative


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
