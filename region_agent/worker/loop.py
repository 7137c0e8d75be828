"""The training loop of one invocation.

A worker attaches to its parameter server, continues from the round that the server names, and makes steps: its own
batch, gradients merged with the other workers that hold the same, one optimiser step that is the same in all of them.
What it holds is the model, or a stage of it (`Trainer`).
At the end of a round it hands over the model, waits for the federation's, and continues from that; with background
exchange it makes the next steps meanwhile, and then adds the correction that it is given. When its slice of time is
over it leaves what it needs in the channel and returns; the next invocation takes it up at the same step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TypeVar

import numpy as np

from geofed_pb.bounds import bounded_metrics
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import worker_pb2
from region_agent.worker.invocation import Invocation, Outcome
from region_agent.worker.ps_client import PsClient, SliceOver
from region_agent.worker.training.optimizer_state import State
from region_agent.worker.training.rounds import Answer, Ended, Sums
from region_agent.worker.training.scheduling import request_low_latency
from region_agent.worker.training.trainer import Trainer
from sync import framing
from sync.channel import Channel
from sync.collective import State as CollectiveState
from sync.layout import Vector
from sync.overlap import overlapped_steps
from sync.tree import dump_tree, load_tree

__all__ = ["WorkerLoop"]

_BROKEN = ("FENCED", "CHANNEL_TIMEOUT")
"""Codes with which an attempt ends for a worker that is itself well: others can continue from where it is."""
_NOT_MEASURED = ("TASK_FAILED", "TASK_INVALID", "FUNCTION_OUT_OF_MEMORY")
"""Codes with which an evaluation may fail without the job."""
_MOST_TRIES = 2
"""Of an evaluation, in which the worker was killed."""
_Value = TypeVar("_Value")
_NEWS_SECONDS = 1.0
"""Between two news of steps."""
_STATE_SECONDS = 10.0
"""With background exchange the optimiser's state is handed over this often: only a new attempt asks for it."""


