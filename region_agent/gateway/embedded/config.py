"""The configuration of the embedded gateway: a JSON or TOML file whose unknown keys are errors."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geofed_pb.address import bracketed
from geofed_pb.errors import GeofedError
from geofed_pb.platforms import EDITIONS, Edition
from region_agent.gateway.client import is_loopback
from region_agent.gateway.functions import BasicAuth
from region_agent.gateway.quantities import parse_duration

if TYPE_CHECKING:
    from region_agent.config import KubernetesGateway, LambdaGateway, ScfGateway

__all__ = ["Config", "Profile", "load"]


@dataclass(frozen=True)
class Profile:
    """The limits of an edition, and of its queue."""

    edition: Edition
    """Functions and replicas."""
    queue_items: int
    """Asynchronous calls that may wait."""
    queue_body_bytes: int
    """Largest body of an asynchronous call."""
    queue_inflight: int
    """Asynchronous calls that run at the same time."""


PROFILES = {
    "none": Profile(EDITIONS["none"], queue_items=1000, queue_body_bytes=2**20, queue_inflight=64),
    "ce": Profile(EDITIONS["ce"], queue_items=10, queue_body_bytes=256 * 1024, queue_inflight=1),
    "faasd": Profile(EDITIONS["faasd"], queue_items=10, queue_body_bytes=256 * 1024, queue_inflight=1),
}


ISOLATION = ("require", "prefer", "none")


@dataclass(frozen=True)
class Config:
    """Settings of the embedded gateway."""

    state_dir: Path
    """Directory for secrets, logs and the replicas' own directories."""
    listen: str = "127.0.0.1:0"
    """``host:port`` (port 0 picks one) or ``unix:/path``; TLS is required beyond loopback."""
    ready_file: Path | None = None
    """File that receives ``{"url", "pid"}`` once calls are served."""
    auth_user_file: Path | None = None
    """File with the user of the system routes; required beyond loopback."""
    auth_password_file: Path | None = None
    """File with the password."""
    tls_cert: Path | None = None
    """Certificate chain, PEM."""
    tls_key: Path | None = None
    """Private key, PEM."""
    callback_ca: Path | None = None
    """Authority that certificates of https callback receivers are checked against."""
    profile: str = "none"
    """``ce`` for the limits of the community edition, ``faasd`` for those of faasd and for its conduct, ``none`` for no
    limits."""
    images: Mapping[str, str] = field(default_factory=lambda: {"geofed/worker": "region_agent.worker.handler:handle"})
    """Image prefix to handler; the longest prefix wins."""
    preload: tuple[str, ...] = ("numpy", "torch")
    """Modules that the warm parent imports; they must start no threads. One that is missing is skipped."""
    python_path: tuple[str, ...] = ()
    """Folders in which handlers are found, appended to ``sys.path``."""
    hide_paths: tuple[str, ...] = ()
    """Directories that no function may see, even if what it may read contains them; the state directory always belongs
    to them."""
    isolation: str = "require"
    """``require``: functions run in sandboxes, or not at all. ``prefer``: without sandboxes where there can be none.
    ``none``: without."""
    docker: str = ""
    """Address of a Docker engine, e.g. ``unix:///var/run/docker.sock``: replicas are its containers, and a function's
    image is one of the engine's. Empty: replicas are processes."""
    docker_network: str = ""
    """Network of the containers; empty: one of the gateway's own, from which only this machine is reached."""
    docker_gpus: int = 0
    """GPUs of the engine's machine that each container sees."""
    kubernetes: KubernetesGateway | None = None
    """The section ``gateway`` of a region file with the kind ``kubernetes``: replicas are Jobs of its cluster."""
    serverless: LambdaGateway | ScfGateway | None = None
    """The section ``gateway`` of a region file with the kind ``lambda`` or ``scf``: replicas are invocations of its
    functions."""
    owner: str = "local"
    """Mark of the gateway's objects on a platform that others use, too, which no other gateway there has."""
    dial_host: str = "127.0.0.1"
    """Address of this machine at which it listens for replicas elsewhere, and to which they connect."""
    read_timeout: timedelta = timedelta(seconds=60)
    """Longest time for a request's body to arrive."""
    write_timeout: timedelta = timedelta(seconds=60)
    """Longest time until the answer is complete."""
    upstream_timeout: timedelta = timedelta(seconds=60)
    """Longest time of a call in its replica."""
    drain_timeout: timedelta = timedelta(seconds=10)
    """Longest time in which a replica that is being removed may finish its calls."""
    start_timeout: timedelta = timedelta(seconds=10)
    """Longest time for which a call waits for a first replica."""
    cold_start: timedelta = timedelta(0)
    """Emulated cold start of every replica."""
    max_inflight: int = 1
    """Concurrent calls in one replica, if the function's environment does not set ``max_inflight``."""
    max_body_bytes: int = 256 * 2**20
    """Largest body of a synchronous call."""
    memory_poll: timedelta = timedelta(milliseconds=100)
    """Interval at which memory limits are checked."""
    log_lines: int = 10_000
    """Lines per function kept in memory."""
    log_file_bytes: int = 16 * 2**20
    """Size at which a function's log file is rotated; one old file is kept."""

    @property
    def limits(self) -> Profile:
        """The limits of the configured profile."""
        return PROFILES[self.profile]

    @property
    def auth(self) -> BasicAuth | None:
        """Credentials of the system routes; raises ``CONFIG_INVALID`` where the files cannot be read."""
        if self.auth_user_file is None or self.auth_password_file is None:
            return None
        return BasicAuth.from_files(self.auth_user_file, self.auth_password_file)

    def validate(self) -> Config:
        """Check the settings and return them; raises ``CONFIG_INVALID`` or ``PLAINTEXT_REFUSED``."""
        if self.profile not in PROFILES:
            raise GeofedError("CONFIG_INVALID", f"profile {self.profile!r} is none of {', '.join(PROFILES)}")
        if self.isolation not in ISOLATION:
            raise GeofedError("CONFIG_INVALID", f"isolation {self.isolation!r} is none of {', '.join(ISOLATION)}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise GeofedError("CONFIG_INVALID", "tls_cert and tls_key must be set together")
        if (self.auth_user_file is None) != (self.auth_password_file is None):
            raise GeofedError("CONFIG_INVALID", "auth_user_file and auth_password_file must be set together")
        if self.listen.startswith("unix:"):
            return self
        host, _, port = self.listen.rpartition(":")
        try:
            named = bracketed(host)
        except ValueError:
            named = ""
        if not named or not port.isdecimal():
            raise GeofedError("CONFIG_INVALID", f"listen {self.listen!r} is neither host:port nor unix:/path")
        if not is_loopback(host.strip("[]")):
            if self.tls_cert is None:
                raise GeofedError(
                    "PLAINTEXT_REFUSED", f"{self.listen} is reachable from outside: give tls_cert and tls_key"
                )
            if self.auth_user_file is None:
                raise GeofedError("CONFIG_INVALID", f"{self.listen} is reachable from outside: give the auth files")
        return self


def load(path: Path) -> Config:
    """The configuration in a file; raises ``CONFIG_INVALID`` naming the key."""
    try:
        text = path.read_text()
        raw = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise GeofedError("CONFIG_INVALID", f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise GeofedError("CONFIG_INVALID", f"{path} must hold an object")
    return parse(raw, str(path))


def parse(raw: Mapping[str, Any], where: str) -> Config:
    """The configuration in an object; raises ``CONFIG_INVALID`` naming the key."""
    kinds = {member.name: member.type for member in dataclasses.fields(Config)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in kinds:
            raise GeofedError("CONFIG_INVALID", f"{where}: unknown key {key!r}; known are {', '.join(kinds)}")
        try:
            values[key] = _convert(str(kinds[key]), value)
        except (TypeError, ValueError) as error:
            raise GeofedError("CONFIG_INVALID", f"{where}: {key}: {error}") from error
    if "state_dir" not in values:
        raise GeofedError("CONFIG_INVALID", f"{where}: state_dir is missing")
    return Config(**values).validate()


def _convert(kind: str, value: Any) -> Any:
    if kind.startswith("Path"):
        return Path(_expect(value, str)) if value is not None else None
    if kind.startswith("KubernetesGateway"):
        from region_agent.config import KubernetesGateway

        return KubernetesGateway.model_validate(_expect(value, dict))
    if kind.startswith("LambdaGateway"):
        from region_agent.config import LambdaGateway, ScfGateway

        found = _expect(value, dict)
        return (ScfGateway if found.get("kind") == "scf" else LambdaGateway).model_validate(found)
    if kind == "timedelta":
        return parse_duration(value if isinstance(value, str) else str(_expect(value, int | float)))
    if kind.startswith("tuple"):
        return tuple(_expect(item, str) for item in _expect(value, list))
    if kind.startswith("Mapping"):
        return {_expect(key, str): _expect(item, str) for key, item in _expect(value, dict).items()}
    return _expect(value, {"int": int, "str": str, "bool": bool}[kind])


def _expect(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r} has the wrong type")
    return value
