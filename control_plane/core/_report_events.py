"""Events for what is new in an agent's report."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from control_plane._figures import metric_text
from control_plane.core._events import Record
from control_plane.core._state import Failure, MeterTotals, Partition, Report, RoundTime

_SHOWN_METRICS = 20
"""Number of metrics in an event's text; its data have all."""
_ENDED_STATES = ("finished", "published", "failed", "refused", "stopped")
"""States of a partition that has no workers any more."""


def records_of(part: Partition, report: Report) -> list[Record]:
    """Return the events for what has changed since a partition's last report."""
    last, name, found = part.report or Report(part.epoch, ""), part.region, list[Record]()
    if report.state != part.state:
        text = f"{name}: {report.state}" + (f" ({report.condition})" if report.condition else "")
        data: dict[str, Any] = {"state": report.state, "epoch": report.epoch, "round": report.round}
        if report.error is not None:
            data["error"] = {"code": report.error.code, "message": report.error.message}
        found.append(Record("partition.state", text, name, data))
    if report.round > last.round:
        loss = loss_of_round(report)
        figures = {"round": report.round, "step": report.step, "samples": report.samples, "loss": loss}
        usd, sent = sum(charge.usd for charge in report.totals.money), sum(report.totals.sent_bytes.values())
        used = asdict(report.usage) | {"usd": usd, "wan_bytes": sent}
        figures |= {name: value for name, value in used.items() if value}
        figures |= _taken(last, report)
        told = "not told" if report.privacy is not None else metric_text(loss)
        found.append(Record("partition.round", f"{name}: round {report.round}, loss {told}", name, figures))
    if report.logged.round > last.logged.round and report.logged.values:
        text = f"{name}: logged in round {report.logged.round}: {_values_text(report.logged.values)}"
        data = {"round": report.logged.round, "values": report.logged.values}
        found.append(Record("partition.logged", text, name, data))
    now = report.evaluation
    if now.metrics and now.round > last.evaluation.round:
        text = f"{name}: after round {now.round}: {_values_text(now.metrics)}"
        data = {
            "round": now.round,
            "metrics": now.metrics,
            "samples": now.samples,
        }
        found.append(Record("partition.evaluated", text, name, data))
    if now.error and now.round > last.evaluation.round:
        missing = "some metrics missing" if now.metrics else "no metrics"
        text = f"{name}: {missing} after round {now.round}; the job continues: {now.error}"
        data = {"round": now.round, "error": now.error}
        found.append(Record("partition.unmeasured", text, name, data))
    return found


def _taken(last: Report, report: Report) -> dict[str, float]:
    """Return what the rounds since the last event have taken, in seconds; empty: not known.

    It is not known if the last report had rounds and no times; if an agent has lost its disk; and if a parameter server
    was ended between a round's steps and its exchange: only it knew the steps.
    """
    if report.time is None or (last.time is None and last.round > 0):
        return {}
    before = asdict(last.time or RoundTime())
    taken = {f"{name}_seconds": value - before[name] for name, value in asdict(report.time).items()}
    return taken if min(taken.values()) >= 0 and taken["compute_seconds"] > 0 else {}


def _values_text(values: dict[str, float]) -> str:
    shown = ", ".join(f"{key} {metric_text(value)}" for key, value in sorted(values.items())[:_SHOWN_METRICS])
    return shown + (f", and {len(values) - _SHOWN_METRICS} more" if len(values) > _SHOWN_METRICS else "")


def loss_of_round(report: Report) -> float:
    """Return the mean loss of the report's round; agents of older versions report only that of the last steps."""
    return report.loss if report.round_loss is None else report.round_loss


def fewer_workers(part: Partition, report: Report) -> Record | None:
    """Return an event if a partition has fewer workers than it was commanded to have, else None.

    A report sent before the latest command was obeyed says nothing about that command, and is ignored.
    """
    if part.workers is None or report.workers >= part.workers or part.state in _ENDED_STATES:
        return None
    obeys, left = report.scale_order == part.scale_order > 0, report.workers
    # Agents of older versions send no `scale_order`.
    if not obeys and not (report.scale_order == 0 and report.preempted and part.preemptible):
        return None
    data = {"before": part.workers, "workers": left}
    if report.preempted:
        kind = "preemptible workers" if part.preemptible else "workers"
        text = f"{part.region}: {part.workers - left} of {part.workers} {kind} were preempted"
        return Record("partition.preempted", text, part.region, data)
    text = f"{part.region} continues with only {left} of {part.workers} workers"
    return Record("partition.short", text, part.region, data)


def never_backwards(report: Report, last: Report | None) -> Report:
    """Keep the last report's progress if a report is behind it, as after a restart of the parameter server."""
    if last is not None and report.logged.round < last.logged.round:
        report = replace(report, logged=last.logged)
    if last is None or report.round >= last.round:
        same = last is not None and report.round == last.round and report.round_loss is None
        return replace(report, round_loss=last.round_loss) if last is not None and same else report
    now, known = report.totals, last.totals
    return replace(
        report,
        round=last.round,
        step=last.step,
        samples=last.samples,
        loss=last.loss,
        round_loss=last.round_loss,
        evaluation=last.evaluation,
        usage=last.usage,
        time=last.time,
        exchange=replace(report.exchange, applied_updates=last.exchange.applied_updates),
        totals=MeterTotals(
            now.money or known.money, now.sent_bytes or known.sent_bytes, now.received_bytes or known.received_bytes
        ),
    )


def failure_of(region: str, report: Report, what: str = "the partition") -> Failure:
    """Return the report's error, with the region and what failed in its message."""
    if report.error is None:
        return Failure("INTERNAL", f"region {region} {report.state} {what} without giving a reason")
    verb = f"refused {what}" if report.state == "refused" else "failed"
    return replace(report.error, message=f"region {region} {verb}: {report.error.message}")
