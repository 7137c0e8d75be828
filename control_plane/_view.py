"""Convert jobs, regions and events to plain dictionaries, for json output and tables."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from control_plane._advanced import as_written
from control_plane._figures import metric_text
from geofed_pb.user_code.recording import RESERVED

if TYPE_CHECKING:
    from geofed_pb.v1 import common_pb2, control_pb2

Data = dict[str, Any]
"""A view: a JSON object."""
ENDED = ("succeeded", "failed", "cancelled")
"""States of an ended job."""


def standing_text(state: str) -> str:
    """Return a job's state as a predicate: "is running", "has failed"."""
    if state == "cancelled":
        return "was cancelled"
    return f"{'has' if state in ENDED else 'is'} {state}"


def job_view(job: control_pb2.Job) -> Data:
    """Return the full view of a job."""
    error = None
    if job.HasField("error"):
        error = {
            "code": job.error.code,
            "message": job.error.message,
            "hint": job.error.hint,
            "retryable": job.error.retryable,
        }
    return {
        "id": job.id,
        "name": job.name,
        "user": job.user or "operator",
        "shared_with": list(job.shared_with),
        "labels": dict(job.labels),
        "state": job.state,
        "condition": job.condition,
        "created_at": time_text(job.created_at),
        "started_at": time_text(job.started_at),
        "finished_at": time_text(job.finished_at),
        "deadline_at": time_text(job.deadline_at),
        "slack_seconds": _slack(job),
        "initial_model": _initial_model_view(job.initial_model) if job.HasField("initial_model") else None,
        "models": [_kept_view(model) for model in job.models],
        "successor": job.successor or None,
        "rounds": job.rounds,
        "usd": sum(charge.usd for part in job.partitions for charge in part.money)
        + sum(charge.usd for copy in job.copies for charge in copy.money),
        "partitions": [_partition_view(part) for part in job.partitions],
        "shards": [_copy_view(copy) for copy in job.copies],
        "links": [_link_view(link) for link in job.links],
        "spec": as_written(_loaded(job.spec_json)) if job.spec_json else None,
        "plan": _loaded(job.plan_json),
        "result": _loaded(job.result_json),
        "error": error,
    }


def _slack(job: control_pb2.Job) -> float | None:
    """Return the seconds between the expected end and the promised deadline; negative: missed, or about to be.

    None: no deadline is promised, or the job ended without the result that was promised.
    """
    if not job.deadline_at or job.successor or job.state in ("failed", "cancelled"):
        return None
    if job.finished_at:
        return job.deadline_at - job.finished_at
    now = time.time()
    done = min((part.round for part in job.partitions), default=0)
    if job.started_at and done:
        return job.deadline_at - now - (job.rounds - done) * (now - job.started_at) / done
    return job.deadline_at - max(now, (job.started_at or now) + job.expected_seconds)


def slack_text(view: Data) -> str:
    """Format by how much a job keeps or misses its promised deadline, or has; empty without a deadline."""
    if view["deadline_at"] is None:
        return ""
    if view["successor"]:
        return f"now that of {view['successor']}"
    ended, slack = view["finished_at"] is not None, view["slack_seconds"]
    if slack is None:
        return f"not met: the job {standing_text(view['state'])}"
    if slack >= 0:
        words = "met with {} to spare" if ended else "slack {}"
    else:
        words = "missed by {}" if ended else "will be missed by {}"
    return words.format(seconds_text(abs(slack)))


def job_summary(view: Data) -> Data:
    """Return a job's view without spec, plan and result."""
    left_out = ("spec", "plan", "result")
    return {key: value for key, value in view.items() if key not in left_out}


def _initial_model_view(model: control_pb2.InitialModel) -> Data:
    return {
        "job": model.job,
        "digest": model.digest,
        "bytes": model.bytes,
        "round": model.round or None,
        "file": model.file,
        "partial": model.partial,
        "uri": model.uri,
        "adapter": model.adapter,
        "adapter_bytes": model.adapter_bytes,
        "adapter_file": model.adapter_file,
    }


def _kept_view(model: control_pb2.KeptModel) -> Data:
    """Return the view of a model at the control plane."""
    return {
        "round": model.round,
        "digest": model.digest,
        "bytes": model.bytes,
        "metrics": dict(model.metrics),
        "best": model.best,
    }


