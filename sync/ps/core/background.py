"""Background exchange: workers continue at once, and updates are merged as they arrive.

At the end of a round the workers' model is put into the log, and they continue from it, corrected by what the last
merge knew: their own fresh change in full, everybody's earlier ones as merged (delayed application with the own fresh
term; arXiv 2502.12996, and Decoupled DiLoCo, arXiv 2604.21428, for the quorum and the grace window). Meanwhile the
round's update is made, shipped and merged together with the remote ones that have come. When a merge or the workers
wait for other regions, and for how long, is decided by `WaitingPolicy`. A region that does not keep up is not waited
for until it does; its updates are merged when they come, and until then the others' count for more in the model that
the workers continue from (`Replica`).

With ``Setup.same_round`` all regions make the same merges, as with synchronous exchange, one round later: each merge
holds one round of every region that makes it, and the workers end no round before the last one is merged. Who makes no
round any more is known from the updates that are merged, so all regions know it before the same merge.

After its last round a region merges the others' updates until all have made their last: then every region's model
holds every update. Where the job is to end before its plan, a region's last round is the one that it is told in, by the
control plane or by another region's last update.
"""

from __future__ import annotations

import math

from sync.file_transfer.manifest import Manifest
from sync.ps.core.actions import (
    Action,
    Failed,
    LogRoundEnd,
    MergeUpdates,
    Refuse,
    Reply,
    Restart,
    SetTimer,
    StoreOwnUpdate,
)
from sync.ps.core.answers import AttachAnswer, BoundaryAnswer
from sync.ps.core.events import (
    NOTHING_MEASURED,
    BoundaryArrived,
    Event,
    Measured,
    Restarted,
    RoundEndLogged,
    UpdatesMerged,
)
from sync.ps.core.ledger import NO_MODEL
from sync.ps.core.machine import Machine, Recovered, Setup
from sync.ps.core.waiting import Continue, WaitingPolicy, WaitView
from sync.ps.core.worker_group import ModelEvaluation
from sync.wan import overlapped_steps

__all__ = ["Background"]

_MAX_AHEAD_ROUNDS = 1 << 16
"""Rounds that an accepted update may be ahead of the last merged one of its region; it bounds what is kept. Far
more than a region makes while another one is away."""


