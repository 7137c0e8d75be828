"""What lets a new attempt continue where a broken one was, for one stage of a pipeline.

Two things lie in the channel. The **state** of a stage after some step: parameters, optimiser and sums, stored seldom,
since it is large. And a **log**: what came into the stage since, activations and gradients, which crosses the channel
anyway and is only deleted later. Whoever takes over loads the state and makes the steps since then anew, alone, from
the log (`sync.pipeline`'s replay). At a round's end the parameter server has the model, which begins both anew.

Why that is enough. A stage cannot end a step before the stages behind it have computed theirs back to it, nor begin one
before the stages ahead of it have ended the one before. So when any worker has ended step M, every worker has computed
step M - 1, and whatever that took is in the channel. An attempt that breaks off can therefore always continue after M -
1, and after M where the log of M is whole. A stage deletes what it had for the steps up to a stored state only when it
has ended a step more than that: nobody can be further behind.
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
from sync.pipeline import Logged, Pipeline, logged_keys

__all__ = ["StageCheckpoints", "state_key"]

_log = logging.getLogger("geofed.worker")
_SHARE = 0.05
"""Of a stage's time that storing its state may take, and of what the stage keeps a core busy."""
_REPLAY_SECONDS = 30.0
"""Compute that a log may hold: the other stages wait while it is made anew, and give up after 90 s."""
_LEAST_LOG_BYTES = 64 << 20
"""A log above this, and larger than the state, gives way to a new state: what lies in the channel stays bounded."""
_NOTHING = -1
"""Step of an agreement on none: the round begins anew."""
_SERVER = 0
"""Stands for an attempt: the state is the parameter server's, at the beginning of the round."""


@dataclass(frozen=True)
class _Era:
    """An attempt's part of the log."""

    attempt: int
    begins: int
    """First step that it made, or would have made."""
    degree: int
    micro_batch: int


@dataclass(frozen=True)
class _Agreement:
    """Where all stages of an attempt continue from."""

    step: int
    """The first one to be made together is the next; `_NOTHING`: from the parameter server's model, all of them."""
    bases: tuple[tuple[int, int], ...] = ()
    """By stage: attempt and step of the state that it loads; steps from there to `step` are made anew."""
    eras: tuple[_Era, ...] = field(default=())
    """The oldest first, the attempt itself last."""

    def facts(self) -> dict[str, float]:
        found: dict[str, float] = {"step": self.step}
        for stage, (attempt, step) in enumerate(self.bases):
            found |= {f"base/{stage}/attempt": attempt, f"base/{stage}/step": step}
        for number, era in enumerate(self.eras):
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
        eras = tuple(_Era(*row) for row in rows("era", "attempt", "begins", "degree", "micro_batch"))
        return cls(int(facts["step"]), bases, eras)

    def era(self, step: int) -> _Era:
        """Whose log holds a step: the youngest attempt that has begun by then."""
        return next(era for era in reversed(self.eras) if era.begins <= step)


