"""A partition's life in its region, as a state machine: events in, actions out.

::

    preparing ──► ready ──► training ──► finished ──► published
        │           │           │            │
        └───────────┴───────────┴────────────┴──► failed | stopped

Workers belong to an *attempt*. When one of them fails, or the parameter server cannot continue with them, a new attempt
begins: the parameter server fences the old one, and all workers are invoked again from the last durable round. A
parameter server that dies is started again on its own state, and the workers' calls find it there; they need not
begin anew.

A partition whose number of workers changes gets a new attempt too: the old one's workers leave what they have at their
next exchange, and the new ones continue from there. No step is lost or made twice, except in the background, where the
open round begins anew. Where the batch goes with the workers it changes with the round after that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geofed_pb.errors import GeofedError
from region_agent.partition.batches import BatchPlan
from region_agent.partition.events import (
    Action,
    Begin,
    Configured,
    ConfigurePs,
    Deployed,
    Ended,
    Event,
    Happened,
    Invoke,
    KeepBatches,
    PeersKnown,
    Preempted,
    Prepared,
    Progress,
    PsEnded,
    PsPeer,
    PsReady,
    PsSaid,
    PsView,
    PsWays,
    Publish,
    PublishAsked,
    Published,
    Quit,
    Report,
    Restart,
    Retry,
    Scale,
    Scaled,
    Setback,
    Started,
    StartPs,
    Stopped,
    TakeAway,
    WorkerEnded,
)

__all__ = ["FATAL", "PartitionMachine"]

FATAL = frozenset(
    {
        "TASK_INVALID",
        "TASK_FAILED",
        "SHARD_UNREADABLE",
        "SAMPLES_MISMATCH",
        "MODEL_MISMATCH",
        "RESIDENCY_VIOLATION",
        "CONFIG_INVALID",
        "LIMIT_EXCEEDED",
        "STATE_INVALID",
    }
)
"""Codes that trying again does not mend."""
_OUTSIDE = frozenset({"DISK_FULL", "GATEWAY_UNAVAILABLE"})
"""Codes of what somebody outside must mend: the partition says what it waits for, and waits as long as it takes."""
_SETBACKS_WITHOUT_PROGRESS = 8
"""After this many in a row, with no round in between, the partition has failed."""
_OUT_OF_MEMORY_SETBACKS = 2
"""The same for a worker that was ended over its memory. Who was killed in an evaluation tries it in smaller batches,
and then continues without: nothing that is trained is lost over it."""
_PORT_SETBACKS = 4
"""The same for a parameter server without ports: a server before it may not have let go of them yet, for seconds. While
others hold them, the job's workers in all regions would cost money for nothing."""
_TIMEOUT_SETBACKS = 2
"""The same for a call that did not answer in time, as in an evaluation that hangs: each takes minutes, and costs what
they cost."""
_IDLE_SECONDS = 20.0
"""Without a step, before the condition says so."""
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 15.0
_OUTSIDE_PAUSE_SECONDS = 3.0
"""Looking again whether it is mended costs little."""
_LONGEST_WAIT_FOR_LEFT_SECONDS = 5.0
"""For workers of a broken attempt to leave what they have; they do at their next exchange."""
_LONGEST_WAIT_FOR_FIRST_SECONDS = 60.0
"""For the first worker of an attempt that ends only because there will be more workers, or fewer: all are well, and
none has to make a step again."""
_OVER = frozenset({"failed", "stopped", "published"})


@dataclass
class _Workers:
    """The workers of the present attempt."""

    running: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)


@dataclass
class _Broken:
    """The attempt before, while its workers end."""

    attempt: int = 0
    running: set[int] = field(default_factory=set)
    resume_key: str = ""
    """What the one that got furthest has left."""
    step: int = -1
    waited_seconds: float = 0.0
    well: bool = False
    """It was broken off to continue with another number of workers."""

    @property
    def awaited(self) -> bool:
        """Whether what its workers have is still to come."""
        if not self.running:
            return False
        first = self.well and not self.resume_key
        return self.waited_seconds < (_LONGEST_WAIT_FOR_FIRST_SECONDS if first else _LONGEST_WAIT_FOR_LEFT_SECONDS)


