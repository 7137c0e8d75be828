"""Background exchange: workers continue at once, and updates are merged as they arrive.

At the end of a round the workers' model is put into the log, and they continue from it, corrected by what the last
merge knew: their own fresh change in full, everybody's earlier ones as merged (delayed application with the own fresh
term; arXiv 2502.12996, and Decoupled DiLoCo, arXiv 2604.21428, for the quorum and the grace window). Meanwhile the
round's update is made, shipped and merged together with the remote ones that have come. Nobody waits for anybody,
unless the workers end another round before this one is merged: a merge waits for the same round of every region that
keeps up, and of one that lacked it the last time for what it will have. At the end of the next round the workers wait
for the one before, and after a moment for one a few rounds older.
A region that does not is left out until it does (`Membership`); its updates are merged when they come, and until then
the others' count for more in the model that the workers continue from (`Replica`). Regions get their model one after
the other, and make the first rounds together. So is the last quarter of the job made, with all, whoever was away, so
that what regions made apart is trained on together. A quorum makes a merge wait for fewer, a lead bounds how far a
region may then run ahead.

After its last round a region merges the others' updates until all have made their last: then every region's model
holds every update. Where the job is to end before its plan, a region's last round is the one that it is told in, by the
control plane or by another region's last update.
"""

from __future__ import annotations

from sync.ps.core.actions import (
    Action,
    Apply,
    Failed,
    Log,
    Prepare,
    Refuse,
    Reply,
    Restart,
    StartGrace,
    StartPatience,
    StartPause,
)
from sync.ps.core.answers import AttachAnswer, BoundaryAnswer
from sync.ps.core.cadence import Tempo
from sync.ps.core.events import Applied, BoundaryArrived, GraceOver, Logged, PatienceOver, PauseOver, Restarted
from sync.ps.core.ledger import NO_MODEL
from sync.ps.core.machine import Machine, Recovered, Setup
from sync.ps.core.membership import Membership
from sync.ps.core.worker_group import Evaluation
from sync.transfer.manifest import Manifest

__all__ = ["FIRST", "Background"]

_BACKLOG = 32
"""Remote updates after which a merge does not wait for a round of ours."""
_TOGETHER = 4
"""The last 1/4 of the steps is made together: what regions that were cut off from each other have made apart is
averaged when they meet, and a model like that must be trained on. All are waited for in the end anyway."""
FIRST = 2
"""So many rounds are begun together: regions get the first model one after the other, and who is rounds ahead from the
start merges what is old throughout, and waits in the end for those that have as far to go."""
_NEAR = 4
"""A region that is further behind merges the others' rounds as they come."""
_LATE = 3
"""By so many rounds a region may be late before the workers wait for longer than the grace window: a server that starts
anew, bytes that are sent again. It is more than the patience with a region of which nothing comes at all
(`Punctuality`), so that one that is gone holds nobody up."""
_BACK = 16
"""One that was away and is no more than so many rounds behind catches up in the grace windows: models that have stayed
near average better, and the job ends no later, since the end waits for all."""
_AHEAD = 1 << 16
"""A peer cannot be further ahead than this; it bounds what is kept of it."""


