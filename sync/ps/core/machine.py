"""The parameter server as a state machine: events in, actions out; no sockets, no clock, no files.

A partition's life is a chain of rounds. In a round the workers make their local steps, merging gradients here after
each (`Merge`); at its end their model's change becomes an update that is made durable (`Prepare`) and shipped to
every peer (`Ship`), and updates are merged into the model (`Apply`). When that is done, and with which model the
workers continue, is what `Synchronous` and `Background` decide. Round 0 has no steps: the first region's fresh model is
its update, so that all regions begin with the same bits whatever machine they run on.

Exactly once: an update is named (job, region, sequence); a region's updates are merged in the order of their sequence,
each only where the watermark says that the one before was the last. Model and watermarks become durable in one step of
the shell.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace

from sync.ps.core.actions import Action, Failed, Forget, Keep, Log, Merge, Prepare, Refuse, Reply, Reproduce
from sync.ps.core.answers import EvaluatedAnswer
from sync.ps.core.events import (
    Applied,
    Attached,
    BoundaryArrived,
    CallGone,
    Configured,
    Evaluated,
    Event,
    GraceOver,
    Kept,
    Logged,
    Merged,
    PatienceOver,
    PauseOver,
    PeerHas,
    Prepared,
    Progress,
    ReduceArrived,
    Restarted,
    StateLost,
    Stepped,
    Stored,
    SumGone,
    Summed,
    Tried,
    Unreached,
)
from sync.ps.core.ledger import NO_MODEL, Ledger
from sync.ps.core.worker_group import Evaluation, StepMerge, mean_loss
from sync.transfer.manifest import Manifest, Verdict

__all__ = ["FIRST_WEIGHT", "Boundary", "Machine", "Recovered", "Setup"]

FIRST_WEIGHT = 1.0
"""Of the model that all begin with, as its update says; it is the weight of nothing."""

_STATE_LOST = "its state is lost: asking all other regions for theirs"


@dataclass(frozen=True)
class Setup:
    """What does not change in a partition's life, but for the number of its workers."""

    region: str
    regions: tuple[str, ...]
    """All of the job, sorted; the first one's fresh model is the one that all begin with."""
    workers: int
    """Of the present attempt."""
    rounds: int
    steps_per_round: int
    evaluate_every: int
    """Rounds; 0: only after the last."""
    background: bool = False
    """Updates travel while the workers continue."""
    quorum: int = 0
    """Regions, this one included, whose new updates a merge in the background waits for; 0: all that keep up, each
    with its update of the same round."""
    lead: int = 0
    """Rounds that this region may be ahead of the last update here of any other that keeps up; 0: any number."""
    rerouted: bool = False
    """The ways of updates may change while the job runs."""
    sums: bool = False
    """Updates may be summed up for a region that has been away: with background exchange, where it makes no difference
    how old an update is."""

    def another_model(self, differs: str) -> str:
        """What is told where this region's workers make another model than the job began with."""
        return (
            f"model(config) makes another model in {self.region} than the job began with in {self.regions[0]}: "
            f"{differs}; it must not depend on a region's data, nor on how often it has been called"
        )

    def contributors(self, sequence: int) -> tuple[str, ...]:
        """The regions that make an update of a round."""
        return self.regions[:1] if sequence == 0 else self.regions

    @property
    def steps(self) -> int:
        """Of the whole job, in this region, as planned."""
        return self.rounds * self.steps_per_round

    def is_last(self, end: Log) -> bool:
        """With background exchange: whether a round is the region's last."""
        return end.last or end.step >= self.steps

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(region for region in self.regions if region != self.region)


