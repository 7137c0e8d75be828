"""State machine of a partition: it takes events and returns actions.

::

    preparing ──► ready ──► training ──► finished ──► published
        │           │           │            │
        └───────────┴───────────┴────────────┴──► failed | stopped

Workers belong to an *attempt*. When one of them fails, a new attempt begins: the parameter server fences the old one,
and all workers are invoked again from the last durable round, or from the state that a worker of the old attempt has
stored. A parameter server that dies is restarted on its own state; the workers' calls reconnect to it and no new
attempt is needed.

A partition whose number of workers changes gets a new attempt too: the workers of the old attempt store their state at
their next exchange, and the workers of the new one continue from it. No step is lost or repeated, except with a
background exchange, where the open round starts again. Where the batch depends on the number of workers, it changes at
the beginning of the following round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geofed_pb.errors import GeofedError
from region_agent.partition.batches import BatchPlan
from region_agent.partition.events import (
    Action,
    ActionFailed,
    ConfigurePs,
    Deployed,
    Event,
    IdleTick,
    Invoke,
    PartitionConfigured,
    PartitionPrepared,
    PeersKnown,
    Preempted,
    PreparePartition,
    PsEnded,
    PsPeer,
    PsReady,
    PsStatusChanged,
    PsTopology,
    PsView,
    Publish,
    PublishAsked,
    Published,
    RecordEvent,
    RemoveReplicas,
    Retry,
    RetryLater,
    Scaled,
    ScaleWorkers,
    SendReport,
    ShutDown,
    ShutDownFinished,
    Started,
    StartPs,
    Stopped,
    StoreBatches,
    WorkerEnded,
)

__all__ = ["FATAL", "PartitionMachine"]

FATAL = frozenset(
    {
        "TASK_INVALID",
        "TASK_FAILED",
        "SHARD_UNREADABLE",
        "SAMPLES_MISMATCH",
        "SECRET_MISSING",
        "PACKAGES_UNAVAILABLE",
        "MODEL_MISMATCH",
        "RESIDENCY_VIOLATION",
        "CONFIG_INVALID",
        "LIMIT_EXCEEDED",
        "PEER_INVALID",
        "REGION_LOST",
        "STATE_INVALID",
    }
)
"""Error codes that a retry cannot fix: the partition fails immediately."""
_FATAL_TO_PREPARE = frozenset({"MODEL_NOT_FOUND"})
"""The same of preparing: a store that answers that it has no such model to start from has none at a retry either."""
_EXTERNAL = frozenset({"DISK_FULL", "GATEWAY_UNAVAILABLE"})
"""Error codes that the region's operator must fix: the condition names the problem, and retries go on without limit."""
_MAX_FAILURES = 8
"""Failures in a row without a completed round; with the next one the partition fails."""
_MAX_OUT_OF_MEMORY_FAILURES = 2
"""The same limit for a worker that exceeded its memory. After a kill during an evaluation the worker first evaluates in
smaller batches and then skips the evaluation, so training does not depend on it."""
_MAX_PORT_FAILURES = 4
"""The same limit for a parameter server without free ports. The previous server may hold them for some seconds; if
another process holds them, the job's workers in all regions would wait at cost."""
_MAX_TIMEOUT_FAILURES = 2
"""The same limit for calls that time out, as in an evaluation that hangs. Each takes minutes and is billed."""
_MAX_START_FAILURES = 2
"""The same limit for functions without a node or an image. The platform has tried for minutes each time."""
_IDLE_SECONDS = 20.0
"""Time without a step after which the condition reports it."""
_FIRST_PAUSE_SECONDS = 0.2
"""Pause before the first retry; it doubles with each further one."""
_LONGEST_PAUSE_SECONDS = 15.0
"""Longest pause before a retry."""
_EXTERNAL_PAUSE_SECONDS = 3.0
"""Longest pause before a retry after an error of `_EXTERNAL`; short, since such a retry is cheap."""
_STATE_TIMEOUT_SECONDS = 5.0
"""Wait for the workers of a failed attempt to store their state, which they do at their next exchange."""
_HEALTHY_STATE_TIMEOUT_SECONDS = 60.0
"""The same wait for the first worker of an attempt that ended only because the number of workers changes. No worker has
failed, so waiting longer saves repeated steps."""
_OVER = frozenset({"failed", "stopped", "published"})
"""States in which only a stop can follow."""


