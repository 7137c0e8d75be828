"""The training loop of one invocation.

A worker attaches to its parameter server, continues from the round that the server names, and makes steps: it computes
gradients of its own batch, merges them with the other workers that hold the same parameters, and makes the same
optimiser step as they do. It holds the whole model or one stage of it (`Trainer`).
At the end of a round it uploads the model, waits for the federation's, and continues from that. With background
exchange it makes the next steps concurrently, and then adds the correction that it gets. When its slice is over it
stores its state in the channel and returns; the next invocation continues at the same step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from geofed_pb.bounds import bounded_metrics
from geofed_pb.errors import GeofedError
from geofed_pb.linux import request_low_latency
from geofed_pb.user_code.recording import Recorder, Sums, recording
from geofed_pb.v1 import worker_pb2
from region_agent.worker.invocation import Invocation, Outcome
from region_agent.worker.ps_client import PsClient, SliceOver
from region_agent.worker.ranks.devices import own_device
from region_agent.worker.tensor_tree import dump_tree, load_tree
from region_agent.worker.training.optimizer_state import State
from region_agent.worker.training.rounds import BoundaryAnswer, PendingBoundary, RoundSums
from region_agent.worker.training.trainer import Model, Trainer
from region_agent.worker.training.usage import UsageMeter
from sync import framing
from sync.channel import Channel
from sync.collective import State as CollectiveState
from sync.histograms import Histogram, bounded, to_messages
from sync.layout import Vector
from sync.wan import overlapped_steps

__all__ = ["WorkerLoop"]

_ATTEMPT_OVER = ("FENCED", "CHANNEL_TIMEOUT")
"""Errors that end an attempt for a healthy worker: it stores its state, from which the next attempt continues."""
_EVALUATION_FAILURES = ("TASK_FAILED", "TASK_INVALID", "FUNCTION_OUT_OF_MEMORY", "GPU_MEMORY")
"""Errors of an evaluation that do not fail the job."""
_MAX_EVALUATION_TRIES = 2
"""Evaluations of one round in which a worker may be killed before it skips that evaluation."""
_Value = TypeVar("_Value")
_PROGRESS_SECONDS = 1.0
"""Shortest interval between two progress reports."""
_STATE_SECONDS = 10.0
"""Shortest interval at which the optimiser's state is uploaded with background exchange; only a new attempt needs
it."""


class WorkerLoop:
    """Training of one invocation; `run` returns its outcome."""

    def __init__(
        self,
        invocation: Invocation,
        trainer: Trainer,
        channel: Channel,
        begun: float,
        server: Callable[[Invocation, float], Any] | None = None,
    ) -> None:
        """``server``: makes what takes the place of a `PsClient`; None: a `PsClient`."""
        self._server = server
        self._call, self._trainer, self._channel = invocation, trainer, channel
        self._flat = trainer.flat
        self._slice_ends = begun + invocation.slice_seconds
        self._attached = False
        self._completed = 0
        """Rounds whose federated model this worker continues from."""
        self._step = 0
        self._until = 0
        """Last step of the open round."""
        self._background = False
        self._pending: PendingBoundary | None = None
        self._state_given = 0.0
        self._applied: list[PendingBoundary] = []
        """Boundaries whose correction has been added. Unmapping a correction takes as long as adding it, so they are
        released by the background thread."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="boundary")
        self._reported_at = time.monotonic()
        self._settled = 0
        """Last step after which the workers have made sure that they hold the same model."""
        self._round = RoundSums()
        self._recorder, self._usage = Recorder(), UsageMeter(own_device(invocation), trainer.helpers)
        self._outcome_steps, self._outcome_samples, self._compute_seconds = 0, 0, 0.0
        self._merge_seconds = 0.0
        """Time of the steps beyond their compute."""
        self._steady = False
        """Whether the last operation was a step, so that the partition's other workers are at the next step, too."""
        self._steady_seconds: list[float] = []
        self._waits_for = 0
        """Round whose end is waited for; 0: none."""

    def run(self) -> Outcome:
        """Train until the end of the job, of the slice, or of the attempt."""
        request_low_latency()
        fenced: GeofedError | None = None
        finished = False
        with (self._server or PsClient)(self._call, self._slice_ends) as server, self._executor, closing(self._trainer):
            try:
                with recording(self._recorder):
                    finished = self._train_slice(server)
            except GeofedError as error:
                if error.code not in _ATTEMPT_OVER or not self._attached or self._background:
                    raise
                fenced = error
            resume_key = self._delete_state() if finished else self._store_state(fenced is not None)
        return Outcome(
            status="done" if finished else "left" if fenced else "continue",
            resume_key=resume_key,
            step=self._step,
            waits_for=0 if finished or fenced else self._waits_for,
            code=fenced.code if fenced else "",
            message=fenced.message if fenced else "",
            channel=asdict(self._channel.usage),
            merged_by=self._trainer.name,
            steps=self._outcome_steps,
            samples=self._outcome_samples,
            compute_seconds=self._compute_seconds,
            merge_seconds=self._merge_seconds,
            steady_steps=len(self._steady_seconds),
            steady_seconds=statistics.median(self._steady_seconds or [0.0]) * len(self._steady_seconds),
        )

    def _train_slice(self, server: PsClient) -> bool:
        """Train until the end of the job (True) or of the slice (False), and wait until all messages are sent."""
        try:
            finished = self._train(server)
        except SliceOver:
            finished = False
        self._trainer.drain()
        self._flat.base.check(values=True)
        return finished

    # Rounds

    def _train(self, server: PsClient) -> bool:
        """Make rounds until the end of the job (True) or of the slice (False)."""
        start = self._attach(server)
        awaited, finished = start.boundary, start.finished
        if start.evaluate and self._pending is None:
            self._evaluate(server)
        finished = self._apply_answer_if_due(server) or finished
        while not finished:
            while not awaited and self._step < self._until:
                if self._slice_over():
                    return False
                self._make_step(server, self._step + 1)
                if self._apply_answer_if_due(server):
                    return True
            if self._background and not awaited and self._step < self._call.rounds * self._call.steps_per_round:
                self._begin_end_of_round(server, self._completed + 1)
                continue
            reply = self._end_round(server, self._completed + 1, known=awaited)
            self._apply_reply(reply)
            if awaited and reply.state_key and not self._background:
                self._trainer.load_state(self._trainer.read_state(reply.state_key))
            awaited, finished = False, reply.finished
            self._completed, self._round = reply.round, RoundSums()
            if not self._background:
                self._step = self._completed * self._call.steps_per_round
            self._round_ended()
            if reply.evaluate:
                self._evaluate(server)
            if self._slice_over() and not finished:
                return False
        return True

    def _apply_reply(self, reply: worker_pb2.BoundaryReply) -> None:
        """Load the model, or add the correction, that the server has answered with."""
        self._steady = False
        if reply.model_key:
            model = self._trainer.read(reply.model_key, "model")
            self._flat.load(model)
            self._trainer.begin_round(model)
        elif reply.correction_key:
            self._flat.add(self._trainer.read(reply.correction_key, "correction"))
        self._until = reply.until_step

    def _correction(self, key: str) -> Vector | None:
        """Read a correction, in the background thread. ``key`` "": there is none."""
        return self._trainer.read(key, "correction") if key else None

    # The end of a round, with background exchange

    def _begin_end_of_round(self, server: PsClient, sequence: int) -> None:
        """Copy the present model, and upload it in the background while the next steps are made."""
        self._settle()
        request, state = self._boundary_request(sequence, self._step, self._round), None
        model = self._present(request)
        # The stages of a model must all upload the state of the same round.
        due = self._trainer.in_stages or len(self._flat.local) or time.monotonic() - self._state_given > _STATE_SECONDS
        if self._trainer.leads and due:
            self._state_given = time.monotonic()
            tensors, numbers = self._trainer.dump_state()
            # Copied, since the next steps change the optimiser's tensors.
            state = {name: np.array(array) for name, array in tensors.items()}, numbers
        # Separate calls, so that the copies are freed before the correction is read.
        uploaded = self._executor.submit(self._upload, request, model, state)
        reply = self._executor.submit(self._exchange, server, request, uploaded)
        self._set_pending(request, self._round, reply)
        self._round = RoundSums()

    def _present(self, request: worker_pb2.BoundaryRequest) -> Vector | None:
        """Return a copy of the present model, to be uploaded; None: it is uploaded already.

        Where the channel is memory, the copy is made there: it takes as long, and this process needs no other.
        """
        at_once = self._trainer.alone and self._channel.in_memory
        model = self._trainer.present(lasting=not at_once)
        if isinstance(model, list):
            self._upload(request, model, None)
            return None
        return model

    def _set_pending(
        self,
        request: worker_pb2.BoundaryRequest,
        sums: RoundSums,
        reply: Future[BoundaryAnswer],
    ) -> None:
        """Set the boundary that is being exchanged, and continue with steps until its answer is due.

        Only the answer says where the next round ends.
        """
        each, total = self._call.steps_per_round, self._call.rounds * self._call.steps_per_round
        self._until = min(request.step + overlapped_steps(each), total)
        self._pending = PendingBoundary(request, sums, self._until, reply)

    def _exchange(
        self, server: PsClient, request: worker_pb2.BoundaryRequest, uploaded: Future[None] | None = None
    ) -> BoundaryAnswer:
        """``uploaded``: of the model; None: it was uploaded before."""
        if uploaded is not None:
            uploaded.result()
        reply = server.boundary(request)
        return reply, self._correction(reply.correction_key)

    def _apply_answer_if_due(self, server: PsClient) -> bool:
        """Apply the answer to a boundary at the step where it is due, which is the same in all workers of the
        partition.

        True if the answer says that the job is over, which may be before its planned end.
        """
        if self._pending is None or self._step < self._pending.due:
            return False
        reply = self._apply_answer(self._pending)
        self._until = reply.until_step
        self._completed, self._pending = reply.round, None
        self._executor.submit(self._applied.clear)
        self._round_ended()
        if reply.evaluate:
            self._evaluate(server)
        return reply.finished

    def _apply_answer(self, ended: PendingBoundary) -> worker_pb2.BoundaryReply:
        self._waits_for = ended.request.round
        reply, correction = ended.reply.result()
        self._waits_for = 0
        if reply.finished:
            # The steps made since the boundary belong to no round.
            self._step, self._round = ended.request.step, RoundSums()
            self._apply_reply(reply)
        elif correction is not None:
            self._flat.add(correction)
            self._applied.append(ended)
        return reply

    def _round_ended(self) -> None:
        self._recorder.round = self._completed
        self._trainer.round_ended(self._completed)

    def _slice_over(self) -> bool:
        # Each invocation makes at least one step, so that the job ends even with very short slices.
        return self._outcome_steps > 0 and time.monotonic() > self._slice_ends

    def _attach(self, server: PsClient) -> worker_pb2.AttachReply:
        call = self._call
        initial_key = f"init/{call.attempt}/{call.worker}"
        base_key = ""
        if not call.resume_key:
            initial_key = self._trainer.put_initial(initial_key)
            base_key = self._put_base()
        layout = self._trainer.layout.to_json()
        request = worker_pb2.AttachRequest(layout_json=layout, initial_key=initial_key, base_key=base_key)
        start = server.attach(request)
        self._trainer.delete_initial(initial_key)
        self._load_base(start.base_key)
        self._attached, self._completed, self._until = True, start.round, start.until_step
        self._background = start.background
        if not self._resume(server, start) and not (start.background and start.boundary):
            if not start.model_key:
                raise GeofedError("FENCED", "the state of the last slice is no longer in the channel")
            self._step = start.step
            model = self._trainer.read(start.model_key, "model")
            self._flat.load(model)
            self._trainer.begin_round(model)
            if start.state_key:
                self._trainer.load_state(self._trainer.read_state(start.state_key))
        elif self._trainer.needs_round_model and start.model_key and not start.boundary:
            self._trainer.begin_round(self._trainer.read(start.model_key, "model"))
        return start

    def _put_base(self) -> str:
        """Store the base for the server, which exports it with the model; "": another worker does, or it has it."""
        base = self._flat.base
        if not len(base) or not self._trainer.leads or self._call.base_given:
            return ""
        key = f"init/{self._call.attempt}/base-{self._trainer.group}"
        self._channel.put(key, framing.encode(base.contents()))
        return key

    def _load_base(self, key: str) -> None:
        """Load the base that the server has, if it has another one than the task makes."""
        base = self._flat.base
        if key:
            stored = self._channel.get(key)
            if stored is None:
                raise GeofedError("FENCED", f"{key} is no longer in the channel: a newer attempt has taken over")
            given = framing.decode(stored).tensors
            base.load(given)
            self._flat.local.load(given)
        base.watch()

    def _end_round(self, server: PsClient, sequence: int, *, known: bool) -> worker_pb2.BoundaryReply:
        """Upload the round's model and wait for the federation's; ``known``: it was uploaded before."""
        request = worker_pb2.BoundaryRequest(round=sequence, step=self._step)
        if not known:
            self._settle()
            model = self._trainer.present()
            request = self._boundary_request(sequence, self._step, self._round)
            # All workers of a group hold the same model and optimiser state, so one uploads them for all.
            self._upload(request, model, self._trainer.dump_state() if self._trainer.leads else None)
        # Stays set if the slice ends during the wait.
        self._waits_for = sequence
        reply = server.boundary(request)
        self._waits_for = 0
        if not self._background and self._trainer.leads:
            # By name: the worker's user of the channel may not list keys, which may be of other jobs.
            last = f"b/{self._call.attempt}/{sequence - 1}"
            self._channel.delete_many(
                [name for kind in ("model", "state") for name in self._trainer.names_of(f"{last}/{kind}")]
            )
        return reply

    def _settle(self) -> None:
        """Make sure that the workers of the partition hold the same model, once after the last step."""
        self._flat.check_names()
        self._flat.base.check()
        if self._settled < self._step:
            self._trainer.settle(self._step)
            self._settled = self._step

    def _boundary_request(self, sequence: int, step: int, sums: RoundSums) -> worker_pb2.BoundaryRequest:
        """Build the request for the end of a round, without the model's digest."""
        prefix = f"b/{self._call.attempt}/{sequence}"
        return worker_pb2.BoundaryRequest(
            round=sequence,
            step=step,
            model_key=f"{prefix}/model" if self._call.worker == 0 else "",
            group=self._trainer.group,
            samples=sums.samples,
            loss=sums.loss,
            compute_seconds=sums.compute_seconds,
            merge_seconds=sums.merge_seconds,
            evaluate_seconds=sums.evaluate_seconds,
            logged=_logged(self._recorder.up_to(sequence)),
            usage=self._usage.of_round(),
        )

    def _upload(self, request: worker_pb2.BoundaryRequest, model: Model | None, state: State | None) -> None:
        prefix = f"b/{self._call.attempt}/{request.round}"
        if model is not None:
            request.digest = self._digest_of(model)
            if self._trainer.leads:
                self._trainer.put(f"{prefix}/model", model)
        if state is not None:
            self._trainer.put_state(f"{prefix}/state", state)
            if request.model_key:
                request.state_key = f"{prefix}/state"

    def _digest_of(self, model: Model) -> str:
        if self._trainer.alone:
            # A single worker has no other model to compare with.
            return "alone"
        parts = model if isinstance(model, list) else [model]
        return framing.digest_of(part.view(np.uint8).data for part in parts)

    # Steps

    def _make_step(self, server: PsClient, step: int) -> None:
        # Inputs of the next step may be received ahead only if no evaluation comes before it.
        more = step < self._until
        self._recorder.round = 1 + (self._completed if self._pending is None else self._pending.request.round)
        begun = time.monotonic()
        value, seconds = self._trainer.step(server, step, more)
        duration = time.monotonic() - begun
        if not self._trainer.in_stages:
            # A stage spends the rest of a step mostly on waiting for other stages, not on merging.
            self._round.merge_seconds += max(0.0, duration - seconds)
            self._merge_seconds += max(0.0, duration - seconds)
        if self._steady:
            self._steady_seconds.append(duration)
        self._steady = True
        counted = self._trainer.counted
        self._step = step
        self._round.samples += counted
        self._round.loss_sum += value * counted
        self._round.compute_seconds += seconds
        self._outcome_steps += 1
        self._outcome_samples += counted
        self._compute_seconds += seconds
        if self._trainer.stores_after(step) and not self._background:
            self._trainer.store(step, self._frame(for_others=True))
        reports = self._trainer.reports_steps and not self._trainer.server_counts_steps
        if reports and time.monotonic() - self._reported_at > _PROGRESS_SECONDS:
            # Last, since it raises if the attempt is over: by now the step and its sums are complete.
            self._reported_at = time.monotonic()
            server.stepped(worker_pb2.SteppedRequest(step=step, loss=value))

    def _evaluate(self, server: PsClient) -> None:
        """Evaluate the model and report the metrics, or the error: a failed evaluation does not fail the job."""
        self._steady, self._recorder.round = False, self._completed
        samples, metrics, histograms = 0, dict[str, float](), dict[str, Histogram]()
        message, begun = "", time.monotonic()
        try:
            with self._counted_try() as tries:
                samples, found = self._trainer.evaluate(self._completed, tries)
            metrics, message = bounded_metrics({n: v for n, v in found.items() if not isinstance(v, Histogram)})
            histograms, dropped = bounded({n: v for n, v in found.items() if isinstance(v, Histogram)})
            message = message or dropped
        except (GeofedError, MemoryError) as error:
            code = error.code if isinstance(error, GeofedError) else "FUNCTION_OUT_OF_MEMORY"
            if code not in _EVALUATION_FAILURES or not self._trainer.evaluation_may_fail:
                raise
            message = error.message if isinstance(error, GeofedError) else "the evaluation ran out of memory"
        self._round.evaluate_seconds += time.monotonic() - begun
        request = worker_pb2.EvaluatedRequest(
            round=self._completed,
            samples=samples,
            metrics=metrics,
            error=message,
            logged=_logged(self._recorder.up_to(self._completed)),
            histograms=to_messages(histograms),
        )
        server.evaluated(request)

    @contextmanager
    def _counted_try(self) -> Iterator[int]:
        """Yield how often this worker was killed in the evaluation of this round, for instance over its memory.

        Raises FUNCTION_OUT_OF_MEMORY after too many times, and the job continues without this evaluation. The number
        is stored in the channel during the evaluation; it stays there only if the worker is killed.
        """
        if self._trainer.in_stages:
            # All stages evaluate together, so one of them cannot skip it.
            yield 0
            return
        key = f"e/{self._completed}/{self._call.worker}"
        known = self._channel.get(key) if self._call.attempt > 1 else None
        tries = 0 if known is None else int(bytes(known))
        if tries >= _MAX_EVALUATION_TRIES:
            text = f"the worker was killed {tries} times during an evaluation: it exceeded its memory or its time"
            raise GeofedError("FUNCTION_OUT_OF_MEMORY", text)
        self._channel.put(key, [str(tries + 1).encode()])
        try:
            yield tries
        finally:
            self._channel.delete(key)

    # State between invocations

    def _store_state(self, fenced: bool = False) -> str:
        """Store model, optimiser and the round's sums for the next invocation; returns their channel key.

        ``fenced``: the attempt is over, so the state is for the workers of the next one.
        """
        if not self._attached:
            return self._call.resume_key
        if not self._trainer.between_steps:
            # The own part of the step was made: made again, it would count twice.
            return ""
        key = self._trainer.resume_key_of(self._step, fenced)
        if not (fenced and self._trainer.in_stages and self._channel.has(key)):
            self._channel.put(key, self._frame(for_others=fenced))
        if self._call.resume_key.startswith(f"w/{self._call.attempt}/") and self._call.resume_key != key:
            self._channel.delete(self._call.resume_key)
        return key

    def _frame(self, *, for_others: bool) -> list[memoryview]:
        """Return the state that the next invocation of this worker needs.

        ``for_others``: that any worker with the same parameters needs in another attempt.
        """
        tensors, numbers = self._trainer.dump_state()
        # A round is completed here only when its answer is applied, even if the server has completed it already.
        completed = self._completed if self._pending is None else self._pending.request.round - 1
        facts = {"round": completed, "step": self._step, "settled": self._settled, **self._round.facts()}
        facts |= {"attempt": self._call.attempt, "worker": self._call.worker, "batch": self._trainer.share(self._step)}
        facts |= {"base": self._flat.base.checksum, **self._trainer.facts(), **self._recorder.facts()}
        if self._pending is not None:
            # The slice ends during a wait for an answer; the next invocation repeats the request.
            facts |= {"ended_step": self._pending.request.step, **self._pending.sums.facts("ended_")}
        prefixed = {f"o/{name}": array for name, array in tensors.items()}
        prefixed |= dump_tree(self._flat.exact(), "x/") | dump_tree(self._flat.scratch(), "n/")
        facts |= {f"o/{name}": value for name, value in numbers.items()}
        if not for_others:
            # It is unknown what other workers received of an interrupted merge, so residuals are valid for this attempt
            # only.
            state = self._trainer.merging_state()
            prefixed |= {f"c/{name}": array for name, array in state.tensors.items()}
            facts |= {f"c/{name}": value for name, value in state.facts.items()}
        # What is for others may be stored in the background.
        model = self._trainer.present(lasting=for_others)
        return framing.encode({"model": model, **prefixed}, facts)

    def _delete_state(self) -> str:
        """Delete the stored state at the job's end; returns the empty resume key."""
        if self._call.resume_key:
            self._channel.delete(self._call.resume_key)
        self._trainer.delete_state()
        return ""

    def _resume(self, server: PsClient, start: worker_pb2.AttachReply) -> bool:
        """Restore the state of the last slice or attempt; False if it is missing or older than the server's model."""
        key = self._call.resume_key
        if key and not key.startswith(f"w/{self._call.attempt}/"):
            key = self._trainer.inherited_key(key)
        stored = self._channel.get(key) if key else None
        if stored is None or start.finished:
            return False
        frame = framing.decode(stored)
        facts = frame.facts
        if facts.get("base", 0) != self._flat.base.checksum and not self._trainer.in_stages:
            text = "model(config) makes other values of what is not trained each time it is called"
            raise GeofedError("TASK_INVALID", text, hint="make them from the seed that torch has when it is called")
        if facts["attempt"] == self._call.attempt:
            # Buffers of this worker only; the server does not have them.
            self._flat.load_named(load_tree(frame.tensors, "n/"))
        if start.boundary:
            return False
        behind = start.round - int(facts["round"])
        # With background exchange the stored model is still valid if only the answer to the last boundary is missing.
        missed = self._background and behind == 1 and (facts.get("ended_step") or facts["step"]) == start.step
        if behind and not missed:
            return False
        other_attempt = facts["attempt"] != self._call.attempt
        if other_attempt and self._background:
            # With background exchange an attempt begins from the server's model.
            return False
        self._step = int(facts["step"])
        self._round = RoundSums.of(facts)
        self._recorder.restore(facts)
        if other_attempt and facts["batch"]:
            # Sums of another worker, which may have had another share of each step.
            self._round.rescale(self._trainer.share(self._step) / facts["batch"])
        self._flat.load(np.asarray(frame.tensors["model"], np.float32))
        self._flat.load_named(load_tree(frame.tensors, "x/"))
        if self._background:
            # A new attempt begins from the server's model.
            self._channel.delete(key)
        self._trainer.load_state((_without_prefix("o/", frame.tensors), _without_prefix("o/", facts)))
        if not other_attempt:
            self._restore_own(frame)
        if missed:
            if "ended_step" not in facts:
                self._round = RoundSums()
            self._resume_answered(start)
        elif "ended_step" in facts:
            self._resume_unanswered(server, facts)
        return True

    def _restore_own(self, frame: framing.Frame) -> None:
        """Restore what only the next slice of the same attempt has: which steps are settled, and the collective."""
        self._settled = int(frame.facts["settled"])
        self._trainer.restore_facts(frame.facts)
        held = CollectiveState(_without_prefix("c/", frame.tensors), _without_prefix("c/", frame.facts))
        if held.tensors or held.facts:
            self._trainer.restore_merging(held)

    def _resume_answered(self, start: worker_pb2.AttachReply) -> None:
        """Resume while the answer to the last slice's boundary is known but not due yet."""
        correction = self._correction(start.correction_key)
        reply: Future[BoundaryAnswer] = Future()
        # All workers evaluate when the answer is applied, and none continues before all have.
        answer = worker_pb2.BoundaryReply(round=start.round, until_step=start.until_step, evaluate=start.evaluate)
        reply.set_result((answer, correction))
        self._set_pending(worker_pb2.BoundaryRequest(round=start.round, step=start.step), RoundSums(), reply)

    def _resume_unanswered(self, server: PsClient, facts: dict[str, float]) -> None:
        """Resume after the last slice has uploaded the model but the server has not processed the boundary."""
        sums = RoundSums.of(facts, "ended_")
        request = self._boundary_request(self._completed + 1, int(facts["ended_step"]), sums)
        key = f"b/{self._call.attempt}/{request.round}/model"
        vector = self._trainer.read_own(key)
        if vector is None:
            raise GeofedError("FENCED", f"{key} is no longer in the channel: a newer attempt has taken over")
        request.digest = self._digest_of(vector)
        self._set_pending(request, sums, self._executor.submit(self._exchange, server, request))


def _logged(rounds: Mapping[int, Sums]) -> list[worker_pb2.LoggedRound]:
    return [
        worker_pb2.LoggedRound(
            round=one,
            values={name: worker_pb2.LoggedSum(sum=total, count=count) for name, (total, count) in sums.items()},
        )
        for one, sums in rounds.items()
    ]


def _without_prefix(prefix: str, named: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
