"""Probe new tasks: before the first plan of a task, an agent that holds its data counts the model and times a few
steps.

Without a probe, the plan would be based on a default for the model's size.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import structlog

from control_plane.service.measuring._measurements import MeasurementFailed, Measurements
from control_plane.service.measuring._task_history import TaskHistory, counts_labels, task_keys
from control_plane.service.rpc._wire import task_of
from control_plane.service.state._federation import Federation
from control_plane.spec import JobSpec
from control_plane.store import WeightRow
from geofed_pb.bounds import MOST_BATCH_NORMS, MOST_LABELS, NAME_BYTES, clean
from geofed_pb.errors import GeofedError
from geofed_pb.features import COMPILE, GPUS, IMAGE, PROBED_LABELS, SHARDING
from geofed_pb.tasks import awaited, background, log_only
from geofed_pb.v1 import agent_pb2, common_pb2

WAIT = timedelta(seconds=10)
"""How long a plan waits for a task's probe, and as long again for the model's size, without which it knows nothing of
exchanges; a later result is used by later plans."""
PROBE_SECONDS = 2.0
"""Time for steps, once model and data are loaded."""
_LIMIT_SECONDS = 120.0
"""Timeout of a probe over all regions; the agent gets it, too."""
_SMALLER, _SMALLEST_PROBED = 4, 4
"""Divisor of a batch that has lacked memory, and the smallest one that is probed, where the plan chooses the batch."""
_LAST_REPORT_SECONDS = 10.0
"""Time after that timeout for the agent's last report, with the cost."""
_MOST_COUNTED = 20
"""Regions whose labels are counted with a probe, those with the most data: the others weigh little."""
_COUNT_SECONDS = _LIMIT_SECONDS + _LAST_REPORT_SECONDS
"""Time after which a region that counts labels is given up."""
_LABELS_SECONDS = 3.0
"""How long a plan waits after a probe for regions that still count labels, which takes about as long as the probe; what
comes later is used by later plans."""
_MAX_PROBES = 8
"""Number of tasks probed at the same time; each occupies a worker of a region for some seconds."""
_MAX_COUNTS = _MAX_PROBES * _MOST_COUNTED
"""Regions that count labels at the same time, of all tasks together."""
_REST_SECONDS = 60.0
"""Time after which a task that could not be probed may be tried again."""
_TASK_CODES = frozenset({"TASK_FAILED", "TASK_INVALID"})
"""Error codes of running the task's code. The cause may still be its environment, such as a missing package."""
_RAISED, _PLACE = re.compile(r"([\w' ]{1,60}) raised (\w+)"), re.compile(r" at [^\s:]{1,200}:\d+(?= \(|,|$)")
"""In a worker's message on an exception of the user's code: the call and the type, and file and line."""
_CODE_ERRORS = frozenset(
    {
        "AttributeError", "IndentationError", "IndexError", "KeyError", "NameError", "NotImplementedError",
        "SyntaxError", "TabError", "TypeError", "UnboundLocalError", "ZeroDivisionError",
    }
)  # fmt: skip
"""Exceptions that are certainly faults of the code if a line of the task raises them. An ImportError, an OSError or a
RuntimeError, which PyTorch uses for many causes, may be due to the environment."""
_EVERYWHERE = frozenset({"IndentationError", "NameError", "SyntaxError", "TabError", "UnboundLocalError"})
"""Those of them that depend on neither the data nor the installed packages, and so occur in every region."""
_STEP_ERRORS = frozenset({"AssertionError", "RuntimeError", "ValueError"})
"""Exceptions of a step that are faults of the code, too, such as shapes that do not fit each other."""
_STEPPING = re.compile(r"(loss|the loss|the backward pass|the model's \S+|the optimiser's step) raised ")
"""Beginning of a worker's message on a step that failed."""
_NO_LINE = ("the backward pass", "the optimiser's step")
"""Calls that raise outside of the task's own lines."""
_SURROUNDINGS = re.compile(r"CUDA|cuDNN|CUBLAS|NCCL|memory|connect|download|No space", re.IGNORECASE)
"""Messages of `_STEP_ERRORS` that may be due to the environment."""
_GPU_MEMORY = "GPU_MEMORY"
"""Code of a step that does not fit into the GPU's memory, which may fit into that of another region."""
_LACKS_SECONDS = 86_400.0
"""Time for which plans keep out a region whose GPU was too small: it may get another one."""
_INCOMPLETE = re.compile(r"does not define|there is no task module|\breturned\b|must return|shard")
"""Messages of TASK_INVALID that do not depend on the environment."""
_OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator|out of memory|can't allocate memory|OutOfMemoryError|MemoryError")
"""Messages on lack of memory, which are no fault of the code: a plan may choose more memory."""
_MAX_BYTES, _MAX_BATCH, _MAX_STEPS = 2**46, 2**31, 16
_MIN_SECONDS, _MAX_SECONDS = 1e-6, 1e6
"""Limits of plausible results. Values beyond are errors of the agent, and would distort every later plan."""
_ELSEWHERE = "the probe in another region failed: "
"""Beginning of what a note says of another region."""
_MAX_NOTE_CHARACTERS = 1000
"""Limit of a stored note."""
_Lack = tuple[int, str, float]
"""Smallest batch that has not fitted into a region's GPU, what was told of it, and when (Unix seconds)."""
_Asked = tuple[str, str]
"""A task's key, and the user who asks for its plan."""
_log = structlog.get_logger("geofed.probing")