class StageCheckpoints:
    """One replica's side. The first replica of a stage stores and deletes for all of them, which hold the same."""

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
        """``channel``: one whose waits end with the attempt. ``state_bytes``: of the stage's parameters, at least.
        ``busy``: seconds that the process has kept cores busy; ``own_busy``: the same, of the thread that asks."""
        self._call, self._shape, self._channel, self._clock = call, shape, channel, clock
        self._busy, self._own_busy = busy, own_busy
        self._stage, replica = shape.position(call.worker).stage, shape.position(call.worker).replica
        self._leads = replica == 0
        self._agreed = _Agreement(_NOTHING, (), (self._own_era(1),))
        self._replays: bool | None = None
        """Whether this invocation makes steps anew; None: not known before its first step."""
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._storing: Future[None] | None = None
        self._states: list[int] = []
        """Steps of this attempt after which the state is stored, and told of; two at most."""
        self._logged = 0
        """The first step of which this attempt's log may still be there; 0: none was made."""
        self._background = False
        self._asked: float | None = None
        """Since when a state was asked for that has not come."""
        self._state_bytes = state_bytes
        self._stored_at, self._store_seconds = clock(), 0.0
        self._busy_at, self._store_busy, self._asked_busy = busy(), 0.0, 0.0
        """The same of what keeps cores busy: a stage on a machine of its own mostly waits for others while it stores,
        but where functions share cores, storing takes its time from all of them."""
        self._log_bytes, self._log_seconds = 0, 0.0
        """What came into all replicas, and what they computed, since the last state."""

    def _own_era(self, begins: int) -> _Era:
        return _Era(self._call.attempt, begins, self._shape.degree, self._shape.micro_batch)

    # At the beginning of an attempt

    def begin_anew(self) -> None:
        """An attempt before which there was nothing; the first worker tells those that come after."""
        if self._call.worker == 0:
            self._channel.put(_agreement_key(self._call.attempt), framing.encode({}, self._agreed.facts()))

    def take_over(self, key: str, timeout_seconds: float) -> str:
        """Where this stage's state lies; "": the parameter server has it. ``key``: what the furthest worker of the
        attempt before has left."""
        agreed = _agreement_key(self._call.attempt)
        if self._call.worker == 0 and self._channel.get(agreed) is None:
            self._channel.put(agreed, framing.encode({}, self._agree(key).facts()))
        for _, value in self._channel.wait([agreed], timeout_seconds):
            self._agreed = _Agreement.of(framing.decode(value).facts)
        if self._agreed.step == _NOTHING:
            return ""
        attempt, step = self._agreed.bases[self._stage]
        return "" if attempt == _SERVER else state_key(attempt, self._stage, step)

    def _agree(self, key: str) -> _Agreement:
        _, attempt, _, furthest = key.split("/")
        before, told = int(attempt), self._channel.get(_agreement_key(int(attempt)))
        nothing = _Agreement(_NOTHING, (), (self._own_era(1),))
        if told is None:
            _log.warning("attempt %d has not told how it began; the round begins anew", before)
            return nothing
        origin = _Agreement.of(framing.decode(told).facts)
        last = max(int(furthest), origin.step)
        for step in range(last, last - 2, -1):
            if step <= 0 or (step < last and step % self._call.steps_per_round == 0):
                # Somebody is in the round after this step, so the parameter server has the model.
                return nothing
            bases = tuple(self._base(origin, before, stage, step) for stage in range(len(self._shape.stages)))
            if self._whole(origin, bases, step):
                return _Agreement(step, bases, (*origin.eras, self._own_era(step + 1)))
        _log.warning("no step of attempt %d is whole; the round begins anew", before)
        return nothing

    def _base(self, origin: _Agreement, before: int, stage: int, step: int) -> tuple[int, int]:
        """Attempt and step of the last state of a stage that is no later than a step, and of its round."""
        found = [(self._round_start(step), _SERVER)]
        if origin.step != _NOTHING:
            attempt, base = origin.bases[stage]
            found.append((base, attempt))
        told = self._channel.get(_states_key(before, stage))
        if told is not None:
            found += [(int(state), before) for state in framing.decode(told).facts.values()]
        # Who is well leaves the state when the attempt is over; it has ended this step, or is one behind.
        found += [
            (state, before) for state in (step, step - 1) if self._channel.has(state_key(before, stage, state))
        ]  # fmt: skip
        base, attempt = max(one for one in found if self._round_start(step) <= one[0] <= step)
        return (_SERVER, base) if base == self._round_start(step) else (attempt, base)

    def _whole(self, origin: _Agreement, bases: tuple[tuple[int, int], ...], step: int) -> bool:
        """Whether every stage that has to make this step anew finds what it takes."""
        return all(
            self._channel.has(key)
            for stage, (_, base) in enumerate(bases)
            if base < step
            for key in logged_keys(self._logged_in(origin.era(step)), stage, step)
        )

    def _round_start(self, step: int) -> int:
        return (step - 1) // self._call.steps_per_round * self._call.steps_per_round

    def _logged_in(self, era: _Era) -> Logged:
        shape = Pipeline(self._shape.stages, era.degree, era.micro_batch, self._shape.order)
        batch = self._call.region_batch
        samples = tuple(len(share_of(replica, era.degree, batch)) for replica in range(era.degree))
        return Logged(f"p/{era.attempt}", shape, samples)

    # At every step

    def replayed(self, step: int) -> Logged | None:
        """What a step is to be made anew from; None: it is a new one, and made with the others."""
        base = self._agreed.bases[self._stage][1] if self._agreed.step != _NOTHING else 0
        if self._replays is None:
            # Where the parameter server is in another round than was agreed on, all begin with what it has.
            self._replays = base + 1 == step <= self._agreed.step
        if not (self._replays and base < step <= self._agreed.step):
            return None
        return self._logged_in(self._agreed.era(step))

    def made(self, step: int, compute_seconds: float, taken_bytes: int) -> None:
        """After a step; ``taken_bytes``: what came into this replica for it. Deletes what nobody can need any more."""
        if not self._leads:
            return
        if step > self._agreed.step:
            self._logged = self._logged or step
        self._log_bytes += taken_bytes * self._shape.degree
        self._log_seconds += compute_seconds * self._shape.degree
        # With background exchange the parameter server's model is what a new attempt begins with.
        self._background |= self._asked is not None
        done = step if self._background else self._round_start(step)
        # Stored after an earlier step, and there by now.
        done = max([done, *self._states])
        gone = [state for state in self._states if state < done]
        self._states = [state for state in self._states if state >= done]
        first = self._logged or done + 1
        if gone or done >= first:
            self._logged = self._logged and max(first, done + 1)
            self._beside.submit(self._delete, gone, range(first, done + 1))

    def due(self) -> bool:
        """Whether the state should be stored now: where that has become cheap against the time since the last one, or
        the log long. The caller then gives it with `store`, unless the exchange continues in the background."""
        if not self._leads or self._background:
            return False
        now = self._clock()
        rare = now - self._stored_at >= max(self._call.store_seconds, self._store_seconds / _SHARE)
        rare = rare and self._busy() - self._busy_at >= self._store_busy / _SHARE
        large = self._log_bytes >= max(self._state_bytes, _LEAST_LOG_BYTES)
        if rare or large or self._log_seconds >= _REPLAY_SECONDS:
            self._asked, self._asked_busy = now, self._own_busy()
        return self._asked == now

    def store(self, step: int, pieces: list[memoryview]) -> None:
        """Put the state after a step into the channel, beside what follows; `settle` before it changes."""
        self.settle()
        begun, self._asked = self._asked or self._clock(), None
        busy, self._busy_at = self._own_busy() - self._asked_busy, self._busy()
        self._log_bytes, self._log_seconds = 0, 0.0
        self._state_bytes = sum(piece.nbytes for piece in pieces)
        self._stored_at = self._clock()
        self._storing = self._beside.submit(self._store, step, pieces, begun, busy)

    def settle(self) -> None:
        """Wait until what is being stored has been; raises what the channel raised."""
        if self._storing is not None:
            storing, self._storing = self._storing, None
            storing.result()

    def _store(self, step: int, pieces: list[memoryview], begun: float, busy: float) -> None:
        """``busy``: what making the pieces has kept a core busy."""
        before = self._own_busy()
        self._channel.put(state_key(self._call.attempt, self._stage, step), pieces)
        states = [*self._states[-1:], step]
        told = {str(number): float(state) for number, state in enumerate(states)}
        self._channel.put(_states_key(self._call.attempt, self._stage), framing.encode({}, told))
        self._states = states
        self._stored_at = self._clock()
        self._store_seconds = self._stored_at - begun
        self._store_busy = busy + self._own_busy() - before

    def _delete(self, states: list[int], steps: range) -> None:
        logged = self._logged_in(self._own_era(1))
        keys = [key for step in steps for key in logged_keys(logged, self._stage, step)]
        keys += [state_key(self._call.attempt, self._stage, state) for state in states]
        if keys:
            self._channel.delete_many(keys)

    # From one invocation to the next

    def facts(self) -> dict[str, float]:
        """What the next invocation of this worker must know."""
        found = {"logged": float(self._logged), "background": float(self._background)}
        return found | {f"stored/{number}": float(state) for number, state in enumerate(self._states)}

    def recall(self, facts: dict[str, float]) -> None:
        """Take that up."""
        self._logged, self._background = int(facts["logged"]), bool(facts["background"])
        self._states = [int(facts[name]) for name in ("stored/0", "stored/1") if name in facts]
        told = self._channel.get(_agreement_key(self._call.attempt))
        if told is not None:
            self._agreed = _Agreement.of(framing.decode(told).facts)
        self._replays = self._agreed.step != _NOTHING

    def forget(self, last: int) -> None:
        """Nothing of this stage is needed any more. ``last``: the last step that was made."""
        self.settle()
        if self._call.worker == 0:
            self._channel.delete(_agreement_key(self._call.attempt))
        if self._leads:
            self._beside.submit(self._delete, self._states, range(self._logged or last + 1, last + 1)).result()
            self._channel.delete(_states_key(self._call.attempt, self._stage))

    def close(self) -> None:
        """End what continues beside, when it is done."""
        self._beside.shutdown(wait=True)


def state_key(attempt: int, stage: int, step: int) -> str:
    """Of a stage's state after a step."""
    return f"w/{attempt}/s{stage}/{step}"


def _states_key(attempt: int, stage: int) -> str:
    """Of the steps after which there are states."""
    return f"w/{attempt}/at{stage}"


def _agreement_key(attempt: int) -> str:
    return f"p/{attempt}/resume"
