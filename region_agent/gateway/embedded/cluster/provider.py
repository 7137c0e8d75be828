"""Carries out the actions of the function table in a Kubernetes cluster: each replica is a Job with one pod."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, field
from functools import partial

import httpx2
import structlog

from geofed_pb.errors import GeofedError
from geofed_pb.tasks import awaited, background, end_process, log_only
from region_agent.gateway.embedded.cluster.api import ClusterApi
from region_agent.gateway.embedded.cluster.manifests import (
    MOST_SECRET_BYTES,
    ObjectOwner,
    job_of,
    secret_of,
)
from region_agent.gateway.embedded.cluster.pods import PodState, judge, refusal
from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.logs import LineSplitter
from region_agent.gateway.embedded.remote import RemoteProvider
from region_agent.gateway.embedded.replica_table import OverLimit, Refused, ReplicaReady
from region_agent.gateway.embedded.replicas.running import Running
from region_agent.gateway.functions import FunctionSpec, Isolation
from region_agent.gateway.redaction import Redaction

__all__ = ["ClusterProvider"]

_log = structlog.get_logger("gateway.cluster")
_LOOK_SECONDS = 1.0
"""Interval at which the pods are looked at while replicas start."""
_QUIET_SECONDS = 3.0
"""Interval at which they are looked at otherwise."""
_LEAST_PAUSE_SECONDS = 0.1
"""Least time between two looks, however often replicas connect."""
_PODLESS_SECONDS = 3.0
"""Time after which it is asked why a Job has no pod."""
_LOG_SECONDS = 2.0
"""Time for the last lines of a pod that has ended."""
_STOP_SECONDS = 5.0
"""Time for the Jobs to be deleted when the gateway stops."""
_SECRETS = "/var/openfaas/secrets"


@dataclass
class _Placed:
    """A replica's objects in the cluster."""

    name: str
    """Name of its Job and Secret."""
    created_at: float
    """When the Job was created, by the monotonic clock."""
    verdict: PodState = field(default_factory=lambda: PodState("waiting", text="it has no pod yet"))
    """What was seen last."""
    pod: str = ""
    """Name of its pod, once there is one."""
    runs: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its container runs."""
    followed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its output is read."""
    log: asyncio.Task[None] | None = None
    over: bool = False
    """Whether its end has been noticed."""


