"""Client of function platforms with the OpenFaaS REST API, and an embedded platform that serves this API."""

from region_agent.gateway.client import GatewayClient
from region_agent.gateway.functions import (
    BasicAuth,
    FunctionSpec,
    FunctionStatus,
    LogLine,
    Response,
    fixed_scale_labels,
    timeout_env,
)
from region_agent.gateway.retry import RetryPolicy

__all__ = [
    "BasicAuth",
    "FunctionSpec",
    "FunctionStatus",
    "GatewayClient",
    "LogLine",
    "Response",
    "RetryPolicy",
    "fixed_scale_labels",
    "timeout_env",
]
