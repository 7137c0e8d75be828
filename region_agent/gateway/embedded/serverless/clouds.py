"""The function service of each kind of gateway."""

from __future__ import annotations

from region_agent.config import LambdaGateway, ScfGateway
from region_agent.gateway.embedded.serverless.api import CloudFunctions
from region_agent.gateway.embedded.serverless.aws import LambdaFunctions
from region_agent.gateway.embedded.serverless.tencent import ScfFunctions

__all__ = ["functions_of"]


def functions_of(settings: LambdaGateway | ScfGateway) -> CloudFunctions:
    """Return the function service of a region file's gateway; raises ``GeofedError("CONFIG_INVALID")``."""
    if isinstance(settings, ScfGateway):
        return ScfFunctions(settings)
    return LambdaFunctions(settings)