@dataclass(frozen=True)
class _Unprobed:
    """Why a task was not probed."""

    error: GeofedError
    certain: bool = False
    """Whether any run of the task would fail the same way, so that planning it is useless."""


@dataclass(frozen=True)
class _Labels:
    """Labels that a region has counted."""

    samples: int = 0
    """Of its training split."""
    counts: tuple[tuple[int, int], ...] = ()
    """Label and number; empty: it has no labels, or they may not leave it."""


class Probing:
    """Running probes, at most one for each task and user: a region may refuse the code of one user only."""

    def __init__(self, federation: Federation, measurements: Measurements, wait: timedelta = WAIT) -> None:
        self._federation, self._measurements = federation, measurements
        self._wait = wait.total_seconds()
        self._running: dict[_Asked, asyncio.Task[_Unprobed | None]] = {}
        self._sized: dict[_Asked, asyncio.Event] = {}
        """Of each running probe: whether the model's size has arrived."""
        self._rests: dict[_Asked, tuple[float, GeofedError]] = {}
        """When a task may be probed again, and why it could not be probed."""
        self._counts: dict[tuple[_Asked, str], asyncio.Task[_Labels]] = {}
        """Regions that count labels of a task. They outlive its probe."""
        self._keeping: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel all running probes."""
        going = [*self._running.values(), *self._counts.values(), *self._keeping]
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)

    async def history(
        self,
        spec: JobSpec,
        code_digest: str,
        bundle_digest: str = "",
        submission: common_pb2.Submission | None = None,
    ) -> TaskHistory:
        """Return all measurements of a task. A new task is probed first, if its code is uploaded; wait for that at most
        the time set at construction.

        Raises ``GeofedError``: TASK_FAILED or TASK_INVALID if the task certainly cannot create its model, or make a
        step.
        """
        keys = task_keys(spec, code_digest)
        history = await self._stored(keys)
        if bundle_digest and not history.of_own_code(keys[0]) and not _is_complete(history.weight):
            why = await self._probed(keys[0], spec, bundle_digest, submission or common_pb2.Submission())
            history = await self._stored(keys)
            if why is not None and why.certain:
                given = why.error.hint if why.error.hint != why.error.entry.hint else "correct the task module"
                hint = f"{given}; it failed in a probe before the plan, and no job was created"
                raise GeofedError(why.error.code, why.error.message, hint=hint)
            if history.weight is None and why is not None:
                return replace(history, note=f"the task was not probed: {why.error.message}")
        return replace(history, note=self._note(history, keys[0]))

    async def _stored(self, keys: tuple[str, str]) -> TaskHistory:
        history = await self._federation.read(
            lambda store: TaskHistory(tuple(store.runs(*keys)), store.weight(keys[0]))
        )
        weight = history.weight
        if weight is None:
            return history
        recent = json.dumps(_recent_lacks(weight, self._federation.clock()))
        return replace(history, weight=replace(weight, gpu_lacks_json=recent))

    def _note(self, history: TaskHistory, key: str) -> str:
        """Return why no steps are timed, or what else went wrong; empty if there are runs of the task."""
        weight = history.weight
        if weight is None or history.of_own_code(key):
            return ""
        if weight.steps_json != "[]":
            return weight.note
        running = any(task == key for task, _ in self._running)
        why = "the probe is still running" if running else weight.note or "the probe was interrupted"
        return f"the agent of {weight.region} has not timed the task's steps: {why}"

    async def _probed(
        self, key: str, spec: JobSpec, bundle_digest: str, submission: common_pb2.Submission
    ) -> _Unprobed | None:
        """Probe a task, or join its running probe; return why it is not or not completely probed, else None."""
        asked = key, submission.user
        until, why = self._rests.get(asked, (-math.inf, None))
        if why is not None and time.monotonic() < until:
            return _Unprobed(why)
        task = self._running.get(asked)
        if task is None:
            if len(self._running) >= _MAX_PROBES:
                return _Unprobed(GeofedError("UNAVAILABLE", f"{len(self._running)} other tasks are being probed"))
            self._sized[asked] = asyncio.Event()
            task = self._running[asked] = awaited(self._probe_and_count(key, spec, bundle_digest, submission))
            task.add_done_callback(lambda _: (self._running.pop(asked, None), self._sized.pop(asked, None)))
        sized = self._sized[asked]
        await asyncio.wait({task}, timeout=self._wait)
        if not task.done():
            waiting = awaited(sized.wait())
            await asyncio.wait({task, waiting}, timeout=self._wait, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        if not task.done():
            waited = self._wait if sized.is_set() else 2 * self._wait
            text = f"the probe takes longer than {waited:g} s; later plans will use its result"
            return _Unprobed(GeofedError("WAIT_TIMEOUT", text))
        if task.cancelled():
            return _Unprobed(GeofedError("UNAVAILABLE", "the control plane is stopping"))
        return task.result()

    async def _probe_and_count(
        self, key: str, spec: JobSpec, bundle_digest: str, submission: common_pb2.Submission
    ) -> _Unprobed | None:
        """Probe a task while other regions count labels, and wait for these a little; return as `_probe`."""
        counts: dict[str, asyncio.Task[_Labels]] = {}
        why = await self._probe(key, spec, bundle_digest, submission, counts)
        if counts:
            # Only now, since each report of the probe replaces what is stored.
            keeping = background(self._keep_labels(key, counts), log_only)
            self._keeping.add(keeping)
            keeping.add_done_callback(self._keeping.discard)
            if why is None:
                await asyncio.wait({keeping}, timeout=_LABELS_SECONDS)
        return why

    async def _probe(
        self, key: str, spec: JobSpec, bundle_digest: str, submission: common_pb2.Submission,
        counts: dict[str, asyncio.Task[_Labels]],
    ) -> _Unprobed | None:  # fmt: skip
        """Try one region after another until one has probed the task; return why none has, else None. ``counts``: gets
        the regions that count labels meanwhile."""
        asked, failed = (key, submission.user), dict[str, GeofedError]()
        tried, row = False, None
        try:
            ends = time.monotonic() + _LIMIT_SECONDS
            async with asyncio.timeout(_LIMIT_SECONDS + _LAST_REPORT_SECONDS):
                alone = len(self._measurements.live_holders(spec)) == 1
                regions = self._regions(spec)
                counts |= self._counting(asked, regions, spec, bundle_digest, submission)
                for region in regions:
                    if time.monotonic() >= ends:
                        raise TimeoutError
                    tried = True
                    try:
                        row = await self._probe_at(region, key, spec, bundle_digest, submission, ends, failed)
                    except GeofedError as error:
                        failed[region] = error
                    else:
                        if (error_of_step := _step_error(row)) is None:
                            self._rest(asked, None if _is_complete(row) else GeofedError("UNAVAILABLE", row.note))
                            return None
                        failed[region] = error_of_step
                    if (fault := _certain_fault(failed, alone, spec.function.gpus not in (1, "auto"))) is not None:
                        return _Unprobed(fault, certain=True)
            none = GeofedError("INADMISSIBLE", "no region that holds its data has a free worker")
            why = _of_task(failed) or next(reversed(failed.values()), none)
        except TimeoutError:
            late = GeofedError("WAIT_TIMEOUT", f"the probe timed out after {_LIMIT_SECONDS:g} s")
            why = _of_task(failed) or late
        except GeofedError as error:
            why = error
        except Exception as error:  # noqa: BLE001 - plans that wait for the probe must continue without it
            _log.exception("a task could not be probed", task=key)
            why = GeofedError("INTERNAL", f"{type(error).__name__}: {error}")
        if tried:
            # If no region could be asked, the next request may try immediately.
            self._rest(asked, why)
        return _Unprobed(why)

    async def _probe_at(
        self, region: str, key: str, spec: JobSpec, bundle_digest: str, submission: common_pb2.Submission, ends: float,
        failed: Mapping[str, GeofedError],
    ) -> WeightRow:  # fmt: skip
        """Probe a task in a region, once more where the first probe has lacked memory; where the plan chooses the
        batch, with smaller ones, too, until one fits. ``ends``: monotonic seconds."""
        weight = await self._federation.read(lambda store: store.weight(key))
        memory = self._measurements.memory_mb(region, spec, weight)
        command = self._command(region, spec, bundle_digest, ends - time.monotonic(), submission, memory)
        row = await self._probe_in(command, key, spec.metadata.name, failed)
        enough = self._measurements.memory_mb(region, spec, row)
        if enough > memory and _lacked_memory(row) and (left := ends - time.monotonic()) > 0:
            # What it needs is known only now. Plans give it that, too.
            command = self._command(region, spec, bundle_digest, left, submission, enough)
            row = await self._probe_in(command, key, spec.metadata.name, failed)
        batch, memory = spec.train.probed_batch, max(memory, enough)
        while spec.train.batch == "auto" and batch > _SMALLEST_PROBED and _fits_not(row):
            if (left := ends - time.monotonic()) <= 0:
                break
            batch //= _SMALLER
            command = self._command(region, spec, bundle_digest, left, submission, memory)
            command.batch = batch
            row = await self._probe_in(command, key, spec.metadata.name, failed)
        return row

    def _counting(
        self, asked: _Asked, regions: Sequence[str], spec: JobSpec, bundle_digest: str,
        submission: common_pb2.Submission,
    ) -> dict[str, asyncio.Task[_Labels]]:  # fmt: skip
        """Have labels counted in all regions but the first, which counts its own when its steps are timed."""
        if not counts_labels(spec):
            return {}
        others = [region for region in regions[1:_MOST_COUNTED] if self._measurements.knows(region, PROBED_LABELS)]
        found: dict[str, asyncio.Task[_Labels]] = {}
        for region in others:
            task = self._counts.get((asked, region))
            if task is None:
                if len(self._counts) >= _MAX_COUNTS:
                    break
                memory = self._measurements.memory_mb(region, spec, None)
                command = self._command(region, spec, bundle_digest, _LIMIT_SECONDS, submission, memory)
                command.labels_only = True
                task = self._counts[asked, region] = awaited(self._labels_in(command, spec.metadata.name))
                task.add_done_callback(partial(self._counted, (asked, region)))
            found[region] = task
        return found

    def _counted(self, count: tuple[_Asked, str], _: object) -> None:
        self._counts.pop(count, None)

    async def _labels_in(self, command: agent_pb2.ProfileTask, name: str) -> _Labels:
        """Have an agent count labels; return what it has reported, nothing if it could not."""
        region, labels, usd = command.region, _Labels(), 0.0
        try:
            async with (
                _timeout_of(region, _COUNT_SECONDS),
                aclosing(self._measurements.run(agent_pb2.ToAgent(probe=command))) as reports,
            ):
                async for report in reports:
                    labels, usd = _labels_of(report.weight), _money(report.weight.usd)
        except GeofedError as error:
            text = f"counting the labels of {name} failed: {error.code}: {error.message}"
            usd = _money(error.usd) if isinstance(error, MeasurementFailed) else 0.0
            async with self._federation.change() as draft:
                draft.record("task.probe-failed", text, region=region, data={"usd": usd})
            return labels
        async with self._federation.change() as draft:
            text = f"{region} has counted {len(labels.counts)} labels of {name}"
            draft.record("task.labels", text, region=region, data={"labels": len(labels.counts), "usd": usd})
        return labels

    async def _keep_labels(self, key: str, counts: Mapping[str, asyncio.Task[_Labels]]) -> None:
        """Store the labels that other regions count beside a task's probe, as they arrive."""
        left = set(counts.values())
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            told = {region: task.result() for region, task in counts.items() if task in done and not task.cancelled()}
            found = {region: [one.samples, one.counts] for region, one in told.items() if one.counts}
            row = await self._federation.read(lambda store: store.weight(key)) if found else None
            if row is not None:
                async with self._federation.change() as draft:
                    draft.weights.append(replace(row, labels_json=json.dumps(json.loads(row.labels_json) | found)))

    def _rest(self, asked: _Asked, why: GeofedError | None) -> None:
        """Block another probe of a task for its user for a while if `why` is given; drop expired entries."""
        now = time.monotonic()
        self._rests = {other: rest for other, rest in self._rests.items() if rest[0] > now}
        if why is not None:
            self._rests[asked] = now + _REST_SECONDS, why

    def _regions(self, spec: JobSpec) -> list[str]:
        """Return regions with a free worker: those with the fewest measurements first, then those with the most data,
        since the other regions will wait for these."""
        free = []
        for region in self._measurements.live_holders(spec):
            try:
                self._measurements.require_free(region)
            except GeofedError:
                continue
            if spec.clients is not None and not self._measurements.tells_clients(region, spec.data.dataset):
                # The plan is declined, and says so.
                continue
            if spec.task.image is not None and not self._measurements.knows(region, IMAGE):
                # It would run the task in its own image.
                continue
            if spec.function.gpus != 1 and not self._measurements.knows(region, GPUS):
                # It would measure one device.
                continue
            if spec.function.sharding != "none" and not self._measurements.knows(region, SHARDING):
                # It would not say what cannot be divided.
                continue
            if spec.train.compile and not self._measurements.knows(region, COMPILE):
                # It would measure what is not compiled.
                continue
            samples = self._measurements.train_samples(region, spec.data.dataset)
            free.append((self._measurements.running(region), -samples, region))
        return [region for _, _, region in sorted(free)]

    def _command(
        self,
        region: str,
        spec: JobSpec,
        bundle_digest: str,
        wait_seconds: float,
        submission: common_pb2.Submission,
        memory_mb: int,
    ) -> agent_pb2.ProfileTask:
        return agent_pb2.ProfileTask(
            # Unique, since an agent repeats its result for a known ID, and a failed probe may succeed the next time.
            id=f"probe-{secrets.token_hex(8)}",
            region=region,
            task=task_of(spec, bundle_digest, submission),
            batch=spec.train.probed_batch,
            evaluation_batch=spec.train.eval_batch or 0,
            seed=spec.train.seed,
            memories_mb=[memory_mb],
            labels=counts_labels(spec),
            limit_seconds=PROBE_SECONDS,
            wait_seconds=wait_seconds,
        )

    async def _probe_in(
        self, command: agent_pb2.ProfileTask, key: str, name: str, failed: Mapping[str, GeofedError]
    ) -> WeightRow:
        """Have an agent probe a task, and store its reports as they arrive. A failure after the size is known only
        leaves the steps unknown.

        Args:
            failed: errors in other regions, which are noted in the plan.
        """
        region, fault = command.region, _of_task(failed)
        before = await self._federation.read(lambda store: store.weight(key))
        known = _recent_lacks(before, self._federation.clock())
        elsewhere = f"{_ELSEWHERE}{fault.message}" if fault else ""
        row: WeightRow | None = None
        try:
            async with aclosing(self._measurements.run(agent_pb2.ToAgent(probe=command))) as reports:
                async for report in reports:
                    if report.HasField("weight"):
                        row = _row(key, region, self._federation.clock(), report.weight)
                        lacks = _lacks(row, command.batch, known)
                        row = replace(row, note=_joined(row.note, elsewhere), gpu_lacks_json=json.dumps(lacks))
                        await self._keep(row, name, report.weight)
            if row is None:
                raise GeofedError("FRAME_INVALID", f"region {region} has not reported the model's size")
        except GeofedError as error:
            why = f"{error.code}: {error.message}"
            async with self._federation.change() as draft:
                if row is not None:
                    row = replace(row, note=_joined(why, elsewhere))
                    draft.weights.append(row)
                data = {"usd": _money(error.usd) if isinstance(error, MeasurementFailed) else 0.0}
                draft.record("task.probe-failed", f"probing {name} failed: {why}", region=region, data=data)
            if row is None:
                raise
        return row

    async def _keep(self, row: WeightRow, name: str, reported: agent_pb2.TaskWeight) -> None:
        async with self._federation.change() as draft:
            draft.weights.append(row)
            if reported.last:
                text = f"{name} was probed in {row.region}: {row.parameters:,} parameters"
                data = {"parameters": row.parameters, "model_bytes": row.model_bytes, "usd": _money(reported.usd)}
                draft.record("task.probed", text, region=row.region, data=data)
        for (key, _), sized in self._sized.items():
            if key == row.task_key:
                sized.set()


