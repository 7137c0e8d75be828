"""A federation of real daemons on this machine: one control plane, and one agent for each region.

With an emulator every process runs in its site's network namespace, and regions reach each other over the emulated WAN.
Without one they share the loopback interface, which is not shaped. Used by the demo and by the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from control_plane.client import Context, ControlClient
from deploy.emulator import Emulator, WanProfile
from geofed_pb.errors import GeofedError
from region_agent.link.enrolment import join_federation

__all__ = ["LOOPBACK", "LocalFederation", "RegionSite", "links_of", "reusable_port"]

LOOPBACK = "127.0.0.1"
_REUSABLE_PORTS = range(10_000, 20_000)
"""Ports below the range of outgoing connections."""
_PORTS_PER_PROCESS = 100
"""Ports that one process chooses from."""
_chosen = itertools.count()

_READY_SECONDS = 40.0
"""Timeout of a daemon's start, and of an agent's session."""
_STOP_SECONDS = 10.0
"""Time for daemons to end after SIGTERM, before SIGKILL."""
CONTROL_SITE = "control"
"""The control plane's site in the emulator."""
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class RegionSite:
    """A region to run."""

    name: str
    config: Mapping[str, Any]
    """Content of the region file, without `apiVersion`, `kind`, `metadata` and `advertise`."""