_TELLING_ROUNDS = 8
"""Rounds within which regions tell how long their rounds take: the first ones that count, and some until they are
here. Those of earlier versions never tell."""


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
        """Store key of the correction that the workers apply at the next end of a round to reach the merged model."""
        self._lasts = set(recovered.lasts)
        self._own_last = recovered.ended is not None and setup.is_last(recovered.ended)
        self._told_to_end = any(manifest.ends for manifest in recovered.inbox)
        self._start_key, self._start_sequence = recovered.model_key, self._ended_sequence
        """Store key of the model that the open round began with, for workers that join; and its round."""
        self._restart_wanted = self._restarting = False
        self._start_lost = recovered.start_lost
        self.waiting = WaitingPolicy(setup)
        self._timer_at = math.inf
        """Instant at which the timer fires; infinity: no timer is set."""
        self.round_seconds = 0.0
        """Duration of the last round, without the time that the workers waited for other regions; 0: not known."""
        self.stretch = 1
        """Factor by which this region wants rounds to be longer than the planned interval."""
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
    def _pending(self) -> LogRoundEnd | None:
        """The round that has ended and is not merged yet."""
        return self._ended if self._ended is not None and self._ended.sequence > self._sequence else None

    def _heard(self, manifest: Manifest) -> list[Action]:
        self._told_to_end |= bool(manifest.ends)
        self.waiting.update_came(manifest.region, manifest.sequence, manifest.round_seconds, self._measured.now)
        return []

    def _was_prepared(self, manifest: Manifest) -> list[Action]:
        self.waiting.own_update_made(manifest.sequence, self._measured.now)
        return []

    def _expects(self, manifest: Manifest) -> bool:
        if manifest.sequence == 0 or self._sequence > NO_MODEL:
            return manifest.sequence <= self.ledger.marks[manifest.region] + _MAX_AHEAD_ROUNDS
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
        self._restarting, self._start_lost, self._correction_key = False, False, ""
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
            # Without further steps a worker needs no state, and a new attempt discards the state of the last one.
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
        if self._start_lost:
            return [Refuse(event.call, "FENCED", "what the open round began from is lost")]
        self._boundary.waiting[event.call] = event.sequence
        if self._logging:
            return []
        self._boundary.arrived[event.worker] = event
        return self._try_log()

    def _try_log(self) -> list[Action]:
        busy = self._logging or self._boundary.applying
        if not self._workers_done or busy or self._failure is not None:
            return []
        if (waits := self._wait()) is not None:
            return waits
        if self._pending is not None:
            return self._try_apply()
        agreed = self._agreed()
        if isinstance(agreed, Failed):
            return self._fail(agreed)
        end, weight = agreed
        stretch = max(self._stretches.values(), default=1)
        until = min(end.step + stretch * self.setup.steps_per_round, self.setup.steps)
        last = self._told_to_end or end.step >= self.setup.steps
        self._logging, self._boundary.arrived = True, {}
        self.waiting.workers_continue(self._measured.now)
        log = LogRoundEnd(
            end.sequence, end.model_key, end.state_key, weight, end.step, self._correction_key, until, last
        )
        return [log]

    def _was_logged(self, event: RoundEndLogged) -> list[Action]:
        self._logging = False
        self._ended = event.log
        overlap_seconds = self.step_seconds * overlapped_steps(self.setup.steps_per_round)
        self.round_seconds = self.waiting.round_logged(self._measured.now, overlap_seconds)
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

    def hiding_seconds(self) -> float:
        """Return the seconds of a local step within which an exchange is hidden: this region's own, or longer where
        its workers wait for slower regions anyway; 0 as long as it is not known how long rounds take elsewhere, and
        once no round follows."""
        steps, view = self._until - self._open_step, self._view()
        unknown = self._ended_sequence <= _TELLING_ROUNDS and not self.waiting.knows_durations(view)
        if unknown or self._own_last or self._told_to_end:
            return 0.0
        return max(self.step_seconds, self.waiting.slowest_seconds(view) / steps if steps > 0 else 0.0)

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
            if (waits := self._wait(remote)) is not None:
                return waits
            own = self.ledger.own(pending.sequence)
            return self._apply(pending.sequence, [*remote, *([own] if own is not None else [])])
        if remote and (self._own_last or len(remote) >= self.setup.waiting.max_waiting_updates):
            return self._apply(self._sequence, remote)
        # The workers may have waited for what has come.
        return self._try_log()

    def _prepare(self, ended: LogRoundEnd) -> StoreOwnUpdate:
        self._boundary.preparing = True
        return StoreOwnUpdate(
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
        if self.setup.same_round:
            return self._of_next_round()
        takes_all = self.setup.quorum or (self._own_last and self._pending is None)
        ended = self._ended_sequence
        found: list[Manifest] = []
        for region in self.setup.others:
            run = self.ledger.next_of(region)
            far_ahead = bool(run) and run[-1].sequence > ended + self.setup.waiting.far_ahead_rounds
            found += (manifest for manifest in run if takes_all or far_ahead or manifest.begins <= ended)
        return found

    def _of_next_round(self) -> list[Manifest]:
        """The others' updates of the next round to merge; none as long as one is missing, or our own round is open."""
        if self._pending is None and not self._own_last:
            return []
        making = [region for region in self.setup.others if region not in self._lasts]
        found = [self.ledger.kept.get((region, self.ledger.marks[region] + 1)) for region in making]
        here = [manifest for manifest in found if manifest is not None]
        return here if len(here) == len(found) else []

    # Waiting

    def handle(self, event: Event, measured: Measured = NOTHING_MEASURED) -> list[Action]:
        """Handle an event; return the actions to execute, in order."""
        actions = super().handle(event, measured)
        self.waiting.clock.held(measured.now, self.held_up)
        return actions

    def _wait(self, mergeable: list[Manifest] | None = None) -> list[Action] | None:
        """Return the actions if the next merge or end of a round must wait, or None if it may be done."""
        decision = self.waiting.decide(self._view(mergeable), self._measured.now)
        if isinstance(decision, Continue):
            return None
        if decision.at in (self._timer_at, math.inf):
            return []
        self._timer_at = decision.at
        return [SetTimer(decision.at, decision.reason)]

    def _timer_fired(self) -> list[Action]:
        self._timer_at = math.inf
        return self._try_apply()

    def _view(self, mergeable: list[Manifest] | None = None) -> WaitView:
        """Return what the waiting policy decides from. ``mergeable``: what the next merge takes, if known already."""
        others, ledger = self.setup.others, self.ledger
        pending = self._pending is not None
        update_made = pending and ledger.own(self._ended_sequence) is not None
        if mergeable is None:
            mergeable = self._mergeable() if self.setup.quorum and update_made else []
        return WaitView(
            ended=self._ended_sequence,
            step=self._open_step,
            pending=pending,
            update_made=update_made,
            workers_done=self._workers_done,
            own_last=self._own_last,
            newest={region: ledger.newest(region) for region in others},
            last_here=frozenset(region for region in others if ledger.has_ended(region)),
            last_merged=frozenset(self._lasts),
            mergeable=frozenset(manifest.region for manifest in mergeable),
            elsewhere={
                region: max((ledger.has(who, region) for who in others if who != region), default=NO_MODEL)
                for region in others
            },
            step_seconds=self.step_seconds,
            update_bytes=self._update_bytes,
            links=self._measured.links,
        )

    @property
    def _workers_done(self) -> bool:
        return len(self._boundary.arrived) >= self.setup.workers

    @property
    def held_up(self) -> bool:
        """Whether our workers have ended a round and wait for other regions."""
        return self._workers_done and not self._logging and self.waiting.holds_workers(self._view())

    def _apply(self, sequence: int, manifests: list[Manifest]) -> list[Action]:
        self._boundary.applying = True
        ordered = tuple(sorted(manifests, key=lambda m: (m.region, m.sequence)))
        marks = dict(self.ledger.marks) if sequence else dict.fromkeys(self.setup.regions, 0)
        marks |= {manifest.region: manifest.sequence for manifest in ordered}
        lasts = self._lasts | {m.region for m in ordered if m.last and m.region != self.setup.region}
        own = next((m for m in ordered if m.region == self.setup.region and m.sequence), None)
        complete = self._own_last and sequence == self._ended_sequence and lasts >= set(self.setup.others)
        return [
            MergeUpdates(
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

    def _was_applied(self, event: UpdatesMerged) -> list[Action]:
        apply = event.apply
        self._boundary.applying = False
        self._sequence, self._step, self._version = apply.sequence, apply.step, apply.version
        self._samples, self._applied = apply.samples, apply.applied
        self._model_digest, self._lasts = event.digest or self._model_digest, set(apply.lasts)
        self.ledger.sums.model_bytes = event.model_bytes
        self.ledger.marks |= dict(apply.watermarks) | {self.setup.region: apply.sequence}
        self._stretches |= {manifest.region: manifest.stretch for manifest in apply.manifests}
        if any(manifest.region == self.setup.region for manifest in apply.manifests):
            membership, came = self.waiting.membership, {manifest.region for manifest in apply.manifests}
            for region in self.setup.others:
                lag_rounds, finished = apply.sequence - self.ledger.marks[region], region in self._lasts
                membership.merged(region, came=region in came, lag_rounds=lag_rounds, finished=finished)
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
                self._evaluation = ModelEvaluation(self.setup.workers)
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
        late = bool(self._boundary.arrived) and bool(self.waiting.late(self._view()))
        merging = bool(self._boundary.arrived) and self._pending is not None
        held = self._own_last or self.held_up or merging or late
        return "exchanging" if held else "training"

    @property
    def awaited(self) -> tuple[str, ...]:
        if self._sequence == NO_MODEL:
            return tuple(region for region in self.setup.regions[:1] if region != self.setup.region)
        if self._own_last and not self._complete:
            return tuple(region for region in self.setup.others if region not in self._lasts)
        return self.waiting.late(self._view()) if self._boundary.arrived else ()

    @property
    def paused(self) -> bool:
        return self.held_up and not self.awaited

    @property
    def lacks_quorum(self) -> bool:
        ended = self._pending
        if ended is None or self._boundary.applying or self.ledger.own(ended.sequence) is None:
            return False
        quorum = min(self.setup.quorum, len(self.setup.regions))
        return len({manifest.region for manifest in self._mergeable()}) + 1 < quorum

    def _condition(self) -> str:
        if self._sequence == NO_MODEL:
            return f"waiting for the update of round 0 from {self.awaited[0]}" if self.awaited else ""
        if self._own_last and not self._complete:
            missing = ", ".join(self.awaited)
            return f"waiting for the last updates from {missing}" if missing else ""
        view = self._view()
        if self._boundary.arrived and (late := self.waiting.late(view)):
            if self.setup.quorum:
                return f"{self.setup.max_rounds_ahead} rounds ahead of {', '.join(late)}"
            return f"waiting for round {self.waiting.awaited_round(late[0], view)} of {', '.join(late)}"
        if self.held_up and (slower := self.waiting.slower(view)):
            return f"in step with {', '.join(slower)}"
        if absent := self.waiting.membership.absent:
            return f"continuing without {', '.join(absent)}"
        return ""
