"""Secrets that the region holds for tasks: which a job may read, and their values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.user_code.secrets import FILES_VARIABLE, OWN_PREFIX, VARIABLES_VARIABLE
from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig
from region_agent.gateway import GatewayClient
from region_agent.gateway.owner import Owner
from region_agent.gateway.redaction import Redaction

__all__ = ["GivenSecrets", "check_secrets", "give_secrets", "remove_secrets"]

_NONE: Mapping[str, str] = {}
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


@dataclass(frozen=True)
class GivenSecrets:
    """The secrets of one job's functions, or of a profile's."""

    names: tuple[str, ...] = ()
    """Names of the secrets at the function platform."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the functions, in which tasks find the secrets by their own names, and which has no value of them.
    """
    redact: Redaction = field(default_factory=Redaction)
    """Takes their values out of texts."""


async def give_secrets(
    config: RegionConfig,
    gateway: GatewayClient,
    owner: Owner,
    job: str,
    names: Iterable[str],
    env: Mapping[str, str] = _NONE,
    secret_env: Mapping[str, str] = _NONE,
) -> GivenSecrets:
    """Store a job's own copies of the named secrets at the function platform, except for those that it has by itself.

    ``env``: further variables of the functions. ``secret_env``: those whose values are secrets, too.

    Raises ``GeofedError("SECRET_MISSING")`` if a file cannot be read.
    """
    names = tuple(names)
    values = {name: _value(config.name, name, file) for name in names if (file := config.secrets[name].file)}
    variables = {variable: OWN_PREFIX + variable.lower().replace("_", "-") for variable in secret_env}
    values |= {name: secret_env[variable].encode() for variable, name in variables.items()}
    copies = {name: owner.secret(name, job) for name in values}
    for name, value in values.items():
        await gateway.put_secret(copies[name], value)
    renamed = {name: copies[name] for name in names if copies.get(name, name) != name}
    files = {variable: copies[name] for variable, name in variables.items()}
    own = {FILES_VARIABLE: renamed, VARIABLES_VARIABLE: files}
    told = {variable: json.dumps(content) for variable, content in own.items() if content}
    held = tuple(copies.get(name, name) for name in (*names, *variables.values()))
    return GivenSecrets(held, {**env, **told}, Redaction.of(values))


async def remove_secrets(gateway: GatewayClient, owner: Owner, job: str) -> None:
    """Delete what `give_secrets` has stored for a job or a profile. The agent's own platform keeps the values."""
    if owner.mark:
        for name in owner.secrets_of(await gateway.list_secrets(), job):
            await gateway.delete_secret(name)


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
