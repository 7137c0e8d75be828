"""Replicas as containers of a Docker engine on this machine, each with `region_agent.gateway.container` in it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2

from geofed_pb.errors import GeofedError, install_hint
from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.logs import LineSplitter
from region_agent.gateway.embedded.provider import Provider
from region_agent.gateway.embedded.replica_table import ReplicaReady
from region_agent.gateway.embedded.replicas import memory
from region_agent.gateway.embedded.replicas.running import Running
from region_agent.gateway.functions import FunctionSpec, Grants, Isolation
from region_agent.gateway.quantities import format_bytes, parse_cpu
from region_agent.gateway.redaction import Redaction

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

__all__ = ["ContainerProvider"]

_LABEL = "geofed.gateway"
"""Label of a gateway's containers and network."""
_REMOVED_AT_ONCE = 8
"""Containers that are removed at the same time."""
_PORT = 8080
"""Port on which the worker's image listens in its container."""
_SECRETS = "/var/openfaas/secrets"
_MOST_PROCESSES = 512
"""Processes of a container; torch starts threads, which count."""
_LOOK_SECONDS = 0.05
"""Interval at which a starting container is asked whether it is ready."""
_STOP_SECONDS = 5.0
"""Time for the containers to be removed when the gateway stops."""
_NETWORK_OPTIONS = {"com.docker.network.bridge.enable_icc": "false"}
"""Containers cannot connect to each other: each runs code of a job, with that job's secrets and shards."""
_ENGINE_LOG = {"type": "json-file", "config": {"max-size": "10m", "max-file": "1"}}
"""The engine's own copy of a container's output, which is removed with it."""