class ClusterProvider(RemoteProvider):
    """The functions of one gateway, as Jobs in a namespace of a cluster, whose pods connect to it."""

    orchestration = "kubernetes"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert config.kubernetes is not None
        self._settings = config.kubernetes
        self._identity = ObjectOwner(config.owner, secrets.token_hex(3))
        self._api = ClusterApi(config.kubernetes)
        self._look_now = asyncio.Event()
        """Set when a replica connects: its pod runs."""
        self._placed: dict[str, _Placed] = {}
        self._left: set[str] = set()
        """Names of objects that could not be deleted yet."""
        self._number = 0
        self._creating: set[asyncio.Task[None]] = set()
        """Requests that create objects. None is cut short: the cluster may carry it out all the same, later."""

    def _greeted(self, replica: str) -> None:
        self._look_now.set()

    async def start(self) -> None:
        """Listen for the replicas, and begin to look at their pods; objects of an earlier gateway are deleted."""
        self._clear_runtime()
        await self._dialled.start(self.config.dial_host, self._settings.port)
        self.isolation = Isolation("container", "", limits_processes=True)
        self._run_task(self._watch(), end_process)

    async def stop(self) -> None:
        """Delete every Job, once none is being created any more."""
        self._stopping = True
        self.logs.end()
        await self._dialled.stop()
        await self._stop_tasks()
        if self._number:
            with contextlib.suppress(TimeoutError, GeofedError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await asyncio.gather(*self._creating, return_exceptions=True)
                    await self._api.delete_run(self._identity)
        with contextlib.suppress(httpx2.HTTPError, OSError):
            await self._api.close()

    async def _start_replica(self, name: str, spec: FunctionSpec) -> None:
        if self._stopping:
            return
        running = Running.create(name, spec, self.config, None)
        self._running[name] = running
        self._number += 1
        self._look_now.set()
        begun = time.monotonic()
        placed = self._placed[name] = _Placed(self._identity.name(self._number), begun)
        try:
            redact = self._redaction(spec)
            await self._create(placed.name, running)
        except Refused as refused:
            self._fail(name, GeofedError("LIMIT_EXCEEDED" if refused.status == 413 else "SECRET_MISSING", refused.text))
            return
        except GeofedError as error:
            if self._placed.get(name) is placed:
                self._fail(name, error)
            else:
                self._delete_later(placed.name)
            return
        if self._placed.get(name) is not placed:
            self._delete_later(placed.name)
            return
        placed.created_at = time.monotonic()
        placed.log = background(self._follow(running, placed, redact), log_only)
        running.tasks.append(placed.log)
        if await self._connected(running, placed, begun):
            self._last_failure.pop(spec.service, None)
            _log.info("replica ready", replica=name, job=placed.name, seconds=round(time.monotonic() - begun, 3))
            self.apply(ReplicaReady(name))

    async def _create(self, name: str, running: Running) -> None:
        spec = running.spec
        files = {one: self.secrets.read(one) for one in spec.secrets}
        own = {"OPENFAAS_SECRETS": _SECRETS, "HOME": "/tmp", "TMPDIR": "/tmp"}
        env = {**own, **self._environment(running, self._settings.cpu), **self._dialled.expect(name).env}
        size = sum(map(len, files.values())) + sum(len(key) + len(value.encode()) for key, value in env.items())
        if size > MOST_SECRET_BYTES:
            raise Refused(413, f"{size} bytes of secrets and environment; {MOST_SECRET_BYTES} are the most")
        job = job_of(name, spec, self._identity, self._settings, env)
        created = awaited(self._api.create(job, partial(secret_of, name, spec, self._identity, env, files)))
        self._creating.add(created)
        created.add_done_callback(self._creating.discard)
        await asyncio.shield(created)

    async def _connected(self, running: Running, placed: _Placed, begun: float) -> bool:
        """Wait until a replica says over its connection that it is ready; False if it ends or takes too long."""
        limit = self._settings.start_seconds
        http = await self._client_of(running, placed.name, lambda: placed.over, begun + limit)
        if http is None:
            if running.name in self._running and not placed.over:
                self._fail(running.name, _overdue(placed.verdict, limit, self.config.dial_host))
            return False
        # So that its first lines have about the time at which they were printed.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(placed.followed.wait(), _LOOK_SECONDS)
        if running.name not in self._running or placed.over:
            await http.aclose()
            return False
        running.http = http
        return True

    # the cluster's side

    async def _watch(self) -> None:
        """Look at the pods for ever."""
        cleared, told = False, ""
        while True:
            try:
                if not cleared:
                    await self._api.delete_earlier(self._identity)
                    cleared = True
                await self._look()
                told = ""
            except GeofedError as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("the state of the cluster could not be read", cause=told)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), self._pause)
            self._look_now.clear()
            await asyncio.sleep(_LEAST_PAUSE_SECONDS)

    @property
    def _pause(self) -> float:
        starting = any(one.http is None for one in self._running.values())
        return _LOOK_SECONDS if starting or self._left else _QUIET_SECONDS

    async def _look(self) -> None:
        for name in list(self._left):
            await self._delete(name)
        if not self._placed:
            return
        pods = await self._api.pods(self._identity.labels)
        for replica, placed in list(self._placed.items()):
            if placed.over or self._placed.get(replica) is not placed:
                continue
            # Where the cluster has made a second pod, it counts that the first one is gone.
            of_job = pods.get(placed.name, {})
            pod = of_job.get(placed.pod) if placed.pod else next(iter(of_job.values()), None)
            if pod is not None:
                placed.pod, placed.verdict = placed.pod or next(iter(of_job)), judge(pod)
                self._judged(replica, placed)
            elif placed.pod:
                placed.verdict = PodState("ended", "FUNCTION_EVICTED", "was deleted in the cluster", "evicted")
                self._judged(replica, placed)
            elif time.monotonic() - placed.created_at > _PODLESS_SECONDS:
                error = refusal(await self._api.events(placed.name))
                if error is not None:
                    self._fail(replica, error)

    def _judged(self, replica: str, placed: _Placed) -> None:
        running, verdict = self._running[replica], placed.verdict
        if verdict.state in ("running", "leaving", "ended"):
            placed.runs.set()
        text = f"replica {replica}: {verdict.text}"
        match verdict.state:
            case "leaving":
                # It answers the calls that it has; another takes its place.
                self.apply(OverLimit(replica))
            case "failing":
                self._fail(replica, GeofedError(verdict.code, text))
            case "ended":
                placed.over = True
                self._run_task(self._ended(running, placed, text), log_only)

    async def _ended(self, running: Running, placed: _Placed, text: str) -> None:
        """Read a pod's last lines, then give it up."""
        if placed.log is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({placed.log}, timeout=_LOG_SECONDS)
        running.kill_reason = running.kill_reason or placed.verdict.reason
        self._fail(running.name, GeofedError(placed.verdict.code, text))

    def _end(self, name: str) -> None:
        placed = self._placed.pop(name, None)
        if placed is None:
            return
        placed.over = True
        self._dialled.forget(placed.name)
        self._delete_later(placed.name)
        # Not in the middle of the actions that ended it.
        asyncio.get_running_loop().call_soon(self._exited, name, None)

    def _delete_later(self, name: str) -> None:
        self._dialled.forget(name)
        self._left.add(name)
        self._run_task(self._delete(name, warn=True), log_only)

    async def _delete(self, name: str, *, warn: bool = False) -> None:
        """Delete a replica's Job; one that cannot be deleted now is tried again with the next look."""
        try:
            await self._api.delete(name)
            self._left.discard(name)
        except GeofedError as error:
            if warn:
                _log.warning("a Job could not be deleted yet", job=name, cause=str(error))

    async def _follow(self, running: Running, placed: _Placed, redact: Redaction) -> None:
        """Copy what a replica prints into its function's log."""
        again = False
        while not placed.over:
            await placed.runs.wait()
            splitter = LineSplitter(lambda line: self.logs.append(running.spec.service, running.name, redact(line)))
            with contextlib.suppress(GeofedError):
                async with self._api.log(placed.pod, from_now=again) as parts:
                    placed.followed.set()
                    async for part in parts:
                        again = True
                        splitter.feed(part)
            splitter.end()
            await asyncio.sleep(_LOOK_SECONDS)


def _overdue(verdict: PodState, limit: float, host: str) -> GeofedError:
    """Return the error of a replica that is not ready after its time."""
    if verdict.state == "running":
        text = f"its container runs, and has not connected to {host} and been ready within {limit:g} s"
        hint = "see that pods reach `server.workerHost` and `gateway.port`, and that the image is of this version"
        return GeofedError("FUNCTION_FAILED", text, hint=hint)
    code = verdict.code or "FUNCTION_UNSCHEDULABLE"
    return GeofedError(code, f"it did not start within {limit:g} s: {verdict.text}")
