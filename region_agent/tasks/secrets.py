"""Secrets that the region holds for tasks: which a job may read, and their values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig
from region_agent.gateway import GatewayClient
from region_agent.gateway.redaction import Redaction

__all__ = ["check_secrets", "give_secrets"]

_LONGEST = 64 << 10
"""Bytes of a secret at most; Kubernetes' own limit is 1 MiB for all of an object."""


def check_secrets(config: RegionConfig, task: agent_pb2.TaskRef) -> None:
    """Check that a job's user may read the secrets that it names.

    Raises ``GeofedError``: SECRET_MISSING; FORBIDDEN.
    """
    for name in task.secrets:
        held, user = config.secrets.get(name), task.submission.user
        if held is None:
            raise GeofedError("SECRET_MISSING", f"region {config.name} holds no secret {name}")
        if held.users is not None and user not in held.users:
            text = f"region {config.name} lets user {user or 'unknown'} read no secret {name}"
            raise GeofedError("FORBIDDEN", text, hint=f"`secrets.{name}.users` in its file lists who may")


async def give_secrets(config: RegionConfig, gateway: GatewayClient, names: Iterable[str]) -> Redaction:
    """Store the named secrets at the function platform, except for those that it has by itself.

    Raises ``GeofedError("SECRET_MISSING")`` if a file cannot be read.
    """
    values = {name: _value(config.name, name, file) for name in names if (file := config.secrets[name].file)}
    for name, value in values.items():
        await gateway.put_secret(name, value)
    return Redaction.of(values)


def _value(region: str, name: str, file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            value = opened.read(_LONGEST + 1)
    except OSError as error:
        text = f"region {region} cannot read its secret {name}: {error.strerror or 'the file cannot be read'}"
        raise GeofedError("SECRET_MISSING", text, hint="its operator corrects the file") from None
    if not 0 < len(value) <= _LONGEST:
        text = f"secret {name} of region {region} is {'empty' if not value else f'longer than {_LONGEST >> 10} KiB'}"
        raise GeofedError("SECRET_MISSING", text, hint="its operator corrects the file")
    return value