def _partition_view(part: control_pb2.PartitionStatus) -> Data:
    return {
        "region": part.region,
        "state": part.state,
        "epoch": part.epoch,
        "round": part.round,
        "step": part.step,
        "samples": part.samples,
        "loss": part.loss if part.step else None,
        "metrics": dict(part.metrics),
        "logged": dict(part.logged.values),
        "usage": usage_view(part.usage),
        "workers": part.workers,
        "preemptible": part.preemptible,
        "samples_per_second": part.samples_per_second,
        "sent_bytes": dict(part.sent_bytes),
        "money": [_charge_view(charge) for charge in part.money],
        "usd": sum(charge.usd for charge in part.money),
        "epsilon": part.epsilon if part.HasField("epsilon") else None,
        "condition": part.condition,
        "last_contact": time_text(part.last_contact),
    }


def usage_view(usage: common_pb2.Usage) -> Data:
    """Return what a region's workers have used in their last round; the memory is that of the largest worker."""
    return {
        "cpu_cores": usage.cpu_cores,
        "memory_bytes": usage.memory_bytes,
        "gpu_memory_bytes": usage.gpu_memory_bytes,
    }


def _copy_view(copy: control_pb2.ShardCopy) -> Data:
    """Return the view of a shard that another region processes."""
    return {
        "source": copy.source,
        "destination": copy.destination,
        "state": copy.state,
        "condition": copy.condition,
        "bytes": copy.bytes,
        "sent_bytes": copy.sent_bytes,
        "money": [_charge_view(charge) for charge in copy.money],
        "usd": sum(charge.usd for charge in copy.money),
    }


def _charge_view(m: common_pb2.Money) -> Data:
    return {"item": m.item, "quantity": m.quantity, "unit": m.unit, "usd": m.usd, "source": m.source}


def _link_view(link: control_pb2.WanLink) -> Data:
    """Return the view of a WAN link; values not measured are None."""
    return {
        "source": link.source,
        "destination": link.destination,
        "state": link.state,
        "rtt_ms": link.rtt_ms or None,
        "goodput_mbps": link.goodput_mbps or None,
        "streams": link.streams,
        "codec": link.codec,
        "interval_steps": link.interval,
        "sent_bytes": link.sent_bytes,
        "received_bytes": link.received_bytes,
        "staleness_rounds": link.staleness,
        "refused_updates": link.refused,
    }


def model_text(model: Data) -> str:
    """Format the round and the metrics of a model: round 8 (loss 0.4100), the best."""
    metrics = ", ".join(f"{name} {metric_text(value)}" for name, value in sorted(model["metrics"].items()))
    return f"round {model['round']}{f' ({metrics})' if metrics else ''}{', the best' if model['best'] else ''}"


_SHOWN_MODELS = 3
"""Kept models that a sentence has room for: the last ones."""


def kept_if_cancelled(view: Data) -> str:
    """Return in a sentence which models stay if the job is cancelled."""
    models = view["models"]
    if not models:
        return "No round was evaluated: nothing is kept."
    return f"Kept: {'; '.join(model_text(model) for model in models[-_SHOWN_MODELS:])}."


_SHOWN_CATEGORIES = 5
"""Categories that a line has room for."""


def histogram_text(histogram: Data) -> str:
    """Format a histogram of a result in a line: 12,304 samples, median 41.2, 90 % between 22.1 and 67.9."""
    counts = f"{histogram['total']:,} samples"
    missing = f"; {histogram['withheld']:,} not reported" if histogram["withheld"] else ""
    if not histogram["edges"]:
        pairs = list(zip(histogram["categories"], histogram["counts"], strict=True))
        named = [f"{name} {count:,}" for name, count in pairs[:_SHOWN_CATEGORIES]]
        more = [f"{len(pairs) - _SHOWN_CATEGORIES:,} more"] if len(pairs) > _SHOWN_CATEGORIES else []
        return f"{', '.join([counts, *named, *more])}{missing}"
    at = histogram["quantiles"]
    if at["0.5"] is None:
        return f"{counts}{missing}"
    low, median, high = (figure_text(at[share]) for share in ("0.05", "0.5", "0.95"))
    return f"{counts}, median {median}, 90 % between {low} and {high}{missing}"


def region_view(region: control_pb2.Region) -> Data:
    """Return the full view of a region."""
    catalogue = _loaded(region.catalogue_json) or {}
    return {
        "name": region.name,
        "cloud": region.cloud,
        "state": region.state,
        "condition": region.condition,
        "last_contact": time_text(region.last_contact),
        "agent_version": region.agent_version,
        "certificate_expires": time_text(region.certificate_expires),
        "channel": catalogue.get("channel"),
        "channel_plaintext": catalogue.get("channel_plaintext", False),
        "isolation": catalogue.get("isolation", ""),
        "capacity": catalogue.get("capacity"),
        "prices": catalogue.get("prices"),
        "datasets": catalogue.get("datasets", []),
        "links": _region_links(catalogue.get("links", []), region),
    }


