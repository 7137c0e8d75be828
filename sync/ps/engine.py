"""Connects the state machine with the world: executes its actions and feeds their results back as events.

Events are handled one at a time, on the event loop. Actions that use the disk or need many floating-point operations
run in one thread, in order, and their results return as events.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from geofed_pb.errors import GeofedError
from geofed_pb.tasks import background
from geofed_pb.tracing import JobTrace
from sync.codec import codec_named
from sync.layout import Layout, Vector
from sync.ps.controller import Controller
from sync.ps.core.actions import (
    Action,
    CheckInitialModel,
    Failed,
    Forget,
    LogRoundEnd,
    MergeGradients,
    MergeUpdates,
    Refuse,
    Reply,
    Restart,
    SendUpdates,
    SetTimer,
    StoreMetrics,
    StoreOwnUpdate,
    SumUp,
)
from sync.ps.core.answers import Answer
from sync.ps.core.background import Background
from sync.ps.core.events import (
    CallGone,
    Configured,
    Event,
    Measured,
    TimerFired,
    UpdatesMerged,
)
from sync.ps.core.machine import Machine, Setup
from sync.ps.core.synchronous import Synchronous
from sync.ps.execution.executor import ActionExecutor, merged_key
from sync.ps.execution.own_updates import FramedUpdate
from sync.ps.execution.threads import lower_priority
from sync.ps.waiting_time import WaitTimes, waits_only
from sync.wan import ExchangeSettings, LinkSample

__all__ = ["Engine", "merged_key"]

_log = logging.getLogger("geofed.ps")
_PAUSED_SECONDS = 120.0
"""Without a call of a worker for this long, the partition counts as paused: a waiting worker calls every 15 s, and one
whose time slice has ended is invoked again."""


class Engine:
    """State machine and executor of one partition, together."""

    def __init__(self, executor: ActionExecutor, exchange: ExchangeSettings | None = None) -> None:
        self.executor, self.storage, self.channel = executor, executor.storage, executor.channel
        exchange = exchange or ExchangeSettings()
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ps-disk", initializer=lower_priority)
        self.machine = _machine_of(executor, executor.setup)
        setup = executor.setup
        self.controller = Controller(exchange, executor.codec_name, setup.steps_per_round, setup.steps)
        self.links: Callable[[], Mapping[str, LinkSample]] = dict
        """Returns measurements of the links to the peers."""
        self._timer: asyncio.TimerHandle | None = None
        self._calls: dict[int, asyncio.Future[Answer | None]] = {}
        self._next_call = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self.version = 0
        """Number that increases with every change; see `changed_since`."""
        self.on_ship: Callable[[SendUpdates], None] = lambda _: None
        self.on_reproduced: Callable[[FramedUpdate], None] = lambda _: None
        """Called with the initial model's update if our own workers have initialised the model."""
        self.standstill = WaitTimes()
        self.arriving: Callable[[], Iterable[tuple[str, int]]] = tuple
        """Returns the updates that are being received, by region and sequence."""
        self.times: dict[str, float] = {}
        """What the rounds have taken since the start, up to the last completed one: seconds by the fields of
        ``RoundTime``."""
        self._timed = 0
        self.trace = JobTrace()
        """What the rounds took, as spans."""
        self.patience_seconds = math.inf
        """How long the same update of another region may be awaited before the server fails."""
        self._called_at = time.monotonic()
        """When a worker has called last."""
        self._awaited: tuple[object, ...] = ()
        self._patience: asyncio.TimerHandle | None = None
        self.failed: GeofedError | None = None
        """Error that ended the server."""
        self.broken = asyncio.Event()
        """Set once `failed` is."""

    async def take_over(self, install: Callable[[], None]) -> None:
        """Continue from another region's state; ``install`` makes it durable here."""
        loop, before = asyncio.get_running_loop(), self.machine
        await loop.run_in_executor(self._disk, install)
        machine = await loop.run_in_executor(self._disk, _machine_of, self.executor, before.setup)
        self.machine, ledger = machine, before.ledger
        peers = tuple(ledger.peers.values())
        self.retry_calls()
        routes = ledger.neighbours, 0, ledger.routes, ledger.former
        self.feed(Configured(before.epoch, before.attempt, peers, *routes))

    def retry_calls(self) -> None:
        """Answer all waiting workers' calls with "pending", so that the workers call again."""
        for future in self._calls.values():
            if not future.done():
                future.set_result(None)

    # Events in

    def feed(self, event: Event) -> None:
        """Pass an event to the state machine and execute the actions that it returns. An error in them ends the server,
        since the machine may be in between two states."""
        try:
            for action in self.machine.handle(event, Measured(time.monotonic(), self.links())):
                self._carry_out(action)
            self.watch_times()
            self._watch_awaited()
        except Exception as error:  # noqa: BLE001 - whoever feeds, a timer or a caller, does not own the machine
            _log.exception("%s could not be handled", type(event).__name__)
            self.fail(GeofedError("INTERNAL", f"{type(error).__name__}: {error}"))
        self.notify()

    async def ask(self, make: Callable[[int], Event], timeout_seconds: float) -> Answer | None:
        """Feed a worker's call and return its answer, or None after the timeout; the worker then calls again."""
        call, self._next_call = self._next_call, self._next_call + 1
        self._called_at = time.monotonic()
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self.feed(make(call))
            async with asyncio.timeout(timeout_seconds):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._calls[call]
            if not future.done() or future.cancelled():
                self.feed(CallGone(call))

    async def changed_since(self, version: int) -> int:
        """Wait until something has changed since ``version``; return the current version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version != version)
            return self.version

    def notify(self) -> None:
        """Record a change, and wake all that wait for one."""
        self.version += 1
        self._start(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def watch_times(self) -> None:
        """Note what the workers stand still for, if they do, after a change."""
        machine, still = self.machine, self.standstill
        stands_still = machine.phase == "exchanging"
        still.seen(time.monotonic(), stands_still, waits=stands_still and waits_only(machine, self.arriving()))
        if machine.reached != self._timed:
            # All of one round, whenever it is read.
            self._timed = machine.reached
            self.times = {
                "compute": machine.compute_seconds,
                "merge": machine.merge_seconds,
                "exchange": still.exchange_seconds,
                "wait": still.wait_seconds,
                "evaluate": machine.evaluate_seconds,
            }

    def _watch_awaited(self) -> None:
        """Fail once the same update of another region has been awaited for too long."""
        machine = self.machine
        awaited = machine.awaited if self.failed is None else ()
        marks = (awaited, machine.sequence, *(machine.ledger.newest(region) for region in awaited))
        if marks == self._awaited:
            return
        self._awaited = marks
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if awaited and math.isfinite(self.patience_seconds):
            self._patience = asyncio.get_running_loop().call_later(self.patience_seconds, self._lost, awaited)

    def _lost(self, awaited: tuple[str, ...]) -> None:
        if time.monotonic() - self._called_at > _PAUSED_SECONDS:
            # The job is paused: nobody here waits, and the other region may be paused as well.
            self._awaited = ()
            self._watch_awaited()
            return
        text = f"nothing came from {', '.join(awaited)} for {self.patience_seconds:.0f} s"
        self.fail(GeofedError("REGION_LOST", f"{text}: {self.machine.progress.condition}"))

    # Actions out

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reply():
                self._answer(action.call, lambda future: future.set_result(action.answer))
            case Refuse():
                error = GeofedError(action.code, action.text)
                self._answer(action.call, lambda future: future.set_exception(error))
            case (
                MergeGradients()
                | LogRoundEnd()
                | StoreOwnUpdate()
                | SumUp()
                | MergeUpdates()
                | Restart()
                | StoreMetrics()
                | Forget()
            ):
                self._start(self._in_thread(action))
            case CheckInitialModel():
                self._start(self._reproduce(action))
            case SetTimer():
                self._set_timer(action)
            case SendUpdates():
                self.on_ship(action)
            case Failed():
                self.fail(GeofedError(action.code, action.text))

    def _set_timer(self, action: SetTimer) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = max(0.0, action.at - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(seconds, self.feed, TimerFired())

    def _answer(self, call: int, settle: Callable[[asyncio.Future[Answer | None]], None]) -> None:
        future = self._calls.get(call)
        if future is not None and not future.done():
            settle(future)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = background(work, self.fail)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reproduce(self, action: CheckInitialModel) -> None:
        try:
            loop = asyncio.get_running_loop()
            first = await loop.run_in_executor(self._disk, self.executor.reproduced, action)
        except Exception as error:  # noqa: BLE001 - this is only an optimisation: without it the model is received
            _log.warning("cannot read our own workers' initial model; it will be received instead: %s", error)
            return
        if first is not None:
            self.on_reproduced(first)

    async def _in_thread(self, action: Action) -> None:
        began = time.time()
        try:
            loop = asyncio.get_running_loop()
            event = await loop.run_in_executor(self._disk, self.executor.do, action, self.machine.attempt)
        except GeofedError as error:
            self.fail(error)
            return
        except Exception as error:  # noqa: BLE001 - outermost frame of the action: the error must be reported
            _log.exception("%s failed", type(action).__name__)
            self.fail(GeofedError("INTERNAL", f"{type(error).__name__}: {error}"))
            return
        self._trace_round(action, began)
        if event is not None:
            self.feed(event)
            if isinstance(event, UpdatesMerged):
                self._steer(event.apply.sequence)

    def _trace_round(self, action: Action, began: float) -> None:
        """Send the span of what was done for a round; 0 is the initial model. It is part of the partition: a round
        that no report has told of has no span."""
        if isinstance(action, StoreOwnUpdate | MergeUpdates):
            name = "merge" if isinstance(action, MergeUpdates) else "build update"
            self.trace.add(name, began, {"round": action.sequence})

    def _steer(self, sequence: int) -> None:
        """Pass a round's measurements to the controller, and apply its choice from the next round on."""
        machine, layout = self.machine, self.storage.layout
        if not self.controller.active or not isinstance(machine, Background) or layout is None:
            return
        coding = self.executor.coding_bytes_per_second
        self.controller.round_over(sequence, machine.hiding_seconds(), 4 * layout.size, self.links(), coding)
        machine.stretch = -(-self.controller.interval_steps // self.executor.setup.steps_per_round)
        self.executor.own_updates.codec_wanted = codec_named(self.controller.codec)

    def fail(self, error: GeofedError) -> None:
        """Record an error that ends the server. Nothing durable is changed after it."""
        _log.error("%s", error)
        self.failed = self.failed or error
        self.broken.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self.notify()

    async def agree(self, layout: Layout, base_key: str, *, begins: bool) -> tuple[str, str]:
        """Compare a worker's layout with the job's: see `ActionExecutor.agree`."""
        ask = partial(self.executor.agree, layout, base_key, begins=begins)
        return await asyncio.get_running_loop().run_in_executor(self._disk, ask)

    async def model(self, sequence: int = 0) -> Vector | None:
        """Return the current model or an evaluated round's, shape (n,): see `copy_of_model`."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, self.executor.copy_of_model, sequence)

    async def close(self) -> None:
        """Wait until all actions under way have ended, then stop the thread."""
        if self._timer is not None:
            self._timer.cancel()
        if self._patience is not None:
            self._patience.cancel()
        while pending := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(pending)
        self._disk.shutdown()


def _machine_of(executor: ActionExecutor, setup: Setup) -> Machine:
    kind = Background if setup.background else Synchronous
    return kind(setup, executor.recover())