class Background(Machine):
    """Workers continue while updates travel."""

    def __init__(self, setup: Setup, recovered: Recovered | None = None) -> None:
        recovered = recovered or Recovered()
        super().__init__(setup, recovered)
        self._version = recovered.version
        self._ended = recovered.ended
        """The last round whose end is in the log."""
        self._logging = False
        self._correction_key = recovered.correction_key
        """What the last merge leads the workers to the model with, at the next end of a round."""
        self._lasts = set(recovered.lasts)
        self._own_last = recovered.ended is not None and setup.is_last(recovered.ended)
        self._told_to_end = any(manifest.ends for manifest in recovered.inbox)
        self._start_key, self._start_sequence = recovered.model_key, self._ended_sequence
        """A worker without a place of its own finds the model of the open round here, if it began with this one."""
        self._restart_wanted = self._restarting = False
        self._grace: set[int] = set()
        """Rounds whose grace window was begun: with a quorum for more updates than it needs, else for regions that are
        a little late."""
        self._grace_over: set[int] = set()
        self._membership = Membership()
        self._lags: dict[str, tuple[int, int]] = {}
        """Rounds of each region that were lacking at the last end of one that our workers came to, and at the one
        before."""
        self._lags_of = 0
        self._patience = 0
        """The round for which patience is running out."""
        self._pause = self._pause_over = 0
        """The round before which the workers were last held up because this region is alone, and that may be ended."""
        self._tempo = Tempo()
        self.stretch = 1
        """Times the planned interval that rounds should last, as seen from here."""
        self._stretches = {
            manifest.region: manifest.stretch
            for manifest in sorted((*recovered.inbox, *recovered.outbox), key=lambda m: m.sequence)
            if manifest.sequence <= self.ledger.marks[manifest.region]
        }
        """As each region said in its last update that is merged: the longest counts, for all."""
        if recovered.ended is not None:
            self._live_step = recovered.ended.step

    # Where it stands

    @property
    def _ended_sequence(self) -> int:
        return self._ended.sequence if self._ended is not None else min(self._sequence, 0)

    @property
    def _complete(self) -> bool:
        return self._own_last and self._sequence == self._ended_sequence and self._lasts >= set(self.setup.others)

    @property
    def _reached(self) -> int:
        return self._ended_sequence - (1 if self._own_last and not self._complete else 0)

    @property
    def _open_step(self) -> int:
        return self._ended.step if self._ended is not None else 0

    @property
    def _until(self) -> int:
        if self._ended is not None:
            return self._ended.until_step
        return min(self.setup.steps_per_round, self.setup.steps)

    @property
    def _pending(self) -> Log | None:
        """The round that has ended and is not merged yet."""
        return self._ended if self._ended is not None and self._ended.sequence > self._sequence else None

    def _heard(self, manifest: Manifest) -> list[Action]:
        self._told_to_end |= bool(manifest.ends)
        self._tempo.made(manifest.region, manifest.round_seconds)
        return []

    def _expects(self, manifest: Manifest) -> bool:
        if manifest.sequence == 0 or self._sequence > NO_MODEL:
            return manifest.sequence <= self.ledger.marks[manifest.region] + _AHEAD
        return False

    # Workers come

    def _attempt_begins(self) -> list[Action]:
        self._restart_wanted = self._sequence > NO_MODEL and not self._own_last
        return self._try_restart()

    def _try_restart(self) -> list[Action]:
        """Begin the open round from the model, once no end of a round is on its way that still needs the old start."""
        settled = self._pending is None or self.ledger.own(self._ended_sequence) is not None
        if not self._restart_wanted or self._logging or self._boundary.preparing or not settled:
            return []
        self._restart_wanted, self._restarting = False, True
        return [Restart(self.attempt)]

    def _was_restarted(self, event: Restarted) -> list[Action]:
        if event.attempt != self.attempt:
            return []
        self._restarting, self._correction_key = False, ""
        self._start_key, self._start_sequence = event.model_key, self._ended_sequence
        self._state_key = event.state_key
        return self._answer_attached()

    def _answer_attached(self) -> list[Action]:
        if self._restart_wanted or self._restarting:
            return []
        waiting, self._attaching = self._attaching, {}
        settling = self._own_last and not self._complete
        begins = self._start_sequence == self._ended_sequence
        answer = AttachAnswer(
            sequence=self._reached,
            step=self._open_step,
            model_key=self._model_key if self._complete else self._start_key if begins else "",
            # Who makes no more steps needs none; what workers hand over goes with their attempt.
            state_key=self._state_key if begins and not self._own_last else "",
            boundary=settling,
            finished=self._complete,
            evaluate=self._evaluates(self._reached) and not self._has_metrics(self._reached) and not settling,
            until_step=self._until,
            correction_key=self._ended.correction_key if self._ended is not None else "",
            background=True,
        )
        return [Reply(call, answer) for call in waiting]

    # Rounds

    def _boundary_arrived(self, event: BoundaryArrived) -> list[Action]:
        ended = self._ended_sequence
        if event.sequence == ended and self._ended is not None:
            if self._own_last and not self._complete:
                self._boundary.waiting[event.call] = event.sequence
                return []
            return [Reply(event.call, self._boundary_answer())]
        if event.sequence != ended + 1 or self._own_last or self._sequence == NO_MODEL or not event.digest:
            return [Refuse(event.call, "FENCED", f"round {event.sequence} cannot end now")]
        if self._restart_wanted or self._restarting:
            return [Refuse(event.call, "FENCED", "the attempt has not begun")]
        self._boundary.waiting[event.call] = event.sequence
        if self._logging:
            return []
        self._boundary.arrived[event.worker] = event
        return self._try_log()

    def _try_log(self) -> list[Action]:
        busy = self._logging or self._boundary.applying
        if len(self._boundary.arrived) < self.setup.workers or busy or self._failure is not None:
            return []
        ended = self._ended_sequence
        if self._lags_of != ended:
            self._lags_of = ended
            for region in self.setup.others:
                before, _ = self._lags.get(region, (0, 0))
                self._lags[region] = max(0, ended - self.ledger.newest(region)), before
        if late := self._late():
            return self._lose_patience(ended, late)
        if self._pending is not None:
            return self._try_apply()
        if self._pause_over <= self._ended_sequence and (self._alone or self._slower):
            return self._pauses(self._ended_sequence + 1)
        agreed = self._agreed()
        if isinstance(agreed, Failed):
            return self._fail(agreed)
        end, weight = agreed
        stretch = max(self._stretches.values(), default=1)
        until = min(end.step + stretch * self.setup.steps_per_round, self.setup.steps)
        last = self._told_to_end or end.step >= self.setup.steps
        self._logging, self._boundary.arrived = True, {}
        log = Log(end.sequence, end.model_key, end.state_key, weight, end.step, self._correction_key, until, last)
        return [log]

    def _was_logged(self, event: Logged) -> list[Action]:
        self._logging = False
        self._ended = event.log
        self._tempo.made(self.setup.region, self.round_seconds)
        self._own_last = self.setup.is_last(event.log)
        actions: list[Action] = []
        if not self._own_last:
            actions += self._answer_waiting()
        return actions + self._try_apply()

    def _answer_waiting(self) -> list[Action]:
        done = [call for call, sequence in self._boundary.waiting.items() if sequence == self._ended_sequence]
        for call in done:
            del self._boundary.waiting[call]
        return [Reply(call, self._boundary_answer()) for call in done]

    def _boundary_answer(self) -> BoundaryAnswer:
        return BoundaryAnswer(
            sequence=self._ended_sequence,
            model_key=self._model_key if self._complete else "",
            state_key="",
            evaluate=self._evaluates(self._ended_sequence) and not self._has_metrics(self._ended_sequence),
            finished=self._complete,
            until_step=self._until,
            correction_key="" if self._complete or self._ended is None else self._ended.correction_key,
        )

    # Merges

    def _try_apply(self) -> list[Action]:
        """Whatever can be done next for the round that has ended, and for what has come."""
        if self._boundary.preparing or self._boundary.applying or self._logging:
            return []
        if self._sequence == NO_MODEL:
            first = self.ledger.kept.get((self.setup.regions[0], 0))
            return [] if first is None else self._apply(0, [first])
        restart = self._try_restart()
        if restart:
            return restart
        pending = self._pending
        if pending is not None and self.ledger.own(pending.sequence) is None:
            return [self._prepare(pending)]
        remote = self._mergeable()
        if pending is not None:
            waits = self._waits_for_quorum(pending.sequence, {manifest.region for manifest in remote})
            if waits is not None:
                return waits
            if self._late():
                return self._try_log()
            own = self.ledger.own(pending.sequence)
            return self._apply(pending.sequence, [*remote, *([own] if own is not None else [])])
        if remote and (self._own_last or len(remote) >= _BACKLOG):
            return self._apply(self._sequence, remote)
        # The workers may have waited for what has come.
        return self._try_log()

    def _prepare(self, ended: Log) -> Prepare:
        self._boundary.preparing = True
        return Prepare(
            ended.sequence,
            self.epoch,
            ended.model_key,
            ended.state_key,
            ended.weight,
            ended.step,
            ended.correction_key,
            seen=self.ledger.seen(),
            last=self.setup.is_last(ended),
            stretch=self.stretch,
            ends=ended.sequence if ended.step < self.setup.steps and ended.last else 0,
            round_seconds=self.round_seconds,
        )

    def _mergeable(self) -> list[Manifest]:
        """Remote updates that can be merged next: of no later round than ours, unless a merge takes what there is.

        One that sums up several rounds comes from a region that was away, and need not wait for the last of them. Nor
        does what comes from one that is far ahead, as others are where this region was cut off and waited for them in
        vain: it would be old by the time that the same round ends here.
        """
        takes_all = self.setup.quorum or (self._own_last and self._pending is None)
        ended = self._ended_sequence
        found: list[Manifest] = []
        for region in self.setup.others:
            run = self.ledger.next_of(region)
            far_ahead = bool(run) and run[-1].sequence > ended + _NEAR
            found += (manifest for manifest in run if takes_all or far_ahead or manifest.begins <= ended)
        return found

    def _waits_for_quorum(self, sequence: int, fresh: set[str]) -> list[Action] | None:
        """None: it does not wait."""
        if not self.setup.quorum:
            return None
        if len(fresh) + 1 >= min(self.setup.quorum, len(self.setup.regions)) or sequence in self._grace_over:
            return None
        if sequence in self._grace:
            return []
        self._grace = {sequence}
        return [StartGrace(sequence)]

    def _grace_is_over(self, event: GraceOver) -> list[Action]:
        if event.sequence in self._grace:
            self._grace_over = {event.sequence}
        return self._try_apply()

    def _awaited_round(self, region: str) -> int:
        """The round that must be here of a region that keeps up, for the pending one to be merged, or the next one to
        be ended."""
        if self.setup.quorum:
            return self._ended_sequence - self.setup.lead
        if self._ended_sequence <= FIRST:
            return self._ended_sequence
        if len(self._boundary.arrived) < self.setup.workers:
            # The more of two: what comes just at the end of a round lacks in turn, and does not. Of a region that lacks
            # one more each time, one more still: nothing has come since the last end.
            lag, before = self._lags.get(region, (0, 0))
            return self._ended_sequence - (lag + 1 if lag > before else before)
        if self._together or self._ended_sequence not in self._grace_over:
            return self._ended_sequence - 1
        return self._ended_sequence - self._membership.behind(region) - _LATE

    @property
    def _together(self) -> bool:
        """The end of the job is near: every region is waited for."""
        return self._open_step * _TOGETHER > self.setup.steps * (_TOGETHER - 1)

    def _late(self) -> tuple[str, ...]:
        """Regions that the merge of the pending round waits for, and then the workers.

        Without a quorum all that keep up. The merge waits for the same round, or for one as much older as a region
        lacked at the last end: a merge that would wait in vain would be made while the workers wait. They wait for the
        one before (in the first rounds for the same), and after the grace window for one a few rounds older. With a
        quorum, both wait for those that are too far behind (stale synchronous parallel, Ho et al. 2013).
        """
        if self.setup.quorum and (not self.setup.lead or self._own_last):
            return ()
        away = {*self._lasts} if self._together else {*self._membership.absent, *self._lasts}
        present = [region for region in self.setup.others if region not in away]
        late = (region for region in present if self.ledger.newest(region) < self._awaited_round(region))
        return tuple(region for region in late if not self.ledger.has_ended(region))

    def _lose_patience(self, sequence: int, late: tuple[str, ...]) -> list[Action]:
        """The workers are held up by regions whose updates have not come."""
        making = self._pending is not None and self.ledger.own(sequence) is None
        if self._together or self._patience >= sequence or making:
            return []
        if not self.setup.quorum and sequence not in self._grace_over:
            if sequence in self._grace:
                return []
            self._grace = {sequence}
            return [StartGrace(sequence)]
        self._patience = sequence
        alone = {*late, *self._membership.absent, *self._lasts} >= set(self.setup.others)
        return [StartPatience(sequence, late, alone, tuple(region for region in late if self._is_elsewhere(region)))]

    def _is_elsewhere(self, region: str) -> bool:
        """Whether another region has said that it has what this one waits for."""
        awaited = self._awaited_round(region)
        return any(self.ledger.has(who, region) >= awaited for who in self.setup.others if who != region)

    def _patience_is_over(self, event: PatienceOver) -> list[Action]:
        if event.sequence != self._patience:
            return []
        self._patience = 0
        if self._ended_sequence == event.sequence and not self._together:
            self._membership.gave_up(region for region in self._late() if region in event.regions)
        return self._try_apply()

    @property
    def usual_round_seconds(self) -> float:
        return self._tempo.usual(self.setup.region)

    @property
    def held_up(self) -> bool:
        if len(self._boundary.arrived) < self.setup.workers or self._logging:
            return False
        return self._pause > max(self._pause_over, self._ended_sequence) or bool(self._late())

    @property
    def _alone(self) -> bool:
        """Nobody that still trains is waited for, and nobody is further than this region."""
        absent = self._membership.absent
        if self.setup.quorum or self._together or not {*absent, *self._lasts} >= set(self.setup.others):
            return False
        training = [region for region in absent if not self.ledger.has_ended(region)]
        return bool(training) and all(self.ledger.newest(region) < self._ended_sequence for region in training)

    @property
    def _slower(self) -> dict[str, float]:
        """Regions that still train and are not absent whose rounds take longer than ours, and how many seconds."""
        if self.setup.quorum:
            return {}
        gone = {*self._membership.absent, *self._lasts}
        training = [one for one in self.setup.others if one not in gone and not self.ledger.has_ended(one)]
        return self._tempo.slower_than(self.setup.region, training)

    def _pauses(self, sequence: int) -> list[Action]:
        """With others that are slower it ends its rounds when they do (`sync.ps.core.cadence`). Alone it makes them no
        faster than with the others: who waits for nobody is through with the job where rounds are short, before anybody
        is heard again, and what it makes alone is worth the least."""
        if self._pause >= sequence:
            return []
        self._pause = sequence
        return [StartPause(sequence, tuple(sorted(self._slower.items())))]

    def _pause_is_over(self, event: PauseOver) -> list[Action]:
        self._pause_over = max(self._pause_over, event.sequence)
        return self._try_log()

    def _apply(self, sequence: int, manifests: list[Manifest]) -> list[Action]:
        self._boundary.applying = True
        ordered = tuple(sorted(manifests, key=lambda m: (m.region, m.sequence)))
        marks = dict(self.ledger.marks) if sequence else dict.fromkeys(self.setup.regions, 0)
        marks |= {manifest.region: manifest.sequence for manifest in ordered}
        lasts = self._lasts | {m.region for m in ordered if m.last and m.region != self.setup.region}
        own = next((m for m in ordered if m.region == self.setup.region and m.sequence), None)
        complete = self._own_last and sequence == self._ended_sequence and lasts >= set(self.setup.others)
        return [
            Apply(
                sequence,
                ordered,
                step=self._open_step,
                samples=self._samples + (own.weight if own else 0.0),
                applied=self._applied + sum(m.rounds for m in ordered if m.region != self.setup.region),
                version=self._version + 1,
                watermarks=tuple(sorted((r, mark) for r, mark in marks.items() if r != self.setup.region)),
                staleness=tuple(
                    0
                    if m.region == self.setup.region
                    else max(0, self._ended_sequence - m.saw.get(self.setup.region, 0))
                    for m in ordered
                ),
                lasts=tuple(sorted(lasts - {self.setup.region})),
                whole=complete or sequence == 0,
                complete=complete,
            )
        ]

    def _was_applied(self, event: Applied) -> list[Action]:
        apply = event.apply
        self._boundary.applying = False
        self._sequence, self._step, self._version = apply.sequence, apply.step, apply.version
        self._samples, self._applied = apply.samples, apply.applied
        self._model_digest, self._lasts = event.digest or self._model_digest, set(apply.lasts)
        self.ledger.sums.model_bytes = event.model_bytes
        self.ledger.marks |= dict(apply.watermarks) | {self.setup.region: apply.sequence}
        self._stretches |= {manifest.region: manifest.stretch for manifest in apply.manifests}
        if any(manifest.region == self.setup.region for manifest in apply.manifests):
            came = {manifest.region for manifest in apply.manifests}
            for region in self.setup.others:
                behind = apply.sequence - self.ledger.marks[region]
                near = region in came and behind <= _BACK
                keeps_up = near or behind <= 0 or region in self._lasts
                self._membership.merged(region, keeps_up=keeps_up, behind=max(0, behind))
        for manifest, stale in zip(apply.manifests, apply.staleness, strict=False):
            if manifest.region != self.setup.region:
                old = self._staleness.get(manifest.region, float(stale))
                self._staleness[manifest.region] = 0.8 * old + 0.2 * stale
        if apply.whole:
            self._model_key, self._correction_key = event.model_key, ""
            self._start_key, self._start_sequence = event.model_key, self._ended_sequence
        else:
            self._correction_key = event.correction_key
        actions: list[Action] = []
        if apply.sequence == 0 or self._complete:
            if self._complete:
                self._evaluation = Evaluation(self.setup.workers)
                actions += self._answer_waiting()
            actions += self._answer_attached()
        return actions + self._forget() + self._try_log() + self._try_apply()

    # What it says of itself

    def _phase(self) -> str:
        if self._failure is not None:
            return "failed"
        if self.finished:
            return "finished"
        if self._sequence == NO_MODEL:
            return "starting"
        merging = bool(self._boundary.arrived) and (self._pending is not None or bool(self._late()))
        held = self._own_last or self.held_up or merging
        return "exchanging" if held else "training"

    def _condition(self) -> str:
        if self._sequence == NO_MODEL:
            first = self.setup.regions[0]
            waits = first != self.setup.region
            return f"waiting for the update of round 0 from {first}" if waits else ""
        if self._own_last and not self._complete:
            missing = [region for region in self.setup.others if region not in self._lasts]
            return f"waiting for the last updates from {', '.join(missing)}" if missing else ""
        if self._boundary.arrived and (late := self._late()):
            if self.setup.quorum:
                return f"{self.setup.lead} rounds ahead of {', '.join(late)}"
            return f"waiting for round {self._awaited_round(late[0])} of {', '.join(late)}"
        if self.held_up and (slower := self._slower):
            return f"in step with {', '.join(slower)}"
        if self._membership.absent:
            return f"continuing without {', '.join(self._membership.absent)}"
        return ""
