"""What an agent's report says that is new."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from control_plane.core._events import Record
from control_plane.core._state import Failure, Partition, Report

_SHOWN_METRICS = 20
"""In the sentence of an event; its data hold all."""
_WITHOUT_WORKERS = ("finished", "published", "failed", "refused", "stopped")
"""States of a partition whose number of workers means nothing any more."""


def records_of(part: Partition, report: Report) -> list[Record]:
    """What is to be written down since a partition's last report."""
    last, name, found = part.report or Report(part.epoch, ""), part.region, list[Record]()
    if report.state != part.state:
        text = f"{name}: {report.state}" + (f" ({report.condition})" if report.condition else "")
        data: dict[str, Any] = {"state": report.state, "epoch": report.epoch, "round": report.round}
        if report.error is not None:
            data["error"] = {"code": report.error.code, "message": report.error.message}
        found.append(Record("partition.state", text, name, data))
    if report.round > last.round:
        figures = {"round": report.round, "step": report.step, "samples": report.samples, "loss": report.loss}
        found.append(Record("partition.round", f"{name}: round {report.round}, loss {report.loss:.4f}", name, figures))
    if report.metrics and report.metrics_round > last.metrics_round:
        shown = sorted(report.metrics.items())[:_SHOWN_METRICS]
        values = ", ".join(f"{key} {value:.4f}" for key, value in shown)
        if len(report.metrics) > _SHOWN_METRICS:
            values += f", and {len(report.metrics) - _SHOWN_METRICS} more"
        text = f"{name}: after round {report.metrics_round}: {values}"
        data = {"round": report.metrics_round, "metrics": report.metrics, "samples": report.metrics_samples}
        found.append(Record("partition.evaluated", text, name, data))
    if report.metrics_error and report.metrics_round > last.metrics_round:
        lack = "not all" if report.metrics else "no"
        text = f"{name}: {lack} metrics after round {report.metrics_round}, the job continues: {report.metrics_error}"
        data = {"round": report.metrics_round, "error": report.metrics_error}
        found.append(Record("partition.unmeasured", text, name, data))
    return found


def fewer_workers(part: Partition, report: Report) -> Record | None:
    """Where a partition has fewer workers than it was told to have; what crosses an order is no word of what became of
    it."""
    if part.workers is None or report.workers >= part.workers or part.state in _WITHOUT_WORKERS:
        return None
    obeys, left = report.scale_order == part.scale_order > 0, report.workers
    # An older agent names no order, and says nothing of those that stay.
    if not obeys and not (report.scale_order == 0 and report.preempted and part.preemptible):
        return None
    data = {"before": part.workers, "workers": left}
    if report.preempted:
        kind = "preemptible workers" if part.preemptible else "workers"
        text = f"{part.region}: {part.workers - left} of {part.workers} {kind} were taken away"
        return Record("partition.preempted", text, part.region, data)
    text = f"{part.region} has {left} of {part.workers} workers that it is to continue with"
    return Record("partition.short", text, part.region, data)


def no_step_back(report: Report, last: Report | None) -> Report:
    """A parameter server that has just been restarted knows less than it told before; what it told stays."""
    if last is None or report.round >= last.round:
        return report
    return replace(
        report,
        round=last.round,
        step=last.step,
        samples=last.samples,
        loss=last.loss,
        metrics=last.metrics,
        metrics_samples=last.metrics_samples,
        metrics_round=last.metrics_round,
        metrics_error=last.metrics_error,
        applied_updates=last.applied_updates,
        sent_bytes=report.sent_bytes or last.sent_bytes,
        received_bytes=report.received_bytes or last.received_bytes,
        money=report.money or last.money,
    )


def failure_of(region: str, report: Report, what: str = "the partition") -> Failure:
    """The report's own error, with what failed where."""
    if report.error is None:
        return Failure("INTERNAL", f"region {region} {report.state} {what} without saying why")
    verb = f"refuses {what}" if report.state == "refused" else "failed"
    return replace(report.error, message=f"region {region} {verb}: {report.error.message}")