class PartitionMachine:
    """One partition. ``attempt`` is the last one that an earlier life of the agent used."""

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
        """The workers are on capacity that may be taken away."""
        self.preempted = False
        """Some were, since the control plane last said how many there shall be."""
        self.order = order
        """The last one about their number that it obeys."""
        self._batches = batches or BatchPlan(1, 0)
        self._begun = attempt > 0
        """Steps may have been made."""
        self._fenced = (0, 0)
        """Attempt that the parameter server knows, and rounds that were completed by then."""
        self._awaits_fence = False
        """The present attempt's workers are called once the parameter server has said where it stands."""
        self.epoch, self.attempt = epoch, attempt
        self.state = "new"
        self.condition = ""
        self.error: GeofedError | None = None
        self.ps_address = ""
        self._prepared = False
        self._ps_up = False
        self._peers: tuple[PsPeer, ...] = ()
        self._ways = PsWays()
        self._finish = False
        self._view = PsView()
        self._worker_group = _Workers()
        self._broken = _Broken()
        self._setbacks = 0
        self._setback_round = 0
        self._last_setback = ""
        self._noted = ""
        """A condition that the next step, or the next round, does away with."""
        self._publish_wanted = False
        self._publishing = False
        self._blob_digest = ""
        self._preparing = False
        self._pauses = 0
        self._replicas: int | None = workers
        """That the function platform holds; None: not known."""
        self._deploying = False
        """It has been asked for others, and has not answered."""
        self._awaits_deploy = 0
        """Attempt whose workers are called as soon as it has."""

    @property
    def holds_workers(self) -> bool:
        """They may be at work, or are to be."""
        return self.state not in (*_OVER, "finished")

    @property
    def over(self) -> bool:
        """Nothing but a stop can follow."""
        return self.state in _OVER

    def handle(self, event: Event) -> list[Action]:
        """Take an event; returns what is to be done because of it, in order."""
        if isinstance(event, Stopped):
            return self._stopped(event)
        if isinstance(event, Ended):
            # Only now is the account that goes with it whole.
            return [self._report()]
        if self.state in ("failed", "stopped"):
            return [self._report()] if isinstance(event, Started) else []
        match event:
            case Started():
                return self._started(event)
            case Prepared():
                self._prepared, self._preparing = True, False
                return self._maybe_train()
            case PeersKnown():
                self._peers, self._ways, self._finish = event.peers, event.ways, event.finish
                return self._configure()
            case PsReady():
                return self._ps_ready(event)
            case Configured():
                return self._configured(event)
            case PsSaid():
                return self._ps_said(event.view)
            case Progress():
                return self._progress(event)
            case PsEnded():
                self._ps_up = False
                return self._after_setback(event.error, "ps-ended", "the parameter server ended")
            case WorkerEnded():
                return self._worker_ended(event)
            case Setback() if event.step == "configure" and not self._awaits_fence:
                return []
            case Setback():
                self._preparing = self._preparing and event.step != "prepare"
                self._publishing = self._publishing and event.step != "publish"
                if event.step == "scale":
                    self._deploying, self._replicas = False, None
                return self._after_setback(event.error, "setback", "a step could not be taken")
            case Retry():
                return self._retry(event)
            case Scaled():
                fewer, self.preempted = self.preempted, False
                self.order = self.order if self._ends else event.order
                # Those that are left make the batch of all until it is known what they are to make.
                return self._scaled(event, anew=fewer and event.batch > 0)
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

    # The control plane speaks

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
        self._preparing, self._replicas = True, self.workers
        return [Begin()]

    def _stopped(self, event: Stopped) -> list[Action]:
        if self.state == "stopped":
            return [self._report()]
        self.state, self.condition = "stopped", event.reason
        return [Quit(event.discard)]

    # The parameter server speaks

    def _ps_ready(self, event: PsReady) -> list[Action]:
        moved = event.address != self.ps_address
        self.ps_address, self._ps_up = event.address, True
        actions = self._configure()
        if moved and self.state not in ("preparing", "new"):
            actions.append(self._report())
        return actions + self._maybe_train() + self._maybe_publish()

    def _configure(self) -> list[Action]:
        return [ConfigurePs(self.epoch, self.attempt, self._peers, self._ways, self._finish)] if self._ps_up else []

    def _configured(self, event: Configured) -> list[Action]:
        self._fenced = (event.attempt, event.round)
        if not self._awaits_fence or event.attempt != self.attempt:
            return []
        self.condition = self._view.condition
        return self._maybe_train()

    def _ps_said(self, view: PsView) -> list[Action]:
        before, self._view = self._view, view
        if view.phase == "finished":
            return self._maybe_finish()
        if self.state != "training":
            return []
        if view.condition != before.condition or (self._noted and view.round > self._setback_round):
            self._note("" if view.round > self._setback_round else self._tries())
            return [self._report()]
        return []

    def _progress(self, event: Progress) -> list[Action]:
        """Task code that hangs says nothing itself. What is noted goes with the next report; there is one soon."""
        if self.state != "training" or not self._worker_group.running or self.condition not in ("", self._noted):
            return []
        idle = event.idle_seconds >= _IDLE_SECONDS
        text = f"no step for {event.idle_seconds:.0f} s (a call without an answer is ended after"
        noted = [f"{text} {event.limit_seconds:.0f} s)"] if idle else []
        self._note("; ".join(filter(None, [*noted, self._tries()])))
        return []

    def _note(self, text: str) -> None:
        """Something to say where the server has nothing that is waited for."""
        self._noted = "" if self._view.condition else text
        self.condition = self._view.condition or text

    def _tries(self) -> str:
        """Task code that fails again and again is tried again in between."""
        if not self._setbacks or self._view.round > self._setback_round:
            return ""
        count = "a failure" if self._setbacks == 1 else f"{self._setbacks} failures"
        return f"{count} without a round in between, the last: {self._last_setback}"

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
        stated: list[Action] = []
        if self.workers and self._batches.pending:
            awaited, self._awaits_fence = self._awaits_fence, self._begun and self._fenced[0] != self.attempt
            if self._awaits_fence:
                # What it was asked before anybody waited for it may have failed.
                return [] if awaited else self._configure()
        if self._replicas != self.workers:
            # Not before those who had to leave something have done so; nor is anybody called before it is done.
            self._awaits_deploy = self.attempt
            return self._order(Scale(self.workers))
        if not self.workers:
            return []
        if self._batches.pending:
            stated = self._state_batch()
        self._worker_group, self._begun = _Workers(running=set(range(self.workers))), True
        left, self._broken = self._broken, _Broken()
        actions: list[Action] = [self._invoke(worker, left.resume_key) for worker in range(self.workers)]
        if left.resume_key:
            text = f"{self.region}: attempt {self.attempt} continues from step {left.step}"
            actions.append(Happened("attempt.resumed", text, {"attempt": self.attempt, "step": left.step}))
        return [*stated, *actions]

    def _invoke(self, worker: int, resume_key: str) -> Invoke:
        return Invoke(worker, self.attempt, resume_key, self.workers, self._batches.stretches, self.preemptible)

    def _state_batch(self) -> list[Action]:
        made = self._batches.settle(self._fenced[1] if self._begun else None)
        text = (
            f"{self.region}: from step {made.first_step} on {self.workers} workers make steps of {made.batch} samples, "
            f"at {made.rate:.3g} times the learning rate"
        )
        data: dict[str, object] = {
            "first_step": made.first_step, "workers": self.workers, "batch": made.batch, "learning_rate": made.rate
        }  # fmt: skip
        return [KeepBatches(self._batches.stretches), Happened("partition.batch", text, data)]

    def _worker_ended(self, event: WorkerEnded) -> list[Action]:
        if event.attempt == self._broken.attempt and event.worker in self._broken.running:
            self._broken.running.discard(event.worker)
            self._take_up(event)
            return []
        if event.attempt != self.attempt or event.worker not in self._worker_group.running:
            return []
        if event.status == "continue":
            return [self._invoke(event.worker, event.resume_key)]
        self._worker_group.running.discard(event.worker)
        if event.status == "done":
            self._worker_group.done.add(event.worker)
            return self._maybe_finish()
        error = event.error or GeofedError("FUNCTION_FAILED", f"worker {event.worker} ended without a reason")
        actions = self._after_setback(error, "worker-failed", f"worker {event.worker} failed")
        self._take_up(event)
        return actions

    def _take_up(self, event: WorkerEnded) -> None:
        """All continue from where the furthest of a broken attempt was; it is at most one step ahead of any other."""
        if event.status in ("left", "continue") and event.resume_key and event.step > self._broken.step:
            self._broken.resume_key, self._broken.step = event.resume_key, event.step

    def _maybe_finish(self) -> list[Action]:
        """The end is told once the last invocation has returned, so that the account it goes with is whole."""
        over = self._view.phase == "finished" and 0 < self.workers == len(self._worker_group.done)
        return self._enter("finished") if over and self.state == "training" else []

    # More workers, or fewer

    def _scaled(self, event: Scaled, *, anew: bool = False) -> list[Action]:
        moves = event.preemptible != self.preemptible
        if (event.workers == self.workers and not (moves or anew)) or self._ends:
            return []
        before, self.workers, self.preemptible = self.workers, event.workers, event.preemptible
        if event.batch:
            self._batches.want(event.batch, event.rate)
        if self._preparing or moves:
            # Whether the function is deployed with the number of before or of now is not known; or it moves.
            self._replicas = None
        self.condition = f"paused: {event.reason or 'no workers'}" if not event.workers else ""
        kind = "preemptible workers" if self.preemptible else "workers"
        words = f"{before} → {event.workers} {kind}" + (f": {event.reason}" if event.reason else "")
        data: dict[str, object] = {"before": before, "workers": event.workers, "reason": event.reason}
        data["preemptible"] = self.preemptible
        actions: list[Action] = [Happened("partition.scaled", f"{self.region}: {words}", data)]
        if self.state == "training":
            if self._worker_group.running:
                self._broken = _Broken(self.attempt, set(self._worker_group.running), well=True)
            self.attempt += 1
            self._worker_group, self._awaits_fence = _Workers(), False
            actions += [*self._configure(), Restart(self.attempt, _FIRST_PAUSE_SECONDS)]
        return [*actions, self._report()]

    def _preempted(self, event: Preempted) -> list[Action]:
        """As if the control plane had asked for what is left; it is told, and asks for what it wants instead."""
        if not self.preemptible or event.workers >= self.workers or self._ends:
            return []
        self.preempted = True
        actions = self._scaled(Scaled(event.workers, "workers were taken away", preemptible=True))
        self._replicas = None
        # Those that go are ended now; those that stay leave what they have at their next exchange.
        return [*actions, *(self._order(TakeAway(self.workers)) if self.state == "training" else [])]

    def _order(self, order: Action) -> list[Action]:
        """Tell the function platform, one order at a time, so that none overtakes another."""
        if self._deploying:
            return []
        self._deploying = True
        return [order]

    def _deployed(self, event: Deployed) -> list[Action]:
        self._deploying = False
        self._replicas = event.workers if event.preemptible == self.preemptible else None
        if self.preempted and self._replicas not in (None, self.workers):
            return self._order(TakeAway(self.workers))
        return self._maybe_train() if self._awaits_deploy == self.attempt else []

    @property
    def _ends(self) -> bool:
        """Its workers change no more; where some are done the others are about to be."""
        return self.state in (*_OVER, "finished") or bool(self._worker_group.done)

    # Setbacks

    def _after_setback(self, error: GeofedError, kind: str, text: str) -> list[Action]:
        if self.state in _OVER:
            return []
        if self._view.round > self._setback_round:
            self._setbacks = self._pauses = 0
        self._setback_round = self._view.round
        waits = error.code in _OUTSIDE or (kind == "setback" and error.retryable)
        self._setbacks += not waits
        self._pauses += 1
        told = Happened(kind, f"{self.region}: {text}: {error.message}", {"code": error.code, "attempt": self.attempt})
        if error.code in FATAL or self._setbacks > _patience(error):
            self.state, self.condition, self.error = "failed", error.message, error
            return [told, Quit(discard=False)]
        longest = _OUTSIDE_PAUSE_SECONDS if error.code in _OUTSIDE else _LONGEST_PAUSE_SECONDS
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(self._pauses - 1, 16), longest)
        self.condition = f"{error.code}: {error.message}; trying again"
        self._last_setback = f"{error.code}: {error.message}"
        if kind == "worker-failed":
            # The workers that still run belong to the old attempt; they are fenced as soon as the new one begins.
            self._broken = _Broken(self.attempt, set(self._worker_group.running))
            self.attempt += 1
            self._worker_group = _Workers()
        # The parameter server must know at once, so that those who wait there hear that their attempt is over.
        fenced = self._configure() if kind == "worker-failed" else []
        return [told, self._report(), *fenced, Restart(self.attempt, pause)]

    def _retry(self, event: Retry) -> list[Action]:
        if event.attempt != self.attempt:
            return []
        if self._broken.awaited:
            self._broken.waited_seconds += _FIRST_PAUSE_SECONDS
            # It is the parameter server that tells them that their attempt is over.
            server = [] if self._ps_up else [StartPs(self.epoch, self.attempt)]
            return [*server, Restart(self.attempt, _FIRST_PAUSE_SECONDS)]
        if self.workers and not self._awaits_fence:
            self._note(self._tries())
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

    def _report(self) -> Report:
        return Report(self.state, self.condition, self.error, self._blob_digest)


def _patience(error: GeofedError) -> int:
    """Setbacks in a row, with no round in between, after which a partition fails with the next one."""
    known = {
        "FUNCTION_OUT_OF_MEMORY": _OUT_OF_MEMORY_SETBACKS,
        "FUNCTION_TIMEOUT": _TIMEOUT_SETBACKS,
        "PORT_IN_USE": _PORT_SETBACKS,
    }
    return known.get(error.code, _SETBACKS_WITHOUT_PROGRESS)