@dataclass(frozen=True)
class Recovered:
    """What the durable state held when the process started."""

    sequence: int = NO_MODEL
    step: int = 0
    samples: float = 0.0
    applied: int = 0
    version: int = NO_MODEL
    """Merges made; with synchronous exchange the same as the sequence."""
    model_digest: str = ""
    model_key: str = ""
    """Where the workers find the model that the open round begins with."""
    state_key: str = ""
    inbox: tuple[Manifest, ...] = ()
    outbox: tuple[Manifest, ...] = ()
    metrics: Keep | None = None
    marks: tuple[tuple[str, int], ...] = ()
    """The last merged update of each other region; empty: as `sequence`."""
    lasts: tuple[str, ...] = ()
    """Other regions whose last update is merged."""
    ended: Log | None = None
    """The last round whose end is in the log."""
    correction_key: str = ""
    """What the last merge leads the workers to the model with."""
    model_bytes: int = 0
    """Of the whole model in float32; 0: there is none yet."""
    attempt: int = 1
    """Background exchange: of the workers, the last that began from where this state says; a later one has yet to."""
    ends: int = 0
    """Synchronous exchange, where the job ends before its plan: its last round, as the checkpoint tells."""


@dataclass
class Boundary:
    """What the workers said at the end of the current round."""

    arrived: dict[int, BoundaryArrived] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    """Calls to answer, and the sequence they wait for."""
    preparing: bool = False
    applying: bool = False


