"""The parameter server as a state machine: events in, actions out; no sockets, no clock, no files.

A partition runs one round after the other. In a round the workers make their local steps, and their gradients are
merged here after each step (`MergeGradients`). At the end of the round the change of their model becomes an update,
which is made durable (`StoreOwnUpdate`) and sent to every peer (`SendUpdates`); updates are merged into the model
(`MergeUpdates`). When that happens, and with which model the workers continue, is decided by `Synchronous` and
`Background`. Round 0 has no steps: its update is the initial model of the first region, so that all regions begin with
the same bits whatever machines they run on.

Each update is merged exactly once: an update is identified by (job, region, sequence), and a region's updates are
merged in the order of their sequence, each only if the watermark states that the one before was the last. Model and
watermarks become durable in one step.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sync.file_transfer.manifest import Manifest, Verdict
from sync.ps.core.actions import (
    Action,
    CheckInitialModel,
    Failed,
    Forget,
    LogRoundEnd,
    MergeGradients,
    Refuse,
    Reply,
    StoreMetrics,
    StoreOwnUpdate,
)
from sync.ps.core.answers import EvaluatedAnswer
from sync.ps.core.events import (
    NOTHING_MEASURED,
    Attached,
    BoundaryArrived,
    CallGone,
    Configured,
    Evaluated,
    Event,
    GradientsMerged,
    MaskKeyKnown,
    Measured,
    MetricsStored,
    OwnUpdateStored,
    PeerHas,
    PeerMisbehaved,
    PeerUnreachable,
    Progress,
    ReduceArrived,
    ResourceUsage,
    Restarted,
    RoundEndLogged,
    SendAttempted,
    StateLost,
    Stepped,
    SumGone,
    Summed,
    TimerFired,
    UpdatesMerged,
    UpdateStored,
)
from sync.ps.core.ledger import NO_MODEL, Ledger
from sync.ps.core.waiting_settings import WaitingSettings
from sync.ps.core.worker_group import LoggedValues, ModelEvaluation, StepMerge, mean_loss, usage_of

__all__ = ["FIRST_WEIGHT", "Boundary", "Machine", "Recovered", "Setup"]

FIRST_WEIGHT = 1.0
"""Weight of the initial model in its manifest; it has no meaning."""

_STATE_LOST = "its state is lost; asking all other regions for theirs"


@dataclass(frozen=True)
class Setup:
    """What does not change while a partition runs, except the number of its workers."""

    region: str
    regions: tuple[str, ...]
    """All regions of the job, sorted; the first one provides the initial model."""
    workers: int
    """Workers of the current attempt."""
    rounds: int
    steps_per_round: int
    evaluate_every: int
    """Rounds between two evaluations; 0: only after the last round."""
    background: bool = False
    """Whether updates are exchanged while the workers continue."""
    quorum: int = 0
    """With background exchange: number of regions, including this one, whose new updates a merge waits for; 0: all that
    keep up, each with its update of the same round."""
    max_rounds_ahead: int = 0
    """Rounds by which this region may be ahead of the last update that it has of any other region that keeps up; 0: any
    number."""
    grace_seconds: float = 0.0
    """With a quorum: longest time that a merge waits for it."""
    same_round: bool = False
    """With background exchange: whether a merge holds the same round of all regions that make one, so that all regions
    make the same merges, as a robust rule needs it. No region is continued without."""
    waiting: WaitingSettings = field(default_factory=WaitingSettings)
    """With background exchange: when it waits for other regions, and for how long."""
    rerouted: bool = False
    """Whether the routes of updates may change while the job runs."""
    sums: bool = False
    """Whether updates may be summed up for a region that was unreachable: with background exchange, if the age of an
    update makes no difference."""
    masked: str = ""
    """With secure aggregation: the codec of masked updates; empty: updates are not masked."""

    def model_mismatch_text(self, differs: str) -> str:
        """Return the error text if this region's workers make another model than the job began with."""
        return (
            f"model(config) makes another model in {self.region} than in {self.regions[0]}, where the job began: "
            f"{differs}; it must not depend on a region's data, nor on how often it has been called"
        )

    def contributors(self, sequence: int) -> tuple[str, ...]:
        """Return the regions that make an update of a round."""
        return self.regions[:1] if sequence == 0 else self.regions

    @property
    def steps(self) -> int:
        """Planned steps of the whole job in this region."""
        return self.rounds * self.steps_per_round

    def is_last(self, end: LogRoundEnd) -> bool:
        """Whether a round is the region's last; with background exchange."""
        return end.last or end.step >= self.steps

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(region for region in self.regions if region != self.region)


