"""Carries out the actions of the function table at a cloud's function service: each replica is one invocation.

A function of the table is a function of the cloud, made when its first replica starts and deleted when its last one has
ended and it is not wanted any more. Environment and secrets travel with the event that starts a replica. The service
tells nobody how an invocation ends, and none can be ended from outside: replicas tell it themselves, one that loses all
its connections has ended, and one whose connections the gateway does not accept any more ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import structlog

from geofed_pb.errors import GeofedError
from geofed_pb.platforms import PLATFORMS
from geofed_pb.tasks import awaited, end_process
from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.dialled import Listener
from region_agent.gateway.embedded.logs import LineSplitter
from region_agent.gateway.embedded.remote import RemoteProvider
from region_agent.gateway.embedded.replica_table import Expired, Refused, ReplicaNearTimeLimit, ReplicaReady
from region_agent.gateway.embedded.replicas.running import FunctionLimits, Running
from region_agent.gateway.embedded.serverless.api import (
    EVENT_SECONDS,
    GATEWAY_TAG,
    RUN_TAG,
    CloudFunctions,
    Hosted,
    NoFunction,
)
from region_agent.gateway.embedded.serverless.clouds import functions_of
from region_agent.gateway.functions import FunctionSpec, Isolation
from region_agent.gateway.quantities import parse_memory_bytes
from region_agent.gateway.serverless.order import Order

__all__ = ["ServerlessProvider", "memory_mb"]

_log = structlog.get_logger("gateway.serverless")
_DEFAULT_MEMORY = "1Gi"
"""Memory of a function that states none."""
_LOOK_SECONDS = 1.0
"""Interval at which replicas without a connection, and functions that nobody wants, are looked for."""
_LONGEST_PAUSE_SECONDS = 15.0
"""Longest pause before functions that could not be deleted are deleted again."""
_LOST_SECONDS = 3.0
"""Time without any connection after which a replica counts as ended."""
_POLL_SECONDS = 0.5
"""Interval at which a function that is being made is looked at."""
_MOST_TAG = 256
"""Most characters of a tag's value."""
_LEAVE_SECONDS = 8.0
"""Time before the platform's limit in which a replica begins no call."""
_LEAST_SERVING_SECONDS = 5.0
"""Least time in which a replica may begin calls, once it is ready."""
_LEAST_LEAD_SECONDS = 10.0
"""Least time before a replica's last call in which its successor is started."""
_EARLY_SHARE, _TURN = 0.25, (math.sqrt(5) - 1) / 2
"""Part of the time in which replicas begin calls over which their replacement is spread, and the step from one to the
next as a part of that: multiples of the golden ratio are spread evenly, however many there are."""
_STOP_SECONDS = 5.0
"""Time for the functions to be deleted when the gateway stops; the agent kills it some seconds later."""
_CLEAR_AGAIN_SECONDS = 300.0
"""Time after the start at which functions of an earlier gateway are looked for again: a request of one that was killed
may be carried out after this one has looked first."""
_MOST_REQUESTS = 16
"""Most requests to the cloud at the same time."""
_ENDS = {
    "time": ("FUNCTION_EVICTED", "evicted"),
    "crash": ("FUNCTION_FAILED", "crash"),
}
"""Codes and reasons of how replicas say that they have ended."""
_Key = tuple[str, str, int]
_T = TypeVar("_T")


@dataclass
class _Function:
    """A function at the cloud."""

    name: str
    key: _Key
    """Function of the table, image, and memory in MB."""
    created: asyncio.Task[None]
    """The request that makes it. It is not cut short: the cloud may carry it out all the same, later."""
    made: asyncio.Task[None]
    """Ends when it can be started."""
    replicas: set[str] = field(default_factory=set)


@dataclass
class _Placed:
    """A replica."""

    name: str
    """Name under which it connects."""
    function: _Function
    over: bool = False
    alone_since: float | None = None
    """When it had no connection first, after it had one; by the monotonic clock."""


