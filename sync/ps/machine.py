"""The parameter server as a state machine: events in, actions out; no sockets, no clock, no files.

A partition's life is a chain of rounds. In a round the workers make their local steps, merging gradients here after
each (`Merge`); at its end their model's change becomes an update that is made durable (`Prepare`) and shipped to
every peer (`Ship`). Once the updates of all regions are durable here, they are merged into the model (`Apply`), the
same bits in every region, and the workers go on from it. Round 0 has no steps: the first region's fresh model is its
update, so that all regions begin with the same bits whatever machine they run on.

Exactly once: an update is named (job, region, sequence); it enters `inbox` once, and only `Apply` of exactly the next
sequence takes it out. Model, watermark and optimiser state become durable in one step of the shell.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sync.ps.crew import Evaluation, StepMerge, mean_loss
from sync.ps.events import (
    Action,
    Applied,
    Apply,
    AttachAnswer,
    Attached,
    BoundaryAnswer,
    BoundaryArrived,
    CallGone,
    Configured,
    Evaluated,
    EvaluatedAnswer,
    Event,
    Failed,
    Forget,
    Keep,
    Kept,
    Manifest,
    Merge,
    Merged,
    Peer,
    PeerHas,
    Prepare,
    Prepared,
    Progress,
    ReduceArrived,
    Refuse,
    Reply,
    Ship,
    Stored,
    Verdict,
)

__all__ = ["Machine", "Recovered", "Setup"]

NO_MODEL = -1
"""The sequence before round 0 is applied."""


@dataclass(frozen=True)
class Setup:
    """What does not change in a partition's life."""

    region: str
    regions: tuple[str, ...]
    """All of the job, sorted; the first one's fresh model is the one that all begin with."""
    workers: int
    rounds: int
    steps_per_round: int
    evaluate_every: int
    """Rounds; 0: only after the last."""

    def contributors(self, sequence: int) -> tuple[str, ...]:
        """The regions whose updates a round needs."""
        return self.regions[:1] if sequence == 0 else self.regions


@dataclass(frozen=True)
class Recovered:
    """What the durable state held when the process started."""

    sequence: int = NO_MODEL
    step: int = 0
    samples: float = 0.0
    applied: int = 0
    model_digest: str = ""
    model_key: str = ""
    state_key: str = ""
    layout_digest: str = ""
    inbox: tuple[Manifest, ...] = ()
    outbox: tuple[Manifest, ...] = ()
    metrics: Keep | None = None


@dataclass
class _Boundary:
    """What the workers said at the end of the current round."""

    arrived: dict[int, BoundaryArrived] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    """Calls to answer when the round is over, and the sequence they wait for."""
    preparing: bool = False
    applying: bool = False