@dataclass(frozen=True)
class Recovered:
    """The durable state when the process started."""

    sequence: int = NO_MODEL
    step: int = 0
    samples: float = 0.0
    applied: int = 0
    version: int = NO_MODEL
    """Number of merges; with synchronous exchange the same as the sequence."""
    model_digest: str = ""
    model_key: str = ""
    """Channel key of the model that the open round begins with."""
    state_key: str = ""
    inbox: tuple[Manifest, ...] = ()
    outbox: tuple[Manifest, ...] = ()
    metrics: StoreMetrics | None = None
    marks: tuple[tuple[str, int], ...] = ()
    """The last merged update of each other region; empty: the same as ``sequence``."""
    lasts: tuple[str, ...] = ()
    """Other regions whose last update is merged."""
    ended: LogRoundEnd | None = None
    """The last round whose end is logged."""
    correction_key: str = ""
    """Channel key of the last merge's correction."""
    model_bytes: int = 0
    """Size of the model in float32; 0: there is none yet."""
    attempt: int = 1
    """With background exchange: the last attempt whose workers began from this state; a later one has not begun yet."""
    start_lost: bool = False
    """With background exchange: what that attempt's workers began the open round from is lost, so that only those of a
    later attempt can end it."""
    ends: int = 0
    """With synchronous exchange, if the job ends before its planned end: its last round, as the checkpoint states; else
    0."""


@dataclass
class Boundary:
    """The workers' reports at the end of the current round."""

    arrived: dict[int, BoundaryArrived] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    """Waiting calls, and the sequence that each waits for."""
    preparing: bool = False
    applying: bool = False