class ServerlessProvider(RemoteProvider):
    """The functions of one gateway, as functions of a cloud, whose invocations connect to it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert config.serverless is not None
        self._settings = config.serverless
        self._platform = PLATFORMS[self._settings.kind]
        self.orchestration = self._settings.kind
        self._mark, self._run = config.owner, secrets.token_hex(3)
        self._cloud: CloudFunctions
        self._functions: dict[_Key, _Function] = {}
        self._given_up: list[_Function] = []
        """Functions of which no further replica starts; each is deleted when it has none."""
        self._left: set[str] = set()
        """Names of functions at the cloud that nobody wants."""
        self._placed: dict[str, _Placed] = {}
        self._number = 0
        # Threads of its own: requests that the cloud does not answer hold up nothing else.
        self._threads = ThreadPoolExecutor(_MOST_REQUESTS, thread_name_prefix="cloud")
        self._look_now = asyncio.Event()
        self._start_seconds = _LEAST_LEAD_SECONDS
        """Time that the last start of a replica has taken."""
        self._longest_start = 0.0
        """The longest start so far; 0: there was none."""
        self._turn = 0.0

    def _greeted(self, replica: str) -> None:
        self._look_now.set()

    async def start(self) -> None:
        """Listen for the replicas; functions of an earlier gateway are deleted."""
        self._cloud = await self._ask(functions_of, self._settings)
        self._clear_runtime()
        await self._dialled.start(self.config.dial_host, self._settings.port)
        self.isolation = Isolation("container", "", limits_processes=True)
        self._run_task(self._watch(), end_process)
        self._run_task(self._delete_unwanted(), end_process)

    async def stop(self) -> None:
        """End every replica and delete every function."""
        self._stopping = True
        self.logs.end()
        deleted = awaited(self._delete_all())
        await self._dialled.stop()
        await self._stop_tasks()
        await deleted
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _delete_all(self) -> None:
        """Delete all functions at the same time; one whose request has not been answered, as soon as it has been."""
        known = [*self._functions.values(), *self._given_up]
        for one in known:
            one.made.cancel()
        loop = asyncio.get_running_loop()
        # Other threads than those that may wait for answers.
        threads = ThreadPoolExecutor(_MOST_REQUESTS, thread_name_prefix="stop")

        async def delete(name: str, created: asyncio.Task[None] | None = None) -> None:
            if created is not None:
                await asyncio.wait([created])
            await loop.run_in_executor(threads, self._cloud.delete, name)

        deletions = [*map(delete, self._left), *(delete(one.name, one.created) for one in known)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.gather(*deletions, return_exceptions=True)
        threads.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Make a call to the cloud, which blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    def deploy(self, spec: FunctionSpec) -> None:
        """Create or change a function; raises ``Refused``, also for more than the platform has."""
        limits, life = FunctionLimits.of(spec, self.config), float(self._settings.life_seconds)
        if limits.call_timeout.total_seconds() + _LEAVE_SECONDS + _LEAST_SERVING_SECONDS > life:
            text = f"its calls take {limits.call_timeout.total_seconds():g} s, and its replicas live for {life:g} s"
            raise Refused(400, f"function {spec.service}: {text}")
        try:
            self._key(spec)
        except ValueError as error:
            raise Refused(400, f"function {spec.service}: {error}") from error
        super().deploy(spec)

    # replicas

    async def _start_replica(self, name: str, spec: FunctionSpec) -> None:
        if self._stopping:
            return
        running = Running.create(name, spec, self.config, None)
        self._running[name] = running
        begun = time.monotonic()
        self._number += 1
        placed = self._placed[name] = _Placed(f"geofed-{self._mark}-{self._run}-{self._number}", self._function(spec))
        placed.function.replicas.add(name)
        try:
            await asyncio.shield(placed.function.made)
        except GeofedError as error:
            # Another one is made for the next replica.
            self._give_up(placed.function)
            self._fail(name, error)
            return
        invoked = await self._invoked(name, running, placed)
        if invoked is None:
            return
        limit = self._settings.start_seconds

        def dropped() -> bool:
            return self._is_dropped(placed, invoked)

        http = await self._client_of(running, placed.name, lambda: placed.over or dropped(), begun + limit)
        if http is None:
            if self._placed.get(name) is placed and not placed.over:
                self._fail(name, self._unrun() if dropped() else self._overdue(limit))
            return
        left = self._dialled.left(placed.name)
        if left is None:
            left = self._settings.life_seconds - (time.monotonic() - invoked)
        serving = left - running.limits.call_timeout.total_seconds() - _LEAVE_SECONDS
        if serving < _LEAST_SERVING_SECONDS:
            # Its successor would have no more time: the job must change.
            await http.aclose()
            self._fail(name, self._too_late(running, left))
            return
        running.http = http
        self._last_failure.pop(spec.service, None)
        self._start_seconds = time.monotonic() - invoked
        self._longest_start = max(self._longest_start, self._start_seconds)
        _log.info(
            "replica ready", replica=name, function=placed.function.name, seconds=round(time.monotonic() - begun, 3)
        )
        self.apply(ReplicaReady(name))
        self._replace_in_time(running, serving)

    async def _invoked(self, name: str, running: Running, placed: _Placed) -> float | None:
        """Invoke a replica's function; return when, in seconds of the monotonic clock, or None if that has failed."""
        try:
            event = self._event(placed, running)
            invoked = time.monotonic()
            if self._placed.get(name) is placed:
                await self._ask(self._cloud.start, placed.function.name, event)
        except Refused as refused:
            self._fail(name, GeofedError("LIMIT_EXCEEDED" if refused.status == 413 else "SECRET_MISSING", refused.text))
            return None
        except GeofedError as error:
            # But for a function that is not there, the next replica is an invocation of the same one: it has others.
            if isinstance(error, NoFunction):
                self._give_up(placed.function)
            self._fail(name, error)
            return None
        return invoked

    def _replace_in_time(self, running: Running, serving: float) -> None:
        """Start another replica, and end this one, before a call in it could exceed the platform's limit.

        ``serving``: seconds in which it may begin calls.
        """
        lead = min(max(_LEAST_LEAD_SECONDS, 2 * self._start_seconds), serving / 2)
        # Replicas that started together are not replaced together.
        self._turn = (self._turn + _TURN) % 1
        early = self._turn * _EARLY_SHARE * (serving - lead)
        self._after(serving - lead - early, self.apply, ReplicaNearTimeLimit(running.name))
        self._after(serving, self.apply, Expired(running.name))

    def _too_late(self, running: Running, left: float) -> GeofedError:
        call, title = running.limits.call_timeout.total_seconds(), self._platform.title
        text = f"its calls take {call:g} s, but {title} ends it {left:.0f} s after it was ready"
        hint = "lower function.slice of the job, or raise `gateway.lifeSeconds`"
        return GeofedError("LIMIT_EXCEEDED", f"replica {running.name}: {text}", hint=hint)

    def _event(self, placed: _Placed, running: Running) -> bytes:
        spec, redact = running.spec, self._redaction(running.spec)

        def line(text: str) -> None:
            self.logs.append(spec.service, running.name, redact(text))

        splitter = LineSplitter(line)
        dial = self._dialled.expect(placed.name, Listener(splitter.feed, partial(self._said, running, placed)))
        running.exited.add_done_callback(lambda _: splitter.end())
        order = Order(
            address=dial.address, replica=dial.replica, token=dial.token, certificate=dial.certificate,
            env=self._environment(running, "1"),
            secrets={one: base64.b64encode(self.secrets.read(one)) for one in spec.secrets},
            life_seconds=self._settings.life_seconds, memory_mb=placed.function.key[2],
        )  # fmt: skip
        event, most = order.model_dump_json().encode(), self._platform.event_bytes
        if most is not None and len(event) > most:
            raise Refused(413, f"{len(event)} bytes of environment and secrets; {self._platform.title} takes {most}")
        return event

    def _said(self, running: Running, placed: _Placed, reason: str, text: str) -> None:
        """Take a replica's word that it has ended."""
        code, kind = _ENDS.get(reason, _ENDS["crash"])
        self._ended(running, placed, code, kind, " ".join(text.split())[:500] or "it has ended")

    def _ended(self, running: Running, placed: _Placed, code: str, reason: str, text: str) -> None:
        if not placed.over:
            placed.over = True
            running.kill_reason = running.kill_reason or reason
            self._fail(running.name, GeofedError(code, f"replica {running.name}: {text}"))

    def _is_dropped(self, placed: _Placed, invoked: float) -> bool:
        """Whether the service has dropped a replica's event, by how long starts have taken."""
        waited, longest = time.monotonic() - invoked, self._longest_start
        if not longest or self._dialled.left(placed.name) is not None:
            return False
        return waited > EVENT_SECONDS + longest + _LEAST_LEAD_SECONDS

    def _unrun(self) -> GeofedError:
        text = f"{self._platform.title} has not run an event for {EVENT_SECONDS} s; another one is sent"
        hint = "have the account's concurrency raised, raise `gateway.reservedConcurrency`, or lower `capacity`"
        return GeofedError("GATEWAY_UNAVAILABLE", text, hint=hint)

    def _overdue(self, limit: float) -> GeofedError:
        host = self.config.dial_host
        text = f"no invocation has connected to {host} and been ready within {limit:g} s"
        hint = (
            "see that functions reach `server.workerHost` and `gateway.port`, that the image is of this version, and "
            f"that {self._platform.title} has room for another invocation; its own log of the function may say more"
        )
        return GeofedError("FUNCTION_UNSCHEDULABLE", text, hint=hint)

    def _end(self, name: str) -> None:
        placed = self._placed.pop(name, None)
        if placed is None:
            return
        placed.over = True
        placed.function.replicas.discard(name)
        self._dialled.forget(placed.name)
        self._look_now.set()
        # Not in the middle of the actions that ended it.
        asyncio.get_running_loop().call_soon(self._exited, name, None)

    # functions at the cloud

    def _function(self, spec: FunctionSpec) -> _Function:
        """Return the function at the cloud that runs a specification, and have it made if there is none."""
        key = self._key(spec)
        found = self._functions.get(key)
        if found is None:
            self._number += 1
            name = f"geofed-{self._mark}-{self._run}-f{self._number}"
            own = {one: value[:_MOST_TAG] for one, value in spec.labels.items() if one.startswith("geofed.") and value}
            tags = {**own, GATEWAY_TAG: self._mark, RUN_TAG: self._run}
            created = awaited(self._ask(self._create, Hosted(name, spec.image, key[2], tags)))
            made = awaited(self._make(name, created))
            for task in (created, made):
                # Replicas ask for their errors, if there are replicas.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
            found = self._functions[key] = _Function(name, key, created, made)
        return found

    def _create(self, function: Hosted) -> None:
        # It may have waited for a thread until the gateway stops.
        if self._stopping:
            raise GeofedError("GATEWAY_UNAVAILABLE", "the gateway stops")
        self._cloud.create(function)

    def _key(self, spec: FunctionSpec) -> _Key:
        return spec.service, spec.image, memory_mb(spec, self._platform.memory_mb, self._platform.memory_step_mb)

    async def _make(self, name: str, created: asyncio.Task[None]) -> None:
        begun, limit = time.monotonic(), self._settings.start_seconds
        await asyncio.shield(created)
        while not await self._ask(self._cloud.is_ready, name):
            if time.monotonic() - begun > limit:
                text = f"{self._platform.title} has not made the function within {limit:g} s"
                raise GeofedError("FUNCTION_UNSCHEDULABLE", text)
            await asyncio.sleep(_POLL_SECONDS)
        _log.info("function made", function=name, seconds=round(time.monotonic() - begun, 3))

    def _give_up(self, function: _Function) -> None:
        if self._functions.get(function.key) is function:
            del self._functions[function.key]
            self._given_up.append(function)

    async def _watch(self) -> None:
        """Look for ever for replicas that have no connection any more, and for functions that nobody wants."""
        while True:
            self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), _LOOK_SECONDS)
            self._look_now.clear()
            await asyncio.sleep(0.1)

    async def _delete_unwanted(self) -> None:
        """Delete for ever the functions that nobody wants."""
        begun, told, pause = time.monotonic(), "", _LOOK_SECONDS
        clear_at = [begun, begun + _CLEAR_AGAIN_SECONDS]
        while True:
            failed = ""
            if clear_at and time.monotonic() >= clear_at[0]:
                try:
                    await self._clear_earlier()
                    del clear_at[0]
                except GeofedError as error:
                    failed = str(error)
            for name in sorted(self._left):
                try:
                    await self._ask(self._cloud.delete, name)
                    self._left.discard(name)
                except GeofedError as error:
                    failed = str(error)
            if failed and failed != told:
                _log.warning("functions could not be deleted yet", cause=failed)
            told = failed
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS) if failed else _LOOK_SECONDS

    def _look(self) -> None:
        now = time.monotonic()
        for name, placed in list(self._placed.items()):
            running = self._running.get(name)
            if running is None or running.http is None or self._dialled.connected(placed.name):
                placed.alone_since = None
            elif placed.alone_since is None:
                placed.alone_since = now
            elif now - placed.alone_since > _LOST_SECONDS:
                text = "its invocation has ended without a word, as when the platform ends it or its memory is used up"
                self._ended(running, placed, "FUNCTION_EVICTED", "evicted", text)
        wanted = {self._key(self.table.spec(name)) for name in self.table.names()}
        for function in list(self._functions.values()):
            if not function.replicas and function.key not in wanted and function.made.done():
                self._give_up(function)
        # A function that is deleted loses the events that wait for an invocation.
        self._left |= {one.name for one in self._given_up if not one.replicas}
        self._given_up = [one for one in self._given_up if one.replicas]

    async def _clear_earlier(self) -> None:
        """Delete what earlier runs of this gateway have left."""
        for name in await self._ask(self._cloud.names, self._mark):
            if not name.startswith(f"geofed-{self._mark}-{self._run}-"):
                self._left.add(name)


def memory_mb(spec: FunctionSpec, limits: tuple[int, int] | None, step: int = 1) -> int:
    """Return the memory of a function in MB, within a platform's limits and a multiple of its step.

    Raises ``ValueError`` for more.
    """
    asked = math.ceil(parse_memory_bytes(spec.limits.get("memory", _DEFAULT_MEMORY)) / 2**20)
    least, most = limits or (1, asked)
    if asked > most:
        raise ValueError(f"it has {asked} MB of memory; {most} MB are the most")
    return max(least, -(-asked // step) * step)
