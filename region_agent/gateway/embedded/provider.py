"""Carries out the actions of the function table: processes, timers, logs, memory limits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import socket
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from geofed_pb import address
from geofed_pb.errors import GeofedError
from geofed_pb.storage import is_nearly_full
from geofed_pb.tasks import background, end_process, log_only
from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.logs import LogStore, pipe_to_lines
from region_agent.gateway.embedded.replica_table import (
    Action,
    CallEnded,
    CallStarted,
    DeleteFunction,
    Deploy,
    Event,
    FunctionTable,
    LimitDrain,
    OverLimit,
    Refused,
    ReplicaExited,
    ReplicaReady,
    RestartLater,
    ScaleFunction,
    StartReplica,
    StopReplica,
)
from region_agent.gateway.embedded.replicas import disk, memory
from region_agent.gateway.embedded.replicas.process_limit import remove_old_groups
from region_agent.gateway.embedded.replicas.relay import addresses_inside
from region_agent.gateway.embedded.replicas.running import FunctionLimits, Running, replica_spec
from region_agent.gateway.embedded.replicas.sandbox import SandboxView
from region_agent.gateway.embedded.replicas.system_view import system_view
from region_agent.gateway.embedded.replicas.zygote_link import ZygoteEvents, ZygoteLink
from region_agent.gateway.embedded.secret_store import SecretStore
from region_agent.gateway.functions import FunctionSpec, FunctionStatus, Grants, Isolation, ReplicaFailure
from region_agent.gateway.redaction import Redaction
from region_agent.gateway.socket_folders import remove_short_folder, short_folder

__all__ = ["Provider", "unreachable"]

_log = structlog.get_logger("gateway.provider")
_DISK_PAUSE_SECONDS = 1.0
"""Pause after a nearly full disk was found."""
_TRIAL = "trial-0"
"""Name of the replica with which sandboxes are tried."""


def unreachable(function: str) -> str:
    """Return what OpenFaaS says of a function that does not listen, or has ended during a call."""
    return f"Can't reach service for: {function}."


class Provider:
    """The functions of one gateway, as processes of this machine."""

    answer_grace = timedelta(0)
    """Time beyond a call's limit in which a replica may tell that it has ended the call itself."""
    exit_grace = timedelta(seconds=2)
    """Time in which the end of a replica that has closed its connection is known."""
    orchestration = "processes"
    """What replicas are."""
    host = ""
    """Address of this machine for functions; empty: its loopback addresses."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.table = FunctionTable(config.limits.edition)
        self.secrets = SecretStore(config.state_dir / "secrets")
        self.logs = LogStore(
            config.state_dir / "logs", lines_in_memory=config.log_lines, file_bytes=config.log_file_bytes
        )
        self._temporary: Path | None = None
        self._running: dict[str, Running] = {}
        self._created: dict[str, datetime] = {}
        self._last_failure: dict[str, ReplicaFailure] = {}
        """How a replica of each function has ended last, unless a request ended it."""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._system_view: list[str] = []
        """Arguments of bubblewrap for what all functions see."""
        self.isolation = Isolation("none", "the gateway has not started", limits_processes=False)
        """How functions are isolated, from what was tried at the start."""
        events = ZygoteEvents(self._spawned, self._exited, self._zygote_lost, self._sandbox_pids, self._zygote_output)
        self._zygote = ZygoteLink(config.preload, config.python_path, events)

    async def start(self) -> None:
        """Start the warm parent, and delete folders that an earlier gateway has left in the state directory."""
        self._clear_runtime()
        remove_old_groups()
        await self._zygote.start()
        self._system_view = system_view(self._zygote.python_path, self._hidden)
        self.isolation = await self._tried_isolation()
        if self.isolation.kind == "none":
            self._temporary = short_folder(self.config.state_dir / "temporary-folders")
            _log.warning("functions are not isolated: they can read what this process can", cause=self.isolation.reason)
        self._run_task(self._watch_memory(), end_process)
        self._run_task(self._watch_disk(), end_process)

    async def stop(self) -> None:
        """End every replica and the warm parent."""
        self.logs.end()
        await self._zygote.stop()
        await self._stop_tasks()

    def _clear_runtime(self) -> None:
        runtime = self.config.state_dir / "r"
        shutil.rmtree(runtime, ignore_errors=True)
        runtime.mkdir(mode=0o700)

    def _end(self, name: str) -> None:
        """End a replica's process."""
        self._zygote.kill(name)

    async def _stop_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for running in list(self._running.values()):
            await running.clean()
        self._running.clear()
        shutil.rmtree(self.config.state_dir / "r", ignore_errors=True)
        remove_short_folder(self.config.state_dir / "temporary-folders")

    # requests

    def deploy(self, spec: FunctionSpec) -> None:
        """Create or change a function; raises ``Refused``."""
        if self.config.isolation == "require" and self.isolation.kind == "none":
            raise Refused(400, f"functions cannot be isolated on this machine: {self.isolation.reason}")
        self.handler(spec.image)
        FunctionLimits.of(spec, self.config)
        try:
            Grants.of(spec)
        except ValueError as error:
            raise Refused(400, f"function {spec.service}: {error}") from error
        for name in spec.secrets:
            if name not in self.secrets.names():
                raise Refused(400, f"function {spec.service} needs secret {name}, which does not exist")
        self.apply(Deploy(spec))
        self._created.setdefault(spec.service, datetime.now(UTC))

    def delete(self, name: str) -> None:
        """Remove a function; its replicas finish their calls within the drain time.

        Raises ``Refused`` 404, and 500 for a container that has not begun to handle signals, as faasd does after 30 s.
        """
        starting = [one for one in self.table.replicas(name) if one in self._running and not self._running[one].http]
        if self.table.limits.bare and starting and self.table.spec(name):
            for replica in starting:
                self._stop_replica(replica)
            raise Refused(500, f"error deleting container {name}: cannot delete running task: failed precondition")
        self.apply(DeleteFunction(name))
        self._created.pop(name, None)
        self._last_failure.pop(name, None)
        self.logs.end(name)

    def status(self, name: str) -> FunctionStatus:
        """Return the status of a function; raises ``Refused`` 404."""
        return FunctionStatus(
            spec=self.table.spec(name),
            replicas=self.table.wanted(name),
            available_replicas=self.table.available(name),
            invocation_count=self.table.invocations(name),
            created_at=self._created.get(name),
            failure=self._last_failure.get(name),
        )

    def usage(self, name: str) -> dict[str, float]:
        """CPU seconds per second since start and memory of all replicas."""
        found = [running for replica in self.table.replicas(name) if (running := self._running.get(replica))]
        return memory.usage([pid for running in found for pid in running.pids])

    def handler(self, image: str) -> str:
        """The handler that an image names; raises ``Refused`` 400."""
        prefixes = [prefix for prefix in self.config.images if image.startswith(prefix)]
        if not prefixes:
            known = ", ".join(sorted(self.config.images)) or "none"
            raise Refused(400, f"image {image!r} names no handler of the embedded gateway; known prefixes: {known}")
        return self.config.images[max(prefixes, key=len)]

    def apply(self, event: Event) -> None:
        """Pass an event to the table and carry out the actions that it returns; raises ``Refused``."""
        actions = self.table.handle(event)
        self._changed.set()
        self._changed = asyncio.Event()
        for action in actions:
            self._carry_out(action)

    async def acquire(self, name: str) -> Running:
        """Reserve a replica for a call; the caller must release it. Raises ``Refused`` 404, 429, 503."""
        limits = FunctionLimits.of(self.table.spec(name), self.config)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.start_timeout.total_seconds()
        bare = self.table.limits.bare
        if self.table.is_down(name):
            self.apply(self.table.restart(name))
        if self.table.wanted(name) == 0:
            if not self.config.limits.edition.scale_from_zero:
                raise Refused(503, f"function {name} is scaled to zero")
            self.apply(ScaleFunction(name, 1))
        while (replica := self.table.pick(name, limits.max_inflight)) is None:
            if bare:
                raise Refused(500, unreachable(name), exit_reason="crash")
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except TimeoutError:
                last = self._last_failure.get(name)
                cause = "its replicas are still starting" if last is None else last.message
                raise Refused(503, f"function {name} has no replica that answers: {cause}") from None
        self.apply(CallStarted(replica))
        return self._running[replica]

    def release(self, running: Running) -> None:
        """Release a replica after its call has ended."""
        self.apply(CallEnded(running.name))

    def kill(self, running: Running, reason: str, text: str) -> None:
        """Kill a replica that has exceeded a limit; it is replaced."""
        running.kill_reason, running.kill_text = reason, text
        self.logs.append(running.spec.service, running.name, text)
        self._end(running.name)
        self.apply(OverLimit(running.name))

    # actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartReplica(name, spec):
                self._run_task(self._start_replica(name, spec), partial(self._not_started, name))
            case StopReplica(name):
                self._stop_replica(name)
            case LimitDrain(name):
                self._after(self.config.drain_timeout.total_seconds(), self._stop_replica, name)
            case RestartLater(due, wait):
                self._after(wait.total_seconds(), self.apply, due)

    async def _start_replica(self, name: str, spec: FunctionSpec) -> None:
        running = Running.create(name, spec, self.config, self._temporary)
        self._running[name] = running
        try:
            redact = self._redaction(spec)
            self.secrets.copy(spec.secrets, running.directory / "secrets")
        except Refused as refusal:
            running.kill_text = refusal.text
            self._exited(name, 0)
            return
        await self._zygote.wait_ready()
        if name not in self._running:
            return
        try:
            control = await self._fork(running, lambda line: self.logs.append(spec.service, name, redact(line)))
        except OSError as error:
            running.kill_text = f"replica {name} could not be forked: {error}"
            self._exited(name, None)
            return
        if name not in self._running:
            control.close()
            await running.clean()
            return
        description = replica_spec(running, self.handler(spec.image), self.config)
        egress = list(Grants.of(spec).egress)
        if await running.begin(control, description, egress, functools.partial(self._target_of, spec.service)):
            self.apply(ReplicaReady(name))

    def _redaction(self, spec: FunctionSpec) -> Redaction:
        """Return what takes the values of a function's secrets out of its output; raises ``Refused``."""
        return Redaction.of({secret: self.secrets.read(secret) for secret in spec.secrets})

    async def _fork(self, running: Running, take_line: Callable[[str], None]) -> socket.socket:
        """Fork a replica, in a sandbox unless it was created without; returns the socket for its specification.

        Raises ``OSError``.
        """
        place = await running.enter(self._view(running)) if running.temporary is None else None
        control, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        control.setblocking(False)
        running.output = await pipe_to_lines(read_fd, take_line)
        try:
            self._zygote.spawn(running.name, theirs.fileno(), write_fd, place)
        except OSError:
            control.close()
            raise
        finally:
            theirs.close()
            os.close(write_fd)
        return control

    @property
    def _hidden(self) -> list[str]:
        return [str(self.config.state_dir), *self.config.hide_paths]

    def _view(self, running: Running) -> SandboxView:
        grants = Grants.of(running.spec)
        return SandboxView(
            self._system_view,
            str(running.directory),
            read=grants.read,
            write=grants.write,
            hidden=self._hidden,
            egress=[address.split(target) for target in grants.egress],
            hosts=None if grants.host_network else addresses_inside(grants.egress),
            memory_bytes=running.limits.memory_bytes,
        )

    def _target_of(self, function: str, name: str) -> str | None:
        """Return the present address outside of one in a function's sandboxes."""
        try:
            return Grants.of(self.table.spec(function)).egress.get(name) or None
        except Refused:
            return None

    async def _tried_isolation(self) -> Isolation:
        """Start a replica without a handler in a sandbox and return how it is isolated."""
        if self.config.isolation == "none":
            return Isolation("none", "it is switched off", limits_processes=False)
        lines: list[str] = []
        running = Running.create(_TRIAL, FunctionSpec(_TRIAL, _TRIAL), self.config, None)
        try:
            control = await self._fork(running, lines.append)
            if await running.begin(control, replica_spec(running, "", self.config), [], lambda _: None):
                return Isolation("bubblewrap", "", limits_processes=running.process_limit.file != "")
            reason = lines[-1] if lines else "no process could enter a sandbox"
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            await running.clean()
        return Isolation("none", reason, limits_processes=False)

    def _sandbox_pids(self) -> set[int]:
        return {running.sandbox.pid for running in self._running.values() if running.sandbox is not None}

    def _not_started(self, name: str, error: GeofedError) -> None:
        running = self._running.get(name)
        if running is None:
            self.apply(ReplicaExited(name))
            return
        running.kill_text = f"replica {name} could not be started: {error}"
        self._end(name)
        self._exited(name, None)

    def _stop_replica(self, name: str) -> None:
        running = self._running.get(name)
        if running is not None:
            running.kill_text = running.kill_text or f"replica {name} was stopped by a request"
            self._end(name)

    # events of the zygote

    def _spawned(self, name: str, pid: int) -> None:
        running = self._running.get(name)
        if running is not None:
            running.pid = pid
            if running.kill_text:
                self._end(name)

    def _exited(self, name: str, status: int | None) -> None:
        running = self._running.pop(name, None)
        if running is None:
            return
        text = running.end_text(status)
        expected = running.kill_text.endswith("by a request")
        if not expected:
            last = self._last_failure.get(running.spec.service)
            count = 1 if last is None else last.count + 1
            self._last_failure[running.spec.service] = ReplicaFailure(count, running.kill_code, text, running.kill_hint)
            _log.warning("replica ended", replica=name, cause=text)
        running.exited.set_result(text)
        self._run_task(running.clean(), log_only)
        self.apply(ReplicaExited(name))

    def _zygote_lost(self) -> None:
        for name, running in list(self._running.items()):
            if running.pid is not None:
                # The kernel has killed the replica, but processes that it had started are still in its process group.
                with contextlib.suppress(OSError):
                    os.killpg(running.pid, signal.SIGKILL)
            self._exited(name, None)

    def _zygote_output(self, line: str) -> None:
        _log.warning("zygote output", text=line)

    # tasks

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(self.config.memory_poll.total_seconds())
            for running in list(self._running.values()):
                limit = running.limits.memory_bytes
                if limit is None or running.pid is None or running.kill_reason:
                    continue
                used = running.memory.used(running.pids, limit)
                if used > limit:
                    self.kill(running, "memory", memory.over_limit_text(running.name, used, limit))

    async def _watch_disk(self) -> None:
        runtime = self.config.state_dir / "r"
        while True:
            await asyncio.sleep(self.config.memory_poll.total_seconds())
            if not is_nearly_full(runtime):
                continue
            folders = {name: running.directory for name, running in self._running.items()}
            found = await asyncio.to_thread(disk.largest, folders)
            running = None if found is None else self._running.get(found[0])
            if found is not None and running is not None and not running.kill_reason:
                self.kill(running, "disk", disk.full_disk_text(*found))
            # Its files are removed, or others than functions fill the disk.
            await asyncio.sleep(_DISK_PAUSE_SECONDS)

    def _run_task(self, work: Coroutine[Any, Any, None], failed: Callable[[GeofedError], object]) -> None:
        task = background(work, failed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _after(self, wait_s: float, call: Any, *arguments: Any) -> None:
        asyncio.get_running_loop().call_later(wait_s, call, *arguments)
