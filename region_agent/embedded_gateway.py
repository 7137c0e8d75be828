"""Opens a region's function gateway, and runs the embedded one as a child process of the agent."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.fork_server import ExecStarter, Process, Starter, end
from region_agent.config import (
    DockerGateway,
    EmbeddedGateway,
    KubernetesGateway,
    LambdaGateway,
    OpenFaasGateway,
    RegionConfig,
    ScfGateway,
)
from region_agent.gateway import BasicAuth, GatewayClient

__all__ = ["WORKER_IMAGE", "EmbeddedGatewayProcess", "openfaas_client", "reachable"]

WORKER_IMAGE = "geofed/worker"
"""Image name of the worker function, which the embedded gateway maps to the worker's handler."""
_LOOPBACK = "127.0.0.1"
_READY_SECONDS = 60.0
"""Timeout of the gateway's start."""
_STOP_SECONDS = 8.0
"""Time after which a process that should end is killed: 2 s for open requests, 5 s for what its platform still has."""


def openfaas_client(gateway: OpenFaasGateway) -> GatewayClient:
    """Return a client of a region's OpenFaaS; raises ``GeofedError("CONFIG_INVALID")``."""
    auth = None
    if gateway.user_file and gateway.password_file:
        auth = BasicAuth.from_files(gateway.user_file, gateway.password_file)
    return GatewayClient(
        gateway.url, auth=auth, verify=gateway.ca_file, namespace=gateway.namespace, edition=gateway.edition
    )


async def reachable(config: RegionConfig, client: GatewayClient) -> RegionConfig:
    """Return the region's configuration with an address at which containers reach its parameter servers.

    Where the file names none but loopback, it is this machine's address in their network.
    """
    if not isinstance(config.gateway, DockerGateway) or config.server.worker_host != _LOOPBACK:
        return config
    host = str((await client.info())["provider"].get("host", ""))
    return config.model_copy(update={"server": config.server.model_copy(update={"worker_host": host or _LOOPBACK})})


class EmbeddedGatewayProcess:
    """The gateway's process. It listens on a socket file that only this user can open, and ends with the agent."""

    def __init__(
        self,
        state_dir: Path,
        platform: EmbeddedGateway | DockerGateway | KubernetesGateway | LambdaGateway | ScfGateway,
        *,
        isolation: str,
        warm: bool = True,
        owner: str = "",
        worker_host: str = _LOOPBACK,
        gpus: int = 0,
        log_format: str = "text",
        starter: Starter | None = None,
    ) -> None:
        """``isolation``: "require", "prefer" or "none". ``warm``: start workers from a process that has imported what
        they need. ``owner``: mark of the region on a platform that others use, too. ``worker_host``: address to which
        functions connect that the gateway cannot reach. ``gpus``: those that a container is to see."""
        self._platform, self._owner, self._worker_host, self._gpus = platform, owner, worker_host, gpus
        self._state_dir, self._folder = state_dir, state_dir / "gateway"
        self._isolation = isolation
        self._warm, self._log_format = warm, log_format
        self._starter = starter or ExecStarter()
        self._process: Process | None = None

    async def start(self) -> GatewayClient:
        """Start the process and wait until it listens; returns a client.

        Raises ``GeofedError("GATEWAY_UNAVAILABLE")``.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ready = self._folder / "ready.json"
        ready.unlink(missing_ok=True)
        user, password = self._folder / "user", self._folder / "password"
        for path, content in ((user, "agent"), (password, secrets.token_urlsafe(24))):
            write_durably(path, [content.encode()], mode=0o600)
        config: dict[str, object] = {
            "state_dir": str(self._folder / "state"),
            "listen": f"unix:{self._folder / 'api'}",
            "ready_file": str(ready),
            "auth_user_file": str(user),
            "auth_password_file": str(password),
            "preload": ["numpy", "torch", "region_agent.worker.handler"] if self._warm else [],
            "isolation": self._isolation,
            "hide_paths": [str(self._state_dir)],
            "write_timeout": "1h",
            "upstream_timeout": "1h",
            # Short, since the agent deletes a function only when its answers are no longer needed.
            "drain_timeout": "500ms",
        }
        match self._platform:
            case EmbeddedGateway(profile=profile):
                config["profile"] = profile
            case DockerGateway(engine=engine, network=network):
                config |= {"docker": engine, "docker_network": network, "docker_gpus": self._gpus}
            case KubernetesGateway() as cluster:
                settings = cluster.model_dump(mode="json", exclude_none=True)
                config |= {"kubernetes": settings, "owner": self._owner, "dial_host": self._worker_host}
            case (LambdaGateway() | ScfGateway()) as functions:
                settings = functions.model_dump(mode="json", exclude_none=True)
                config |= {"serverless": settings, "owner": self._owner, "dial_host": self._worker_host}
        config_file = self._folder / "config.json"
        write_durably(config_file, [json.dumps(config).encode()])
        log = (self._folder / "gateway.log").open("ab")
        try:
            arguments = ("--config", str(config_file), "--log-format", self._log_format)
            self._process = await self._starter.start("region_agent.gateway.embedded", *arguments, stderr=log)
        finally:
            log.close()
        deadline = asyncio.get_running_loop().time() + _READY_SECONDS
        while not ready.exists():
            if self._process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                await self.stop()
                raise GeofedError("GATEWAY_UNAVAILABLE", f"the embedded gateway did not start; see {log.name}")
            await asyncio.sleep(0.05)
        url = str(json.loads(ready.read_text())["url"])
        return GatewayClient(url, auth=BasicAuth.from_files(user, password))

    async def ended(self) -> None:
        """Wait until the process has exited."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """Terminate the process, kill it if it is still running after some seconds."""
        if self._process is not None:
            await end(self._process, _STOP_SECONDS)
        # A copy of the state folder fails at a socket.
        (self._folder / "api").unlink(missing_ok=True)
