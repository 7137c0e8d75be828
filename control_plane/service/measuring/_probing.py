"""Probes tasks that nobody has run: before the first plan an agent that holds the data counts the model, and times a
few steps. Else that plan would rest on a guess of the model's size."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import timedelta

import structlog

from control_plane.service.measuring._known import Learnt, task_keys
from control_plane.service.measuring._measurements import MeasurementFailed, Measurements
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec
from control_plane.store import WeightRow
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2

WAIT = timedelta(seconds=10)
"""How long an answer waits for a task to be probed; what comes later is for later plans."""
PROBE_SECONDS = 2.0
"""Of steps, once model and data are there."""
_LIMIT_SECONDS = 120.0
"""After it a probing is given up, by the agent as well."""
_LAST_WORD_SECONDS = 10.0
"""And so much later it has told what it took."""
_MOST_AT_ONCE = 8
"""Tasks; each takes a worker of a region for some seconds."""
_REST_SECONDS = 60.0
"""A task that could not be probed is not tried again for so long."""
_TASK = frozenset({"TASK_FAILED", "TASK_INVALID"})
"""What came of running the task's code; what it runs on, a package or a download, may be the reason all the same."""
_RAISED, _PLACE = re.compile(r"[\w' ]{1,60} raised (\w+)"), re.compile(r" at [^\s:]{1,200}:\d+$")
"""How a worker tells what the user's code has raised, and at its end in which line of it."""
_OWN_KINDS = frozenset(
    {
        "AttributeError", "IndentationError", "IndexError", "KeyError", "NameError", "NotImplementedError",
        "SyntaxError", "TabError", "TypeError", "UnboundLocalError", "ZeroDivisionError",
    }
)  # fmt: skip
"""Raised in a line of the task these are the code's own fault. An ImportError, an OSError or a RuntimeError, of which
torch makes all sorts of things, may be its surroundings'."""
_INCOMPLETE = re.compile(r"does not define|there is no task module|\breturned\b|must return")
"""In words of TASK_INVALID: nothing of the surroundings is in play."""
_MEMORY = re.compile(r"DefaultCPUAllocator|out of memory|can't allocate memory|OutOfMemoryError|MemoryError")
"""A plan may choose a function that has more."""
_MOST_BYTES, _MOST_BATCH, _MOST_STEPS = 2**46, 2**31, 16
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 1e6
"""Of what an agent tells: what lies beyond is a fault of its, and would stay in every later plan."""
_LONGEST_NOTE = 1000
_log = structlog.get_logger("geofed.probing")


@dataclass(frozen=True)
class _Unprobed:
    """Why a task was not probed."""

    error: GeofedError
    certain: bool = False
    """Any run would fail so: there is no use in planning one."""


