"""What a job waits for, in words."""

from __future__ import annotations

from datetime import UTC, datetime

from control_plane.core._copies import links_needed
from control_plane.core._state import ENDED_PARTITION, JobState

__all__ = ["condition_of"]


def condition_of(state: JobState) -> str:
    """What a job waits for, in words; empty when it waits for nothing."""
    if state.terminal:
        return _account_awaits(state)
    if state.awaits_successor:
        return "waiting: for the job that continues with its model to be planned"
    waits_for_shards = bool(state.copies) and not state.copied
    away = [one for one in links_needed(state) if one[1] != "live"]
    gone = [f"region {name} {link} since {_clock(since)}" for name, link, since in away]
    # While a job runs an agent that is not heard may well train on, and the others do as far as they say.
    if gone and state.phase in ("starting", "finishing", "cancelling"):
        return "waiting: " + "; ".join(gone)
    if state.phase == "queued":
        return f"waiting: {state.waits_for or 'for a plan'}"
    if state.phase == "starting" and waits_for_shards:
        return f"waiting: {_shards_on_their_way(state)}"
    if state.phase == "starting":
        unready = [part.region for part in state.partitions if not part.address]
        return f"waiting: for {_listed(unready)} to get ready" if unready else ""
    if state.phase == "cancelling":
        going = [part.region for part in state.partitions if part.state not in ENDED_PARTITION]
        going += [copy.source for copy in state.copies if copy.report and copy.state not in ENDED_PARTITION]
        return f"waiting: for {_listed(going)} to stop"
    if state.phase == "finishing":
        return f"waiting: for {state.publisher} to hand the model in" if state.publisher else ""
    heard = [part for part in state.partitions if part.link == "live"]
    said = [f"{p.region}: {p.report.condition}" for p in heard if p.report and p.report.condition]
    ending = [f"ending before its plan: {state.ends_early}"] if state.ends_early else []
    return "; ".join([*ending, *gone, *said])


def _shards_on_their_way(state: JobState) -> str:
    told = []
    for copy in state.copies:
        text = f"for the shard of {copy.source} to be in {copy.destination}"
        said = copy.report.condition if copy.report is not None else ""
        told.append(f"{text}: {said}" if said else text)
    return "; ".join(told)


def _account_awaits(state: JobState) -> str:
    """Whose calls or shards were cut off, and have not been told as ended."""
    # What a job succeeds with, all calls have ended for; a shard may have been on its way once more.
    parts = () if state.phase == "succeeded" else state.partitions
    open_ = [p.region for p in parts if p.report and p.report.meter and p.state not in ENDED_PARTITION]
    ended = (*ENDED_PARTITION, "sent")
    sending = [c.source for c in state.copies if c.report and c.report.meter and c.state not in ended]
    lacks = [f"the last calls of {_listed(open_)}"] if open_ else []
    lacks += [f"what {_listed(sending)} sent last"] if sending else []
    return f"the account is not final: {' and '.join(lacks)} are not counted yet" if lacks else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names)


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