def _region_links(stated: list[Data], region: control_pb2.Region) -> list[Data]:
    """Return the links that plans count with: what jobs have measured of one counts where no operator states it."""
    found = [{**link, "basis": "stated"} for link in stated]
    known = {link["destination"] for link in stated}
    for link in region.measured_links:
        if link.destination not in known:
            one = {"source": region.name, "destination": link.destination, "rtt_ms": link.rtt_ms, "mbps": link.mbps}
            found.append({**one, "basis": "measured"})
    return found


def event_view(event: control_pb2.Event) -> Data:
    """Return the view of an event."""
    return {
        "cursor": event.cursor,
        "at": time_text(event.at),
        "job": event.job,
        "region": event.region,
        "kind": event.kind,
        "text": event.text,
        "data": _loaded(event.data_json) or {},
        "terminal": event.terminal,
    }


USAGE = ("cpu_cores", "memory_bytes", "gpu_memory_bytes")
"""Figures of a round about what its workers have used."""
SO_FAR = ("usd", "wan_bytes")
"""Figures of a round about its region since the start: money, and bytes sent to other regions."""


_KEPT_NAMES = RESERVED | {*USAGE, *SO_FAR}
"""What a metric of the task cannot be called in rows of rounds."""


def round_rows(events: Iterable[Data]) -> list[Data]:
    """Return what the regions have reported of their rounds, from the views of a job's events: one row for each region
    and round, with its step, samples, loss, what its workers have used and the task has logged, and the metrics of an
    evaluated round."""
    rows: dict[tuple[int, str], Data] = {}
    for event in events:
        if event["kind"] not in ("partition.round", "partition.logged", "partition.evaluated"):
            continue
        data = event["data"]
        row = rows.setdefault((data["round"], event["region"]), {"round": data["round"], "region": event["region"]})
        if event["kind"] == "partition.round":
            row |= {"at": event["at"], "step": data["step"], "samples": data["samples"], "loss": data["loss"]}
            row |= {name: data[name] for name in (*USAGE, *SO_FAR) if name in data}
        elif event["kind"] == "partition.logged":
            # A metric of the evaluation takes precedence.
            row |= {name: value for name, value in data["values"].items() if name not in row}
        else:
            row |= {name: value for name, value in data["metrics"].items() if name not in _KEPT_NAMES}
            row["test_loss"] = data["metrics"].get("loss")
    return [rows[key] for key in sorted(rows)]


def log_view(line: control_pb2.LogLine) -> Data:
    """Return the view of a log line."""
    return {
        "cursor": line.cursor,
        "at": time_text(line.at),
        "region": line.region,
        "source": line.source,
        "text": line.text,
    }


def time_text(seconds: float) -> str | None:
    """Format a time in UTC; None for 0, which means not yet."""
    if not seconds:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(text: str | None) -> str:
    """Return the local time of day of a time that `time_text` returned."""
    if not text:
        return ""
    return datetime.fromisoformat(text).astimezone().strftime("%H:%M:%S")


_SMALL, _WITHOUT_EXPONENT = 1e-6, 1e15
"""Figures between these are written without an exponent."""


def figure_text(value: float) -> str:
    """Format a figure with four significant digits, of large ones with all before the point: 0.1235, 12.35, 23,612."""
    size = abs(value)
    if 999.95 <= size < _WITHOUT_EXPONENT:
        return f"{value:,.0f}"
    if _SMALL <= size < 1:
        return f"{value:.{3 - math.floor(math.log10(size))}f}".rstrip("0").rstrip(".")
    return f"{value:.4g}"


def bytes_text(count: float) -> str:
    """Format a number of bytes: 1.2 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.{1 if count < 100 * size else 0}f} {unit}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Format a duration: 4.2 s, 3 min 20 s, 2 h 5 min."""
    # What is shown is rounded first, so that no part of it reaches the next unit.
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    if (whole := round(seconds)) < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def usd_text(usd: float) -> str:
    """Format US dollars; small amounts keep two significant digits."""
    if usd >= 1 or usd < 1e-9:
        return f"${usd:,.2f}"
    if usd >= 0.001:
        return f"${usd:.4f}"
    digits = 1 - math.floor(math.log10(usd))
    return f"${usd:.{digits}f}"


def _loaded(text: str) -> Any:
    return json.loads(text) if text else None
