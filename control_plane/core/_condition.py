"""The condition of a job: what it waits for, as a sentence."""

from __future__ import annotations

from datetime import UTC, datetime

from control_plane.core._shard_copies import links_needed
from control_plane.core._state import ENDED_PARTITION, JobState

__all__ = ["condition_of"]


def condition_of(state: JobState) -> str:
    """Return what a job waits for, as a sentence; empty if it waits for nothing."""
    if state.terminal:
        return _missing_charges(state)
    if state.awaits_successor:
        return "waiting for the plan of the job that continues its model"
    waits_for_shards = bool(state.copies) and not state.copied
    away = [one for one in links_needed(state) if one[1] != "live"]
    gone = [f"region {name} {link} since {_clock(since)}" for name, link, since in away]
    # While a job runs, an unreachable region may still be training, and the others report what they wait for.
    if gone and state.phase in ("starting", "finishing", "cancelling"):
        return "waiting: " + "; ".join(gone)
    if state.phase == "queued":
        return f"waiting {state.waits_for or 'for a plan'}"
    if state.phase == "starting" and waits_for_shards:
        return f"waiting {_pending_shards(state)}"
    if state.phase == "starting":
        unready = [part for part in state.partitions if not part.address]
        notes = [
            f"; {part.region}: {part.report.condition}" for part in unready if part.report and part.report.condition
        ]
        regions = _listed([part.region for part in unready])
        return f"waiting for {regions} to be ready{''.join(notes)}" if unready else ""
    if state.phase == "cancelling":
        going = [part.region for part in state.partitions if part.state not in ENDED_PARTITION]
        going += [copy.source for copy in state.copies if copy.report and copy.state not in ENDED_PARTITION]
        return f"waiting for {_listed(going)} to stop"
    if state.phase == "finishing":
        return f"waiting for {state.publisher} to upload the model" if state.publisher else ""
    live = [part for part in state.partitions if part.link == "live"]
    conditions = [f"{p.region}: {p.report.condition}" for p in live if p.report and p.report.condition]
    ending = [f"ending early: {state.ends_early}"] if state.ends_early else []
    return "; ".join([*ending, *gone, *conditions])


def _pending_shards(state: JobState) -> str:
    texts = []
    for copy in state.copies:
        text = f"for the shard of {copy.source} to arrive in {copy.destination}"
        condition = copy.report.condition if copy.report is not None else ""
        texts.append(f"{text}: {condition}" if condition else text)
    return "; ".join(texts)


def _missing_charges(state: JobState) -> str:
    """Return which charges of an ended job are not known yet: of calls or transfers not reported as ended."""
    # A job succeeds only after all its calls have ended; a shard may still have been sent a second time.
    parts = () if state.phase == "succeeded" else state.partitions
    open_ = [p.region for p in parts if p.report and p.report.meter and p.state not in ENDED_PARTITION]
    ended = (*ENDED_PARTITION, "sent")
    sending = [c.source for c in state.copies if c.report and c.report.meter and c.state not in ended]
    missing = [f"the last calls of {_listed(open_)}"] if open_ else []
    missing += [f"the last transfers of {_listed(sending)}"] if sending else []
    return f"cost not final: {' and '.join(missing)} are not counted yet" if missing else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names)


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
