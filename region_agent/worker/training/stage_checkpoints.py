"""Checkpoints of one pipeline stage, from which a new attempt continues where the previous one was interrupted.

The channel holds two things. The **state** of a stage after some step: parameters, optimiser and sums, stored seldom,
since it is large. And a **log**: the stage's inputs since then, activations and gradients, which are sent through the
channel anyway and are only deleted later. A worker of a new attempt loads the state and repeats the steps since then on
its own, from the log (`sync.pipeline`'s replay). At the end of a round the parameter server has the model, and state
and log of the round are no longer needed.

Why that is sufficient: a stage cannot end a step before the later stages have sent their gradients back to it, nor
begin a step before the earlier stages have ended the previous one. So when any worker has ended step M, every worker
has computed step M - 1, and its inputs are in the channel. A new attempt can therefore always continue after M - 1, and
after M if the log of M is complete. A stage deletes its log up to a stored state only after it has ended one more step:
no worker can be further behind.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from region_agent.worker.data.shard import share_of
from region_agent.worker.invocation import Invocation
from sync import framing
from sync.channel import Channel
from sync.pipeline import Pipeline, ReplayLog, logged_keys

__all__ = ["StageCheckpoints", "state_key"]

_log = logging.getLogger("geofed.worker")
_MAX_SHARE = 0.05
"""Largest fraction of a stage's time, and of its CPU time, that storing its state may take."""
_REPLAY_SECONDS = 30.0
"""Compute time that a log may hold. The other stages wait during its replay, with a timeout of 90 s."""
_MIN_LOG_BYTES = 64 << 20
"""A log larger than this, and larger than the state, is replaced by a new state, so that the channel's use is
bounded."""
_NO_STEP = -1
"""Step of an agreement without a state: the round starts again from the parameter server's model."""
_SERVER = 0
"""Used in place of an attempt: the state is the parameter server's, at the beginning of the round."""


@dataclass(frozen=True)
class _LogSegment:
    """The part of the log that one attempt has written."""

    attempt: int
    begins: int
    """First step of that attempt, even if the attempt ended before it."""
    degree: int
    micro_batch: int


@dataclass(frozen=True)
class _Agreement:
    """Step after which all stages of an attempt continue, and the states and logs that they need for it."""

    step: int
    """The last step to restore; the stages make the next one together. `_NO_STEP`: all start from the parameter
    server's model."""
    bases: tuple[tuple[int, int], ...] = ()
    """For each stage: attempt and step of the state that it loads; it replays the steps from there to `step`."""
    segments: tuple[_LogSegment, ...] = field(default=())
    """Parts of the log: the oldest first, that of the attempt itself last."""

    def facts(self) -> dict[str, float]:
        found: dict[str, float] = {"step": self.step}
        for stage, (attempt, step) in enumerate(self.bases):
            found |= {f"base/{stage}/attempt": attempt, f"base/{stage}/step": step}
        for number, era in enumerate(self.segments):
            found |= {f"era/{number}/attempt": era.attempt, f"era/{number}/begins": era.begins}
            found |= {f"era/{number}/degree": era.degree, f"era/{number}/micro_batch": era.micro_batch}
        return found

    @classmethod
    def of(cls, facts: dict[str, float]) -> _Agreement:
        def rows(kind: str, *names: str) -> Iterator[list[int]]:
            for number in itertools.count():
                if f"{kind}/{number}/{names[0]}" not in facts:
                    return
                yield [int(facts[f"{kind}/{number}/{name}"]) for name in names]

        bases = tuple((attempt, step) for attempt, step in rows("base", "attempt", "step"))
        segments = tuple(_LogSegment(*row) for row in rows("era", "attempt", "begins", "degree", "micro_batch"))
        return cls(int(facts["step"]), bases, segments)

    def era(self, step: int) -> _LogSegment:
        """Return the part of the log that holds a step: that of the latest attempt that has begun by then."""
        return next(era for era in reversed(self.segments) if era.begins <= step)