@asynccontextmanager
async def _timeout_of(region: str, seconds: float) -> AsyncIterator[None]:
    """Raise ``GeofedError("WAIT_TIMEOUT")`` if what is asked of a region takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise GeofedError("WAIT_TIMEOUT", f"region {region} has not answered within {seconds:g} s") from None


def _certain_fault(failed: Mapping[str, GeofedError], alone: bool, several_gpus: bool = False) -> GeofedError | None:
    """Return an error with which any run of a task would fail: two regions report the same one, or the only region that
    may run it (``alone``) reports one that is certainly the code's fault. None: the task may succeed elsewhere or
    later.
    """
    for error in failed.values():
        # A job's workers are alike in all regions.
        if (error.code == "GPUS_TOO_FEW" and (alone or several_gpus)) or (error.code == _GPU_MEMORY and alone):
            return error
    reports = {region: error for region, error in failed.items() if error.code in _TASK_CODES}
    seen: set[str] = set()
    for region, error in reports.items():
        text = error.message.removeprefix(f"{region}: ")
        if _OUT_OF_MEMORY.search(text):
            continue
        fault = _fault(error.code, text)
        if fault in seen or _is_everywhere(error.code, text) or (alone and _is_own(error.code, text)):
            return error
        seen.add(fault)
    return None


def _fault(code: str, text: str) -> str:
    """Return an error without the parts that may differ between regions, such as addresses and folders."""
    raised, place = _RAISED.match(text), _PLACE.search(text[-_MAX_NOTE_CHARACTERS:])
    return f"{code}: {raised[0]}{place[0]}" if raised and place else f"{code}: {text}"


def _is_own(code: str, text: str) -> bool:
    """Whether an error is certainly the fault of the task's code."""
    if code == "TASK_INVALID":
        return _INCOMPLETE.search(text) is not None
    raised, place = _RAISED.match(text), _PLACE.search(text[-_MAX_NOTE_CHARACTERS:])
    if code != "TASK_FAILED" or raised is None or (place is None and raised[1] not in _NO_LINE):
        return False
    of_step = _STEPPING.match(text) is not None and _SURROUNDINGS.search(text) is None
    return raised[2] in _CODE_ERRORS or (of_step and raised[2] in _STEP_ERRORS)


