"""Wherever an attempt breaks off, and whoever is lost: the next one finds all that it takes to continue, at most a step
behind the furthest worker that was well."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.memory_channel import MemoryChannel

from region_agent.worker.invocation import Invocation
from region_agent.worker.training.stage_checkpoints import StageCheckpoints, state_key
from sync import framing
from sync.channel import Channel
from sync.pipeline import Pipeline, ReplayLog, logged_keys, operations
from sync.pipeline._replay import value_key

BATCH, PER_ROUND, ROUNDS = 8, 5, 3


def _call(worker: int, attempt: int, stages: int, degree: int, store_seconds: float) -> Invocation:
    return Invocation(
        job="j", region="east", worker=worker, workers=stages * degree, attempt=attempt, token="", ps_address="",
        ps_name="", ca_pem="", channel="file", channel_address="", bundle_key="", module="", config={}, splits={},
        region_batch=BATCH, steps_per_round=PER_ROUND, rounds=ROUNDS, seed=0, slice_seconds=1,
        store_seconds=store_seconds,
    )  # fmt: skip


@dataclass
class World:
    """The channel and the parameter server, which outlive attempts."""

    draw: random.Random
    stages: int
    order: str
    channel: MemoryChannel = field(default_factory=MemoryChannel)
    now: float = 0.0
    round: int = 0
    """That the server has."""
    at_end: set[int] = field(default_factory=set)
    """Workers that have handed over the open round's model."""