class StageCheckpoints:
    """Checkpoints of one replica. The first replica of a stage stores and deletes for all, which hold the same."""

    def __init__(
        self,
        call: Invocation,
        shape: Pipeline,
        channel: Channel,
        state_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.process_time,
        own_busy: Callable[[], float] = time.thread_time,
    ) -> None:
        """``channel``: one whose waits end with the attempt. ``state_bytes``: size of the stage's parameters, at least.
        ``busy``: CPU time of the process in seconds; ``own_busy``: CPU time of the calling thread."""
        self._call, self._shape, self._channel, self._clock = call, shape, channel, clock
        self._busy, self._own_busy = busy, own_busy
        self._stage, replica = shape.position(call.worker).stage, shape.position(call.worker).replica
        self._leads = replica == 0
        self._agreed = _Agreement(_NO_STEP, (), (self._own_segment(1),))
        self._replays: bool | None = None
        """Whether this invocation replays steps; None: unknown before its first step."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._storing: Future[None] | None = None
        self._states: list[int] = []
        """Steps of this attempt whose state is stored and listed under `_states_key`; two at most."""
        self._logged = 0
        """First step whose log by this attempt may still be stored; 0: no step was made."""
        self._background = False
        """The exchange of rounds runs in the background, so that no state is needed."""
        self._asked: float | None = None
        """Time at which `due` has requested a state that was not stored yet."""
        self._state_bytes = state_bytes
        self._stored_at, self._store_seconds = clock(), 0.0
        self._busy_at, self._store_busy, self._asked_busy = busy(), 0.0, 0.0
        """The same in CPU time. On a machine of its own a stage mostly waits for others while it stores; where
        functions share cores, storing slows down all of them."""
        self._log_bytes, self._log_seconds = 0, 0.0
        """Bytes that all replicas received, and their compute time, since the last state."""

    def _own_segment(self, begins: int) -> _LogSegment:
        return _LogSegment(self._call.attempt, begins, self._shape.degree, self._shape.micro_batch)

    # At the beginning of an attempt

    def begin_first(self) -> None:
        """Begin an attempt without a previous one; the first worker stores that for later attempts."""
        if self._call.worker == 0:
            self._channel.put(_agreement_key(self._call.attempt), framing.encode({}, self._agreed.facts()))

    def inherit(self, key: str, timeout_seconds: float) -> str:
        """Return the key of the state that this stage continues from; "": the parameter server has it.

        ``key``: the state that the furthest worker of the previous attempt has stored.
        """
        agreed = _agreement_key(self._call.attempt)
        if self._call.worker == 0 and self._channel.get(agreed) is None:
            self._channel.put(agreed, framing.encode({}, self._agree(key).facts()))
        for _, value in self._channel.wait([agreed], timeout_seconds):
            self._agreed = _Agreement.of(framing.decode(value).facts)
        if self._agreed.step == _NO_STEP:
            return ""
        attempt, step = self._agreed.bases[self._stage]
        return "" if attempt == _SERVER else state_key(attempt, self._stage, step)

    def _agree(self, key: str) -> _Agreement:
        _, attempt, _, furthest = key.split("/")
        before, stored = int(attempt), self._channel.get(_agreement_key(int(attempt)))
        nothing = _Agreement(_NO_STEP, (), (self._own_segment(1),))
        if stored is None:
            _log.warning("attempt %d has not stored how it began; the round starts again", before)
            return nothing
        origin = _Agreement.of(framing.decode(stored).facts)
        last = max(int(furthest), origin.step)
        for step in range(last, last - 2, -1):
            if step <= 0 or (step < last and step % self._call.steps_per_round == 0):
                # A worker is in the round after this step, so the parameter server has the model.
                return nothing
            bases = tuple(self._base(origin, before, stage, step) for stage in range(len(self._shape.stages)))
            if self._log_complete(origin, bases, step):
                return _Agreement(step, bases, (*origin.segments, self._own_segment(step + 1)))
        _log.warning("the log of attempt %d is incomplete; the round starts again", before)
        return nothing

    def _base(self, origin: _Agreement, before: int, stage: int, step: int) -> tuple[int, int]:
        """Return attempt and step of a stage's last state that is not later than a step, and of the same round."""
        found = [(self._round_start(step), _SERVER)]
        if origin.step != _NO_STEP:
            attempt, base = origin.bases[stage]
            found.append((base, attempt))
        stored = self._channel.get(_states_key(before, stage))
        if stored is not None:
            found += [(int(state), before) for state in framing.decode(stored).facts.values()]
        # A healthy worker stores its state when the attempt is over; it has ended this step, or is one behind.
        found += [
            (state, before) for state in (step, step - 1) if self._channel.has(state_key(before, stage, state))
        ]  # fmt: skip
        base, attempt = max(one for one in found if self._round_start(step) <= one[0] <= step)
        return (_SERVER, base) if base == self._round_start(step) else (attempt, base)

    def _log_complete(self, origin: _Agreement, bases: tuple[tuple[int, int], ...], step: int) -> bool:
        """Whether the log is complete for every stage that has to replay this step."""
        return all(
            self._channel.has(key)
            for stage, (_, base) in enumerate(bases)
            if base < step
            for key in logged_keys(self._logged_in(origin.era(step)), stage, step)
        )

    def _round_start(self, step: int) -> int:
        return (step - 1) // self._call.steps_per_round * self._call.steps_per_round

    def _logged_in(self, era: _LogSegment) -> ReplayLog:
        shape = Pipeline(self._shape.stages, era.degree, era.micro_batch, self._shape.order)
        batch = self._call.region_batch
        samples = tuple(len(share_of(replica, era.degree, batch)) for replica in range(era.degree))
        return ReplayLog(f"p/{era.attempt}", shape, samples)

    # At every step

    def replayed(self, step: int) -> ReplayLog | None:
        """Return the log that a step is replayed from; None: it is a new step, made together with the other stages."""
        base = self._agreed.bases[self._stage][1] if self._agreed.step != _NO_STEP else 0
        if self._replays is None:
            # If the parameter server is in another round than the agreement, all start from its model.
            self._replays = base + 1 == step <= self._agreed.step
        if not (self._replays and base < step <= self._agreed.step):
            return None
        return self._logged_in(self._agreed.era(step))

    def made(self, step: int, compute_seconds: float, taken_bytes: int) -> None:
        """Count a step and delete states and logs that no worker can need any more.

        ``taken_bytes``: bytes that this replica received for the step.
        """
        if not self._leads:
            return
        if step > self._agreed.step:
            self._logged = self._logged or step
        self._log_bytes += taken_bytes * self._shape.degree
        self._log_seconds += compute_seconds * self._shape.degree
        # With background exchange a new attempt begins from the parameter server's model.
        self._background |= self._asked is not None
        done = step if self._background else self._round_start(step)
        # These states are completely stored by now.
        done = max([done, *self._states])
        gone = [state for state in self._states if state < done]
        self._states = [state for state in self._states if state >= done]
        first = self._logged or done + 1
        if gone or done >= first:
            self._logged = self._logged and max(first, done + 1)
            self._executor.submit(self._delete, gone, range(first, done + 1))

    def due(self) -> bool:
        """Whether the state should be stored now: storing is cheap compared with the time since the last state, or the
        log is long. The caller then calls `store`, unless the exchange runs in the background."""
        if not self._leads or self._background:
            return False
        now = self._clock()
        rare = now - self._stored_at >= max(self._call.store_seconds, self._store_seconds / _MAX_SHARE)
        rare = rare and self._busy() - self._busy_at >= self._store_busy / _MAX_SHARE
        large = self._log_bytes >= max(self._state_bytes, _MIN_LOG_BYTES)
        if rare or large or self._log_seconds >= _REPLAY_SECONDS:
            self._asked, self._asked_busy = now, self._own_busy()
        return self._asked == now

    def store(self, step: int, pieces: list[memoryview]) -> None:
        """Store the state after a step in the background. The caller must call `settle` before it changes the state."""
        self.settle()
        begun, self._asked = self._asked or self._clock(), None
        busy, self._busy_at = self._own_busy() - self._asked_busy, self._busy()
        self._log_bytes, self._log_seconds = 0, 0.0
        self._state_bytes = sum(piece.nbytes for piece in pieces)
        self._stored_at = self._clock()
        self._storing = self._executor.submit(self._store, step, pieces, begun, busy)

    def settle(self) -> None:
        """Wait until the state is stored; raises the channel's errors."""
        if self._storing is not None:
            storing, self._storing = self._storing, None
            storing.result()

    def _store(self, step: int, pieces: list[memoryview], begun: float, busy: float) -> None:
        """Store a state and list it. ``busy``: CPU time in seconds that serialising the pieces took."""
        before = self._own_busy()
        self._channel.put(state_key(self._call.attempt, self._stage, step), pieces)
        states = [*self._states[-1:], step]
        listed = {str(number): float(state) for number, state in enumerate(states)}
        self._channel.put(_states_key(self._call.attempt, self._stage), framing.encode({}, listed))
        self._states = states
        self._stored_at = self._clock()
        self._store_seconds = self._stored_at - begun
        self._store_busy = busy + self._own_busy() - before

    def _delete(self, states: list[int], steps: range) -> None:
        logged = self._logged_in(self._own_segment(1))
        keys = [key for step in steps for key in logged_keys(logged, self._stage, step)]
        keys += [state_key(self._call.attempt, self._stage, state) for state in states]
        if keys:
            self._channel.delete_many(keys)

    # From one invocation to the next

    def facts(self) -> dict[str, float]:
        """Return the numbers that the next invocation of this worker needs, once a state that is being stored is."""
        # Else nobody would know of that state, and delete it.
        self.settle()
        found = {"logged": float(self._logged), "background": float(self._background)}
        return found | {f"stored/{number}": float(state) for number, state in enumerate(self._states)}

    def restore_facts(self, facts: dict[str, float]) -> None:
        """Restore the result of `facts`."""
        self._logged, self._background = int(facts["logged"]), bool(facts["background"])
        self._states = [int(facts[name]) for name in ("stored/0", "stored/1") if name in facts]
        stored = self._channel.get(_agreement_key(self._call.attempt))
        if stored is not None:
            self._agreed = _Agreement.of(framing.decode(stored).facts)
        self._replays = self._agreed.step != _NO_STEP

    def delete_all(self, last: int) -> None:
        """Delete all states and logs of this stage. ``last``: the last step that was made."""
        self.settle()
        if self._call.worker == 0:
            self._channel.delete(_agreement_key(self._call.attempt))
        if self._leads:
            self._executor.submit(self._delete, self._states, range(self._logged or last + 1, last + 1)).result()
            self._channel.delete(_states_key(self._call.attempt, self._stage))

    def close(self) -> None:
        """Wait for the background thread and end it."""
        self._executor.shutdown(wait=True)


def state_key(attempt: int, stage: int, step: int) -> str:
    """Return the channel key of a stage's state after a step."""
    return f"w/{attempt}/s{stage}/{step}"


def _states_key(attempt: int, stage: int) -> str:
    """Return the channel key of the list of a stage's stored states."""
    return f"w/{attempt}/at{stage}"


def _agreement_key(attempt: int) -> str:
    return f"p/{attempt}/resume"