def _is_everywhere(code: str, text: str) -> bool:
    """Whether an error is certainly the fault of the task's code, whatever the region's data and packages are."""
    raised = _RAISED.match(text)
    everywhere = code == "TASK_INVALID" or (raised is not None and raised[2] in _EVERYWHERE)
    return everywhere and _is_own(code, text)


def _step_error(row: WeightRow) -> GeofedError | None:
    """Return the error with which the probe's steps ended, of the task's code or the GPU's memory; None: they were
    timed, or something else was in the way."""
    code, _, text = row.note.partition(f"; {_ELSEWHERE}")[0].partition(": ")
    failed = row.steps_json == "[]" and code in (*_TASK_CODES, _GPU_MEMORY)
    return GeofedError(code, f"{row.region}: {text}") if failed else None


def _of_task(failed: Mapping[str, GeofedError]) -> GeofedError | None:
    """Return the first error of the task's code, which is the most useful one; None if there is none."""
    return next((error for error in failed.values() if error.code in _TASK_CODES), None)


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)[:_MAX_NOTE_CHARACTERS]


def _is_complete(weight: WeightRow | None) -> bool:
    """Whether another probe cannot find more: steps were timed. What was in the way may be gone the next time."""
    return weight is not None and weight.steps_json != "[]"


def _lacked_memory(row: WeightRow) -> bool:
    """Whether the steps of a probe could not be timed for lack of memory."""
    lacked = row.note.startswith("FUNCTION_OUT_OF_MEMORY") or _OUT_OF_MEMORY.search(row.note) is not None
    return lacked and not row.note.startswith(_GPU_MEMORY) and not _is_complete(row)