class LocalFederation:
    """The federation, as a context manager; leaving it ends every process that it has started."""

    def __init__(
        self,
        folder: Path,
        regions: Sequence[RegionSite],
        *,
        emulator: Emulator | None = None,
        serve_options: Sequence[str] = (),
        agent_options: Sequence[str] = (),
    ) -> None:
        self.folder, self.regions, self.emulator = folder.resolve(), list(regions), emulator
        self._serve_options, self._agent_options = list(serve_options), list(agent_options)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []
        self._ports = self._stored_ports()

    def __enter__(self) -> LocalFederation:
        with contextlib.ExitStack() as undo:
            # Also on Ctrl-C: __exit__ is not called, and the daemons would stay.
            undo.callback(self.close)
            self.start_control_plane()
            self.join(*self.regions)
            for region in self.regions:
                self.start_agent(region.name)
            self.wait_connected([region.name for region in self.regions])
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The control plane

    @property
    def control_state(self) -> Path:
        """Folder of the control plane's state."""
        return self.folder / "control-plane"

    @property
    def context_file(self) -> Path:
        """File with the address and the token of the federation, for commands."""
        return self.control_state / "context.json"

    @property
    def dashboard(self) -> str:
        """Address of the dashboard."""
        host = self.emulator.address(CONTROL_SITE) if self.emulator else LOOPBACK
        return f"https://{host}:{self._ports['metrics']}"

    def start_control_plane(self) -> None:
        """Start the control plane, with the state and the ports of its last run, if there was one."""
        host = self.emulator.address(CONTROL_SITE) if self.emulator else LOOPBACK
        ready = self.folder / "control-plane-ready.json"
        ready.unlink(missing_ok=True)
        self.processes["control-plane"] = self._popen(
            CONTROL_SITE,
            "control_plane.cli.main",
            [
                "serve",
                "--state-dir", str(self.control_state), "--ready-file", str(ready), "--advertise", host,
                "--listen", f"{host}:{self._ports['listen']}",
                "--agent-listen", f"{host}:{self._ports['agent']}",
                "--metrics-listen", f"{host}:{self._ports['metrics']}",
                *self._serve_options,
            ],
            "control-plane",
        )  # fmt: skip
        self._await(ready, "control-plane")
        ports = json.loads(ready.read_text())
        self._ports = {"listen": ports["control"], "agent": ports["agent"], "metrics": ports["metrics"]}
        self._ports_file.write_text(json.dumps(self._ports))

    @property
    def _ports_file(self) -> Path:
        return self.folder / "ports.json"

    def _stored_ports(self) -> dict[str, int]:
        """Return the ports of the last run, at which joined regions look for the control plane, or new ones."""
        if self._ports_file.exists():
            stored: dict[str, int] = json.loads(self._ports_file.read_text())
            return stored
        return {name: 0 if self.emulator else reusable_port() for name in ("listen", "agent", "metrics")}

    def control_plane(
        self, *arguments: str, check: bool = True, timeout: float | None = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of `control-plane` and return what it printed. ``timeout``: in seconds; None: none."""
        argv = [*_program("control_plane.cli.main"), *arguments]
        with self._spawn(CONTROL_SITE, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                # Also on Ctrl-C or a timeout: the command must not outlive its caller.
                process.kill()
        done = subprocess.CompletedProcess(argv, process.returncode, out, err)
        if check and done.returncode:
            raise GeofedError("INTERNAL", f"control-plane {' '.join(arguments)} ended with {done.returncode}:\n{err}")
        return done

    def control_plane_data(self, *arguments: str, timeout: float | None = 120) -> Any:
        """Run a command of `control-plane` with `-o json` and return its data. Raises its ``GeofedError``."""
        done = self.control_plane(*arguments, "-o", "json", check=False, timeout=timeout)
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            text = f"control-plane {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}"
            raise GeofedError("INTERNAL", text) from None
        if answer["status"] == "error":
            error = answer["error"]
            raise GeofedError(error["code"], error["message"], hint=error["hint"])
        return answer["data"]

    def control_plane_popen(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command of `control-plane` that stays in the foreground."""
        return self._spawn(CONTROL_SITE, [*_program("control_plane.cli.main"), *arguments], **options)

    def ask(self, request: Callable[[ControlClient], Awaitable[_Answer]]) -> _Answer:
        """Send a request to the control plane from this process, which takes a hundredth of a command's time.

        Not with an emulator, since this process is in none of its network namespaces. Raises ``GeofedError``.
        """

        async def ask() -> _Answer:
            async with ControlClient.connect(Context.load(self.context_file)) as client:
                return await request(client)

        # In a thread of its own: that of a notebook runs an event loop already.
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(asyncio.run, ask()).result()

    # Regions

    def region_state(self, name: str) -> Path:
        """Return the folder of a region agent's state."""
        return self.folder / "regions" / name

    def join(self, *regions: RegionSite) -> None:
        """Write the region files, and have regions join that have not joined yet. With an emulator they are invited:
        their agents join when they start."""
        new = [region.name for region in regions if not self._write_region_file(region)]
        if self.emulator is None:
            self.ask(lambda client: self._enrol(client, new))
        else:
            with ThreadPoolExecutor(max_workers=max(1, len(new))) as inviting:
                list(inviting.map(self._invite, new))

    def _write_region_file(self, region: RegionSite) -> bool:
        """Write the region file; True if the region has joined."""
        state = self.region_state(region.name)
        state.mkdir(parents=True, exist_ok=True)
        address = self.emulator.address(region.name) if self.emulator else LOOPBACK
        whole = {
            "apiVersion": "geofed/v1",
            "kind": "Region",
            "metadata": {"name": region.name},
            "advertise": address,
            "server": {"exchangeHost": address},
            **region.config,
        }
        # JSON is valid YAML.
        (state / "region.yaml").write_text(json.dumps(whole, indent=2))
        return (state / "state" / "identity" / "federation.json").exists()

    async def _enrol(self, client: ControlClient, names: Sequence[str]) -> None:
        """Invite and join regions in this process."""
        for name in names:
            invitation = await client.invite(name)
            await join_federation(invitation.token, self.region_state(name) / "state")

    def _invite(self, name: str) -> None:
        """Invite a region with a command in the network namespace of the control plane."""
        file = self._invitation(name)
        file.touch(mode=0o600)
        file.write_text(self.control_plane("region", "invite", name).stdout)

    def _invitation(self, name: str) -> Path:
        return self.region_state(name) / "invitation"

    def start_agent(self, name: str) -> None:
        """Start a region's agent, with the state of its last run, if there was one."""
        folder = self.region_state(name)
        options = ["--config", str(folder / "region.yaml"), "--state-dir", str(folder / "state"), *self._agent_options]
        if self._invitation(name).exists():
            options += ["--token-file", str(self._invitation(name))]
        self.processes[name] = self._popen(name, "region_agent.cli", ["run", *options], f"agent-{name}")

    def agent_status(self, name: str) -> dict[str, Any]:
        """Return the agent's last status; empty if it has not written one yet."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            status: dict[str, Any] = json.loads((self.region_state(name) / "state" / "status.json").read_text())
            return status
        return {}

    def wait_connected(self, names: Sequence[str]) -> None:
        """Wait until the running agents have a session."""
        deadline = time.monotonic() + _READY_SECONDS
        for name in names:
            process = self.processes[name]
            while not (self.agent_status(name).get("connected") and self.agent_status(name).get("pid") == process.pid):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise GeofedError(
                        "UNAVAILABLE", f"agent {name} did not connect:\n{self.log(f'agent-{name}')[-2000:]}"
                    )
                time.sleep(0.05)

    # Processes

    def kill(self, name: str) -> None:
        """Send SIGKILL to "control-plane" or to a region's agent, and wait until it has exited."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def log(self, name: str) -> str:
        """Return the output of a daemon so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        """Terminate every process, kill those that do not end in time, and close their logs."""
        running = [process for process in self.processes.values() if process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()
        self._logs.clear()

    def _await(self, ready: Path, name: str) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while not ready.exists():
            if self.processes[name].poll() is not None or time.monotonic() > deadline:
                raise GeofedError("UNAVAILABLE", f"{name} did not start:\n{self.log(name)[-2000:]}")
            time.sleep(0.02)

    def _popen(self, site: str, module: str, arguments: list[str], log_name: str) -> subprocess.Popen[bytes]:
        """Start a daemon, whose output goes to the end of a log."""
        return self._logged(site, [*_program(module), *arguments], log_name)

    def _logged(self, site: str, argv: list[str], log_name: str) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / f"{log_name}.log").open("ab")
        self._logs.append(log)
        return self._spawn(site, argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _spawn(self, site: str, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        environment = {**os.environ, "GEOFED_CONTEXT": str(self.context_file), **options.pop("env", {})}
        if self.emulator is not None:
            return self.emulator.popen(site, argv, env=environment, **options)
        return subprocess.Popen(argv, env=environment, **options)


def links_of(region: str, profile: WanProfile) -> dict[str, dict[str, float]]:
    """Return `links` of a region's file for an emulated WAN: what the planner counts with before it has measured."""
    return {
        destination: {"rttMs": link.delay_ms + profile.links[destination, region].delay_ms, "mbps": link.rate_mbps}
        for (source, destination), link in profile.links.items()
        if source == region and destination in profile.regions and link.rate_mbps
    }


def reusable_port() -> int:
    """Choose a free loopback port that a server can use again after a restart.

    It is below the range that the system uses for outgoing connections. Each process chooses from a range of its own,
    and in turn, since a chosen port is not in use immediately.
    """
    first = _REUSABLE_PORTS.start + os.getpid() * _PORTS_PER_PROCESS % len(_REUSABLE_PORTS)
    for _ in range(_PORTS_PER_PROCESS):
        port = first + next(_chosen) % _PORTS_PER_PROCESS
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port
    text = f"all ports from {first} to {first + _PORTS_PER_PROCESS - 1} are in use"
    raise GeofedError("PORT_IN_USE", text, hint="stop the processes that use them, or start again for other ports")


def _program(module: str) -> list[str]:
    """Return the command line of a program of this installation, by its module, independent of the search path."""
    return [
        sys.executable,
        "-c",
        f"import sys; sys.argv[0] = {module.split('.')[0].replace('_', '-')!r}; from {module} import main; main()",
    ]
