"""The life of a job: queued → planned → starting → running → finishing → succeeded | failed | cancelled.

Invariants, held against any order of events by `tests/control_plane/test_job_machine.py`: an ended job stays as it
is; epochs only grow; at most one region is asked for the model at a time; peers are sent only when the addresses of
all are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from control_plane.core._copies import (
    copies_ended,
    copying,
    held_back,
    links_needed,
    orders,
    reported,
    unfinished,
    waited_for,
    with_copy,
    without_told,
)
from control_plane.core._events import (
    Begun,
    CancelAsked,
    Continued,
    FinishAsked,
    JobAction,
    JobEvent,
    Planned,
    Record,
    RegionLive,
    RegionLost,
    RegionUnreachable,
    ReplanAsked,
    Reported,
    Rerouted,
    ScaleAsked,
    SendPeers,
    SendPublish,
    SendScale,
    SendStart,
    SendStop,
    Tick,
    Waits,
)
from control_plane.core._goal import may_end_early, metrics_without_goal, reached
from control_plane.core._meters import settled, with_all_meters
from control_plane.core._report_events import failure_of, fewer_workers, no_step_back, records_of
from control_plane.core._state import ENDED_PARTITION, Copy, Failure, JobPhase, JobState, Link, Partition, Peer

MAX_PUBLISHES = 5
"""How often the model is asked for before the job fails: each time it did not arrive whole."""
_STARTED = ("starting", "running", "finishing")
_EVERYWHERE = "starting in all regions"


class JobMachine:
    """`handle(event)` changes `state` and says what is to be done."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self._out: list[JobAction] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Planned: self._planned,
            Waits: self._waits,
            Begun: self._begun,
            Reported: self._reported,
            CancelAsked: self._cancel_asked,
            FinishAsked: self._finish_asked,
            ReplanAsked: self._replan_asked,
            Continued: self._continued,
            ScaleAsked: self._scale_asked,
            Rerouted: self._rerouted,
            RegionLive: self._region_live,
            RegionUnreachable: self._region_unreachable,
            RegionLost: self._region_lost,
            Tick: self._tick,
        }

    def handle(self, event: JobEvent) -> list[JobAction]:
        """Take one event. Never raises; what does not fit the state changes nothing."""
        if self.state.terminal:
            return []
        self._out = []
        if self.state.awaits_successor:
            self._while_successor_is_planned(event)
        else:
            self._handlers[type(event)](event)
        return self._out

    # --- the way in

    def _planned(self, event: Planned) -> None:
        if self.state.phase != "queued":
            return
        names = [part.region for part in self.state.partitions]
        self._enter("planned", f"planned over {_listed(names)}", {"regions": names})
        for copy in self.state.copies:
            text = f"the shard of {copy.source} is to be processed in {copy.destination}: {copy.bytes:,} bytes"
            data = {"from": copy.source, "to": copy.destination, "bytes": copy.bytes}
            self._record("shard.moves", text, copy.source, data)

    def _waits(self, event: Waits) -> None:
        if self.state.phase != "queued" or self.state.waits_for == event.what_for:
            return
        first = not self.state.waits_for
        self.state = replace(self.state, waits_for=event.what_for)
        if first:
            self._record("job.queued", f"waits {event.what_for}", "", {"waits_for": event.what_for})

    def _begun(self, event: Begun) -> None:
        if self.state.phase != "planned":
            return
        self.state = replace(self.state, begun_at=event.at)
        first = [part for part in self.state.partitions if not held_back(self.state, part)]
        names = _listed([part.region for part in first])
        self._enter("starting", f"starting in {names}, the others after it" if self._waits_for_shards else _EVERYWHERE)
        for part in first:
            self._start(part)

    @property
    def _waits_for_shards(self) -> bool:
        return bool(self.state.copies) and not self.state.copied

    def _go_on_with_copies(self) -> None:
        """Tell the regions that hold shards where they are wanted; once all have come the others begin."""
        self.state, told = orders(self.state)
        self._out += told
        if not self._waits_for_shards or copying(self.state):
            return
        self.state = replace(self.state, copied=True)
        self._record("shard.moved", "all shards are where they are processed", "")
        for part in self.state.partitions:
            if part.state == "pending" and part.link != "lost":
                self._start(part)

    def _start(self, part: Partition) -> None:
        part = replace(part, state="assigned")
        self._put(part)
        # All begin with the first region's model.
        first, begins_with = self.state.partitions[0].region, self.state.initial_model
        digest = begins_with.digest if begins_with is not None and part.region == first else ""
        self._out.append(SendStart(part.region, part.epoch, resumed=part.ran, initial_model=digest))
        if part.workers is not None:
            self._order(part, part.workers, "")

    def _order(self, part: Partition, workers: int, reason: str) -> None:
        """Have a region continue with so many workers; what it reports names the order that it obeys."""
        part = replace(part, workers=workers, scale_order=part.scale_order + 1)
        self._put(part)
        self._out.append(SendScale(part.region, part.epoch, workers, reason, part.preemptible, part.scale_order))

    # --- what the agents say

    def _copy_reported(self, copy: Copy, event: Reported) -> None:
        """What a region says whose shard is processed elsewhere."""
        if self.state.phase in ("queued", "planned"):
            return
        last, report = copy.report, event.report
        if last is None or report.state != last.state:
            text = f"the shard of {copy.source}: {report.state}" + (
                f" ({report.condition})" if report.condition else ""
            )
            self._record("shard.state", text, copy.source, {"state": report.state, "to": copy.destination})
        self.state = reported(self.state, copy, event)
        if self.state.phase == "cancelling":
            self._cancelled_if_all_ended(event.at)
        elif report.state in ("failed", "refused") and waited_for(self.state, copy):
            self._fail(event.at, failure_of(copy.source, report, "the shard's way elsewhere"))

    def _reported(self, event: Reported) -> None:
        copy = self.state.copy_from(event.region)
        if copy is not None:
            self._copy_reported(copy, event)
            return
        part = self.state.partition(event.region)
        if part is None or event.report.epoch != part.epoch or self.state.phase in ("queued", "planned"):
            return
        self._out += records_of(part, event.report)
        before, report = with_all_meters(part, event.report)
        self._put(
            replace(
                part,
                state=event.report.state,
                counted_before=before,
                report=no_step_back(report, part.report),
                address=event.report.ps_address or part.address,
                ran=part.ran or bool(event.report.ps_address),
            )
        )
        self._look_at_workers(event)
        self._note_first_steps(event)
        if self.state.phase == "cancelling":
            self._cancelled_if_all_ended(event.at)
            return
        if event.report.state in ("failed", "refused"):
            self._fail(event.at, failure_of(event.region, event.report))
            return
        self._go_on_with_copies()
        self._settle_ways()
        self._end_early()
        self._tell_peers()
        if event.report.state in ("training", "finished") and self.state.phase == "starting":
            self._to_running(event)
        if event.report.state == "published" and self.state.phase == "finishing":
            self._published(event)
        else:
            self._finish_if_all_done(event.at)

    def _look_at_workers(self, event: Reported) -> None:
        """Where it has fewer than it was told to have: what is left continues, until the job is told otherwise."""
        part, report = self.state.partition(event.region), event.report
        found = fewer_workers(part, report) if part is not None else None
        if part is None or found is None:
            return
        self._out.append(found)
        self._put(replace(part, workers=report.workers, preempted=part.preempted or report.preempted))
        if not report.workers:
            self.state = replace(self.state, gave_way=True)

    def _note_first_steps(self, event: Reported) -> None:
        reports = [part.report for part in self.state.partitions]
        if not self.state.stepped_at and all(report is not None and report.step > 0 for report in reports):
            steps = event.report.step
            self.state = replace(
                self.state, stepped_at=event.at, stepped_region=event.region, stepped_steps=steps
            )  # fmt: skip

    def _to_running(self, event: Reported) -> None:
        self.state = replace(self.state, started_at=event.at)
        took = event.at - self.state.created_at
        self._enter("running", f"training has begun, {took:.1f} s after the submission", {"seconds": took})
        for copy in unfinished(self.state):
            self._out.append(SendStop(copy.source, copy.epoch, "the shard is where it is processed", discard=True))

    def _tell_peers(self) -> None:
        parts = self.state.partitions
        if not all(part.address for part in parts):
            return
        peers = tuple(Peer(part.region, part.epoch, part.address) for part in parts)
        state, finish = self.state, bool(self.state.ends_early)
        for part in parts:
            if (part.told, part.told_routes, part.told_to_finish) != (peers, state.routes, finish):
                self._put(replace(part, told=peers, told_routes=state.routes, told_to_finish=finish))
                ways = (state.routes, state.neighbours, state.former, finish)
                self._out.append(SendPeers(part.region, part.epoch, peers, *ways))

    # --- the ways of updates

    def _rerouted(self, event: Rerouted) -> None:
        """Old and new ways are both in force until all regions know the new ones (`sync.ps.core.ledger`)."""
        state = self.state
        if state.phase != "running" or state.former or event.neighbours == event.present:
            return
        self.state = replace(
            state,
            topology=event.topology,
            neighbours=event.neighbours,
            former=event.present,
            routes=state.routes + 1,
        )
        self._record("wan.rerouted", event.text, "", event.data)
        self._tell_peers()

    def _settle_ways(self) -> None:
        state = self.state
        if state.former and all(part.report and part.report.routes >= state.routes for part in state.partitions):
            self.state = replace(state, former=(), routes=state.routes + 1)
            self._record("wan.settled", "all regions know the new ways; nothing takes the former ones any more", "")

    # --- the end

    def _end_early(self) -> None:
        """Where the goal is reached: all regions hear of it, and end with the same round (`sync.ps`)."""
        state = self.state
        if state.replanned and (why := reached(state)) is not None:
            self._without_successor(why.text, why.data)
        if not may_end_early(state):
            return
        known = metrics_without_goal(state)
        if known is not None and not state.goal_unknown:
            self.state = replace(state, goal_unknown=True)
            text = f"no region measures what was to end the job; measured: {_listed(known) or 'nothing'}"
            self._record("job.goal", text, "", {"reached": False, "measured": known})
        why = reached(state)
        if why is not None:
            self.state = replace(self.state, ends_early=why.text)
            self._record("job.goal", f"ends before its plan: {why.text}", "", {"reached": True, **why.data})

    def _finish_asked(self, event: FinishAsked) -> None:
        why = "a user asked for it" + (f": {event.reason}" if event.reason else "")
        if self.state.replanned and self.state.phase != "cancelling":
            self._without_successor(why, {"asked": True})
        if not may_end_early(self.state):
            return
        self.state = replace(self.state, ends_early=why)
        self._record("job.goal", f"ends before its plan: {why}", "", {"reached": True, "asked": True})
        self._tell_peers()

    def _replan_asked(self, event: ReplanAsked) -> None:
        if not may_end_early(self.state):
            return
        self.state = replace(self.state, ends_early=event.text, replanned=True)
        self._record("job.replanning", f"ends before its plan: {event.text}", "", event.data)
        self._tell_peers()

    def _without_successor(self, why: str, data: dict[str, Any]) -> None:
        """It was to end in any case; now with the model that is wanted, so that nothing is left to continue with."""
        self.state = replace(self.state, ends_early=why, replanned=False)
        self._record("job.goal", f"ends before its plan: {why}", "", {"reached": True, **data})
        told: dict[str, Any] = {"successor": None, "regions": [], "code": None}
        self._record("job.replanned", f"no job continues with its model: {why}", "", told)

    def _while_successor_is_planned(self, event: JobEvent) -> None:
        """The regions have been told to stop: what becomes of them does not matter any more."""
        if isinstance(event, Continued):
            self._continued(event)
        elif isinstance(event, CancelAsked):
            self._end(event.at, "cancelled", _because("cancelled", event.reason))
        elif isinstance(event, FinishAsked):
            self._finish_asked(event)
            self._tell_deadline(event.at)
            self._end_well(event.at)
        elif isinstance(event, Reported):
            self.state = settled(self.state, event.region, event.report)

    def _continued(self, event: Continued) -> None:
        if not self.state.awaits_successor:
            return
        self.state = replace(self.state, successor=event.successor)
        self._record("job.replanned", event.text, "", event.data)
        if not event.successor:
            # Else the promise is the successor's.
            self._tell_deadline(event.at)
        self._end_well(event.at)

    def _finish_if_all_done(self, at: float) -> None:
        if self.state.phase == "running" and all(part.state == "finished" for part in self.state.partitions):
            digests = {part.region: part.report.model_digest for part in self.state.partitions if part.report}
            if len(set(digests.values())) != 1 and self.state.exact:
                told = ", ".join(f"{region} {digest or 'none'}" for region, digest in digests.items())
                self._fail(at, Failure("INTERNAL", f"the regions ended with different models: {told}"))
                return
            self.state = replace(self.state, model_digest=next(iter(digests.values())))
            hold = "the same model" if self.state.exact else "every update"
            self._enter("finishing", f"all regions are done and hold {hold}", {"model": self.state.model_digest})
        if self.state.phase == "finishing":
            self._ask_for_model()

    def _ask_for_model(self) -> None:
        """Ask the first region by name that can be reached and has the model, unless one is being waited for."""
        if self.state.publisher:
            return
        able = [part for part in self.state.partitions if part.state == "finished" and part.link == "live"]
        if not able:
            return
        chosen = able[0]
        self.state = replace(
            self.state,
            publisher=chosen.region,
            publish_epoch=chosen.epoch,
            publishes=self.state.publishes + 1,
        )
        self._out.append(SendPublish(chosen.region, chosen.epoch))
        self._record("job.publishing", f"{chosen.region} hands the model in", chosen.region)

    def _published(self, event: Reported) -> None:
        if event.blob_bytes is None or not event.report.blob_digest:
            self._not_published(event)
            return
        self.state = replace(
            self.state,
            model_digest=event.report.model_digest or self.state.model_digest,
            blob_digest=event.report.blob_digest,
            blob_bytes=event.blob_bytes,
            flat_bytes=event.flat_bytes,
            publisher="",
        )
        self._stop_all("the job has succeeded")
        if not self.state.replanned:
            self._tell_deadline(event.at)
            self._end_well(event.at)

    def _end_well(self, at: float) -> None:
        self._end(at, "succeeded", f"succeeded; the model is {self.state.blob_digest}")

    def _tell_deadline(self, at: float) -> None:
        if self.state.deadline_at is None:
            return
        slack = self.state.deadline_at - at
        kept = f"kept, with {slack:.0f} s to spare" if slack >= 0 else f"broken, by {-slack:.0f} s"
        self._record(
            "job.deadline", f"the promised deadline was {kept}", "", {"kept": slack >= 0, "slack_seconds": slack}
        )

    def _not_published(self, event: Reported) -> None:
        """A region believes to have handed the model in, but it is not here."""
        part = self.state.partition(event.region)
        if part is not None:
            self._put(replace(part, state="finished"))
        if event.region != self.state.publisher:
            return
        if self.state.publishes >= MAX_PUBLISHES:
            text = f"the model did not arrive whole from {event.region} after {MAX_PUBLISHES} attempts"
            self._fail(event.at, Failure("DIGEST_MISMATCH", text))
            return
        self.state = replace(self.state, publisher="")
        self._ask_for_model()

    def _cancel_asked(self, event: CancelAsked) -> None:
        if self.state.phase == "cancelling":
            return
        self.state = replace(self.state, reason=event.reason, publisher="")
        if self.state.phase in ("queued", "planned"):
            self._end(event.at, "cancelled", _because("cancelled before it started", event.reason))
            return
        self._enter("cancelling", _because("being cancelled", event.reason))
        self._stop_all(event.reason or "cancelled")
        self._cancelled_if_all_ended(event.at)

    def _scale_asked(self, event: ScaleAsked) -> None:
        if self.state.phase not in ("starting", "running"):
            return
        self.state = replace(self.state, gave_way=event.gives_way)
        for region, workers in sorted(event.workers.items()):
            part = self.state.partition(region)
            if part is None or part.state == "finished":
                continue
            if (part.workers, part.preemptible, part.preempted) == (workers, event.preemptible, False):
                continue
            part = replace(part, preemptible=event.preemptible, preempted=False)
            self._order(part, workers, event.reason)
            kind = "preemptible workers" if event.preemptible else "workers"
            text = _because(f"{region} is to continue with {workers} {kind}", event.reason)
            data = {"workers": workers, "reason": event.reason, "preemptible": event.preemptible}
            self._record("partition.scaling", text, region, data)

    def _cancelled_if_all_ended(self, at: float) -> None:
        ended = all(part.link == "lost" or part.state in ENDED_PARTITION for part in self.state.partitions)
        if ended and copies_ended(self.state):
            self._end(at, "cancelled", _because("cancelled", self.state.reason))

    def _fail(self, at: float, failure: Failure) -> None:
        self.state = replace(self.state, error=failure, publisher="")
        self._stop_all(f"the job has failed: {failure.code}")
        self._end(at, "failed", f"failed: {failure.message}", {"code": failure.code})

    def _stop_all(self, reason: str) -> None:
        for part in self.state.partitions:
            self._out.append(SendStop(part.region, part.epoch, reason, discard=True))
        for copy in self.state.copies:
            self._out.append(SendStop(copy.source, copy.epoch, reason, discard=True))

    def _end(self, at: float, phase: JobPhase, text: str, data: dict[str, Any] | None = None) -> None:
        self.state = replace(self.state, finished_at=at)
        self._enter(phase, text, data, terminal=True)

    # --- regions come and go

    def _region_live(self, event: RegionLive) -> None:
        copy, part = self.state.copy_from(event.region), self.state.partition(event.region)
        if copy is not None:
            self._source_live(copy, event)
        if part is None:
            return
        before, part = part, self._relink(part, "live", event.at)
        if self.state.phase == "cancelling" and event.restarted:
            self._out.append(SendStop(part.region, part.epoch, self.state.reason or "cancelled", discard=True))
        if self.state.phase not in _STARTED:
            return
        if before.link == "lost" or event.restarted:
            self._restart(part)
        elif before.link != "live" and self.state.phase == "finishing":
            self._ask_for_model()

    def _source_live(self, copy: Copy, event: RegionLive) -> None:
        """What it holds durably it continues from; what it may have forgotten it is told again."""
        self._relink_source(copy, "live", event.at)
        if event.restarted and self.state.phase == "cancelling":
            self._out.append(SendStop(copy.source, copy.epoch, self.state.reason or "cancelled", discard=True))
        elif event.restarted:
            self.state = without_told(self.state, copy.source)
            self._go_on_with_copies()

    def _relink_source(self, copy: Copy, link: Link, at: float) -> None:
        if copy.link != link:
            self.state = with_copy(self.state, replace(copy, link=link, since=at))
            words = "reachable again" if link == "live" else link
            self._record(f"region.{link}", f"region {copy.source} is {words}", copy.source, {"before": copy.link})

    def _restart(self, part: Partition) -> None:
        """The agent gets its orders anew; what it holds durably, it continues from."""
        if held_back(self.state, part):
            return
        self.state = without_told(self.state, part.region)
        if self.state.publisher == part.region:
            self.state = replace(self.state, publisher="")
        self._record(
            "partition.restarted",
            f"{part.region} is given its partition again, epoch {part.epoch}",
            part.region,
            {"epoch": part.epoch},
        )
        self._start(replace(part, told=()))

    def _region_unreachable(self, event: RegionUnreachable) -> None:
        copy, part = self.state.copy_from(event.region), self.state.partition(event.region)
        if copy is not None and copy.link == "live":
            self._relink_source(copy, "unreachable", event.at)
        if part is not None and part.link == "live":
            self._relink(part, "unreachable", event.at)

    def _region_lost(self, event: RegionLost) -> None:
        copy, part = self.state.copy_from(event.region), self.state.partition(event.region)
        if copy is not None:
            self._relink_source(copy, "lost", event.at)
            if self.state.phase == "cancelling":
                self._cancelled_if_all_ended(event.at)
        if part is None or part.link == "lost":
            return
        part = self._relink(part, "lost", event.at)
        if self.state.phase == "cancelling":
            self._cancelled_if_all_ended(event.at)
        if self.state.phase not in _STARTED:
            return
        self._put(replace(part, epoch=part.epoch + 1, state="pending", address="", told=()))
        self._record(
            "partition.fenced",
            f"{part.region} is lost; epoch {part.epoch} ends, {part.epoch + 1} begins when it is back",
            part.region,
            {"epoch": part.epoch + 1},
        )
        if self.state.publisher == part.region:
            self.state = replace(self.state, publisher="")
            self._ask_for_model()

    def _tick(self, event: Tick) -> None:
        if self.state.phase not in _STARTED or self.state.publisher:
            return
        for name, link, since in links_needed(self.state):
            if link == "lost" and event.at - since > self.state.lost_limit_seconds:
                text = f"region {name} was lost for longer than {self.state.lost_limit_seconds:.0f} s"
                self._fail(event.at, Failure("REGION_LOST", text))
                return

    def _relink(self, part: Partition, link: Link, at: float) -> Partition:
        if part.link == link:
            return part
        changed = replace(part, link=link, since=at)
        self._put(changed)
        words = "reachable again" if link == "live" else link
        data = {"before": part.link, "seconds": at - part.since if part.since else None}
        self._record(f"region.{link}", f"region {part.region} is {words}", part.region, data)
        return changed

    # --- small change

    def _put(self, changed: Partition) -> None:
        parts = tuple(changed if part.region == changed.region else part for part in self.state.partitions)
        self.state = replace(self.state, partitions=parts)

    def _enter(self, phase: JobPhase, text: str, data: dict[str, Any] | None = None, *, terminal: bool = False) -> None:
        self.state = replace(self.state, phase=phase)
        self._out.append(Record(f"job.{phase}", text, "", data or {}, terminal))

    def _record(self, kind: str, text: str, region: str, data: dict[str, Any] | None = None) -> None:
        self._out.append(Record(kind, text, region, data or {}))


def _because(text: str, reason: str) -> str:
    return f"{text}: {reason}" if reason else text


def _listed(names: list[str]) -> str:
    return ", ".join(names)
