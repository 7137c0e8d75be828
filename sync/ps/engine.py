"""The thin shell around the machine: carries out its actions and feeds it what follows from them.

One event at a time, on the event loop; what needs a disk or many floating-point operations runs in one worker
thread, in the order in which the machine asked for it, and comes back as an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from geofed_pb.errors import GeofedError
from sync import framing
from sync.channel import Channel
from sync.codec import Codec, ErrorFeedback, Float32, codec_of
from sync.collective import weighted_mean
from sync.layout import Layout, Vector
from sync.ps.events import (
    Action,
    Answer,
    Applied,
    Apply,
    CallGone,
    Event,
    Failed,
    Forget,
    Keep,
    Kept,
    Manifest,
    Merge,
    Merged,
    Prepare,
    Prepared,
    Refuse,
    Reply,
    Ship,
)
from sync.ps.machine import Machine, Recovered, Setup
from sync.ps.storage import Storage
from sync.wan import Contribution, Outer, Policy

__all__ = ["Engine", "merged_key"]

_log = logging.getLogger("geofed.ps")
_ATTEMPT_KINDS = ("init", "g", "b", "w")
"""Channel folders whose next part is the attempt."""


def merged_key(attempt: int, step: int) -> str:
    """Channel key of a step's merged gradient."""
    return f"g/{attempt}/{step}/merged"


