"""Connects the state machine with the world: executes its actions and feeds their results back as events.

Events are handled one at a time, on the event loop. Actions that use the disk or need many floating-point operations
run in one thread, in order, and their results return as events.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from geofed_pb.errors import GeofedError
from sync.codec import codec_named
from sync.layout import Layout, Vector
from sync.overlap import overlapped_steps
from sync.ps.controller import Controller
from sync.ps.core.actions import (
    Action,
    Apply,
    Failed,
    Forget,
    Keep,
    Log,
    Merge,
    Prepare,
    Refuse,
    Reply,
    Reproduce,
    Restart,
    Ship,
    StartGrace,
    StartPatience,
    StartPause,
    SumUp,
)
from sync.ps.core.answers import Answer
from sync.ps.core.background import FIRST, Background
from sync.ps.core.cadence import Cadence
from sync.ps.core.events import (
    Applied,
    CallGone,
    Configured,
    Event,
    GraceOver,
    Logged,
    PatienceOver,
    PauseOver,
    Prepared,
    Stored,
)
from sync.ps.core.machine import Machine, Setup
from sync.ps.core.membership import Pace, Punctuality, Spared
from sync.ps.core.synchronous import Synchronous
from sync.ps.execution.executor import ActionExecutor, FramedUpdate, lower_priority, merged_key
from sync.wan import ExchangeSettings, LinkSample

__all__ = ["Engine", "merged_key"]

_log = logging.getLogger("geofed.ps")
_LEAST_SECONDS = 0.25
"""Of patience: processes pause, and rounds may be shorter than that."""
_LEAST_SPARED_SECONDS = 0.1
"""Of what can be saved up for late regions."""
_LEAST_SECONDS_ALONE = 2.0
"""Where nobody is heard the others may wait for the same region, or be found by another way; and what a region makes
alone is worth the least."""


class Engine:
    """State machine and executor of one partition, together."""

    def __init__(self, executor: ActionExecutor, exchange: ExchangeSettings | None = None) -> None:
        self.executor, self.storage, self.channel = executor, executor.storage, executor.channel
        exchange = exchange or ExchangeSettings()
        self._grace_seconds = exchange.grace_seconds
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ps-disk", initializer=lower_priority)
        self.machine = _machine_of(executor, executor.setup)
        setup = executor.setup
        self.controller = Controller(exchange, executor.codec_name, setup.steps_per_round, setup.steps)
        self.links: Callable[[], Mapping[str, LinkSample]] = dict
        """Returns measurements of the links to the peers."""
        self._punctuality, self._spared, self._pace = Punctuality(), Spared(_LEAST_SPARED_SECONDS), Pace()
        self._cadence = Cadence()
        self._pausing: StartPause | None = None
        self._pause_timer: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._calls: dict[int, asyncio.Future[Answer | None]] = {}
        self._next_call = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self.version = 0
        """Number that increases with every change; see `changed_since`."""
        self.on_ship: Callable[[Ship], None] = lambda _: None
        self.on_reproduced: Callable[[FramedUpdate], None] = lambda _: None
        """Called with the initial model's update if our own workers have initialised the model."""
        self.wan_wait_seconds = 0.0
        """Total time that the partition has waited for other regions."""
        self._exchange_since: float | None = None
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
        """Pass an event to the state machine and execute the actions that it returns."""
        now = time.monotonic()
        # Round 0 says nothing about a region's pace.
        if isinstance(event, Stored | Prepared) and event.manifest.sequence >= FIRST:
            self._punctuality.came(event.manifest.region, now)
        if isinstance(event, Stored):
            self._cadence.came(event.manifest.region, event.manifest.sequence, now)
        if isinstance(event, Logged):
            beside = self.machine.step_seconds * overlapped_steps(self.executor.setup.steps_per_round)
            self.machine.round_seconds = self._cadence.next_round(now, beside)
        actions = self.machine.handle(event)
        self._cadence.held_up(now, self.machine.held_up)
        # A round begins, so late regions are no longer waited for; a merge that waited for them comes before that.
        if any(isinstance(action, Log | StartPause) for action in actions):
            self._spared.end(now)
            self._wait_no_more()
        for action in actions:
            self._carry_out(action)
        if isinstance(event, Stored) and self._pausing is not None and self._pausing.slower:
            # The region may have ended its round earlier than expected.
            self._pause(self._pausing)
        self._watch_exchange()
        self.notify()

    async def ask(self, make: Callable[[int], Event], timeout_seconds: float) -> Answer | None:
        """Feed a worker's call and return its answer, or None after the timeout; the worker then calls again."""
        call, self._next_call = self._next_call, self._next_call + 1
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

    def _watch_exchange(self) -> None:
        exchanging = self.machine.progress.phase == "exchanging"
        if exchanging and self._exchange_since is None:
            self._exchange_since = time.monotonic()
        elif not exchanging and self._exchange_since is not None:
            self.wan_wait_seconds += time.monotonic() - self._exchange_since
            self._exchange_since = None

    # Actions out

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reply():
                self._answer(action.call, lambda future: future.set_result(action.answer))
            case Refuse():
                error = GeofedError(action.code, action.text)
                self._answer(action.call, lambda future: future.set_exception(error))
            case Merge() | Log() | Prepare() | SumUp() | Apply() | Restart() | Keep() | Forget():
                self._start(self._in_thread(action))
            case Reproduce():
                self._start(self._reproduce(action))
            case StartGrace():
                over = GraceOver(action.sequence)
                asyncio.get_running_loop().call_later(self._grace(), self.feed, over)
            case StartPatience():
                self._hold_up(action)
            case StartPause():
                self._pause(action)
            case Ship():
                self.on_ship(action)
            case Failed():
                self.fail(GeofedError(action.code, action.text))

    def _grace(self) -> float:
        """Seconds of the window that begins now."""
        setup = self.executor.setup
        if setup.quorum:
            return self._grace_seconds
        return self._spared.moment_seconds(time.monotonic(), self._punctuality.gap_seconds(setup.region))

    def _pause(self, pause: StartPause) -> None:
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self._pausing, seconds = pause, self._pause_seconds(pause)
        self._pause_timer = asyncio.get_running_loop().call_later(seconds, self._pause_is_over, pause)

    def _pause_is_over(self, pause: StartPause) -> None:
        self._pausing = self._pause_timer = None
        self.feed(PauseOver(pause.sequence))

    def _pause_seconds(self, pause: StartPause) -> float:
        now = time.monotonic()
        if not pause.slower:
            return self._pace.pause_seconds(pause.sequence, now, self._usual_gap())
        update_bytes = self.machine.progress.update_bytes
        ways = {peer: _way_seconds(link, update_bytes) for peer, link in self.links().items()}
        farthest = max(ways.values(), default=0.0)  # what others pass on takes as long, or longer
        pauses = [0.0]
        for region, seconds in pause.slower:
            way = ways.get(region, farthest)
            patience = self._punctuality.patience_seconds((region,), now, _LEAST_SECONDS)
            pauses.append(min(self._cadence.pause_seconds(pause.sequence, region, seconds, way, now), patience))
        return max(pauses)

    def _usual_gap(self) -> float:
        """Seconds from round to round while all hear each other; nobody keeps up with more than one in a round trip.
        0: not known yet."""
        farthest = max((link.rtt_ms for link in self.links().values()), default=0.0)
        usual = self._punctuality.gap_seconds(self.executor.setup.region)
        return max(usual, farthest / 1e3) if usual else 0.0

    def _hold_up(self, late: StartPatience) -> None:
        """Wait for these regions from now on."""
        setup, now = self.executor.setup, time.monotonic()
        if late.alone:
            self._spared.end(now)
            self._wait_for(late, least_seconds=_LEAST_SECONDS_ALONE)
            return
        until = now + self._punctuality.hold_up_seconds(setup.region, late.regions, _LEAST_SECONDS)
        if not setup.quorum and math.isfinite(until):  # a lead says how far this region may be ahead
            regions = {*late.regions} - {*late.elsewhere}
            due = self._punctuality.due_at(regions, now, self.machine.usual_round_seconds)
            spared = self._spared.hold_up_seconds(now, self._punctuality.gap_seconds(setup.region), due)
            until = min(until, due + spared)
        self._wait_for(late, until=until)

    def _wait_for(self, late: StartPatience, *, least_seconds: float = 0.0, until: float = math.inf) -> None:
        """Until these are late. Patience begins anew with each update of theirs: they may have rounds to catch up."""
        self._wait_no_more()
        now, work = time.monotonic(), self.machine.step_seconds * self.executor.setup.steps_per_round
        patience = self._punctuality.patience_seconds(late.regions, now, _LEAST_SECONDS, work)
        seconds = min(max(patience, least_seconds), until - now)
        if seconds > 0:
            again = functools.partial(self._wait_for, late, until=until)
            self._patience = asyncio.get_running_loop().call_later(seconds, again)
        else:
            self._punctuality.went_on(now)
            self.feed(PatienceOver(late.sequence, late.regions))

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _answer(self, call: int, settle: Callable[[asyncio.Future[Answer | None]], None]) -> None:
        future = self._calls.get(call)
        if future is not None and not future.done():
            settle(future)

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]  # a coroutine of None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reproduce(self, action: Reproduce) -> None:
        try:
            loop = asyncio.get_running_loop()
            first = await loop.run_in_executor(self._disk, self.executor.reproduced, action)
        except Exception as error:  # noqa: BLE001 - this is only an optimisation: without it the model is received
            _log.warning("cannot read our own workers' initial model; it will be received instead: %s", error)
            return
        if first is not None:
            self.on_reproduced(first)

    async def _in_thread(self, action: Action) -> None:
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
        if event is not None:
            self.feed(event)
            if isinstance(event, Applied):
                self._steer(event.apply.sequence)

    def _steer(self, sequence: int) -> None:
        """Pass a round's measurements to the controller, and apply its choice from the next round on."""
        machine, layout = self.machine, self.storage.layout
        if not self.controller.active or not isinstance(machine, Background) or layout is None:
            return
        coding = self.executor.coding_bytes_per_second
        self.controller.round_over(sequence, machine.step_seconds, 4 * layout.size, self.links(), coding)
        machine.stretch = -(-self.controller.interval_steps // self.executor.setup.steps_per_round)
        self.executor.codec_wanted = codec_named(self.controller.codec)

    def fail(self, error: GeofedError) -> None:
        """Record an error that ends the server. Nothing durable is changed after it."""
        _log.error("%s", error)
        self.failed = self.failed or error
        self.broken.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self.notify()

    async def keep_layout(self, layout: Layout) -> None:
        """Store the layout of the model, unless one is stored already."""
        await asyncio.get_running_loop().run_in_executor(self._disk, self.storage.keep_layout, layout)

    async def model(self) -> Vector | None:
        """Return a copy of the current model, shape (n,), or None before the first merge."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, self.executor.copy_of_model)

    async def close(self) -> None:
        """Wait until all actions under way have ended, then stop the thread."""
        while pending := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(pending)
        self._disk.shutdown()


def _way_seconds(link: LinkSample, update_bytes: int) -> float:
    """An update's, from one end to the other, taking both directions for alike."""
    sending = 8e-6 * update_bytes / link.goodput_mbps if link.goodput_mbps else 0.0
    return link.rtt_ms / 2e3 + sending


def _machine_of(executor: ActionExecutor, setup: Setup) -> Machine:
    kind = Background if setup.background else Synchronous
    return kind(setup, executor.recover())
