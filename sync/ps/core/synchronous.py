"""Synchronous exchange: a round ends when the updates of all regions have arrived, with the same model everywhere.

A job may end before its planned end. A region that is told to end states in its next update that the round after it is
the last. All regions merge that update in the same round, so all know the last round before they begin it, even if one
of them is killed or unreachable meanwhile. From then on every update and every checkpoint states the last round.

If a region stays away, no round can end. The others are then told to halt: each ends with the last round that it has
merged, and merges nothing more, whatever still arrives.
"""

from __future__ import annotations

from collections.abc import Iterable

from sync.file_transfer.manifest import Manifest
from sync.ps.core.actions import Action, Failed, MergeUpdates, Refuse, Reply, StoreOwnUpdate
from sync.ps.core.answers import AttachAnswer, BoundaryAnswer
from sync.ps.core.events import BoundaryArrived, Configured, ReduceArrived, UpdatesMerged
from sync.ps.core.ledger import NO_MODEL
from sync.ps.core.machine import Boundary, Machine, Recovered, Setup
from sync.ps.core.worker_group import ModelEvaluation, StepMerge

__all__ = ["Synchronous"]


class Synchronous(Machine):
    """Workers wait at the end of a round until all regions' updates are merged, and continue from the merged model."""

    def __init__(self, setup: Setup, recovered: Recovered | None = None) -> None:
        recovered = recovered or Recovered()
        super().__init__(setup, recovered)
        self._rounds = recovered.ends or setup.rounds
        """Number of rounds of the job, as far as the merged updates state."""
        self._keyless = set(setup.others) if setup.masked else set[str]()
        """With secure aggregation: other regions whose mask key is not known yet."""
        self._halts = False
        """Whether the job ends with the last merged round, since another region stays away."""

    def _rounds_with(self, merged: Iterable[Manifest]) -> int:
        """Return the number of rounds of the job after merging these updates."""
        return min([self._rounds, *(manifest.ends for manifest in merged if manifest.ends)])

    @property
    def _complete(self) -> bool:
        return self._sequence >= self._rounds

    @property
    def _reached(self) -> int:
        return self._sequence

    @property
    def _open_step(self) -> int:
        return self._step

    @property
    def _until(self) -> int:
        return min(self._step + self.setup.steps_per_round, self._rounds * self.setup.steps_per_round)

    def _expects(self, manifest: Manifest) -> bool:
        # A peer needs our update of a round to end that round, so it is at most one round ahead of us.
        return manifest.sequence <= min(self._sequence + 2, self._rounds)

    def _attempt_begins(self) -> list[Action]:
        return []

    def _answer_attached(self) -> list[Action]:
        waiting, self._attaching = self._attaching, {}
        under_way = self._boundary.preparing or self.ledger.own(self._sequence + 1) is not None
        waits = under_way and not self._complete
        answer = AttachAnswer(
            sequence=self._sequence,
            step=self._step,
            model_key=self._model_key,
            # The state is deleted as soon as the round is over; the answer for that round names the next one.
            state_key="" if waits or self._complete else self._state_key,
            boundary=waits,
            finished=self._complete,
            evaluate=self._evaluates(self._sequence) and not self._has_metrics(self._sequence),
            until_step=self._until,
        )
        return [Reply(call, answer) for call in waiting]

    def _configured(self, event: Configured) -> list[Action]:
        self._halts |= event.halt
        return super()._configured(event) + self._halted()

    def _halted(self) -> list[Action]:
        """End the job with the last merged round, if it is to halt and no merge is under way."""
        if not self._halts or self._sequence == NO_MODEL or self._boundary.applying or self._complete:
            return []
        self._rounds = self._sequence
        ended, merging = self._boundary.waiting, self._merge.waiting
        self._boundary = Boundary(preparing=self._boundary.preparing)
        self._merge = StepMerge(self.setup.workers)
        actions: list[Action] = [Reply(call, self._boundary_answer()) for call in ended]
        actions += [Refuse(call, "FENCED", self._end_text) for call in merging]
        return actions + self._answer_attached()

    @property
    def _end_text(self) -> str:
        return f"the job has ended with round {self._sequence}"

    def _reduce_arrived(self, event: ReduceArrived) -> list[Action]:
        # The other workers may have ended, so that no step is complete any more.
        if self._halts and self._complete:
            return self._fenced(event.call, event.attempt) or [Refuse(event.call, "FENCED", self._end_text)]
        return super()._reduce_arrived(event)

    def _boundary_arrived(self, event: BoundaryArrived) -> list[Action]:
        halted = self._halts and self._complete and event.sequence == self._sequence + 1
        if event.sequence <= self._sequence or halted:
            return [Reply(event.call, self._boundary_answer())]
        if event.sequence != self._sequence + 1 or self._complete:
            return [Refuse(event.call, "FENCED", f"round {event.sequence} has not begun")]
        under_way = self._boundary.preparing or self.ledger.own(event.sequence) is not None
        if not under_way and not event.digest:
            text = f"the update of round {event.sequence} was lost before it was durable"
            return [Refuse(event.call, "FENCED", text)]
        self._boundary.waiting[event.call] = event.sequence
        if under_way:
            return []
        self._boundary.arrived[event.worker] = event
        return self._prepare_if_due()

    @property
    def _round_ended(self) -> bool:
        """Whether all workers have ended the round, and our update of it is to be made."""
        made = self._boundary.preparing or self.ledger.own(self._sequence + 1) is not None
        return len(self._boundary.arrived) == self.setup.workers and not made

    def _mask_key_known(self, region: str) -> list[Action]:
        self._keyless.discard(region)
        return self._prepare_if_due()

    def _prepare_if_due(self) -> list[Action]:
        return self._prepare() if self._round_ended and not self._keyless else []

    def _prepare(self) -> list[Action]:
        agreed = self._agreed()
        if isinstance(agreed, Failed):
            return self._fail(agreed)
        end, weight = agreed
        self._boundary.preparing = True
        ends = self._rounds if self._rounds < self.setup.rounds else end.sequence + 1 if self._told_to_end else 0
        return [
            StoreOwnUpdate(
                end.sequence,
                self.epoch,
                end.model_key,
                end.state_key,
                weight,
                end.step,
                seen=self.ledger.seen(),
                last=end.sequence >= self._rounds,
                ends=ends,
            )
        ]

    def _of_round(self, sequence: int) -> list[Manifest | None]:
        return [self.ledger.kept.get((region, sequence)) for region in self.setup.contributors(sequence)]

    def _try_apply(self) -> list[Action]:
        sequence = self._sequence + 1
        found = self._of_round(sequence)
        manifests = tuple(manifest for manifest in found if manifest is not None)
        halts = self._halts and self._sequence > NO_MODEL
        if len(manifests) < len(found) or self._boundary.applying or halts:
            return []
        self._boundary.applying = True
        own = self.ledger.own(sequence)
        remote = sum(1 for manifest in manifests if manifest.region != self.setup.region)
        rounds = self._rounds_with(manifests)
        return [
            MergeUpdates(
                sequence,
                manifests,
                step=self._until if sequence else 0,
                samples=self._samples + (own.weight if own and sequence else 0.0),
                applied=self._applied + remote,
                version=sequence,
                watermarks=tuple((region, sequence) for region in self.setup.others),
                complete=sequence >= rounds,
                ends=rounds if rounds < self.setup.rounds else 0,
            )
        ]

    def _was_applied(self, event: UpdatesMerged) -> list[Action]:
        self._sequence, self._step = event.apply.sequence, event.apply.step
        self._samples, self._applied = event.apply.samples, event.apply.applied
        self._live_step = self._step
        self._rounds = self._rounds_with(event.apply.manifests)
        self._model_digest, self._model_key, self._state_key = event.digest, event.model_key, event.state_key
        self.ledger.marks = dict.fromkeys(self.setup.regions, self._sequence)
        done, late = self._boundary.waiting, [*self._merge.waiting, *self._evaluation.waiting]
        self._boundary = Boundary()
        self._merge, self._evaluation = StepMerge(self.setup.workers), ModelEvaluation(self.setup.workers)
        actions: list[Action] = [Reply(call, self._boundary_answer()) for call in done]
        actions += [Refuse(call, "FENCED", f"round {self._sequence} is over") for call in late]
        return actions + self._answer_attached() + self._forget() + self._halted() + self._try_apply()

    def _boundary_answer(self) -> BoundaryAnswer:
        return BoundaryAnswer(
            sequence=self._sequence,
            model_key=self._model_key,
            state_key=self._state_key,
            evaluate=self._evaluates(self._sequence) and not self._has_metrics(self._sequence),
            finished=self._complete,
            until_step=self._until,
        )

    def _phase(self) -> str:
        if self._failure is not None:
            return "failed"
        if self.finished:
            return "finished"
        if self._sequence == NO_MODEL:
            return "starting"
        own = self.ledger.own(self._sequence + 1)
        return "exchanging" if self._boundary.preparing or own is not None else "training"

    @property
    def awaited(self) -> tuple[str, ...]:
        sequence = self._sequence + 1
        if self._round_ended and self._keyless:
            return tuple(sorted(self._keyless))
        own_stored = self.ledger.own(sequence) is not None or self._sequence == NO_MODEL
        if self._complete or not own_stored:
            return ()
        names = self.setup.contributors(sequence)
        missing = (name for name, found in zip(names, self._of_round(sequence), strict=True) if found is None)
        return tuple(name for name in missing if name != self.setup.region)

    def _condition(self) -> str:
        names = ", ".join(self.awaited)
        if self._round_ended and self._keyless:
            return f"waiting for the mask key of {names}"
        return f"waiting for the update of round {self._sequence + 1} from {names}" if names else ""
