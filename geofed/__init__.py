"""Train one model on data in several regions, without moving the data: the client, and training on this machine.

``Client`` is for scripts and notebooks, ``AsyncClient`` for programs with an event loop; ``simulate`` trains over
several regions on this machine; ``log`` and ``secret`` are for task modules. Errors are ``GeofedError`` with a code, a
message and a hint. See docs/python.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geofed._client import AsyncClient, AsyncJob
    from geofed._simulate import Simulation, simulate
    from geofed._sync import Client, Job
    from geofed_pb.errors import GeofedError
    from geofed_pb.user_code.recording import log
    from geofed_pb.user_code.secrets import secret

__all__ = ["AsyncClient", "AsyncJob", "Client", "GeofedError", "Job", "Simulation", "log", "secret", "simulate"]

_PLACES = {
    "AsyncClient": "geofed._client",
    "AsyncJob": "geofed._client",
    "Client": "geofed._sync",
    "GeofedError": "geofed_pb.errors",
    "Job": "geofed._sync",
    "Simulation": "geofed._simulate",
    "log": "geofed_pb.user_code.recording",
    "secret": "geofed_pb.user_code.secrets",
    "simulate": "geofed._simulate",
}
"""Modules of the names, loaded when a name is first used: the command `geofed` needs none of them."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
