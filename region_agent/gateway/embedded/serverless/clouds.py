"""The function service of each kind of gateway."""

from __future__ import annotations

from region_agent.config import LambdaGateway
from region_agent.gateway.embedded.serverless.api import CloudFunctions
from region_agent.gateway.embedded.serverless.aws import LambdaFunctions

__all__ = ["functions_of"]


def functions_of(settings: LambdaGateway) -> CloudFunctions:
    """Return the function service of a region file's gateway; raises ``GeofedError("CONFIG_INVALID")``."""
    return LambdaFunctions(settings)