class Engine:
    """Machine, storage and channel of one partition, together."""

    def __init__(self, setup: Setup, storage: Storage, channel: Channel, policy: Policy, codec: Codec) -> None:
        self.storage, self.channel = storage, channel
        self._policy = policy
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ps-disk")
        recovered = storage.recover()
        prepared = max((manifest.sequence for manifest in recovered.outbox), default=recovered.sequence)
        # A region alone sends nothing, so it has nothing to gain from a lossy codec.
        codec = codec if len(setup.regions) > 1 else Float32()
        self._feedback = ErrorFeedback(codec, storage.residual(max(prepared, recovered.sequence)))
        self.machine = Machine(setup, self._publish_recovered(recovered))
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._next_call = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._cleared_attempts = 0
        self.version = 0
        self.on_ship: Callable[[Ship], None] = lambda _: None
        self.wan_wait_seconds = 0.0
        self._exchange_since: float | None = None
        self.failed: GeofedError | None = None
        self.broken = asyncio.Event()

    def _publish_recovered(self, recovered: Recovered) -> Recovered:
        """Put the durable model back into the channel, which may have been emptied."""
        if self.storage.model is None:
            return recovered
        model_key, state_key = self._publish(recovered.sequence, self.storage.model)
        return Recovered(**{**recovered.__dict__, "model_key": model_key, "state_key": state_key})

    def _publish(self, sequence: int, model: Vector) -> tuple[str, str]:
        model_key, state_key = f"model/{sequence}", ""
        self.channel.put(model_key, framing.encode({"model": model}))
        state = self.storage.state(sequence)
        if state is not None:
            state_key = f"state/{sequence}"
            self.channel.put(state_key, [state])
        return model_key, state_key

    # Events in

    def feed(self, event: Event) -> None:
        """Give the machine an event and carry out what it answers."""
        for action in self.machine.handle(event):
            self._carry_out(action)
        self._watch_exchange()
        self.notify()

    async def ask(self, make: Callable[[int], Event], patience_seconds: float) -> Answer | None:
        """Feed a worker's call; its answer, or None if there is none within the worker's patience."""
        call, self._next_call = self._next_call, self._next_call + 1
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self.feed(make(call))
            async with asyncio.timeout(patience_seconds):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._calls[call]
            if not future.done() or future.cancelled():
                self.feed(CallGone(call))

    async def changed_since(self, version: int) -> int:
        """Wait until something has happened after ``version``; returns the present version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version != version)
            return self.version

    def notify(self) -> None:
        """Wake those who watch: something has changed."""
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
            case Merge():
                self._start(self._in_thread(self._merge, action))
            case Prepare():
                self._start(self._in_thread(self._prepare, action))
            case Apply():
                self._start(self._in_thread(self._apply, action))
            case Keep():
                self._start(self._in_thread(self._keep, action))
            case Forget():
                self._start(self._in_thread(self._forget, action))
            case Ship():
                self.on_ship(action)
            case Failed():
                self.fail(GeofedError(action.code, action.text))

    def _answer(self, call: int, settle: Callable[[asyncio.Future[Answer]], None]) -> None:
        future = self._calls.get(call)
        if future is not None and not future.done():
            settle(future)

    def _start(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]  # a coroutine of None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, work: Callable[..., Event | None], action: Action) -> None:
        try:
            event = await asyncio.get_running_loop().run_in_executor(self._disk, work, action)
        except GeofedError as error:
            self.fail(error)
            return
        except Exception as error:  # noqa: BLE001 - the thread's edge: what it broke on must be told, not lost
            _log.exception("%s failed", type(action).__name__)
            self.fail(GeofedError("INTERNAL", f"{type(error).__name__}: {error}"))
            return
        if event is not None:
            self.feed(event)

    def fail(self, error: GeofedError) -> None:
        """Nothing durable is touched any more; the process tells why and ends."""
        _log.error("%s", error)
        self.failed = self.failed or error
        self.broken.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self.notify()

    def _merge(self, action: Merge) -> Merged:
        vectors = [self._vector(key, "gradient") for key, _ in action.parts]
        weights = [samples for _, samples in action.parts]
        merged = weighted_mean(vectors, weights)
        key = merged_key(action.attempt, action.step)
        self.channel.put(key, framing.encode({"gradient": merged}, {"samples": sum(weights)}))
        if action.step > 1:
            # All workers have pushed this step, so none of them still reads the one before.
            self.channel.delete_tree(f"g/{action.attempt}/{action.step - 1}")
        return Merged(action.attempt, action.step, key, sum(weights))

    def _vector(self, key: str, name: str) -> Vector:
        value = self.channel.get(key)
        if value is None:
            raise GeofedError("INTERNAL", f"{key} has gone from the channel")
        vector = framing.decode(value).tensors[name]
        return np.asarray(vector, np.float32)

    def _prepare(self, action: Prepare) -> Prepared:
        model = self._vector(action.model_key, "model")
        if not np.isfinite(model).all():
            text = f"the model is not finite after round {action.sequence}"
            raise GeofedError("TASK_FAILED", text, hint="training diverged: lower the learning rate")
        base = self.storage.model
        codec: Codec = Float32()
        if base is None:
            # The model that all begin with travels whole.
            tensors = codec.encode(model)
        else:
            codec = self._feedback.codec
            tensors, _ = self._feedback.encode(model - base)
            if self._feedback.residual is not None:
                self.storage.keep_residual(action.sequence, self._feedback.residual)
        facts = {"sequence": action.sequence, "weight": action.weight, "codec": codec.mark}
        pieces = framing.encode(tensors, facts)
        if action.state_key:
            state = self.channel.get(action.state_key)
            if state is not None:
                self.storage.keep_state(action.sequence, state)
        region = self.machine.setup.region
        total = sum(piece.nbytes for piece in pieces)
        digest = framing.digest_of(pieces)
        manifest = Manifest(region, action.epoch, action.sequence, digest, total, action.weight)
        self.storage.keep_update(manifest, pieces)
        return Prepared(manifest)

    def _apply(self, action: Apply) -> Applied:
        contributions = [self._contribution(manifest) for manifest in action.manifests]
        base = self.storage.model
        if base is None:
            outer = Outer(contributions[0].delta)
        else:
            outer = self._policy.merge(base, contributions, self.storage.memory)
        facts = {
            "sequence": action.sequence,
            "step": action.step,
            "samples": action.samples,
            "applied": action.applied,
        }
        digest = self.storage.keep_checkpoint(action.sequence, outer, facts)
        model_key, state_key = self._publish(action.sequence, outer.model)
        self._clear_channel(action.sequence)
        return Applied(action, digest, model_key, state_key)

    def _clear_channel(self, sequence: int) -> None:
        """Forget what no worker reads any more: older models, and all that fenced attempts have left."""
        for kind in ("model", "state"):
            self.channel.delete(f"{kind}/{sequence - 2}")
        attempt = self.machine.attempt
        for old in range(self._cleared_attempts + 1, attempt):
            for kind in _ATTEMPT_KINDS:
                self.channel.delete_tree(f"{kind}/{old}")
        self._cleared_attempts = max(self._cleared_attempts, attempt - 1)

    def _contribution(self, manifest: Manifest) -> Contribution:
        data = self.storage.update(manifest)
        frame = framing.decode(data)
        # The first model may arrive before the first worker has said what it looks like.
        size = self.storage.layout.size if self.storage.layout else frame.tensors["delta"].size
        delta = codec_of(int(frame.facts.get("codec", -1))).decode(frame.tensors, size)
        if not np.isfinite(delta).all():
            raise GeofedError("FRAME_INVALID", f"update {manifest.sequence} of {manifest.region} is not finite")
        return Contribution(manifest.region, manifest.weight, delta)

    def _keep(self, action: Keep) -> Kept:
        self.storage.keep_metrics(action)
        return Kept(action)

    def _forget(self, action: Forget) -> None:
        self.storage.forget(action.inbox_up_to, action.outbox_up_to)

    async def keep_layout(self, layout: Layout) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, self.storage.keep_layout, layout)

    async def close(self) -> None:
        """Let what was begun end, then stop the thread."""
        while pending := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(pending)
        self._disk.shutdown()


def open_engine(setup: Setup, state_dir: Path, channel: Channel, policy: Policy, codec: Codec) -> Engine:
    """Recover a partition from its folder, or begin it."""
    return Engine(setup, Storage(state_dir, setup), channel, policy, codec)