class WorkerLoop:
    """One invocation's training; `run` returns how it ended."""

    def __init__(self, invocation: Invocation, trainer: Trainer, channel: Channel, begun: float) -> None:
        self._call, self._trainer, self._channel = invocation, trainer, channel
        self._flat = trainer.flat
        self._slice_ends = begun + invocation.slice_seconds
        self._attached = False
        self._completed = 0
        """Rounds whose federated model this worker continues from."""
        self._step = 0
        self._until = 0
        """Where the open round ends."""
        self._background = False
        self._ended: Ended | None = None
        self._state_given = 0.0
        self._snapshot: Vector | None = None
        self._spent: list[Ended] = []
        """With an answer that counts already: to unmap what came with it takes as long as to add it, so that is done
        beside the steps, too."""
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="boundary")
        self._told = time.monotonic()
        self._settled = 0
        """The last step after which the workers have made sure that they hold the same."""
        self._round = Sums()
        self._outcome_steps, self._outcome_samples, self._compute_seconds = 0, 0, 0.0
        self._merge_seconds = 0.0
        """Of steps, beyond their compute."""
        self._steady = False
        """The last thing done was a step, so that others of the partition are at the next one, too."""
        self._steady_seconds: list[float] = []

    def run(self) -> Outcome:
        """Train until the job's end or the slice's, or until the attempt is over."""
        request_low_latency()
        broken: GeofedError | None = None
        finished = False
        with PsClient(self._call, self._slice_ends) as server, self._beside, closing(self._trainer):
            try:
                finished = self._train_slice(server)
            except GeofedError as error:
                if error.code not in _BROKEN or not self._attached or self._background:
                    raise
                broken = error
            resume_key = self._forget_left() if finished else self._leave(broken is not None)
        return Outcome(
            status="done" if finished else "left" if broken else "continue",
            resume_key=resume_key,
            step=self._step,
            code=broken.code if broken else "",
            message=broken.message if broken else "",
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
        """True when the job is at its end. What others wait for has then left this worker."""
        try:
            finished = self._train(server)
        except SliceOver:
            finished = False
        self._trainer.drain()
        return finished

    # Rounds

    def _train(self, server: PsClient) -> bool:
        """True when the job is at its end, False when the slice is."""
        start = self._attach(server)
        awaited, finished = start.boundary, start.finished
        if start.evaluate and self._ended is None:
            self._evaluate(server)
        finished = self._hear_if_due(server) or finished
        while not finished:
            while not awaited and self._step < self._until:
                if self._slice_over():
                    return False
                self._make_step(server, self._step + 1)
                if self._hear_if_due(server):
                    return True
            if self._background and not awaited and self._step < self._call.rounds * self._call.steps_per_round:
                self._begin_end_of_round(server, self._completed + 1)
                continue
            reply = self._end_round(server, self._completed + 1, known=awaited)
            self._go_on(reply)
            if awaited and reply.state_key and not self._background:
                self._trainer.load_state(self._trainer.read_state(reply.state_key))
            awaited, finished = False, reply.finished
            self._completed, self._round = reply.round, Sums()
            if not self._background:
                self._step = self._completed * self._call.steps_per_round
            if reply.evaluate:
                self._evaluate(server)
            if self._slice_over() and not finished:
                return False
        return True

    def _go_on(self, reply: worker_pb2.BoundaryReply) -> None:
        self._steady = False
        if reply.model_key:
            self._flat.load(self._trainer.read(reply.model_key, "model"))
        elif reply.correction_key:
            self._flat.add(self._trainer.read(reply.correction_key, "correction"))
        self._until = reply.until_step

    def _correction(self, key: str) -> Vector | None:
        """Read beside the steps; "": there is none."""
        return self._trainer.read(key, "correction") if key else None

    # The end of a round, with background exchange

    def _begin_end_of_round(self, server: PsClient, sequence: int) -> None:
        """Take the model of now and hand it over beside the next steps."""
        self._settle()
        self._snapshot = self._flat.vector(self._snapshot)
        request, state = self._end_of(sequence, self._step, self._round), None
        # The stages of a model must all give theirs of the same round.
        due = self._trainer.in_stages or time.monotonic() - self._state_given > _STATE_SECONDS
        if self._trainer.leads and due:
            self._state_given = time.monotonic()
            tensors, numbers = self._trainer.dump_state()
            # The next steps change what they are views of.
            state = {name: np.array(array) for name, array in tensors.items()}, numbers
        reply = self._beside.submit(self._tell_end, server, request, self._snapshot, state)
        self._go_on_beside(request, self._round, reply)
        self._round = Sums()

    def _go_on_beside(
        self,
        request: worker_pb2.BoundaryRequest,
        sums: Sums,
        reply: Future[Answer],
    ) -> None:
        """Make steps until the answer to an end is due; only it says where the next round ends."""
        each, total = self._call.steps_per_round, self._call.rounds * self._call.steps_per_round
        self._until = min(request.step + overlapped_steps(each), total)
        self._ended = Ended(request, sums, self._until, reply)

    def _tell_end(
        self, server: PsClient, request: worker_pb2.BoundaryRequest, vector: Vector, state: State | None
    ) -> Answer:
        self._spent.clear()
        self._put_end(request, vector, state)
        return self._ask_end(server, request)

    def _ask_end(self, server: PsClient, request: worker_pb2.BoundaryRequest) -> Answer:
        reply = server.boundary(request)
        return reply, self._correction(reply.correction_key)

    def _hear_if_due(self, server: PsClient) -> bool:
        """So many steps after the end of a round, in all workers of the partition, its answer counts; True where it
        says that the job is over, which may be before its plan."""
        if self._ended is None or self._step < self._ended.due:
            return False
        ended = self._ended
        reply, correction = ended.reply.result()
        if reply.finished:
            # The steps since then are in no round.
            self._step, self._round = ended.request.step, Sums()
            self._go_on(reply)
        elif correction is not None:
            self._flat.add(correction)
            self._spent.append(ended)
        self._until = reply.until_step
        self._completed, self._ended = reply.round, None
        if reply.evaluate:
            self._evaluate(server)
        return reply.finished

    def _slice_over(self) -> bool:
        # However short the slice, an invocation makes a step: a chain of them must come to its end.
        return self._outcome_steps > 0 and time.monotonic() > self._slice_ends

    def _attach(self, server: PsClient) -> worker_pb2.AttachReply:
        call = self._call
        initial_key = f"init/{call.attempt}/{call.worker}"
        if not call.resume_key:
            initial_key = self._trainer.offer(initial_key)
        request = worker_pb2.AttachRequest(layout_json=self._trainer.layout.to_json(), initial_key=initial_key)
        start = server.attach(request)
        self._trainer.withdraw(initial_key)
        self._attached, self._completed, self._until = True, start.round, start.until_step
        self._background = start.background
        if not self._resume(server, start) and not (start.background and start.boundary):
            if not start.model_key:
                raise GeofedError("FENCED", "what the last slice left has gone from the channel")
            self._step = start.step
            self._flat.load(self._trainer.read(start.model_key, "model"))
            if start.state_key:
                self._trainer.load_state(self._trainer.read_state(start.state_key))
        return start

    def _end_round(self, server: PsClient, sequence: int, *, known: bool) -> worker_pb2.BoundaryReply:
        """Hand the round's model over and wait for the federation's; ``known``: it was handed over before."""
        request = worker_pb2.BoundaryRequest(round=sequence, step=self._step)
        if not known:
            self._settle()
            vector = self._flat.vector()
            request = self._end_of(sequence, self._step, self._round)
            # All workers of a group hold the same model and optimiser state, so one hands them over for all.
            self._put_end(request, vector, self._trainer.dump_state() if self._trainer.leads else None)
        reply = server.boundary(request)
        if not self._background:
            self._channel.delete_tree(f"b/{self._call.attempt}/{sequence - 1}")
        return reply

    def _settle(self) -> None:
        self._flat.check_names()
        if self._settled < self._step:
            self._trainer.settle(self._step)
            self._settled = self._step

    def _end_of(self, sequence: int, step: int, sums: Sums) -> worker_pb2.BoundaryRequest:
        """All but the model's digest."""
        place = f"b/{self._call.attempt}/{sequence}"
        return worker_pb2.BoundaryRequest(
            round=sequence,
            step=step,
            model_key=f"{place}/model" if self._call.worker == 0 else "",
            group=self._trainer.group,
            samples=sums.samples,
            loss=sums.loss,
            compute_seconds=sums.compute_seconds,
        )

    def _put_end(self, request: worker_pb2.BoundaryRequest, vector: Vector, state: State | None) -> None:
        place = f"b/{self._call.attempt}/{request.round}"
        request.digest = self._digest_of(vector)
        if self._trainer.leads:
            self._trainer.put(f"{place}/model", vector)
        if state is not None:
            self._trainer.put_state(f"{place}/state", state)
            if request.model_key:
                request.state_key = f"{place}/state"

    def _digest_of(self, vector: Vector) -> str:
        # A worker alone has nobody to differ from.
        return "alone" if self._trainer.alone else framing.digest_of([vector.view(np.uint8).data])

    # Steps

    def _make_step(self, server: PsClient, step: int) -> None:
        # What is received ahead must be what comes next: another step, and no evaluation before it.
        more = step < self._until
        begun = time.monotonic()
        value, seconds = self._trainer.step(server, step, more)
        took = time.monotonic() - begun
        if not self._trainer.in_stages:
            # What a stage does not compute it mostly waits for other stages.
            self._merge_seconds += max(0.0, took - seconds)
        if self._steady:
            self._steady_seconds.append(took)
        self._steady = True
        counted = self._trainer.counted
        self._step = step
        self._round.samples += counted
        self._round.loss_sum += value * counted
        self._round.compute_seconds += seconds
        self._outcome_steps += 1
        self._outcome_samples += counted
        self._compute_seconds += seconds
        if self._trainer.keeps(step) and not self._background:
            self._trainer.keep(step, self._frame(for_others=True))
        tells = self._trainer.tells and not self._trainer.server_knows
        if tells and time.monotonic() - self._told > _NEWS_SECONDS:
            # Last, as it may be told that the attempt is over: the step is made by then, with all that counts it.
            self._told = time.monotonic()
            server.stepped(worker_pb2.SteppedRequest(step=step, loss=value))

    def _evaluate(self, server: PsClient) -> None:
        """Where the task cannot measure, it has trained nevertheless: the model is worth more than its metrics."""
        self._steady = False
        samples, metrics, told = 0, dict[str, float](), ""
        try:
            with self._evaluation_tried() as tries:
                samples, found = self._trainer.evaluate(self._completed, tries)
            metrics, told = bounded_metrics(found)
        except (GeofedError, MemoryError) as error:
            code = error.code if isinstance(error, GeofedError) else "FUNCTION_OUT_OF_MEMORY"
            if code not in _NOT_MEASURED or not self._trainer.may_not_measure:
                raise
            told = error.message if isinstance(error, GeofedError) else "the evaluation ran out of memory"
        request = worker_pb2.EvaluatedRequest(round=self._completed, samples=samples, metrics=metrics, error=told)
        server.evaluated(request)

    @contextmanager
    def _evaluation_tried(self) -> Iterator[int]:
        """How often this worker was killed in the evaluation of this round: over its memory, say. Too often, and the
        job continues without. A mark in the channel tells; only who is killed leaves it there."""
        if self._trainer.in_stages:
            # All stages evaluate together, or none.
            yield 0
            return
        key = f"e/{self._completed}/{self._call.worker}"
        known = self._channel.get(key) if self._call.attempt > 1 else None
        tries = 0 if known is None else int(bytes(known))
        if tries >= _MOST_TRIES:
            text = f"the worker was killed {tries} times while it evaluated: its memory or its time did not suffice"
            raise GeofedError("FUNCTION_OUT_OF_MEMORY", text)
        self._channel.put(key, [str(tries + 1).encode()])
        try:
            yield tries
        finally:
            self._channel.delete(key)

    # What passes from one invocation to the next

    def _leave(self, broken: bool = False) -> str:
        """Store model, optimiser and the round's sums where the next slice finds them, or the next attempt."""
        if not self._attached:
            return self._call.resume_key
        key = self._trainer.left_key(self._step, broken)
        if not (broken and self._trainer.in_stages and self._channel.has(key)):
            self._channel.put(key, self._frame(for_others=broken))
        if self._call.resume_key.startswith(f"w/{self._call.attempt}/") and self._call.resume_key != key:
            self._channel.delete(self._call.resume_key)
        return key

    def _frame(self, *, for_others: bool) -> list[memoryview]:
        """All that the next invocation needs, of this worker, or of any that holds the same in another attempt."""
        tensors, numbers = self._trainer.dump_state()
        # Until the answer to an end counts here, that round is not completed here, whatever the server has of it.
        completed = self._completed if self._ended is None else self._ended.request.round - 1
        facts = {"round": completed, "step": self._step, "settled": self._settled, **self._round.facts()}
        facts |= {"attempt": self._call.attempt, "worker": self._call.worker, "batch": self._trainer.share(self._step)}
        facts |= self._trainer.facts()
        if self._ended is not None:
            # The slice ends in the wait for an answer, which the next one will ask for again.
            facts |= {"ended_step": self._ended.request.step, **self._ended.sums.facts("ended_")}
        prefixed = {f"o/{name}": array for name, array in tensors.items()}
        prefixed |= dump_tree(self._flat.exact(), "x/") | dump_tree(self._flat.scratch(), "n/")
        facts |= {f"o/{name}": value for name, value in numbers.items()}
        if not for_others:
            # What was sent of a merge that broke off is not known: what is held back goes with the attempt.
            state = self._trainer.merging_state()
            prefixed |= {f"c/{name}": array for name, array in state.tensors.items()}
            facts |= {f"c/{name}": value for name, value in state.facts.items()}
        return framing.encode({"model": self._flat.vector(), **prefixed}, facts)

    def _forget_left(self) -> str:
        if self._call.resume_key:
            self._channel.delete(self._call.resume_key)
        self._trainer.forget()
        return ""

    def _resume(self, server: PsClient, start: worker_pb2.AttachReply) -> bool:
        """Take up what the last slice left, unless the federation has a newer model: then that one counts."""
        key = self._call.resume_key
        if key and not key.startswith(f"w/{self._call.attempt}/"):
            key = self._trainer.taken_over(key)
        left = self._channel.get(key) if key else None
        if left is None or start.finished:
            return False
        frame = framing.decode(left)
        facts = frame.facts
        if "x/tree" not in frame.tensors:
            # An earlier version has left it: the round begins anew.
            return False
        if facts["attempt"] == self._call.attempt:
            # They are this worker's own: no server knows of them.
            self._flat.load_named(load_tree(frame.tensors, "n/"))
        if start.boundary:
            return False
        behind = start.round - int(facts["round"])
        # With background exchange the model is not the federation's; only the answer to the last end was missed.
        missed = self._background and behind == 1 and (facts.get("ended_step") or facts["step"]) == start.step
        if behind and not missed:
            return False
        other_attempt = facts["attempt"] != self._call.attempt
        if other_attempt and self._background:
            # There an attempt begins from the server's model, since the server must know where.
            return False
        self._step = int(facts["step"])
        self._round = Sums.of(facts)
        if other_attempt:
            # Of another worker, whose share of a step may have been another.
            self._round.rescale(self._trainer.share(self._step) / facts["batch"])
        self._flat.load(np.asarray(frame.tensors["model"], np.float32))
        self._flat.load_named(load_tree(frame.tensors, "x/"))
        self._trainer.load_state((_under("o/", frame.tensors), _under("o/", facts)))
        if not other_attempt:
            self._settled = int(facts["settled"])
            self._trainer.recall(facts)
            held = CollectiveState(_under("c/", frame.tensors), _under("c/", facts))
            if held.tensors or held.facts:
                self._trainer.restore_merging(held)
        if missed:
            if "ended_step" not in facts:
                self._round = Sums()
            self._take_answer(start)
        elif "ended_step" in facts:
            self._tell_end_again(server, facts)
        return True

    def _take_answer(self, start: worker_pb2.AttachReply) -> None:
        """The server has taken the end that the last slice told it of; what it has answered counts when it is due."""
        correction = self._correction(start.correction_key)
        reply: Future[Answer] = Future()
        # The others evaluate when the answer counts, too, and nobody continues before all have.
        answer = worker_pb2.BoundaryReply(round=start.round, until_step=start.until_step, evaluate=start.evaluate)
        reply.set_result((answer, correction))
        self._go_on_beside(worker_pb2.BoundaryRequest(round=start.round, step=start.step), Sums(), reply)

    def _tell_end_again(self, server: PsClient, facts: dict[str, float]) -> None:
        """The last slice had handed the model over, but the server has not taken it."""
        sums = Sums.of(facts, "ended_")
        request = self._end_of(self._completed + 1, int(facts["ended_step"]), sums)
        key = f"b/{self._call.attempt}/{request.round}/model"
        vector = self._trainer.own(key)
        if vector is None:
            raise GeofedError("FENCED", f"{key} has gone from the channel: a newer attempt has taken over")
        request.digest = self._digest_of(vector)
        self._go_on_beside(request, sums, self._beside.submit(self._ask_end, server, request))


def _under(prefix: str, named: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