class Probing:
    """Weighings under way, each task's once, whoever asks for it."""

    def __init__(self, federation: Federation, measurements: Measurements, wait: timedelta = WAIT) -> None:
        self._federation, self._measurements = federation, measurements
        self._wait = wait.total_seconds()
        self._going: dict[str, asyncio.Task[_Unprobed | None]] = {}
        self._rests: dict[str, tuple[float, GeofedError]] = {}
        """By task: until when, and why it could not be probed."""

    async def close(self) -> None:
        """Give up what continues."""
        going = list(self._going.values())
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)

    async def learnt(self, spec: JobSpec, code_digest: str, bundle_digest: str = "") -> Learnt:
        """What is known of a task. One that was never run is probed first, where its code is here: that may take as
        long as the answer may wait.

        Raises ``GeofedError``: TASK_FAILED, TASK_INVALID where its model surely cannot be made.
        """
        keys = task_keys(spec, code_digest)
        learnt = await self._stored(keys)
        if bundle_digest and not learnt.of_own_code(keys[0]) and not _settled(learnt.weight):
            why = await self._probed(keys[0], spec, bundle_digest)
            learnt = await self._stored(keys)
            if learnt.weight is None and why is not None:
                if why.certain:
                    hint = "correct the task module; it was tried before the plan, and no job was made"
                    raise GeofedError(why.error.code, why.error.message, hint=hint)
                return replace(learnt, note=f"the task was not probed: {why.error.message}")
        return replace(learnt, note=self._doubt(learnt, keys[0]))

    async def _stored(self, keys: tuple[str, str]) -> Learnt:
        return await self._federation.read(lambda store: Learnt(tuple(store.runs(*keys)), store.weight(keys[0])))

    def _doubt(self, learnt: Learnt, key: str) -> str:
        """Why no steps are known, or what else went wrong; empty where runs say more."""
        weight = learnt.weight
        if weight is None or learnt.of_own_code(key):
            return ""
        if weight.steps_json != "[]":
            return weight.note
        why = "that takes longer; later plans will know" if key in self._going else weight.note or "it broke off"
        return f"the agent of {weight.region} has not timed the task's steps: {why}"

    async def _probed(self, key: str, spec: JobSpec, bundle_digest: str) -> _Unprobed | None:
        """Wait for it, at most as long as an answer may; why it is not probed, or not wholly."""
        until, why = self._rests.get(key, (-math.inf, None))
        if why is not None and time.monotonic() < until:
            return _Unprobed(why)
        task = self._going.get(key)
        if task is None:
            if len(self._going) >= _MOST_AT_ONCE:
                return _Unprobed(GeofedError("UNAVAILABLE", f"{len(self._going)} other tasks are being probed"))
            task = self._going[key] = asyncio.create_task(self._probe(key, spec, bundle_digest))
            task.add_done_callback(lambda _: self._going.pop(key, None))
        await asyncio.wait({task}, timeout=self._wait)
        if not task.done():
            text = f"that takes longer than {self._wait:g} s; later plans will know"
            return _Unprobed(GeofedError("WAIT_TIMEOUT", text))
        if task.cancelled():
            return _Unprobed(GeofedError("UNAVAILABLE", "the control plane is stopping"))
        return task.result()

    async def _probe(self, key: str, spec: JobSpec, bundle_digest: str) -> _Unprobed | None:
        """In one region after another until one has; None: it is stored."""
        failed: dict[str, GeofedError] = {}
        tried = False
        try:
            ends = time.monotonic() + _LIMIT_SECONDS
            async with asyncio.timeout(_LIMIT_SECONDS + _LAST_WORD_SECONDS):
                alone = len(self._measurements.live_holders(spec)) == 1
                for region in self._regions(spec):
                    left = ends - time.monotonic()
                    if left <= 0:
                        raise TimeoutError
                    tried = True
                    try:
                        command = self._command(region, spec, bundle_digest, left)
                        row = await self._probe_in(command, key, spec.metadata.name, failed)
                    except GeofedError as error:
                        failed[region] = error
                        if (fault := _certain_fault(failed, alone)) is not None:
                            return _Unprobed(fault, certain=True)
                    else:
                        self._rest(key, None if _settled(row) else GeofedError("UNAVAILABLE", row.note))
                        return None
            none = GeofedError("INADMISSIBLE", "no region that holds its data has a worker free")
            why = _of_task(failed) or next(reversed(failed.values()), none)
        except TimeoutError:
            late = GeofedError("WAIT_TIMEOUT", f"it was not probed within {_LIMIT_SECONDS:g} s")
            why = _of_task(failed) or late
        except GeofedError as error:
            why = error
        except Exception as error:  # noqa: BLE001 - the task's edge: whoever waits must continue without it
            _log.exception("a task could not be probed", task=key)
            why = GeofedError("INTERNAL", f"{type(error).__name__}: {error}")
        if tried:
            # Where no region could be asked, the next one that comes can.
            self._rest(key, why)
        return _Unprobed(why)

    def _rest(self, key: str, why: GeofedError | None) -> None:
        """Have a task rest, where there is a reason; those of before that have rested are forgotten."""
        now = time.monotonic()
        self._rests = {other: rest for other, rest in self._rests.items() if rest[0] > now}
        if why is not None:
            self._rests[key] = now + _REST_SECONDS, why

    def _regions(self, spec: JobSpec) -> list[str]:
        """Those with a worker free: first who is asked least, then who has the most data, as the others wait for it."""
        free = []
        for region in self._measurements.live_holders(spec):
            try:
                self._measurements.require_free(region)
            except GeofedError:
                continue
            samples = self._measurements.train_samples(region, spec.data.dataset)
            free.append((self._measurements.going_on(region), -samples, region))
        return [region for _, _, region in sorted(free)]

    def _command(self, region: str, spec: JobSpec, bundle_digest: str, wait_seconds: float) -> agent_pb2.ProfileTask:
        given = spec.function.memory_mb
        memory = given if isinstance(given, int) else self._measurements.usual_memory_mb(region)
        return agent_pb2.ProfileTask(
            # Never again the same: an agent keeps its answers, and what has failed may go well the next time.
            id=f"probe-{secrets.token_hex(8)}",
            region=region,
            task=agent_pb2.TaskRef(
                bundle_digest=bundle_digest,
                module=spec.task.module,
                config_json=json.dumps(spec.task.config),
                dataset=spec.data.dataset,
            ),
            batch=spec.train.batch,
            evaluation_batch=spec.train.eval_batch or 0,
            seed=spec.train.seed,
            memories_mb=[memory],
            limit_seconds=PROBE_SECONDS,
            wait_seconds=wait_seconds,
        )

    async def _probe_in(
        self, command: agent_pb2.ProfileTask, key: str, name: str, failed: Mapping[str, GeofedError]
    ) -> WeightRow:
        """Have an agent probe it, and store what it tells as it comes. What breaks off after the size is known only
        leaves the steps unknown. ``failed``: what came of it elsewhere, which whoever reads the plan should know."""
        region, fault = command.region, _of_task(failed)
        elsewhere = f"where the task was probed before {region} it failed: {fault.message}" if fault else ""
        row: WeightRow | None = None
        try:
            async with aclosing(self._measurements.run(agent_pb2.ToAgent(probe=command))) as reports:
                async for report in reports:
                    if report.HasField("weight"):
                        row = _row(key, region, self._federation.clock(), report.weight)
                        row = replace(row, note=_joined(row.note, elsewhere))
                        await self._keep(row, name, report.weight)
            if row is None:
                raise GeofedError("FRAME_INVALID", f"region {region} has told no weight")
        except GeofedError as error:
            why = f"{error.code}: {error.message}"
            async with self._federation.change() as draft:
                if row is not None:
                    row = replace(row, note=_joined(why, elsewhere))
                    draft.weights.append(row)
                data = {"usd": _money(error.usd) if isinstance(error, MeasurementFailed) else 0.0}
                draft.record("task.probe-failed", f"probing {name} broke off: {why}", region=region, data=data)
            if row is None:
                raise
        return row

    async def _keep(self, row: WeightRow, name: str, told: agent_pb2.TaskWeight) -> None:
        async with self._federation.change() as draft:
            draft.weights.append(row)
            if told.last:
                text = f"{name} was probed in {row.region}: {row.parameters:,} parameters"
                data = {"parameters": row.parameters, "model_bytes": row.model_bytes, "usd": _money(told.usd)}
                draft.record("task.probed", text, region=row.region, data=data)