class Machine(abc.ABC):
    """One partition's parameter server. Not thread-safe; one event at a time."""

    def __init__(self, setup: Setup, recovered: Recovered | None = None) -> None:
        recovered = recovered or Recovered()
        self.setup = setup
        self._measured = NOTHING_MEASURED
        """As of the present event."""
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
        self._merge, self._evaluation = StepMerge(setup.workers), ModelEvaluation(setup.workers)
        self._attaching: dict[int, Attached] = {}
        self._reproduced = False
        """Whether this attempt's own initial model has been compared, in regions other than the first."""
        self._metrics = recovered.metrics
        self._loss, self._speed = 0.0, 0.0
        self._round_losses: dict[int, float | None] = {}
        """Mean losses of the last two rounds that the workers have ended, by sequence."""
        self._logged, self._usage = LoggedValues(), ResourceUsage()
        self.compute_seconds, self.merge_seconds, self.evaluate_seconds = 0.0, 0.0, 0.0
        """Of all rounds that the workers have ended, the mean of the workers."""
        self.step_seconds = 0.0
        """Time of one step in the last round, its merge among the workers included; 0: not known."""
        self._live_step = recovered.step
        self._told_to_end = False
        """Whether the job is to end before its planned end."""
        self._may_end = bool(recovered.ends) or any(manifest.ends for manifest in recovered.inbox)
        """Whether the control plane has told this region so, and not only other regions."""
        self._early: dict[str, int] = {}
        """Regions that state an earlier end of the job than planned, which the control plane has not ordered, with its
        round."""
        self._refused: dict[str, int] = {}
        self._refusal_reasons: dict[str, str] = {}
        self._staleness: dict[str, float] = {}
        self._update_bytes = max(recovered.outbox, key=lambda m: m.sequence).total_bytes if recovered.outbox else 0
        self._failure: Failed | None = None
        self.state_lost = False
        """Whether our state is lost: nothing is begun or accepted before all other regions have reported what they
        have."""

    # Queries

    @property
    def sequence(self) -> int:
        """Rounds completed; -1: there is no model yet."""
        return self._sequence

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the final model is evaluated."""
        return self._complete and self._metrics is not None and self._metrics.sequence == self._sequence

    @property
    def phase(self) -> str:
        """The phase of `progress`, which takes a fraction of its time."""
        return self._phase()

    @property
    def reached(self) -> int:
        """The round of `progress`."""
        return max(0, self._reached)

    @property
    def progress(self) -> Progress:
        """The progress to report."""
        metrics = self._metrics
        return Progress(
            phase=self.phase,
            condition=self._failure.text
            if self._failure is not None
            else _STATE_LOST
            if self.state_lost
            else "; ".join(text for text in (self._condition(), self._early_text()) if text),
            epoch=self.epoch,
            attempt=self.attempt,
            sequence=self.reached,
            # Steps that were made before the end of the last round was known are in no round.
            step=self._open_step if self._complete else max(self._step, self._live_step),
            samples=self._samples,
            loss=self._loss,
            applied=self._applied,
            model_digest=self._model_digest,
            metrics=dict(metrics.metrics) if metrics else {},
            metrics_samples=metrics.samples if metrics else 0.0,
            metrics_sequence=metrics.sequence if metrics else 0,
            metrics_error=metrics.error if metrics else "",
            histograms=dict(metrics.histograms) if metrics else {},
            samples_per_second=self._speed,
            staleness=dict(self._staleness),
            refused=dict(self._refused),
            refusal_reasons=dict(self._refusal_reasons),
            interval=self._until - self._open_step,
            routes=self.ledger.routes,
            update_bytes=self._update_bytes,
            round_loss=self._round_losses.get(self._reached),
            logged_sequence=self._logged.sequence,
            logged=self._logged.means,
            usage=self._usage,
        )

    def verdict(self, manifest: Manifest, via: str = "") -> Verdict:
        """Return the reply to an offered update. ``via`` is the peer that offers it, if it passes on another
        region's."""
        direct = via in ("", manifest.region)
        if direct and manifest.epoch < self._epoch_of(manifest.region):
            return Verdict.FENCED
        if self.ledger.knows(manifest):
            return Verdict.HAVE
        if self.state_lost or not (direct or self.ledger.is_routed(via, manifest.region)):
            return Verdict.LATER
        if manifest.ends and not self._may_end:
            # Only the control plane ends a job; it tells all regions.
            self._early[manifest.region] = manifest.ends
            return Verdict.LATER
        if manifest.first and not (self.setup.sums and self.ledger.follows(manifest)):
            return Verdict.LATER
        possible = manifest.region in self.setup.contributors(manifest.sequence) and self._expects(manifest)
        return Verdict.WANT if possible else Verdict.LATER

    @property
    @abc.abstractmethod
    def awaited(self) -> tuple[str, ...]:
        """Other regions without whose update nothing can go on here, sorted."""

    @property
    def paused(self) -> bool:
        """Whether workers that have ended their round wait for time to pass, and for no update."""
        return False

    @property
    def lacks_quorum(self) -> bool:
        """Whether the merge of the last round waits for updates of any regions."""
        return False

    @property
    def sends(self) -> bool:
        """Whether our newest update is being made, or sent to a peer that can be reached."""
        return self._boundary.preparing or self.ledger.sends

    def _early_text(self) -> str:
        told = [f"{region} states that the job ends with round {ends}" for region, ends in sorted(self._early.items())]
        return f"{', '.join(told)}: the control plane has not said so" if told and not self._may_end else ""

    # To be implemented by the two kinds of exchange

    @property
    @abc.abstractmethod
    def _complete(self) -> bool:
        """Whether the model is final."""

    @property
    @abc.abstractmethod
    def _reached(self) -> int:
        """Number of rounds that the workers have completed."""

    @property
    @abc.abstractmethod
    def _open_step(self) -> int:
        """The step at which the open round began."""

    @property
    @abc.abstractmethod
    def _until(self) -> int:
        """The step at which the open round ends."""

    @abc.abstractmethod
    def _expects(self, manifest: Manifest) -> bool:
        """Whether a new update can be merged now or soon."""

    @abc.abstractmethod
    def _answer_attached(self) -> list[Action]:
        """Answer the workers that ask where to continue; there is a model."""

    @abc.abstractmethod
    def _attempt_begins(self) -> list[Action]:
        """Return the actions for a new attempt, beyond fencing the old one."""

    @abc.abstractmethod
    def _boundary_arrived(self, event: BoundaryArrived) -> list[Action]:
        """Handle a worker of the current attempt that has ended a round."""

    @abc.abstractmethod
    def _try_apply(self) -> list[Action]:
        """Merge the updates that can be merged now."""

    @abc.abstractmethod
    def _was_applied(self, event: UpdatesMerged) -> list[Action]:
        """Handle the end of a merge."""

    @abc.abstractmethod
    def _condition(self) -> str:
        """Describe what the server is waiting for; "": nothing."""

    @abc.abstractmethod
    def _phase(self) -> str:
        """The phase: starting, training, exchanging, finished or failed."""

    def _heard(self, manifest: Manifest) -> list[Action]:
        """Handle another region's update that is stored here but not merged yet."""
        return []

    def _was_prepared(self, manifest: Manifest) -> list[Action]:
        """Handle our own update that has become durable."""
        return []

    def _was_logged(self, event: RoundEndLogged) -> list[Action]:
        return []

    def _was_restarted(self, event: Restarted) -> list[Action]:
        return []

    def _timer_fired(self) -> list[Action]:
        return []

    def _mask_key_known(self, region: str) -> list[Action]:
        return []

    # Events

    def handle(self, event: Event, measured: Measured = NOTHING_MEASURED) -> list[Action]:
        """Handle an event; return the actions to execute, in order."""
        self._measured = measured
        if self._failure is not None:
            call = getattr(event, "call", None)
            return [Refuse(call, self._failure.code, self._failure.text)] if call is not None else []
        if self.state_lost and isinstance(event, Attached | ReduceArrived | BoundaryArrived | Evaluated):
            # Workers wait and call again: what they have made may be just what the round needs.
            return self._fenced(event.call, event.attempt) or []
        match event:
            case Configured():
                return self._configured(event)
            case Attached():
                return self._attached(event)
            case ReduceArrived():
                return self._reduce_arrived(event)
            case GradientsMerged():
                return self._was_merged(event)
            case BoundaryArrived():
                if (refusal := self._fenced(event.call, event.attempt)) is not None:
                    return refusal
                return self._begin_attempt(event.attempt) + self._boundary_arrived(event)
            case RoundEndLogged():
                return self._was_logged(event)
            case OwnUpdateStored():
                return self._was_stored(event.manifest)
            case UpdateStored():
                self.ledger.add(event.manifest)
                return self._heard(event.manifest) + self._ship() + self._try_apply()
            case PeerMisbehaved():
                return self._fail(Failed("PEER_INVALID", event.text))
            case PeerHas() | StateLost() | SendAttempted() | PeerUnreachable() | Summed() | SumGone():
                return self._delivering(event)
            case TimerFired():
                return self._timer_fired()
            case MaskKeyKnown():
                return self._mask_key_known(event.region)
            case Restarted():
                return self._was_restarted(event)
            case UpdatesMerged():
                self._count_refused(event.refused)
                return self._was_applied(event)
            case Evaluated():
                return self._was_evaluated(event)
            case MetricsStored():
                return self._was_kept(event.keep)
            case Stepped():
                self._live_step, self._loss = max(self._live_step, event.step), event.loss
                return []
            case CallGone():
                return self._call_gone(event.call)

    def _count_refused(self, refused: Iterable[tuple[str, str]]) -> None:
        for region, reason in refused:
            self._refused[region] = self._refused.get(region, 0) + 1
            self._refusal_reasons[region] = reason

    def _configured(self, event: Configured) -> list[Action]:
        self.epoch = max(self.epoch, event.epoch)
        self._told_to_end |= event.finish
        self._may_end |= event.finish
        actions = self._begin_attempt(event.attempt)
        if event.workers and event.attempt == self.attempt:
            self.setup = replace(self.setup, workers=event.workers)
            self._merge.workers = self._evaluation.workers = event.workers
        for peer in event.peers:
            if peer.region != self.setup.region and peer.epoch >= self._epoch_of(peer.region):
                self.ledger.peers[peer.region] = peer
        if event.peers:
            self.ledger.route(event.neighbours, event.routes, event.former)
        # Peers that are no longer neighbours get nothing more from here, not even what is being sent.
        actions += self.ledger.ships(self.epoch, all_peers=True)
        # After a restart all updates of the open round may be stored already; then no event would start the merge.
        return actions + self._try_apply()

    def _epoch_of(self, region: str) -> int:
        return self.ledger.peers[region].epoch if region in self.ledger.peers else 0

    def _begin_attempt(self, attempt: int) -> list[Action]:
        """Begin a new attempt of the workers: the open round starts again, and calls of the old attempt are fenced."""
        if attempt <= self.attempt:
            return []
        self.attempt = attempt
        stale = self._waiting()
        self._merge = StepMerge(self.setup.workers)
        # The round's own update, if it is being prepared or applied, stays as it is; only the calls that wait for it
        # are refused.
        self._boundary = Boundary(preparing=self._boundary.preparing, applying=self._boundary.applying)
        self._attaching, self._evaluation = {}, ModelEvaluation(self.setup.workers)
        self._live_step, self._reproduced = self._step, False
        return [Refuse(call, "FENCED", f"attempt {attempt} has taken over") for call in stale] + self._attempt_begins()

    def _waiting(self) -> list[int]:
        return [*self._merge.waiting, *self._boundary.waiting, *self._attaching, *self._evaluation.waiting]

    def _call_gone(self, call: int) -> list[Action]:
        self._attaching.pop(call, None)
        self._merge.waiting.pop(call, None)
        self._boundary.waiting.pop(call, None)
        self._evaluation.waiting.discard(call)
        return []

    def _fenced(self, call: int, attempt: int) -> list[Action] | None:
        """Return the refusal of a call of an old attempt, or None. (A newer attempt in a signed token means that it has
        started.)"""
        if attempt < self.attempt:
            return [Refuse(call, "FENCED", f"attempt {self.attempt} has taken over from {attempt}")]
        return None

    # Workers attach

    def _attached(self, event: Attached) -> list[Action]:
        if (refusal := self._fenced(event.call, event.attempt)) is not None:
            return refusal
        actions = self._begin_attempt(event.attempt)
        if event.differs:
            return [*actions, Refuse(event.call, "TASK_INVALID", self.setup.model_mismatch_text(event.differs))]
        self._attaching[event.call] = event
        if self._sequence > NO_MODEL:
            return actions + self._answer_attached()
        first = self.setup.region == self.setup.regions[0] and not self.state_lost
        # If workers hold stages of the model, one of them submits what all of them have made.
        if first and event.initial_key and self.ledger.own(0) is None and not self._boundary.preparing:
            self._boundary.preparing = True
            actions.append(
                StoreOwnUpdate(0, self.epoch, event.initial_key, "", FIRST_WEIGHT, 0, last=self.setup.rounds == 0)
            )
        if not first and event.initial_key and not self._reproduced:
            self._reproduced = True
            actions.append(CheckInitialModel(event.initial_key))
        return actions

    # Steps

    def _reduce_arrived(self, event: ReduceArrived) -> list[Action]:
        if (refusal := self._fenced(event.call, event.attempt)) is not None:
            return refusal
        actions = self._begin_attempt(event.attempt)
        ended = any(event.step <= end.step for end in self._boundary.arrived.values())
        if ended and event.step not in self._merge.merged:
            # The worker has lost its position and repeats the round's steps, which the others will not repeat.
            text = f"the round of step {event.step} has ended for the others"
            return [*actions, Refuse(event.call, "FENCED", text)]
        actions += self._merge.arrived(event)
        for action in actions:
            if isinstance(action, MergeGradients):
                self._loss, self._live_step = action.loss, action.step
        return actions

    def _was_merged(self, event: GradientsMerged) -> list[Action]:
        return self._merge.done(event) if event.attempt == self.attempt else []

    # Rounds

    def _agreed(self) -> tuple[BoundaryArrived, float] | Failed:
        """Check that the workers agree at the end of a round; return one worker's report and the round's samples."""
        ends = [end for _, end in sorted(self._boundary.arrived.items())]
        groups = {end.group for end in ends}
        if len({(end.group, end.digest) for end in ends}) > len(groups) or len({end.step for end in ends}) > 1:
            return Failed("INTERNAL", f"workers hold different models at the end of round {ends[0].sequence}")
        self._loss, sequence = mean_loss(ends), ends[0].sequence
        self._round_losses = {sequence - 1: self._round_losses.get(sequence - 1), sequence: self._loss}
        self._live_step = ends[0].step
        for end in ends:
            self._logged.add(end.worker, sequence, end.logged)
        # By now all workers have called `on_round` for the round before.
        self._logged.complete(sequence - 1)
        self._usage = usage_of(ends)
        weight = sum(end.samples for end in ends)
        computing = sum(end.compute_seconds for end in ends)
        self._speed = weight / computing if computing > 0 else 0.0
        merging = sum(end.merge_seconds for end in ends)
        self.compute_seconds += computing / len(ends)
        self.merge_seconds += merging / len(ends)
        self.evaluate_seconds += sum(end.evaluate_seconds for end in ends) / len(ends)
        steps = (ends[0].step - self._open_step) * len(ends)
        self.step_seconds = (computing + merging) / steps if steps > 0 else 0.0
        return ends[0], weight

    # Delivery to the peers

    def _was_stored(self, manifest: Manifest) -> list[Action]:
        self.ledger.add(manifest)
        self._update_bytes = manifest.total_bytes
        self._boundary.preparing = False
        return self._was_prepared(manifest) + self._ship() + self._try_apply()

    def _delivering(
        self, event: PeerHas | StateLost | SendAttempted | PeerUnreachable | Summed | SumGone
    ) -> list[Action]:
        """Handle what is known of a peer, of its link, or of a sum of updates for it."""
        sums = self.ledger.sums
        match event:
            case PeerHas():
                self.ledger.note(event.region, event.origin or self.setup.region, event.sequence)
                sums.reached(event.region)
                # If the peer has part of a sum, it now gets the rest of the updates instead.
                shipped = self._ship() if sums.has_any else []
                return shipped + self._forget() + self._try_apply()
            case SendAttempted():
                sums.tried(event.region, event.manifest)
                return []
            case PeerUnreachable():
                sums.unreached(event.region)
                return self._sum_up()
            case StateLost():
                self.ledger.state_lost(event.region)
            case Summed():
                sums.add(event.peer, event.manifest)
            case SumGone():
                sums.remove(event.manifest)
        return self._ship()

    def _ship(self) -> list[Action]:
        return [*self.ledger.ships(self.epoch), *self._sum_up()]

    def _sum_up(self) -> list[Action]:
        if not self.setup.sums or self.state_lost:
            return []
        # With a quorum every update is sent as planned: `max_rounds_ahead` bounds how many can pile up.
        return list(self.ledger.sum_up(backlogs=not self.setup.quorum))

    def _forget(self) -> list[Action]:
        # The last round's updates stay, so that it can be merged again if its checkpoint turns out to be damaged.
        return [Forget(self.ledger.forgettable(margin=1), self.ledger.sums.forget(self.ledger.has))]

    # Evaluation

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
        self._logged.add(event.worker, event.sequence, event.logged)
        return [*actions, *self._evaluation.arrived(event)]

    def _was_kept(self, keep: StoreMetrics) -> list[Action]:
        if not self._has_metrics(keep.sequence):
            self._metrics = keep
            self._logged.complete(keep.sequence)
        if keep.sequence != self._reached:
            return []
        done, self._evaluation = self._evaluation, ModelEvaluation(self.setup.workers)
        return done.done()

    def _fail(self, failed: Failed) -> list[Action]:
        self._failure = failed
        return [failed, *(Refuse(call, failed.code, failed.text) for call in self._waiting())]