@dataclass
class _Workers:
    """Workers of the present attempt."""

    running: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


@dataclass
class _PreviousAttempt:
    """The previous attempt, while its workers end."""

    attempt: int = 0
    running: set[int] = field(default_factory=set)
    resume_key: str = ""
    """Channel key of the state that the furthest worker has stored."""
    step: int = -1
    waited_seconds: float = 0.0
    healthy: bool = False
    """The attempt ended because the number of workers changed, not because of a failure."""

    @property
    def awaited(self) -> bool:
        """Whether the new attempt still waits for the state of this one's workers."""
        if not self.running:
            return False
        first = self.healthy and not self.resume_key
        return self.waited_seconds < (_HEALTHY_STATE_TIMEOUT_SECONDS if first else _STATE_TIMEOUT_SECONDS)


@dataclass
class _Function:
    """The workers' function on the function platform."""

    replicas: int | None
    """Replicas that the platform holds; None: unknown."""
    deploying: bool = False
    """A command to the platform is running."""
    awaiting_attempt: int = 0
    """Attempt whose workers are called when that command has finished."""


@dataclass
class _Failures:
    """Failures since the last completed round."""

    count: int = 0
    """Those that count against the limit."""
    pauses: int = 0
    """Pauses before retries; each is longer than the one before."""
    round: int = 0
    """Rounds that were completed at the last failure."""
    last: str = ""
    """Text of the last failure."""

    def add(self, completed_rounds: int, *, counts: bool) -> None:
        if completed_rounds > self.round:
            self.count = self.pauses = 0
        self.round = completed_rounds
        self.count += counts
        self.pauses += 1

    def summary(self, completed_rounds: int) -> str:
        """Text about the failures; empty if there are none."""
        if not self.count or completed_rounds > self.round:
            return ""
        count = "a failure" if self.count == 1 else f"{self.count} failures"
        return f"{count} without a completed round in between, the last: {self.last}"