class Machine:
    """One partition's parameter server. Not thread-safe; one event at a time."""

    def __init__(self, setup: Setup, recovered: Recovered | None = None) -> None:
        recovered = recovered or Recovered()
        self.setup = setup
        self.epoch = 1
        self.attempt = 1
        self._peers: dict[str, Peer] = {}
        self._sequence = recovered.sequence
        self._step = recovered.step
        self._samples = recovered.samples
        self._applied = recovered.applied
        self._model_digest, self._model_key = recovered.model_digest, recovered.model_key
        self._state_key = recovered.state_key
        self._layout_digest = recovered.layout_digest
        self._inbox = {(m.region, m.sequence): m for m in recovered.inbox if m.sequence > recovered.sequence}
        self._outbox = {m.sequence: m for m in recovered.outbox}
        self._peer_has: dict[str, int] = {}
        self._boundary = _Boundary()
        self._merge, self._evaluation = StepMerge(setup.workers), Evaluation(setup.workers)
        self._attaching: dict[int, Attached] = {}
        self._metrics = recovered.metrics
        self._loss, self._speed = 0.0, 0.0
        self._live_step = recovered.step
        self._failure: Failed | None = None

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
            condition=self._condition(),
            epoch=self.epoch,
            attempt=self.attempt,
            sequence=max(0, self._sequence),
            step=max(self._step, self._live_step),
            samples=self._samples,
            loss=self._loss,
            applied=self._applied,
            model_digest=self._model_digest,
            metrics=dict(metrics.metrics) if metrics else {},
            metrics_samples=metrics.samples if metrics else 0.0,
            metrics_sequence=metrics.sequence if metrics else 0,
            samples_per_second=self._speed,
        )

    def verdict(self, manifest: Manifest) -> Verdict:
        """What to say to a peer that offers an update."""
        if manifest.epoch < self._epoch_of(manifest.region):
            return Verdict.FENCED
        sequence = manifest.sequence
        if sequence <= self._sequence or (manifest.region, sequence) in self._inbox:
            return Verdict.HAVE
        # A peer needs our update of a round to end it, so it is at most one round ahead of us.
        possible = sequence <= min(self._sequence + 2, self.setup.rounds)
        return Verdict.WANT if possible and manifest.region in self.setup.contributors(sequence) else Verdict.LATER

    # What may happen

    def handle(self, event: Event) -> list[Action]:
        """Take an event; returns what is to be done because of it, in order."""
        if self._failure is not None:
            call = getattr(event, "call", None)
            return [Refuse(call, self._failure.code, self._failure.text)] if call is not None else []
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
                return self._boundary_arrived(event)
            case Prepared():
                self._outbox[event.manifest.sequence] = event.manifest
                self._boundary.preparing = False
                return self._ship() + self._try_apply()
            case Stored():
                if event.manifest.sequence > self._sequence:
                    self._inbox[event.manifest.region, event.manifest.sequence] = event.manifest
                return self._try_apply()
            case PeerHas():
                self._peer_has[event.region] = max(self._peer_has.get(event.region, -1), event.sequence)
                return self._forget()
            case Applied():
                return self._was_applied(event)
            case Evaluated():
                return self._was_evaluated(event)
            case Kept():
                return self._was_kept(event.keep)
            case CallGone():
                self._attaching.pop(event.call, None)
                self._merge.waiting.pop(event.call, None)
                self._boundary.waiting.pop(event.call, None)
                self._evaluation.waiting.discard(event.call)
                return []

    def _configured(self, event: Configured) -> list[Action]:
        self.epoch = max(self.epoch, event.epoch)
        actions = self._begin_attempt(event.attempt)
        for peer in event.peers:
            if peer.region != self.setup.region and peer.epoch >= self._epoch_of(peer.region):
                self._peers[peer.region] = peer
        # After a restart all updates of the open round may be here already: nobody sends them again.
        return actions + self._ship() + self._try_apply()

    def _epoch_of(self, region: str) -> int:
        return self._peers[region].epoch if region in self._peers else 0

    def _begin_attempt(self, attempt: int) -> list[Action]:
        """A new attempt of the workers starts the round again; calls of the old one are fenced."""
        if attempt <= self.attempt:
            return []
        self.attempt = attempt
        stale = self._waiting()
        self._merge = StepMerge(self.setup.workers)
        # The round's own update, once on its way to the outbox, stays what it is: only its waiters are gone.
        self._boundary = _Boundary(preparing=self._boundary.preparing, applying=self._boundary.applying)
        self._attaching, self._evaluation = {}, Evaluation(self.setup.workers)
        self._live_step = self._step
        return [Refuse(call, "FENCED", f"attempt {attempt} has taken over") for call in stale]

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
        if self._layout_digest and event.layout_digest != self._layout_digest:
            text = "the task module makes a model of another shape than before"
            return [*actions, Refuse(event.call, "TASK_FAILED", text)]
        self._layout_digest = event.layout_digest
        self._attaching[event.call] = event
        if self._sequence > NO_MODEL:
            return actions + self._answer_attached()
        if self.setup.region == self.setup.regions[0] and 0 not in self._outbox and not self._boundary.preparing:
            self._boundary.preparing = True
            actions.append(Prepare(0, self.epoch, event.initial_key, "", 1.0, 0))
        return actions

    def _answer_attached(self) -> list[Action]:
        waiting, self._attaching = self._attaching, {}
        under_way = self._boundary.preparing or self._sequence + 1 in self._outbox
        answer = AttachAnswer(
            sequence=self._sequence,
            step=self._step,
            model_key=self._model_key,
            state_key=self._state_key,
            boundary=under_way and not self._complete,
            finished=self._complete,
            evaluate=self._evaluates(self._sequence) and not self._has_metrics(self._sequence),
        )
        return [Reply(call, answer) for call in waiting]

    # Steps

    def _reduce_arrived(self, event: ReduceArrived) -> list[Action]:
        if (refusal := self._fenced(event.call, event.attempt)) is not None:
            return refusal
        actions = self._begin_attempt(event.attempt)
        if self._boundary.arrived and event.step not in self._merge.merged:
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

    def _boundary_arrived(self, event: BoundaryArrived) -> list[Action]:
        if (refusal := self._fenced(event.call, event.attempt)) is not None:
            return refusal
        actions = self._begin_attempt(event.attempt)
        if event.sequence <= self._sequence:
            return [*actions, Reply(event.call, self._boundary_answer())]
        if event.sequence != self._sequence + 1 or self._complete:
            return [*actions, Refuse(event.call, "FENCED", f"round {event.sequence} has not begun")]
        under_way = self._boundary.preparing or event.sequence in self._outbox
        if not under_way and not event.digest:
            text = f"the update of round {event.sequence} was lost before it was durable"
            return [*actions, Refuse(event.call, "FENCED", text)]
        self._boundary.waiting[event.call] = event.sequence
        if under_way:
            return actions
        self._boundary.arrived[event.worker] = event
        if len(self._boundary.arrived) < self.setup.workers:
            return actions
        return actions + self._prepare()

    def _prepare(self) -> list[Action]:
        ends = [end for _, end in sorted(self._boundary.arrived.items())]
        if len({end.digest for end in ends}) > 1:
            return self._fail("INTERNAL", f"workers hold different models at the end of round {ends[0].sequence}")
        first = ends[0]
        self._loss = mean_loss(ends)
        self._live_step = first.step
        self._boundary.preparing = True
        weight = sum(end.samples for end in ends)
        computing = sum(end.compute_seconds for end in ends)
        self._speed = weight / computing if computing > 0 else 0.0
        return [Prepare(first.sequence, self.epoch, first.model_key, first.state_key, weight, first.step)]

    def _ship(self) -> list[Action]:
        actions: list[Action] = []
        for region, peer in sorted(self._peers.items()):
            missing = [m for s, m in sorted(self._outbox.items()) if s > self._peer_has.get(region, -1)]
            if missing:
                # Sent under the present epoch, whichever it was when they were made: the older one is fenced there.
                actions.append(Ship(peer, tuple(replace(m, epoch=self.epoch) for m in missing)))
        return actions

    def _round_manifest(self, region: str, sequence: int) -> Manifest | None:
        return self._outbox.get(sequence) if region == self.setup.region else self._inbox.get((region, sequence))

    def _try_apply(self) -> list[Action]:
        sequence = self._sequence + 1
        found = [self._round_manifest(region, sequence) for region in self.setup.contributors(sequence)]
        manifests = tuple(manifest for manifest in found if manifest is not None)
        if len(manifests) < len(found) or self._boundary.applying:
            return []
        self._boundary.applying = True
        own = self._outbox.get(sequence)
        remote = sum(1 for manifest in manifests if manifest.region != self.setup.region)
        step = self._step + (self.setup.steps_per_round if sequence else 0)
        samples = self._samples + (own.weight if own and sequence else 0.0)
        return [Apply(sequence, manifests, step, samples, self._applied + remote)]

    def _was_applied(self, event: Applied) -> list[Action]:
        self._sequence, self._step = event.apply.sequence, event.apply.step
        self._samples, self._applied = event.apply.samples, event.apply.applied
        self._live_step = self._step
        self._model_digest, self._model_key, self._state_key = event.digest, event.model_key, event.state_key
        self._inbox = {key: m for key, m in self._inbox.items() if m.sequence > self._sequence}
        done, late = self._boundary.waiting, [*self._merge.waiting, *self._evaluation.waiting]
        self._boundary = _Boundary()
        self._merge, self._evaluation = StepMerge(self.setup.workers), Evaluation(self.setup.workers)
        actions: list[Action] = [Reply(call, self._boundary_answer()) for call in done]
        actions += [Refuse(call, "FENCED", f"round {self._sequence} is over") for call in late]
        return actions + self._answer_attached() + self._forget() + self._try_apply()

    def _boundary_answer(self) -> BoundaryAnswer:
        return BoundaryAnswer(
            sequence=self._sequence,
            model_key=self._model_key,
            state_key=self._state_key,
            evaluate=self._evaluates(self._sequence) and not self._has_metrics(self._sequence),
            finished=self._complete,
        )

    def _forget(self) -> list[Action]:
        others = [region for region in self.setup.regions if region != self.setup.region]
        everywhere = min((self._peer_has.get(region, -1) for region in others), default=self._sequence)
        # The last round's updates stay, so that it can be made again should its checkpoint turn out to be damaged.
        last = self._sequence - 1
        up_to = min(everywhere, last)
        self._outbox = {sequence: m for sequence, m in self._outbox.items() if sequence > up_to}
        return [Forget(last, up_to)]

    # Measures

    @property
    def _complete(self) -> bool:
        return self._sequence >= self.setup.rounds

    def _evaluates(self, sequence: int) -> bool:
        every = self.setup.evaluate_every
        return sequence >= self.setup.rounds or (every > 0 and sequence > 0 and sequence % every == 0)

    def _has_metrics(self, sequence: int) -> bool:
        return self._metrics is not None and self._metrics.sequence >= sequence

    def _was_evaluated(self, event: Evaluated) -> list[Action]:
        if (refusal := self._fenced(event.call, event.attempt)) is not None:
            return refusal
        actions = self._begin_attempt(event.attempt)
        if event.sequence > self._sequence:
            return [*actions, Refuse(event.call, "FENCED", f"round {event.sequence} is not over")]
        if event.sequence < self._sequence or self._has_metrics(event.sequence):
            return [*actions, Reply(event.call, EvaluatedAnswer())]
        return [*actions, *self._evaluation.arrived(event)]

    def _was_kept(self, keep: Keep) -> list[Action]:
        if not self._has_metrics(keep.sequence):
            self._metrics = keep
        if keep.sequence != self._sequence:
            return []
        done, self._evaluation = self._evaluation, Evaluation(self.setup.workers)
        return done.done()

    # What it says of itself

    def _fail(self, code: str, text: str) -> list[Action]:
        self._failure = Failed(code, text)
        return [self._failure, *(Refuse(call, code, text) for call in self._waiting())]

    def _phase(self) -> str:
        if self._failure is not None:
            return "failed"
        if self.finished:
            return "finished"
        if self._sequence == NO_MODEL:
            return "starting"
        return "exchanging" if self._boundary.preparing or self._sequence + 1 in self._outbox else "training"

    def _condition(self) -> str:
        if self._failure is not None:
            return self._failure.text
        sequence = self._sequence + 1
        own_there = sequence in self._outbox or self._sequence == NO_MODEL
        if not self._complete and own_there:
            missing = [r for r in self.setup.contributors(sequence) if self._round_manifest(r, sequence) is None]
            if missing and missing != [self.setup.region]:
                return f"waiting for the update of round {sequence} from {', '.join(missing)}"
        return ""
