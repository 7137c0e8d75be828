"""Client of function platforms with the OpenFaaS REST API, and an embedded platform that serves this API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_PLACES = {"GatewayClient": "client", "RetryPolicy": "retry"}
"""Modules of the names that are not in `functions`, loaded when a name is first used: a container's first process needs
none of them, and must not wait for their imports before it handles signals."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES.get(name, 'functions')}"), name)