class PartitionMachine:
    """State machine of one partition. ``attempt``: the last one before the agent's restart; 0: none."""

    def __init__(
        self,
        region: str,
        workers: int,
        *,
        epoch: int,
        attempt: int = 0,
        batches: BatchPlan | None = None,
        preemptible: bool = False,
        order: int = 0,
    ) -> None:
        self.region, self.workers = region, workers
        self.preemptible = preemptible
        """The workers run on preemptible capacity."""
        self.preempted = False
        """Workers were preempted since the control plane last set their number."""
        self.order = order
        """Number of the control plane's last scaling command that was accepted."""
        self._batches = batches or BatchPlan(1, 0)
        self._begun = attempt > 0
        """Steps may have been made."""
        self._fenced = (0, 0)
        """Attempt that the parameter server has accepted last, and rounds completed by then."""
        self._awaits_fence = False
        """The present attempt's workers are called after the parameter server has accepted the attempt."""
        self.epoch, self.attempt = epoch, attempt
        self.state = "new"
        self.condition = ""
        self.error: GeofedError | None = None
        self.ps_address = ""
        self._prepared = False
        self._ps_up = False
        self._peers: tuple[PsPeer, ...] = ()
        self._topology = PsTopology()
        self._finish = self._halt = False
        self._halted = False
        """The running parameter server knows that no round ends any more; only the evaluation is left."""
        self._view = PsView()
        self._worker_group = _Workers()
        self._previous = _PreviousAttempt()
        self._waiting: dict[int, WorkerEnded] = {}
        """Workers of the present attempt that are invoked again only when the round that they wait for has ended."""
        self._failures = _Failures()
        self._transient_condition = ""
        """A condition that the next step, or the next round, clears."""
        self._publish_wanted = False
        self._publishing = False
        self._blob_digest = ""
        self._preparing = False
        self._function = _Function(workers)

    @property
    def holds_workers(self) -> bool:
        """Whether workers may be running, or are still to be started."""
        return self.state not in (*_OVER, "finished")

    @property
    def over(self) -> bool:
        """Whether only a stop can follow."""
        return self.state in _OVER

    def handle(self, event: Event) -> list[Action]:
        """Process an event and return the actions that it requires, in order."""
        if isinstance(event, Stopped):
            return self._stopped(event)
        if isinstance(event, ShutDownFinished):
            # Only now is the account in the report complete.
            return [self._report()]
        if self.state in ("failed", "stopped"):
            return [self._report()] if isinstance(event, Started) else []
        match event:
            case Started():
                return self._started(event)
            case PartitionPrepared():
                self._prepared, self._preparing = True, False
                return self._maybe_train()
            case PeersKnown():
                self._peers, self._topology = event.peers, event.topology
                self._finish, self._halt = event.finish, event.halt
                return self._configure()
            case PsReady():
                return self._ps_ready(event)
            case PartitionConfigured():
                return self._configured(event)
            case PsStatusChanged():
                return self._ps_status_changed(event.view)
            case IdleTick():
                return self._progress(event)
            case PsEnded():
                self._ps_up = self._halted = False
                return self._after_failure(event.error, "ps-ended", "the parameter server ended")
            case WorkerEnded():
                return self._worker_ended(event)
            case ActionFailed():
                return self._action_failed(event)
            case Retry():
                return self._retry(event)
            case Scaled():
                return self._scale_ordered(event)
            case Preempted():
                return self._preempted(event)
            case Deployed():
                return self._deployed(event)
            case PublishAsked():
                self._publish_wanted = True
                return self._maybe_publish()
            case Published():
                self._blob_digest = event.blob_digest
                return self._enter("published")

    # Events from the control plane

    def _started(self, event: Started) -> list[Action]:
        if self.state == "new":
            self.epoch, self.attempt = max(self.epoch, event.epoch), self.attempt + 1
            return [*self._enter("preparing"), *self._prepare(), StartPs(self.epoch, self.attempt)]
        if event.epoch > self.epoch:
            self.epoch = event.epoch
            return [*self._configure(), self._report()]
        return [self._report()]

    def _prepare(self) -> list[Action]:
        if self._prepared or self._preparing:
            return []
        self._preparing, self._function.replicas = True, self.workers
        return [PreparePartition()]

    def _stopped(self, event: Stopped) -> list[Action]:
        if self.state == "stopped":
            return [self._report()]
        self.state, self.condition = "stopped", event.reason
        return [ShutDown(event.discard)]

    # Events from the parameter server

    def _ps_ready(self, event: PsReady) -> list[Action]:
        moved = event.address != self.ps_address
        self.ps_address, self._ps_up = event.address, True
        actions = self._configure()
        if moved and self.state not in ("preparing", "new"):
            actions.append(self._report())
        # A server that has started again does not know who waits.
        return actions + self._invoke_waiting(all_=True) + self._maybe_train() + self._maybe_publish()

    def _configure(self) -> list[Action]:
        if not self._ps_up:
            return []
        return [ConfigurePs(self.epoch, self.attempt, self._peers, self._topology, self._finish, self._halt)]

    def _configured(self, event: PartitionConfigured) -> list[Action]:
        self._fenced = (event.attempt, event.round)
        self._halted |= event.halt and self._ps_up
        again = self._invoke_waiting()
        if not self._awaits_fence or event.attempt != self.attempt:
            return again
        self.condition = self._view.condition
        return again + self._maybe_train()

    def _ps_status_changed(self, view: PsView) -> list[Action]:
        before, self._view = self._view, view
        again = self._invoke_waiting()
        if view.phase == "finished":
            return again + self._maybe_finish()
        if self.state != "training":
            return again
        if view.condition != before.condition or (self._transient_condition and view.round > self._failures.round):
            self._set_transient_condition(self._failures.summary(view.round))
            return [*again, self._report()]
        return again

    def _progress(self, event: IdleTick) -> list[Action]:
        """Report task code that hangs. The condition goes with the next report, which comes within seconds."""
        if (
            self.state != "training"
            or not self._worker_group.running
            or self.condition not in ("", self._transient_condition)
        ):
            return []
        idle = event.idle_seconds >= _IDLE_SECONDS
        text = f"no step for {event.idle_seconds:.0f} s (a call without an answer is ended after"
        notes = [f"{text} {event.limit_seconds:.0f} s)"] if idle else []
        self._set_transient_condition("; ".join(filter(None, [*notes, self._failures.summary(self._view.round)])))
        return []

    def _set_transient_condition(self, text: str) -> None:
        """Set a condition; one that the parameter server has reported takes precedence."""
        self._transient_condition = "" if self._view.condition else text
        self.condition = self._view.condition or text

    # Workers

    def _maybe_train(self) -> list[Action]:
        if not (self._prepared and self._ps_up):
            return []
        actions: list[Action] = []
        if self.state == "preparing":
            actions += self._enter("ready")
            actions += self._enter("training")
        if self.state == "training" and not self._worker_group.running and not self._worker_group.done:
            actions += self._invoke_all()
        return actions

    def _invoke_all(self) -> list[Action]:
        batch_actions: list[Action] = []
        if self.workers and self._batches.pending:
            awaited, self._awaits_fence = self._awaits_fence, self._begun and self._fenced[0] != self.attempt
            if self._awaits_fence:
                # An earlier configuration of the server may have failed without a retry, as nothing waited for it.
                return [] if awaited else self._configure()
        if self._function.replicas != self.workers:
            # This runs after the previous attempt's workers have stored their state, and before any new call.
            self._function.awaiting_attempt = self.attempt
            return self._send_order(ScaleWorkers(self.workers))
        if not self.workers:
            return []
        if self._batches.pending:
            batch_actions = self._settle_batch()
        self._worker_group, self._begun = _Workers(running=set(range(self.workers))), True
        previous, self._previous = self._previous, _PreviousAttempt()
        actions: list[Action] = [self._invoke(worker, previous.resume_key) for worker in range(self.workers)]
        if previous.resume_key:
            text = f"{self.region}: attempt {self.attempt} continues from step {previous.step}"
            actions.append(RecordEvent("attempt.resumed", text, {"attempt": self.attempt, "step": previous.step}))
        return [*batch_actions, *actions]

    def _invoke(self, worker: int, resume_key: str) -> Invoke:
        return Invoke(worker, self.attempt, resume_key, self.workers, self._batches.stretches, self.preemptible)

    def _settle_batch(self) -> list[Action]:
        made = self._batches.settle(self._fenced[1] if self._begun else None)
        text = (
            f"{self.region}: from step {made.first_step} on {self.workers} workers make steps of {made.batch} samples, "
            f"at {made.rate:.3g} times the learning rate"
        )
        data: dict[str, object] = {
            "first_step": made.first_step, "workers": self.workers, "batch": made.batch, "learning_rate": made.rate
        }  # fmt: skip
        return [StoreBatches(self._batches.stretches), RecordEvent("partition.batch", text, data)]

    def _worker_ended(self, event: WorkerEnded) -> list[Action]:
        if event.attempt == self._previous.attempt and event.worker in self._previous.running:
            self._previous.running.discard(event.worker)
            self._keep_furthest(event)
            return []
        if event.attempt != self.attempt or event.worker not in self._worker_group.running:
            return []
        if event.status == "continue":
            # Nothing is paid while a worker would only wait, as for a region that is gone.
            self._waiting[event.worker] = event
            return self._invoke_waiting()
        self._worker_group.running.discard(event.worker)
        if event.status == "done":
            self._worker_group.done.add(event.worker)
            return self._maybe_finish()
        error = event.error or GeofedError("FUNCTION_FAILED", f"worker {event.worker} ended without a reason")
        actions = self._after_failure(error, "worker-failed", f"worker {event.worker} failed")
        self._keep_furthest(event)
        return actions

    def _invoke_waiting(self, *, all_: bool = False) -> list[Action]:
        """Invoke the workers that have something to do again, or all of them."""
        # After a halt the round that they wait for never ends, and the last merged model is still to be evaluated.
        done = self._halted or self._view.phase in ("finished", "failed")
        due = [one for one in self._waiting.values() if all_ or done or one.waits_for <= self._view.round]
        for one in due:
            del self._waiting[one.worker]
        return [self._invoke(one.worker, one.resume_key) for one in due]

    def _leave_attempt(self, *, healthy: bool = False) -> None:
        """Make the present attempt the previous one; its waiting workers have ended already."""
        running = self._worker_group.running - set(self._waiting)
        self._previous = _PreviousAttempt(self.attempt, running, healthy=healthy)
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            self._keep_furthest(one)

    def _keep_furthest(self, event: WorkerEnded) -> None:
        """Remember the state of the previous attempt's furthest worker, from which all continue.

        It is at most one step ahead of any other worker.
        """
        if event.status in ("left", "continue") and event.resume_key and event.step > self._previous.step:
            self._previous.resume_key, self._previous.step = event.resume_key, event.step

    def _maybe_finish(self) -> list[Action]:
        """Report the end after the last invocation has returned, so that the account in the report is complete."""
        over = self._view.phase == "finished" and 0 < self.workers == len(self._worker_group.done)
        return self._enter("finished") if over and self.state == "training" else []

    # Scaling

    def _scale_ordered(self, event: Scaled) -> list[Action]:
        preempted, self.preempted = self.preempted, False
        self.order = self.order if self._ending else event.order
        # The remaining workers still compute the batch of all workers until they get one of their own.
        return self._scaled(event, new_attempt=preempted and event.batch > 0)

    def _scaled(self, event: Scaled, *, new_attempt: bool = False) -> list[Action]:
        moves = event.preemptible != self.preemptible
        if (event.workers == self.workers and not (moves or new_attempt)) or self._ending:
            return []
        before, self.workers, self.preemptible = self.workers, event.workers, event.preemptible
        if event.batch:
            self._batches.want(event.batch, event.rate)
        if self._preparing or moves:
            # The function may be deployed with the old or the new number of replicas, or moves to other capacity.
            self._function.replicas = None
        self.condition = f"paused: {event.reason or 'no workers'}" if not event.workers else ""
        kind = "preemptible workers" if self.preemptible else "workers"
        words = f"{before} → {event.workers} {kind}" + (f": {event.reason}" if event.reason else "")
        data: dict[str, object] = {"before": before, "workers": event.workers, "reason": event.reason}
        data["preemptible"] = self.preemptible
        actions: list[Action] = [RecordEvent("partition.scaled", f"{self.region}: {words}", data)]
        if self.state == "training":
            if self._worker_group.running:
                self._leave_attempt(healthy=True)
            self.attempt += 1
            self._worker_group, self._awaits_fence = _Workers(), False
            actions += [*self._configure(), RetryLater(self.attempt, _FIRST_PAUSE_SECONDS)]
        return [*actions, self._report()]

    def _preempted(self, event: Preempted) -> list[Action]:
        """Scale to the remaining workers; the control plane gets a report and then sets the number that it wants."""
        if not self.preemptible or event.workers >= self.workers or self._ending:
            return []
        self.preempted = True
        actions = self._scaled(Scaled(event.workers, "workers were taken away", preemptible=True))
        self._function.replicas = None
        # Preempted replicas are ended now; the remaining ones store their state at their next exchange.
        return [*actions, *(self._send_order(RemoveReplicas(self.workers)) if self.state == "training" else [])]

    def _send_order(self, order: Action) -> list[Action]:
        """Return a command for the function platform, unless one is running, so that none overtakes another."""
        if self._function.deploying:
            return []
        self._function.deploying = True
        return [order]

    def _deployed(self, event: Deployed) -> list[Action]:
        self._function.deploying = False
        self._function.replicas = event.workers if event.preemptible == self.preemptible else None
        if self.preempted and self._function.replicas not in (None, self.workers):
            return self._send_order(RemoveReplicas(self.workers))
        return self._maybe_train() if self._function.awaiting_attempt == self.attempt else []

    @property
    def _ending(self) -> bool:
        """Whether the number of workers is final. Where some workers are done, the others are about to be."""
        return self.state in (*_OVER, "finished") or bool(self._worker_group.done)

    # Failures

    def _action_failed(self, event: ActionFailed) -> list[Action]:
        untold = self._halt and not self._halted and self.holds_workers
        if event.step == "configure" and not (self._awaits_fence or untold):
            return []
        self._preparing = self._preparing and event.step != "prepare"
        self._publishing = self._publishing and event.step != "publish"
        if event.step == "scale":
            self._function.deploying, self._function.replicas = False, None
        fatal = event.step == "prepare" and event.error.code in _FATAL_TO_PREPARE
        return self._after_failure(event.error, "setback", "a step could not be taken", fatal=fatal)

    def _after_failure(self, error: GeofedError, kind: str, text: str, *, fatal: bool = False) -> list[Action]:
        if self.state in _OVER:
            return []
        waits = error.code in _EXTERNAL or (kind == "setback" and error.retryable)
        self._failures.add(self._view.round, counts=not waits)
        record = RecordEvent(
            kind, f"{self.region}: {text}: {error.message}", {"code": error.code, "attempt": self.attempt}
        )
        if fatal or error.code in FATAL or self._failures.count > _failure_limit(error):
            return [record, *self.fail(error)]
        longest = _EXTERNAL_PAUSE_SECONDS if error.code in _EXTERNAL else _LONGEST_PAUSE_SECONDS
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(self._failures.pauses - 1, 16), longest)
        self.condition = f"{error.code}: {error.message}; retrying"
        self._failures.last = f"{error.code}: {error.message}"
        if kind == "worker-failed":
            # The workers that still run belong to the old attempt; they are fenced as soon as the new one begins.
            self._leave_attempt()
            self.attempt += 1
            self._worker_group = _Workers()
        # The parameter server learns of the new attempt now, so that workers waiting there learn that theirs is over.
        fenced = self._configure() if kind == "worker-failed" else []
        return [record, self._report(), *fenced, RetryLater(self.attempt, pause)]

    def _retry(self, event: Retry) -> list[Action]:
        if event.attempt != self.attempt:
            return []
        if self._previous.awaited:
            self._previous.waited_seconds += _FIRST_PAUSE_SECONDS
            # The old attempt's workers learn from the parameter server that it is over.
            server = [] if self._ps_up else [StartPs(self.epoch, self.attempt)]
            return [*server, RetryLater(self.attempt, _FIRST_PAUSE_SECONDS)]
        if self.workers and not self._awaits_fence:
            self._set_transient_condition(self._failures.summary(self._view.round))
        actions = self._prepare()
        if not self._ps_up:
            actions.append(StartPs(self.epoch, self.attempt))
        else:
            actions += self._configure()
        return [*actions, *self._maybe_train(), *self._maybe_publish()]

    # The end

    def _maybe_publish(self) -> list[Action]:
        if self._publishing or not (self._publish_wanted and self._ps_up and self.state == "finished"):
            return []
        self._publishing = True
        return [Publish()]

    def _enter(self, state: str, condition: str = "") -> list[Action]:
        self.state, self.condition = state, condition
        return [self._report(), *(self._maybe_publish() if state == "finished" else [])]

    def fail(self, error: GeofedError) -> list[Action]:
        """End the partition with an error, as after an event that could not be handled."""
        if self.state in ("failed", "stopped"):
            return [self._report()]
        self.state, self.condition, self.error = "failed", error.message, error
        return [ShutDown(discard=False)]

    def _report(self) -> SendReport:
        return SendReport(self.state, self.condition, self.error, self._blob_digest)


def _failure_limit(error: GeofedError) -> int:
    """Failures in a row without a completed round that a partition survives; the next one fails it."""
    limits = {
        "FUNCTION_OUT_OF_MEMORY": _MAX_OUT_OF_MEMORY_FAILURES,
        "GPU_MEMORY": _MAX_OUT_OF_MEMORY_FAILURES,
        "FUNCTION_TIMEOUT": _MAX_TIMEOUT_FAILURES,
        "PORT_IN_USE": _MAX_PORT_FAILURES,
        "FUNCTION_UNSCHEDULABLE": _MAX_START_FAILURES,
        "IMAGE_UNAVAILABLE": _MAX_START_FAILURES,
    }
    return limits.get(error.code, _MAX_FAILURES)