def _certain_fault(failed: Mapping[str, GeofedError], alone: bool) -> GeofedError | None:
    """What any run of a task would fail with, by what regions have told: two say the same, or the only one that may run
    it (``alone``) names what is surely the code's own. None: it may go well in another region, or later."""
    told = {region: error for region, error in failed.items() if error.code in _TASK}
    seen: set[str] = set()
    for region, error in told.items():
        text = error.message.removeprefix(f"{region}: ")
        if _MEMORY.search(text):
            continue
        fault = _fault(error.code, text)
        if fault in seen or (alone and _is_own(error.code, text)):
            return error
        seen.add(fault)
    return None


def _fault(code: str, text: str) -> str:
    """What two regions say alike: the words between may tell of an address or a folder, which are not."""
    raised, place = _RAISED.match(text), _PLACE.search(text[-_LONGEST_NOTE:])
    return f"{code}: {raised[0]}{place[0]}" if raised and place else f"{code}: {text}"


def _is_own(code: str, text: str) -> bool:
    """Whether a task's code alone is to blame."""
    if code == "TASK_INVALID":
        return _INCOMPLETE.search(text) is not None
    raised, place = _RAISED.match(text), _PLACE.search(text[-_LONGEST_NOTE:])
    return code == "TASK_FAILED" and raised is not None and place is not None and raised[1] in _OWN_KINDS


def _of_task(failed: Mapping[str, GeofedError]) -> GeofedError | None:
    """What the task's code was told to fail with, which says most; None: nothing of the kind."""
    return next((error for error in failed.values() if error.code in _TASK), None)


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)[:_LONGEST_NOTE]


def _settled(weight: WeightRow | None) -> bool:
    """Whether nothing more is to be found out: its steps were timed, or the task's own code cannot make them. What else
    has been in the way, a file that was not there, may be mended."""
    if weight is None or weight.steps_json != "[]":
        return weight is not None
    code, _, text = weight.note.partition(": ")
    return _is_own(code, text)


def _row(key: str, region: str, at: float, told: agent_pb2.TaskWeight) -> WeightRow:
    """What an agent has told, without what cannot be: the note says that something was left out.

    Raises ``GeofedError`` FRAME_INVALID where the size is such a thing.
    """
    if not (0 < told.model_bytes <= _MOST_BYTES and told.parameters <= _MOST_BYTES):
        raise GeofedError("FRAME_INVALID", f"what region {region} has probed makes no sense")
    steps = [(step.batch, step.seconds) for step in told.steps[:_MOST_STEPS] if _sound(step)]
    start = told.start_seconds if 0 <= told.start_seconds <= _MOST_SECONDS else 0.0
    left_out = len(steps) < len(told.steps) or start != told.start_seconds
    nonsense = f"FRAME_INVALID: some of what region {region} has probed makes no sense, and was left out"
    note = _joined(nonsense if left_out else "", told.note)
    return WeightRow(key, region, at, told.parameters, told.model_bytes, json.dumps(steps), start, note)


def _money(usd: float) -> float:
    """As told, if it is an amount."""
    return usd if 0 <= usd < math.inf else 0.0


def _sound(step: agent_pb2.TimedStep) -> bool:
    return 1 <= step.batch <= _MOST_BATCH and _LEAST_SECONDS <= step.seconds <= _MOST_SECONDS