class Worker:
    """Does what a stage's replica does, with names instead of tensors."""

    def __init__(self, world: World, attempt: int, number: int, degree: int, store_seconds: float) -> None:
        self.world, self.attempt, self.number, self.degree = world, attempt, number, degree
        self.stage, self.replica = divmod(number, degree)
        self.shape = Pipeline(tuple((at, at) for at in range(world.stages)), degree, 2, world.order)
        call = _call(number, attempt, world.stages, degree, store_seconds)
        channel: Channel = world.channel  # type: ignore[assignment]
        self.checkpoints = StageCheckpoints(call, self.shape, channel, 100, lambda: world.now)
        self.step = self.round = 0
        self.began = -1

    def attach(self, resume_key: str) -> None:
        """As the worker's loop does it."""
        world = self.world
        if not resume_key:
            self.checkpoints.begin_first()
        key = self.checkpoints.inherit(resume_key, 1.0) if resume_key else ""
        self.step, self.round = world.round * PER_ROUND, world.round
        left = world.channel.get(key) if key else None
        if left is not None:
            facts = framing.decode(left).facts
            assert f"/s{self.stage}/" in key
            if facts["round"] == world.round:
                self.step = int(facts["step"])

    def run(self, merged: dict[tuple[int, int], set[int]]) -> Iterator[Callable[[], bool]]:
        """Yields what it waits for."""
        world, channel = self.world, self.world.channel
        while True:
            if self.step == (self.round + 1) * PER_ROUND:
                yield lambda: True
                world.at_end.add(self.number)
                if len(world.at_end) == world.stages * self.degree:
                    world.round, world.at_end = world.round + 1, set()
                yield lambda: world.round > self.round
                self.round = world.round
                if self.round == ROUNDS:
                    return
            step = self.step + 1
            logged = self.checkpoints.replayed(step)
            if logged is not None:
                yield lambda: True
                self._replay(logged, step)
            else:
                self.began = step if self.began < 0 else self.began
                yield from self._pass(step)
                done = merged.setdefault((self.stage, step), set())
                done.add(self.replica)
                yield lambda done=done: len(done) == self.degree  # type: ignore[misc]
            self.checkpoints.settle()
            self.step = step
            self.checkpoints.made(step, 0.1, 10)
            world.now += world.draw.choice([0.0, 1.0, 4.0])
            if self.checkpoints.due():
                self.checkpoints.store(step, self._state())
            # What continues beside is over before anybody else does anything, or the test would not repeat itself.
            self.checkpoints._executor.submit(lambda: None).result()
            assert len([key for key in channel.values if key.startswith(f"w/{self.attempt}/s{self.stage}/")]) <= 3

    def _state(self) -> list[memoryview]:
        return framing.encode({}, {"step": self.step, "round": self.round})

    def _replay(self, logged: ReplayLog, step: int) -> None:
        keys = logged_keys(logged, self.stage, step)
        assert keys or self.world.stages == 1
        assert all(key in self.world.channel.values for key in keys), (self.stage, step)

    def _pass(self, step: int) -> Iterator[Callable[[], bool]]:
        channel, count = self.world.channel, len(self.shape.sizes(BATCH // self.degree))
        for operation in operations(self.shape.order, self.stage, self.world.stages, count):
            forward = operation.kind == "forward"
            onto = self.stage + (1 if forward else -1)
            if 0 <= self.stage - (1 if forward else -1) < self.world.stages:
                key = self._key(step, forward, self.stage, operation.micro_batch)
                yield lambda key=key: key in channel.values  # type: ignore[misc]
            else:
                yield lambda: True
            if 0 <= onto < self.world.stages:
                channel.put(self._key(step, forward, onto, operation.micro_batch), [b"value"])

    def _key(self, step: int, forward: bool, into: int, number: int) -> str:
        return value_key(f"p/{self.attempt}", step, "a" if forward else "g", into, self.replica, number)

    def leave(self) -> str:
        key = state_key(self.attempt, self.stage, self.step)
        self.checkpoints.settle()
        if not self.world.channel.has(key):
            self.world.channel.put(key, self._state())
        return key


def _attempt(world: World, attempt: int, degree: int, resume_key: str, ends: int | None, store_seconds: float) -> str:
    """Run an attempt; break it off after so many turns. Returns what the furthest that was well has left."""
    draw = world.draw
    world.at_end = set()
    workers = [Worker(world, attempt, number, degree, store_seconds) for number in range(world.stages * degree)]
    for worker in workers:
        worker.attach(resume_key)
    merged: dict[tuple[int, int], set[int]] = {}
    running = {worker.number: worker.run(merged) for worker in workers}
    waits = {number: next(one) for number, one in running.items()}
    turns = 0
    while running and (ends is None or turns < ends):
        ready = [number for number in running if waits[number]()]
        assert ready, "everybody waits for somebody"
        number = draw.choice(ready)
        try:
            waits[number] = next(running[number])
        except StopIteration:
            del running[number]
        turns += 1
    assert len({worker.began for worker in workers if worker.began > 0}) <= 1
    if ends is None or not running:
        for worker in workers:
            worker.checkpoints.delete_all(worker.step)
            worker.checkpoints.close()
        return ""
    lost = set(draw.sample(range(len(workers)), draw.randint(0, len(workers) - 1)))
    left = [(worker.step, worker.leave()) for worker in workers if worker.number not in lost]
    for worker in workers:
        worker.checkpoints.close()
    return max(left)[1]


@settings(max_examples=budget(200), deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.sampled_from(["gpipe", "1f1b"]),
    st.lists(st.tuples(st.integers(1, 400), st.sampled_from([1, 2])), max_size=4),
    st.sampled_from([0.0, 3.0, 1e9]),
)
def test_an_attempt_goes_on_where_the_one_before_broke_off(
    seed: int, stages: int, order: str, breaks: list[tuple[int, int]], store_seconds: float
) -> None:
    world, key, agreed, number = World(random.Random(seed), stages, order), "", 0, 0
    for number, (turns, degree) in enumerate(breaks, 1):
        key = _attempt(world, number, degree, key, turns, store_seconds)
        if world.round == ROUNDS:
            break
        # A stage that was still making steps again may be the only one that is left: what was agreed on before holds.
        reached = int(key.rsplit("/", 1)[1])
        begins = _probe(world, number + 1, key, store_seconds)
        assert begins >= max(agreed, reached - 1, world.round * PER_ROUND)
        agreed = begins
    if world.round < ROUNDS:
        number, key = number + 1, _attempt(world, number + 1, 2, key, None, store_seconds)
    assert world.round == ROUNDS
    if not key:
        # Of the last attempt nothing is left; those of attempts that are over go with their trees, at a round's end.
        assert not [name for name in world.channel.values if name.startswith((f"p/{number}/", f"w/{number}/"))]


def _probe(world: World, attempt: int, key: str, store_seconds: float) -> int:
    """After which step the next attempt would begin; it is told to nobody."""
    values = dict(world.channel.values)
    channel: Channel = MemoryChannel(values)  # type: ignore[assignment]
    call = _call(0, attempt, world.stages, 1, store_seconds)
    shape = Pipeline(tuple((at, at) for at in range(world.stages)), 1, 2, world.order)
    checkpoints = StageCheckpoints(call, shape, channel, 100)
    checkpoints.inherit(key, 1.0)
    checkpoints.close()
    return max(checkpoints._agreed.step, world.round * PER_ROUND)


def test_the_next_invocation_knows_of_a_state_that_is_just_being_stored() -> None:
    """Else it would stay in the channel after the job."""
    channel, stored = MemoryChannel(), threading.Event()
    put = channel.put

    def slowly(key: str, pieces: object) -> None:
        assert key != state_key(1, 0, 1) or stored.wait(10)
        put(key, pieces)  # type: ignore[arg-type]

    channel.put = slowly  # type: ignore[method-assign]
    checkpoints = StageCheckpoints(_call(0, 1, 1, 1, 5.0), Pipeline(((0, 0),), 1, 2, "1f1b"), channel, 100)  # type: ignore[arg-type]
    checkpoints.store(1, framing.encode({}, {"step": 1, "round": 0}))
    threading.Timer(0.2, stored.set).start()
    assert checkpoints.facts()["stored/0"] == 1.0
    checkpoints.delete_all(1)
    assert not channel.values
    checkpoints.close()


def test_what_storing_keeps_a_core_busy_counts_apart_from_how_long_it_takes() -> None:
    """Where functions share cores, little of the time passes for a stage itself."""
    clock = {"now": 0.0, "process": 0.0, "thread": 0.0}
    call = _call(0, 1, 1, 1, 5.0)
    channel = MemoryChannel()
    told = [lambda name=name: clock[name] for name in clock]
    checkpoints = StageCheckpoints(call, Pipeline(((0, 0),), 1, 2, "1f1b"), channel, 100, *told)  # type: ignore[arg-type]
    put = channel.put

    def slowly(key: str, pieces: object) -> None:
        clock["thread"] += 0.15 if key == state_key(1, 0, 1) else 0.0
        put(key, pieces)  # type: ignore[arg-type]

    channel.put = slowly  # type: ignore[method-assign]
    clock["now"] += 5.0
    assert checkpoints.due()
    clock["thread"] += 0.05  # what making the frame takes
    checkpoints.store(1, framing.encode({}, {"step": 1, "round": 0}))
    checkpoints.settle()
    clock["now"] += 1000.0
    clock["process"] += 3.9
    assert not checkpoints.due()
    clock["process"] += 0.2
    assert checkpoints.due()
    checkpoints.close()