class ContainerProvider(Provider):
    """The functions of one gateway, as containers of this machine's engine."""

    answer_grace = timedelta(seconds=2)  # the container's own 504 arrives first
    orchestration = "docker"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._mark = hashlib.sha256(str(config.state_dir).encode()).hexdigest()[:12]
        self._engine: DockerClient | None = None
        self._containers: dict[str, Container] = {}
        self._network = config.docker_network
        self._closing = False
        """True: no container may be started any more."""
        self.host = ""

    async def start(self) -> None:
        """Connect to the engine, create the network, and remove containers that an earlier gateway has left."""
        try:
            await asyncio.to_thread(self._open)
        except ImportError:
            raise GeofedError(
                "CONFIG_INVALID", "the package docker is not installed", hint=install_hint("docker")
            ) from None
        except Exception as error:
            text = f"no Docker engine answers at {self.config.docker}: {error}"
            hint = "start it, and let the agent's user use its socket"
            raise GeofedError("GATEWAY_UNAVAILABLE", text, hint=hint) from error
        self._clear_runtime()
        self.isolation = Isolation("container", "", limits_processes=True)

    def _open(self) -> None:
        import docker

        self._engine = docker.DockerClient(base_url=self.config.docker or None, timeout=60)
        self._remove_containers()
        if not self._network:
            self._network = f"geofed-{self._mark}"
            self._create_network(self._engine)
        settings = self._engine.networks.get(self._network).attrs["IPAM"]["Config"] or [{}]
        self.host = str(settings[0].get("Gateway", ""))

    def _create_network(self, engine: DockerClient) -> None:
        found = [one for one in engine.networks.list(names=[self._network]) if one.name == self._network]
        for network in found:
            if _NETWORK_OPTIONS.items() <= (network.attrs.get("Options") or {}).items():
                return
            network.remove()  # of an earlier version
        # Internal: what job code reaches is this machine, nothing else.
        engine.networks.create(
            self._network, driver="bridge", internal=True, options=_NETWORK_OPTIONS, labels={_LABEL: self._mark}
        )

    def _remove_containers(self) -> None:
        assert self._engine is not None
        found = self._engine.containers.list(all=True, ignore_removed=True, filters={"label": f"{_LABEL}={self._mark}"})
        with ThreadPoolExecutor(_REMOVED_AT_ONCE) as pool:
            list(pool.map(_remove, found))

    async def stop(self) -> None:
        """Remove every container, and the network."""
        self.logs.end()
        self._closing = True
        if self._engine is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._close), _STOP_SECONDS)
        await self._stop_tasks()

    def _close(self) -> None:
        assert self._engine is not None
        self._remove_containers()
        if not self.config.docker_network:
            with contextlib.suppress(Exception):
                self._engine.networks.get(self._network).remove()

    def handler(self, image: str) -> str:
        """Return an image itself: its entry point names the handler."""
        return image

    def usage(self, name: str) -> dict[str, float]:
        """CPU and memory of all replicas, of their processes on this machine."""
        found = [self._containers[replica] for replica in self.table.replicas(name) if replica in self._containers]
        return memory.usage([int(one.attrs["State"]["Pid"]) for one in found if one.attrs["State"].get("Pid")])

    async def _start_replica(self, name: str, spec: FunctionSpec) -> None:
        if self._closing:
            return
        running = Running.create(name, spec, self.config, None)
        self._running[name] = running
        try:
            redact = self._redaction(spec)
            self.secrets.copy(spec.secrets, running.directory / "secrets")
            container = await asyncio.to_thread(self._run, running)
        except Exception as error:  # noqa: BLE001 - the library lets errors of what it uses through
            running.kill_text = running.kill_text or f"replica {name} could not be started: {error}"
            self._exited(name, None)
            return
        self._containers[name] = container
        loop = asyncio.get_running_loop()
        arguments = loop, running, container, redact
        threading.Thread(target=self._follow, args=arguments, name=name, daemon=True).start()
        if running.kill_text:
            self._end(name)
        address = container.attrs["NetworkSettings"]["Networks"][self._network]["IPAddress"]
        http = httpx2.AsyncClient(base_url=f"http://{address}:{_PORT}", timeout=None, trust_env=False)
        while name in self._running:
            with contextlib.suppress(httpx2.HTTPError):
                if (await http.get("/_/ready", timeout=5)).status_code == 200:
                    running.http = http
                    self.apply(ReplicaReady(name))
                    return
            await asyncio.sleep(_LOOK_SECONDS)
        await http.aclose()

    def _run(self, running: Running) -> Container:
        """Create and start a replica's container. Blocks."""
        from docker.errors import ImageNotFound

        assert self._engine is not None
        create = partial(self._engine.containers.create, running.spec.image, **self._options(running))
        try:
            container = create()
        except ImageNotFound:
            self._engine.images.pull(running.spec.image)
            container = create()
        try:
            container.start()
            container.reload()
        except Exception:  # whatever the engine answers: it is raised again
            _remove(container)
            raise
        if self._closing:
            _remove(container)
        return container

    def _options(self, running: Running) -> dict[str, Any]:
        """Return what a replica's container is created with."""
        from docker.types import DeviceRequest

        spec, limits, gpus = running.spec, running.limits, self.config.docker_gpus
        grants = Grants.of(spec)
        volumes = {path: {"bind": path, "mode": "ro"} for path in grants.read}
        volumes |= {path: {"bind": path, "mode": "rw"} for path in grants.write}
        volumes[str(running.directory / "secrets")] = {"bind": _SECRETS, "mode": "ro"}
        cpu = spec.limits.get("cpu")
        return {
            "detach": True,
            "name": f"geofed-{self._mark}-{running.name}",
            "hostname": running.name,
            "labels": {_LABEL: self._mark},
            "network": self._network,
            "environment": {
                "OMP_NUM_THREADS": str(limits.threads), "max_inflight": str(limits.max_inflight),
                "OPENFAAS_SECRETS": _SECRETS, "OPENFAAS_NAME": spec.service, "HOME": "/tmp", **spec.env_vars,
            },
            "user": f"{os.getuid()}:{os.getgid()}",
            "volumes": volumes,
            "mem_limit": limits.memory_bytes,
            "memswap_limit": limits.memory_bytes,
            # Of the same memory. The engine's 64 MB are too few for processes that pass each other tensors.
            "shm_size": limits.memory_bytes,
            "nano_cpus": int(parse_cpu(cpu) * 1e9) if cpu else None,
            "pids_limit": _MOST_PROCESSES,
            "read_only": True,
            "tmpfs": {"/tmp": "mode=1777"},
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "restart_policy": {"Name": "no"},
            "log_config": _ENGINE_LOG,
            "device_requests": [DeviceRequest(count=gpus, capabilities=[["gpu"]])] if gpus else None,
        }  # fmt: skip

    def _follow(
        self, loop: asyncio.AbstractEventLoop, running: Running, container: Container, redact: Redaction
    ) -> None:
        """Read a container's output until it ends, and tell the loop how it ended. Runs in a thread of its own."""
        status, killed = 1, False
        with contextlib.suppress(Exception):  # the engine may end at any time
            lines: list[str] = []
            splitter = LineSplitter(lambda line: lines.append(redact(line)))
            for chunk in container.logs(stream=True, follow=True):
                splitter.feed(chunk)
                self._append(loop, running, lines)
            splitter.end()
            self._append(loop, running, lines)
            status = int(container.wait()["StatusCode"])
            container.reload()
            killed = bool(container.attrs["State"]["OOMKilled"])
        _remove(container)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._container_ended, running, status, killed)

    def _append(self, loop: asyncio.AbstractEventLoop, running: Running, lines: list[str]) -> None:
        """Move lines to the log, and wait until it has them, so that no more than one part of an output waits."""
        taken, done = lines.copy(), threading.Event()
        lines.clear()

        def append() -> None:
            for line in taken:
                self.logs.append(running.spec.service, running.name, line)
            done.set()

        loop.call_soon_threadsafe(append)
        while not done.wait(_LOOK_SECONDS) and not self._closing:
            pass

    def _container_ended(self, running: Running, status: int, killed: bool) -> None:
        self._containers.pop(running.name, None)
        if killed and not running.kill_text:
            limit = format_bytes(running.limits.memory_bytes or 0)
            running.kill_reason = "memory"
            running.kill_text = f"replica {running.name} used more memory than its limit of {limit} and was killed"
        # As a process's status: the engine reports a signal as 128 and its number.
        self._exited(running.name, status - 128 if status > 128 else status << 8)

    def _end(self, name: str) -> None:
        container = self._containers.get(name)
        if container is not None:
            threading.Thread(target=_remove, args=(container,), name=f"end {name}", daemon=True).start()

    def kill(self, running: Running, reason: str, text: str) -> None:
        """Kill a replica that has exceeded a limit. One whose caller has gone notices that by itself and stays."""
        if reason != "gone":
            super().kill(running, reason, text)


def _remove(container: Container) -> None:
    """Kill and remove a container with its volumes, unless that has happened already. Blocks."""
    with contextlib.suppress(Exception):
        container.remove(force=True, v=True)