def _fits_not(row: WeightRow) -> bool:
    """Whether the steps of a probe could not be timed for lack of memory, of the function or of its GPU."""
    return _lacked_memory(row) or (row.note.startswith(_GPU_MEMORY) and not _is_complete(row))


def _recent_lacks(weight: WeightRow | None, now: float) -> dict[str, _Lack]:
    """Return the regions whose GPU was too small for a task at most `_LACKS_SECONDS` before ``now`` (Unix seconds)."""
    if weight is None:
        return {}
    lacks = {region: tuple(lack) for region, lack in json.loads(weight.gpu_lacks_json).items()}
    return {region: lack for region, lack in lacks.items() if now <= lack[2] + _LACKS_SECONDS}


def _lacks(row: WeightRow, batch: int, known: Mapping[str, _Lack]) -> dict[str, _Lack]:
    """Return the regions whose GPU is too small, with what a region's probe of a batch tells."""
    code, _, text = row.note.partition(": ")
    lacks = dict(known)
    least, *_ = lacks.get(row.region, (math.inf, "", 0.0))
    if code == _GPU_MEMORY:
        lacks[row.region] = int(min(least, batch)), text, row.at
    elif _is_complete(row) and batch >= least:
        del lacks[row.region]
    return lacks


def _row(key: str, region: str, at: float, reported: agent_pb2.TaskWeight) -> WeightRow:
    """Return the row for an agent's probe, without implausible values; its note says that some were left out.

    Raises ``GeofedError("FRAME_INVALID")`` if the model's size is implausible.
    """
    if not (0 < reported.model_bytes <= _MAX_BYTES and max(reported.parameters, reported.held_bytes) <= _MAX_BYTES):
        raise GeofedError("FRAME_INVALID", f"region {region} reported an implausible probe")
    steps = [
        (step.batch, step.seconds, step.device_bytes) for step in reported.steps[:_MAX_STEPS] if _is_plausible(step)
    ]
    start = reported.start_seconds if 0 <= reported.start_seconds <= _MAX_SECONDS else 0.0
    left_out = len(steps) < len(reported.steps) or start != reported.start_seconds
    warning = f"FRAME_INVALID: region {region} reported implausible values of a probe, which are ignored"
    note = _joined(warning if left_out else "", reported.note)
    names = [clean(name, NAME_BYTES) for name in reported.batch_norms[:MOST_BATCH_NORMS]]
    labels = _labels_of(reported)
    held = {region: [labels.samples, labels.counts]} if labels.counts else {}
    return WeightRow(
        key, region, at, reported.parameters, reported.model_bytes, json.dumps(steps), start, note,
        reported.held_bytes, json.dumps(names), json.dumps(held),
    )  # fmt: skip


def _labels_of(reported: agent_pb2.TaskWeight) -> _Labels:
    """Return the labels that an agent has counted; none if the numbers are implausible."""
    counts = sorted(reported.labels.items())
    sane = len(counts) <= MOST_LABELS and all(
        label < MOST_LABELS and 1 <= count <= reported.samples for label, count in counts
    )
    return _Labels(reported.samples, tuple(counts)) if sane and reported.samples <= _MAX_BYTES else _Labels()


def _money(usd: float) -> float:
    """Return an amount of money, or 0 if it is invalid."""
    return usd if 0 <= usd < math.inf else 0.0


def _is_plausible(step: agent_pb2.TimedStep) -> bool:
    fits = 1 <= step.batch <= _MAX_BATCH and step.device_bytes <= _MAX_BYTES
    return fits and _MIN_SECONDS <= step.seconds <= _MAX_SECONDS