class Machine(abc.ABC):
    """One partition's parameter server. Not thread-safe; one event at a time."""

    def __init__(self, setup: Setup, recovered: Recovered | None = None) -> None:
        recovered = recovered or Recovered()
        self.setup = setup
        self.epoch = 1
        self.attempt = recovered.attempt
        self._sequence = recovered.sequence
        self._step = recovered.step
        self._samples = recovered.samples
        self._applied = recovered.applied
        self._model_digest, self._model_key = recovered.model_digest, recovered.model_key
        self._state_key = recovered.state_key
        marks = dict.fromkeys(setup.regions, recovered.sequence) | dict(recovered.marks)
        kept = [*recovered.inbox, *recovered.outbox]
        self.ledger = Ledger(setup.region, setup.regions, kept, marks, rerouted=setup.rerouted)
        self.ledger.sums.model_bytes = recovered.model_bytes
        self._boundary = Boundary()
        self._merge, self._evaluation = StepMerge(setup.workers), Evaluation(setup.workers)
        self._attaching: dict[int, Attached] = {}
        self._reproduced = False
        """Whether this attempt's workers' own first model was looked at, where it is another region's that counts."""
        self._metrics = recovered.metrics
        self._loss, self._speed = 0.0, 0.0
        self.step_seconds = 0.0
        """Compute of one step in the last round; 0: not known."""
        self.round_seconds = 0.0
        """What the last round took, without what our workers were held up for other regions; 0: not known."""
        self._live_step = recovered.step
        self._told_to_end = False
        """The job is to end before its plan."""
        self._refused: dict[str, int] = {}
        self._staleness: dict[str, float] = {}
        self._update_bytes = max(recovered.outbox, key=lambda m: m.sequence).total_bytes if recovered.outbox else 0
        self._failure: Failed | None = None
        self.state_lost = False
        """Our state was lost: nothing is begun, and nothing taken, before all others have told what they have."""

    # What may be asked

    @property
    def sequence(self) -> int:
        """Rounds completed; -1: not even the first model is there."""
        return self._sequence

    @property
    def finished(self) -> bool:
        """All rounds are done and the final model is evaluated."""
        return self._complete and self._metrics is not None and self._metrics.sequence == self._sequence

    @property
    def progress(self) -> Progress:
        metrics = self._metrics
        return Progress(
            phase=self._phase(),
            condition=self._failure.text
            if self._failure is not None
            else _STATE_LOST
            if self.state_lost
            else self._condition(),
            epoch=self.epoch,
            attempt=self.attempt,
            sequence=max(0, self._reached),
            # Steps that were made while the end of the last round was told are in no round.
            step=self._open_step if self._complete else max(self._step, self._live_step),
            samples=self._samples,
            loss=self._loss,
            applied=self._applied,
            model_digest=self._model_digest,
            metrics=dict(metrics.metrics) if metrics else {},
            metrics_samples=metrics.samples if metrics else 0.0,
            metrics_sequence=metrics.sequence if metrics else 0,
            metrics_error=metrics.error if metrics else "",
            samples_per_second=self._speed,
            staleness=dict(self._staleness),
            refused=dict(self._refused),
            interval=self._until - self._open_step,
            routes=self.ledger.routes,
            update_bytes=self._update_bytes,
        )

    def verdict(self, manifest: Manifest, via: str = "") -> Verdict:
        """What to say to a peer that offers an update; ``via``: the peer, where it passes on another region's."""
        direct = via in ("", manifest.region)
        if direct and manifest.epoch < self._epoch_of(manifest.region):
            return Verdict.FENCED
        if self.ledger.knows(manifest):
            return Verdict.HAVE
        if self.state_lost:
            return Verdict.LATER
        if manifest.first and not (self.setup.sums and self.ledger.follows(manifest)):
            return Verdict.LATER
        possible = manifest.region in self.setup.contributors(manifest.sequence) and self._expects(manifest)
        return Verdict.WANT if possible else Verdict.LATER

    # What the two kinds decide

    @property
    @abc.abstractmethod
    def _complete(self) -> bool:
        """Nothing more will change the model."""

    @property
    @abc.abstractmethod
    def _reached(self) -> int:
        """Rounds that the workers have completed."""

    @property
    @abc.abstractmethod
    def _open_step(self) -> int:
        """Where the open round began."""

    @property
    @abc.abstractmethod
    def _until(self) -> int:
        """The step at which the open round ends."""

    @abc.abstractmethod
    def _expects(self, manifest: Manifest) -> bool:
        """Whether an update that is new can be used now or soon."""

    @abc.abstractmethod
    def _answer_attached(self) -> list[Action]:
        """Tell waiting workers where to continue; there is a model."""

    @abc.abstractmethod
    def _attempt_begins(self) -> list[Action]:
        """What a new attempt needs, beyond that the old one is fenced."""

    @abc.abstractmethod
    def _boundary_arrived(self, event: BoundaryArrived) -> list[Action]:
        """A worker is at the end of a round; it is of the present attempt."""

    @abc.abstractmethod
    def _try_apply(self) -> list[Action]:
        """Merge what can be merged now."""

    @abc.abstractmethod
    def _was_applied(self, event: Applied) -> list[Action]:
        """A merge is done."""

    @abc.abstractmethod
    def _condition(self) -> str:
        """What is waited for."""

    @abc.abstractmethod
    def _phase(self) -> str:
        """starting, training, exchanging, finished or failed."""

    @property
    def usual_round_seconds(self) -> float:
        """What our rounds usually take, without what holds our workers up; 0: not known."""
        return 0.0

    @property
    def held_up(self) -> bool:
        """Our workers have come to the end of a round, and other regions are what they wait for: told of background
        exchange only."""
        return False

    def _heard(self, manifest: Manifest) -> list[Action]:
        """Another region's update is here, not merged yet."""
        return []

    def _was_logged(self, event: Logged) -> list[Action]:
        return []

    def _was_restarted(self, event: Restarted) -> list[Action]:
        return []

    def _grace_is_over(self, event: GraceOver) -> list[Action]:
        return []

    def _patience_is_over(self, event: PatienceOver) -> list[Action]:
        return []

    def _pause_is_over(self, event: PauseOver) -> list[Action]:
        return []

    # What may happen

    def handle(self, event: Event) -> list[Action]:
        """Take an event; returns what is to be done because of it, in order."""
        if self._failure is not None:
            call = getattr(event, "call", None)
            return [Refuse(call, self._failure.code, self._failure.text)] if call is not None else []
        if self.state_lost and isinstance(event, Attached | ReduceArrived | BoundaryArrived | Evaluated):
            # Workers wait, and ask again: what they have made may be just what the round needs.
            return self._fenced(event.call, event.attempt) or []
        match event:
            case Configured():
                return self._configured(event)
            case Attached():
                return self._attached(event)
            case ReduceArrived():
                return self._reduce_arrived(event)
            case Merged():
                return self._was_merged(event)
            case BoundaryArrived():
                if (refusal := self._fenced(event.call, event.attempt)) is not None:
                    return refusal
                return self._begin_attempt(event.attempt) + self._boundary_arrived(event)
            case Logged():
                return self._was_logged(event)
            case Prepared():
                self.ledger.add(event.manifest)
                self._update_bytes = event.manifest.total_bytes
                self._boundary.preparing = False
                return self._ship() + self._try_apply()
            case Stored():
                self.ledger.add(event.manifest)
                return self._heard(event.manifest) + self._ship() + self._try_apply()
            case PeerHas():
                self.ledger.note(event.region, event.origin or self.setup.region, event.sequence)
                self.ledger.sums.reached(event.region)
                # Where it has a part of a sum, the rest goes there instead.
                anew = self._ship() if self.ledger.sums.there_are_some else []
                return anew + self._forget() + self._try_apply()
            case Tried():
                self.ledger.sums.tried(event.region, event.manifest)
                return []
            case Unreached():
                self.ledger.sums.unreached(event.region)
                return self._sum_up()
            case Summed():
                self.ledger.sums.made(event.peer, event.manifest)
                return self._ship()
            case SumGone():
                self.ledger.sums.gone(event.manifest)
                return self._ship()
            case StateLost():
                self.ledger.state_lost(event.region)
                return self._ship()
            case GraceOver():
                return self._grace_is_over(event)
            case PatienceOver():
                return self._patience_is_over(event)
            case PauseOver():
                return self._pause_is_over(event)
            case Restarted():
                return self._was_restarted(event)
            case Applied():
                for region, _ in event.refused:
                    self._refused[region] = self._refused.get(region, 0) + 1
                return self._was_applied(event)
            case Evaluated():
                return self._was_evaluated(event)
            case Kept():
                return self._was_kept(event.keep)
            case Stepped():
                self._live_step, self._loss = max(self._live_step, event.step), event.loss
                return []
            case CallGone():
                self._attaching.pop(event.call, None)
                self._merge.waiting.pop(event.call, None)
                self._boundary.waiting.pop(event.call, None)
                self._evaluation.waiting.discard(event.call)
                return []

    def _configured(self, event: Configured) -> list[Action]:
        self.epoch = max(self.epoch, event.epoch)
        self._told_to_end |= event.finish
        actions = self._begin_attempt(event.attempt)
        if event.workers and event.attempt == self.attempt:
            self.setup = replace(self.setup, workers=event.workers)
            self._merge.workers = self._evaluation.workers = event.workers
        for peer in event.peers:
            if peer.region != self.setup.region and peer.epoch >= self._epoch_of(peer.region):
                self.ledger.peers[peer.region] = peer
        if event.peers:
            self.ledger.route(event.neighbours, event.routes, event.former)
        # Peers that are no neighbours any more get nothing more from here, not even what is on its way.
        actions += self.ledger.ships(self.epoch, all_peers=True)
        # After a restart all updates of the open round may be here already: nobody sends them again.
        return actions + self._try_apply()

    def _epoch_of(self, region: str) -> int:
        return self.ledger.peers[region].epoch if region in self.ledger.peers else 0

    def _begin_attempt(self, attempt: int) -> list[Action]:
        """A new attempt of the workers starts the round again; calls of the old one are fenced."""
        if attempt <= self.attempt:
            return []
        self.attempt = attempt
        stale = self._waiting()
        self._merge = StepMerge(self.setup.workers)
        # The round's own update, once on its way to the outbox, stays what it is: only its waiters are gone.
        self._boundary = Boundary(preparing=self._boundary.preparing, applying=self._boundary.applying)
        self._attaching, self._evaluation = {}, Evaluation(self.setup.workers)
        self._live_step, self._reproduced = self._step, False
        return [Refuse(call, "FENCED", f"attempt {attempt} has taken over") for call in stale] + self._attempt_begins()

    def _waiting(self) -> list[int]:
        return [*self._merge.waiting, *self._boundary.waiting, *self._attaching, *self._evaluation.waiting]

    def _fenced(self, call: int, attempt: int) -> list[Action] | None:
        """Refusal for a call of an old attempt; a newer attempt in a signed token is news of its start."""
        if attempt < self.attempt:
            return [Refuse(call, "FENCED", f"attempt {self.attempt} has taken over from {attempt}")]
        return None

    # Workers come

    def _attached(self, event: Attached) -> list[Action]:
        if (refusal := self._fenced(event.call, event.attempt)) is not None:
            return refusal
        actions = self._begin_attempt(event.attempt)
        if event.differs:
            return [*actions, Refuse(event.call, "TASK_INVALID", self.setup.another_model(event.differs))]
        self._attaching[event.call] = event
        if self._sequence > NO_MODEL:
            return actions + self._answer_attached()
        first = self.setup.region == self.setup.regions[0] and not self.state_lost
        # Of a model in stages, one worker hands over what all have made.
        if first and event.initial_key and self.ledger.own(0) is None and not self._boundary.preparing:
            self._boundary.preparing = True
            actions.append(Prepare(0, self.epoch, event.initial_key, "", FIRST_WEIGHT, 0, last=self.setup.rounds == 0))
        if not first and event.initial_key and not self._reproduced:
            self._reproduced = True
            actions.append(Reproduce(event.initial_key))
        return actions

    # Steps

    def _reduce_arrived(self, event: ReduceArrived) -> list[Action]:
        if (refusal := self._fenced(event.call, event.attempt)) is not None:
            return refusal
        actions = self._begin_attempt(event.attempt)
        ended = any(event.step <= end.step for end in self._boundary.arrived.values())
        if ended and event.step not in self._merge.merged:
            # A worker has lost its place and makes the round's steps again; the others will not come to them.
            text = f"the round of step {event.step} has ended for the others"
            return [*actions, Refuse(event.call, "FENCED", text)]
        actions += self._merge.arrived(event)
        for action in actions:
            if isinstance(action, Merge):
                self._loss, self._live_step = action.loss, action.step
        return actions

    def _was_merged(self, event: Merged) -> list[Action]:
        return self._merge.done(event) if event.attempt == self.attempt else []

    # Rounds

    def _agreed(self) -> tuple[BoundaryArrived, float] | Failed:
        """What the workers say together at the end of a round, and the samples behind it."""
        ends = [end for _, end in sorted(self._boundary.arrived.items())]
        groups = {end.group for end in ends}
        if len({(end.group, end.digest) for end in ends}) > len(groups) or len({end.step for end in ends}) > 1:
            return Failed("INTERNAL", f"workers hold different models at the end of round {ends[0].sequence}")
        self._loss = mean_loss(ends)
        self._live_step = ends[0].step
        weight = sum(end.samples for end in ends)
        computing = sum(end.compute_seconds for end in ends)
        self._speed = weight / computing if computing > 0 else 0.0
        steps = (ends[0].step - self._open_step) * len(ends)
        self.step_seconds = computing / steps if steps > 0 else 0.0
        return ends[0], weight

    def _ship(self) -> list[Action]:
        return [*self.ledger.ships(self.epoch), *self._sum_up()]

    def _sum_up(self) -> list[Action]:
        if not self.setup.sums or self.state_lost:
            return []
        # Who merges what there is sends as often as was said: a lead bounds what can pile up.
        return list(self.ledger.sum_up(piles=not self.setup.quorum))

    def _forget(self) -> list[Action]:
        # The last round's updates stay, so that it can be made again should its checkpoint turn out to be damaged.
        return [Forget(self.ledger.forgettable(margin=1), self.ledger.sums.forget(self.ledger.has))]

    # Measures

    def _evaluates(self, sequence: int) -> bool:
        every = self.setup.evaluate_every
        return self._complete or (every > 0 and sequence > 0 and sequence % every == 0)

    def _has_metrics(self, sequence: int) -> bool:
        return self._metrics is not None and self._metrics.sequence >= sequence

    def _was_evaluated(self, event: Evaluated) -> list[Action]:
        if (refusal := self._fenced(event.call, event.attempt)) is not None:
            return refusal
        actions = self._begin_attempt(event.attempt)
        if event.sequence > self._reached:
            return [*actions, Refuse(event.call, "FENCED", f"round {event.sequence} is not over")]
        if event.sequence < self._reached or self._has_metrics(event.sequence):
            return [*actions, Reply(event.call, EvaluatedAnswer())]
        return [*actions, *self._evaluation.arrived(event)]

    def _was_kept(self, keep: Keep) -> list[Action]:
        if not self._has_metrics(keep.sequence):
            self._metrics = keep
        if keep.sequence != self._reached:
            return []
        done, self._evaluation = self._evaluation, Evaluation(self.setup.workers)
        return done.done()

    def _fail(self, failed: Failed) -> list[Action]:
        self._failure = failed
        return [failed, *(Refuse(call, failed.code, failed.text) for call in self._waiting())]
