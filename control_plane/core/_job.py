"""State machine of a job: queued → planned → starting → running → finishing → succeeded | failed | cancelled.

Invariants, tested for any order of events by `tests/control_plane/test_job_machine.py`: an ended job does not change;
epochs only grow; at most one region is asked for the model at a time; peers are sent only once the addresses of all
regions are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from control_plane.core._events import (
    CancelRequested,
    FinishRequested,
    JobAction,
    JobEvent,
    Planned,
    Record,
    RegionLive,
    RegionLost,
    RegionUnreachable,
    ReplanRequested,
    Reported,
    Rerouted,
    ScaleRequested,
    SendKeep,
    SendPeers,
    SendPublish,
    SendScale,
    SendStart,
    SendStop,
    StartAllowed,
    StartDelayed,
    SuccessorDecided,
    Tick,
)
from control_plane.core._goal import may_end_early, metrics_lacking_goal, reached
from control_plane.core._lost_regions import furthest, halting, lost_for_long, why_not_without
from control_plane.core._meters import with_all_meters, with_late_charges
from control_plane.core._models import (
    keeps_models,
    kept_text,
    uploader,
    with_answer,
    with_evaluation,
    with_final_model,
    with_latest,
)
from control_plane.core._report_events import failure_of, fewer_workers, never_backwards, records_of
from control_plane.core._shard_copies import (
    copies_ended,
    copying,
    forget_commands,
    is_awaited,
    transfer_commands,
    unfinished,
    waits_for_shards,
    with_copy,
    with_report,
)
from control_plane.core._state import ENDED_PARTITION, Copy, Failure, JobPhase, JobState, Link, Partition, Peer

MAX_PUBLISHES = 5
"""Number of uploads of the model that may arrive incomplete before the job fails."""
_HALT_SECONDS = 3600.0
"""Time in which regions that are told to end at once do so. They evaluate the model first."""
_STARTED_PHASES = ("starting", "running", "finishing")
"""Phases in which regions have their partitions."""
_STARTING_EVERYWHERE = "starting in all regions"


class JobMachine:
    """State machine of a job: `handle(event)` changes `state` and returns actions."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self._out: list[JobAction] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Planned: self._planned,
            StartDelayed: self._start_delayed,
            StartAllowed: self._start_allowed,
            Reported: self._reported,
            CancelRequested: self._cancel_requested,
            FinishRequested: self._finish_requested,
            ReplanRequested: self._replan_requested,
            SuccessorDecided: self._successor_decided,
            ScaleRequested: self._scale_requested,
            Rerouted: self._rerouted,
            RegionLive: self._region_live,
            RegionUnreachable: self._region_unreachable,
            RegionLost: self._region_lost,
            Tick: self._tick,
        }

    def handle(self, event: JobEvent) -> list[JobAction]:
        """Apply one event; return the actions. Never raises; an event that does not fit the state changes nothing."""
        if self.state.terminal:
            return []
        self._out = []
        if self.state.awaits_successor:
            self._awaiting_successor(event)
        else:
            self._handlers[type(event)](event)
        return self._out

    # --- from submission to start

    def _planned(self, event: Planned) -> None:
        if self.state.phase != "queued":
            return
        names = [part.region for part in self.state.partitions]
        self._enter("planned", f"planned over {_listed(names)}", {"regions": names})
        for copy in self.state.copies:
            text = f"the shard of {copy.source} will be processed in {copy.destination}: {copy.bytes:,} bytes"
            data = {"from": copy.source, "to": copy.destination, "bytes": copy.bytes}
            self._record("shard.moves", text, copy.source, data)

    def _start_delayed(self, event: StartDelayed) -> None:
        if self.state.phase != "queued" or self.state.waits_for == event.what_for:
            return
        first = not self.state.waits_for
        self.state = replace(self.state, waits_for=event.what_for)
        if first:
            self._record("job.queued", f"waiting {event.what_for}", "", {"waits_for": event.what_for})

    def _start_allowed(self, event: StartAllowed) -> None:
        if self.state.phase != "planned":
            return
        self.state = replace(self.state, begun_at=event.at)
        first = [part for part in self.state.partitions if not waits_for_shards(self.state, part)]
        names = _listed([part.region for part in first])
        self._enter(
            "starting",
            f"starting in {names}; the other regions follow" if self._waits_for_shards else _STARTING_EVERYWHERE,
        )
        for part in first:
            self._start(part)

    @property
    def _waits_for_shards(self) -> bool:
        return bool(self.state.copies) and not self.state.copied

    def _advance_copies(self) -> None:
        """Command the transfers of shards; once all shards have arrived, start the other regions."""
        self.state, commands = transfer_commands(self.state)
        self._out += commands
        if not self._waits_for_shards or copying(self.state):
            return
        self.state = replace(self.state, copied=True)
        self._record("shard.moved", "all shards have arrived where they are processed", "")
        for part in self.state.partitions:
            if part.state == "pending" and part.link != "lost":
                self._start(part)

    def _start(self, part: Partition) -> None:
        part = replace(part, state="assigned")
        self._update_partition(part)
        # What is not trained is not exchanged, so that every region needs the file.
        model = self.state.initial_model
        start = SendStart(part.region, part.epoch, part.ran)
        if model is not None:
            start = replace(
                start, initial_model=model.digest, initial_job=model.job, initial_holds=model.holds,
                initial_uri=model.uri, initial_adapter=model.adapter,
            )  # fmt: skip
        self._out.append(start)
        if part.workers is not None:
            self._command_workers(part, part.workers, "")

    def _command_workers(self, part: Partition, workers: int, reason: str) -> None:
        """Command a region's number of workers; its reports name the command that it obeys."""
        part = replace(part, workers=workers, scale_order=part.scale_order + 1)
        self._update_partition(part)
        self._out.append(SendScale(part.region, part.epoch, workers, reason, part.preemptible, part.scale_order))

    # --- reports of agents

    def _copy_reported(self, copy: Copy, event: Reported) -> None:
        """Apply the report of a region whose shard another region processes."""
        if self.state.phase in ("queued", "planned"):
            return
        last, report = copy.report, event.report
        if last is None or report.state != last.state:
            text = f"the shard of {copy.source}: {report.state}" + (
                f" ({report.condition})" if report.condition else ""
            )
            self._record("shard.state", text, copy.source, {"state": report.state, "to": copy.destination})
        self.state = with_report(self.state, copy, event)
        if self.state.phase == "cancelling":
            self._cancelled_if_all_ended(event.at)
        elif report.state in ("failed", "refused") and is_awaited(self.state, copy):
            self._fail(event.at, failure_of(copy.source, report, "the transfer of its shard"))

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
        self._update_partition(
            replace(
                part,
                state=event.report.state,
                counted_before=before,
                report=never_backwards(report, part.report),
                evaluations=with_latest(part.evaluations, report),
                address=event.report.ps_address or part.address,
                ran=part.ran or bool(event.report.ps_address),
            )
        )
        self._check_worker_count(event)
        self._note_first_step(event)
        if self.state.phase == "cancelling":
            self._cancelled_if_all_ended(event.at)
            return
        if event.report.state in ("failed", "refused") and event.region not in self.state.left_out:
            self._fail(event.at, failure_of(event.region, event.report))
            return
        self._advance_copies()
        self._settle_routes()
        self._keep_models(event)
        self._end_early(event.at)
        self._send_peers()
        if event.report.state in ("training", "finished") and self.state.phase == "starting":
            self._start_running(event)
        if event.report.state == "published" and self.state.phase == "finishing":
            self._published(event)
        else:
            self._finish_if_all_done(event.at)

    def _check_worker_count(self, event: Reported) -> None:
        """Record that a region has fewer workers than commanded; it continues with those until the next command."""
        part, report = self.state.partition(event.region), event.report
        record = fewer_workers(part, report) if part is not None else None
        if part is None or record is None:
            return
        self._out.append(record)
        self._update_partition(replace(part, workers=report.workers, preempted=part.preempted or report.preempted))
        if not report.workers:
            self.state = replace(self.state, gave_way=True)

    def _note_first_step(self, event: Reported) -> None:
        reports = [part.report for part in self.state.partitions]
        if not self.state.stepped_at and all(report is not None and report.step > 0 for report in reports):
            steps = event.report.step
            self.state = replace(
                self.state, stepped_at=event.at, stepped_region=event.region, stepped_steps=steps
            )  # fmt: skip

    def _start_running(self, event: Reported) -> None:
        self.state = replace(self.state, started_at=event.at)
        seconds = event.at - self.state.created_at
        self._enter("running", f"training has begun, {seconds:.1f} s after the submission", {"seconds": seconds})
        for copy in unfinished(self.state):
            self._out.append(SendStop(copy.source, copy.epoch, "the shard has arrived", discard=True))

    def _send_peers(self) -> None:
        if self.state.left_out:
            self.state, commands = halting(self.state)
            self._out += commands
            return
        parts = self.state.partitions
        if not all(part.address for part in parts):
            return
        peers = tuple(
            Peer(part.region, part.epoch, part.address, not (part.report and part.report.ps_signs)) for part in parts
        )
        state, finish = self.state, bool(self.state.ends_early)
        for part in parts:
            if (part.told, part.told_routes, part.told_to_finish) != (peers, state.routes, finish):
                self._update_partition(replace(part, told=peers, told_routes=state.routes, told_to_finish=finish))
                routes = (state.routes, state.neighbours, state.former, finish)
                self._out.append(SendPeers(part.region, part.epoch, peers, *routes))

    # --- routes of updates

    def _rerouted(self, event: Rerouted) -> None:
        """Use old and new routes together until all regions know the new ones (`sync.ps.core.ledger`)."""
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
        self._send_peers()

    def _settle_routes(self) -> None:
        state = self.state
        if state.former and all(
            part.report and part.report.exchange.routes >= state.routes for part in state.partitions
        ):
            self.state = replace(state, former=(), routes=state.routes + 1)
            self._record("wan.settled", "all regions know the new routes; the former ones are not used any more", "")

    # --- models of evaluated rounds

    def _keep_models(self, event: Reported) -> None:
        """Keep the model that the region has uploaded, and have the next one uploaded that is wanted."""
        models, answer = self.state.models, event.report.kept
        if models.region == event.region and models.awaited and models.awaited[0].round == answer.round:
            self.state = with_answer(self.state, answer.digest, event.kept_bytes)
            if event.kept_bytes is not None:
                data = {"round": answer.round, "digest": answer.digest, "bytes": event.kept_bytes}
                self._record("model.kept", f"the model of round {answer.round} is kept", event.region, data)
            else:
                text = f"the model of round {answer.round} is not kept: {answer.error or 'it did not arrive'}"
                self._record("model.left-out", text, event.region, {"round": answer.round})
        before, self.state = self.state.models.evaluated, with_evaluation(self.state)
        if not before and self.state.models.evaluated and not keeps_models(self.state):
            text = "models of evaluated rounds are not kept: the regions' agents are of older versions"
            self._record("model.left-out", text, "", {"round": self.state.models.evaluated})
        self._ask_for_round()

    def _ask_for_round(self) -> None:
        """Command a region to upload the first of the awaited models, unless an upload is already pending."""
        if (part := uploader(self.state)) is not None:
            models = self.state.models
            self.state = replace(self.state, models=replace(models, region=part.region))
            self._out.append(SendKeep(part.region, part.epoch, models.awaited[0].round))

    def _upload_lost(self, region: str) -> None:
        """Have another region upload the model that was awaited from one that is lost or has restarted."""
        if self.state.models.region == region:
            self.state = replace(self.state, models=replace(self.state.models, region=""))
            self._ask_for_round()

    # --- the end

    def _end_early(self, at: float) -> None:
        """End the job early if its goal is reached, its metric does not improve, or its budget or time is spent.

        All regions then end with the same round (`sync.ps`).
        """
        state = self.state
        if state.replanned and (why := reached(state, at)) is not None:
            self._without_successor(why.text, why.data)
        if not may_end_early(state):
            return
        measured = metrics_lacking_goal(state)
        if measured is not None and not state.goal_unknown:
            self.state = replace(state, goal_unknown=True)
            text = f"no region measures the goal's metric; measured metrics: {_listed(measured) or 'none'}"
            self._record("job.goal", text, "", {"reached": False, "measured": measured})
        why = reached(state, at)
        if why is not None:
            self.state = replace(self.state, ends_early=why.text)
            self._record("job.goal", f"ending early: {why.text}", "", {"reached": True, **why.data})

    def _finish_requested(self, event: FinishRequested) -> None:
        why = "requested by a user" + (f": {event.reason}" if event.reason else "")
        if self.state.replanned and self.state.phase != "cancelling":
            self._without_successor(why, {"asked": True})
        if not may_end_early(self.state):
            return
        self.state = replace(self.state, ends_early=why)
        self._record("job.goal", f"ending early: {why}", "", {"reached": True, "asked": True})
        self._send_peers()

    def _replan_requested(self, event: ReplanRequested) -> None:
        if not may_end_early(self.state) or (event.without and why_not_without(self.state, event.without)):
            return
        if any(part.region in event.without and part.link != "lost" for part in self.state.partitions):
            # It came back while the rest was planned.
            return
        self.state = replace(self.state, ends_early=event.text, replanned=True)
        self.state = replace(self.state, left_out=event.without, left_out_at=event.at if event.without else 0.0)
        self._record("job.replanning", f"ending early: {event.text}", "", event.data)
        self._send_peers()

    def _without_successor(self, why: str, data: dict[str, Any]) -> None:
        """Drop the replan of an ending job whose goal is reached or that a user finished: no job continues it."""
        self.state = replace(self.state, ends_early=why, replanned=False)
        self._record("job.goal", f"ending early: {why}", "", {"reached": True, **data})
        none: dict[str, Any] = {"successor": None, "regions": [], "code": None}
        self._record("job.replanned", f"no job continues its model: {why}", "", none)

    def _awaiting_successor(self, event: JobEvent) -> None:
        """Apply an event while the successor is being planned; the regions are stopped, and their links do not
        matter."""
        if isinstance(event, SuccessorDecided):
            self._successor_decided(event)
        elif isinstance(event, CancelRequested):
            self._end(event.at, "cancelled", _because("cancelled", event.reason))
        elif isinstance(event, FinishRequested):
            self._finish_requested(event)
            self._report_deadline(event.at)
            self._succeed(event.at)
        elif isinstance(event, Reported):
            self.state = with_late_charges(self.state, event.region, event.report)

    def _successor_decided(self, event: SuccessorDecided) -> None:
        if not self.state.awaits_successor:
            return
        self.state = replace(self.state, successor=event.successor)
        self._record("job.replanned", event.text, "", event.data)
        if event.fails:
            gone = ", ".join(self.state.left_out)
            self._fail(event.at, Failure("REGION_LOST", f"region {gone} stays away, and {event.text}"))
            return
        if not event.successor:
            # A successor takes over the promised deadline.
            self._report_deadline(event.at)
        self._succeed(event.at)

    def _finish_if_all_done(self, at: float) -> None:
        if self.state.phase == "running" and all(part.state == "finished" for part in self.state.remaining):
            digests = {part.region: part.report.model_digest for part in furthest(self.state) if part.report}
            if len(set(digests.values())) != 1 and self.state.exact:
                listed = ", ".join(f"{region} {digest or 'none'}" for region, digest in digests.items())
                self._fail(at, Failure("INTERNAL", f"the regions ended with different models: {listed}"))
                return
            self.state = replace(self.state, model_digest=next(iter(digests.values())), trained_at=at)
            result = "the same model" if self.state.exact else "every update"
            self._enter("finishing", f"all regions have finished and have {result}", {"model": self.state.model_digest})
        if self.state.phase == "finishing":
            self._ask_for_model()

    def _ask_for_model(self) -> None:
        """Command the first reachable region that has the model to upload it, unless an upload is already pending."""
        if self.state.publisher:
            return
        able = [part for part in furthest(self.state) if part.state == "finished" and part.link == "live"]
        if not able:
            return
        chosen = able[0]
        self.state = replace(self.state, publisher=chosen.region, publishes=self.state.publishes + 1)
        self._out.append(SendPublish(chosen.region, chosen.epoch))
        self._record("job.publishing", f"{chosen.region} uploads the model", chosen.region)

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
        self.state = with_final_model(self.state)
        self._stop_all("the job has succeeded")
        if not self.state.replanned:
            self._report_deadline(event.at)
            self._succeed(event.at)

    def _succeed(self, at: float) -> None:
        self._end(at, "succeeded", f"succeeded; the model is {self.state.blob_digest}")

    def _report_deadline(self, at: float) -> None:
        if self.state.deadline_at is None:
            return
        slack = self.state.deadline_at - at
        kept = f"met with {slack:.0f} s to spare" if slack >= 0 else f"missed by {-slack:.0f} s"
        self._record(
            "job.deadline", f"the promised deadline was {kept}", "", {"kept": slack >= 0, "slack_seconds": slack}
        )

    def _not_published(self, event: Reported) -> None:
        """Retry an upload that the region reports as done, but whose file is missing or incomplete."""
        part = self.state.partition(event.region)
        if part is not None:
            self._update_partition(replace(part, state="finished"))
        if event.region != self.state.publisher:
            return
        if self.state.publishes >= MAX_PUBLISHES:
            text = f"the model did not arrive completely from {event.region} in {MAX_PUBLISHES} attempts"
            self._fail(event.at, Failure("DIGEST_MISMATCH", text))
            return
        self.state = replace(self.state, publisher="")
        self._ask_for_model()

    def _cancel_requested(self, event: CancelRequested) -> None:
        if self.state.phase == "cancelling":
            return
        self.state = replace(self.state, reason=event.reason, publisher="")
        if self.state.phase in ("queued", "planned"):
            self._end(event.at, "cancelled", _because("cancelled before it started", event.reason))
            return
        self._enter("cancelling", _because("being cancelled", event.reason))
        self._stop_all(event.reason or "cancelled")
        self._cancelled_if_all_ended(event.at)

    def _scale_requested(self, event: ScaleRequested) -> None:
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
            self._command_workers(part, workers, event.reason)
            kind = "preemptible workers" if event.preemptible else "workers"
            text = _because(f"scaling {region} to {workers} {kind}", event.reason)
            data = {"workers": workers, "reason": event.reason, "preemptible": event.preemptible}
            self._record("partition.scaling", text, region, data)

    def _cancelled_if_all_ended(self, at: float) -> None:
        ended = all(part.link == "lost" or part.state in ENDED_PARTITION for part in self.state.partitions)
        if ended and copies_ended(self.state):
            self._end(at, "cancelled", _because("cancelled", self.state.reason) + kept_text(self.state))

    def _fail(self, at: float, failure: Failure) -> None:
        self.state = replace(self.state, error=failure, publisher="")
        self._stop_all(f"the job has failed: {failure.code}")
        self._end(at, "failed", f"failed: {failure.message}{kept_text(self.state)}", {"code": failure.code})

    def _stop_all(self, reason: str) -> None:
        for part in self.state.partitions:
            self._out.append(SendStop(part.region, part.epoch, reason, discard=True))
        for copy in self.state.copies:
            self._out.append(SendStop(copy.source, copy.epoch, reason, discard=True))

    def _end(self, at: float, phase: JobPhase, text: str, data: dict[str, Any] | None = None) -> None:
        self.state = replace(self.state, finished_at=at)
        self._enter(phase, text, data, terminal=True)

    # --- regions that are lost or come back

    def _region_live(self, event: RegionLive) -> None:
        copy, part = self.state.copy_from(event.region), self.state.partition(event.region)
        if copy is not None:
            self._source_back(copy, event)
        if part is None:
            return
        before, part = part, self._relink(part, "live", event.at)
        if part.region in self.state.left_out:
            reason = "the job has ended without this region, which was lost"
            self._out.append(SendStop(part.region, part.epoch, reason, discard=True))
            return
        if self.state.phase == "cancelling" and event.restarted:
            self._out.append(SendStop(part.region, part.epoch, self.state.reason or "cancelled", discard=True))
        if self.state.phase not in _STARTED_PHASES:
            return
        if before.link == "lost" or event.restarted:
            self._restart_partition(part)
        elif before.link != "live" and self.state.phase == "finishing":
            self._ask_for_model()

    def _source_back(self, copy: Copy, event: RegionLive) -> None:
        """Send a restarted source its commands again; it resumes from what it has stored."""
        self._relink_source(copy, "live", event.at)
        if event.restarted and self.state.phase == "cancelling":
            self._out.append(SendStop(copy.source, copy.epoch, self.state.reason or "cancelled", discard=True))
        elif event.restarted:
            self.state = forget_commands(self.state, copy.source)
            self._advance_copies()

    def _relink_source(self, copy: Copy, link: Link, at: float) -> None:
        if copy.link != link:
            self.state = with_copy(self.state, replace(copy, link=link, since=at))
            words = "reachable again" if link == "live" else link
            self._record(f"region.{link}", f"region {copy.source} is {words}", copy.source, {"before": copy.link})

    def _restart_partition(self, part: Partition) -> None:
        """Send a region its partition again; it resumes from what it has stored."""
        if waits_for_shards(self.state, part):
            return
        self.state = forget_commands(self.state, part.region)
        if self.state.publisher == part.region:
            self.state = replace(self.state, publisher="")
        self._record(
            "partition.restarted",
            f"{part.region} restarts its partition, epoch {part.epoch}",
            part.region,
            {"epoch": part.epoch},
        )
        self._start(replace(part, told=(), told_to_halt=False))
        self._upload_lost(part.region)

    def _region_unreachable(self, event: RegionUnreachable) -> None:
        copy, part = self.state.copy_from(event.region), self.state.partition(event.region)
        if copy is not None and copy.link == "live":
            self._relink_source(copy, "unreachable", event.at)
        if part is not None and part.link == "live":
            self._relink(part, "unreachable", event.at)

    def _region_lost(self, event: RegionLost) -> None:
        copy, part = self.state.copy_from(event.region), self.state.partition(event.region)
        needed = part is not None and part.region not in self.state.left_out
        if event.final and (needed or copy) and self.state.phase != "cancelling":
            self._fail(event.at, Failure("REGION_LOST", f"region {event.region} was shut out by the operator"))
            return
        if copy is not None:
            self._relink_source(copy, "lost", event.at)
            if self.state.phase == "cancelling":
                self._cancelled_if_all_ended(event.at)
        if part is None or part.link == "lost":
            return
        part = self._relink(part, "lost", event.at)
        if self.state.phase == "cancelling":
            self._cancelled_if_all_ended(event.at)
        if self.state.phase not in _STARTED_PHASES:
            return
        self._update_partition(
            replace(part, epoch=part.epoch + 1, state="pending", address="", told=(), told_to_halt=False)
        )
        self._record(
            "partition.fenced",
            f"{part.region} is lost; epoch {part.epoch} ends, and {part.epoch + 1} begins when it is back",
            part.region,
            {"epoch": part.epoch + 1},
        )
        self._upload_lost(part.region)
        if self.state.publisher == part.region:
            self.state = replace(self.state, publisher="")
            self._ask_for_model()

    def _tick(self, event: Tick) -> None:
        if self.state.phase not in _STARTED_PHASES or self.state.publisher:
            return
        if gone := lost_for_long(self.state, event.at):
            self._stays_lost(gone, event.at)
            return
        if self.state.left_out and event.at - self.state.left_out_at > _HALT_SECONDS and self.state.phase == "running":
            slow = _listed([part.region for part in self.state.remaining if part.state != "finished"])
            text = f"region {_listed(list(self.state.left_out))} stays away, and {slow} does not end without it"
            self._fail(event.at, Failure("REGION_LOST", text))
            return
        if self.state.time_limit_seconds is not None:
            self._end_early(event.at)
            self._send_peers()

    def _stays_lost(self, gone: list[str], at: float) -> None:
        """End the job without these regions, for another one to continue it, or fail it."""
        # Those of one site are lost one after another.
        also = [part.region for part in self.state.partitions if part.link == "lost" and part.region not in gone]
        if also and not why_not_without(self.state, [*gone, *also]):
            gone = sorted([*gone, *also])
        text = f"region {_listed(gone)} has been lost for longer than {self.state.lost_limit_seconds:.0f} s"
        why_not = why_not_without(self.state, gone)
        if not self.state.continues or why_not:
            told = _because(f"{text}; the job cannot continue without it", why_not) if self.state.continues else text
            self._fail(at, Failure("REGION_LOST", told))
            return
        early = self.state.ends_early
        why = early or f"the rest is replanned: {text}"
        self.state = replace(self.state, ends_early=why, replanned=self.state.replanned or not early)
        self.state = replace(self.state, left_out=tuple(gone), left_out_at=at)
        regions = [part.region for part in self.state.partitions]
        data = {"regions": regions, "wanted": [part.region for part in self.state.remaining], "reason": text}
        self._record("job.replanning", f"ending early: {why}", "", {**data, "by_itself": True, "without": gone})
        self._send_peers()

    def _relink(self, part: Partition, link: Link, at: float) -> Partition:
        if part.link == link:
            return part
        changed = replace(part, link=link, since=at)
        self._update_partition(changed)
        words = "reachable again" if link == "live" else link
        data = {"before": part.link, "seconds": at - part.since if part.since else None}
        self._record(f"region.{link}", f"region {part.region} is {words}", part.region, data)
        return changed

    # --- helpers

    def _update_partition(self, changed: Partition) -> None:
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
