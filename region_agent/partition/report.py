"""Meters of a partition, and its reports to the control plane."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import error_of, to_proto
from geofed_pb.v1 import agent_pb2, common_pb2, sync_pb2
from region_agent.config import ChannelPricesConfig, PricesConfig
from region_agent.partition.billing import bill, invocation_amounts, money_of
from region_agent.partition.channel import usage_meters
from region_agent.partition.events import PsView
from region_agent.partition.machine import PartitionMachine
from region_agent.state.store import AgentStore
from region_agent.worker.invocation import Outcome
from sync.channel import Usage
from sync.histograms import from_messages, to_message, without_small_counts

__all__ = ["PartitionMeter", "report_of", "view_of", "withhold", "withhold_metrics", "withhold_small_counts"]

_TIMES = ("compute", "merge", "exchange", "wait", "evaluate")


class PartitionMeter:
    """Sums of resource use that survive restarts of the parameter server and of the agent.

    A parameter server counts from zero at each start; the growth of its counters is added to the sums.
    """

    def __init__(self, store: AgentStore, job: str, devices: int = 0) -> None:
        """``devices``: those that an invocation holds."""
        self._store, self._job, self._devices = store, job, devices
        self._counted: dict[str, float] = {}
        self._unstored: dict[str, float] = {}
        """Growth of the times of rounds that is not in the sums yet: they are stored less often than reported."""
        self._server_since: float | None = None
        self._open: dict[int, tuple[float, int, bool]] = {}
        """Running invocations by number: begin (Unix seconds), memory (MB), preemptible."""

    def values(self, now: float | None = None) -> dict[str, float]:
        """Return the sums by meter. ``now`` (Unix seconds): include running invocations up to then; None: only
        ended."""
        sums = self._store.meters(self._job)
        for begun, memory_mb, preemptible in self._open.values() if now is not None else ():
            for name, amount in self._amounts(begun, now or 0.0, memory_mb, preemptible).items():
                sums[name] = sums.get(name, 0.0) + amount
        return sums

    @property
    def identity(self) -> int:
        """Identity of the agent's store; sums from another store do not continue these."""
        return self._store.meter_id

    def server_started(self, now: float) -> None:
        """Begin to count a server's time at `now`, and its counters from zero."""
        self._counted, self._unstored, self._server_since = {}, {}, now

    def server_ended(self, now: float) -> None:
        """Add the server's time until `now`, and stop counting it."""
        self.add_server_time(now)
        self._server_since = None

    def add_server_status(self, status: sync_pb2.PsStatus, now: float) -> None:
        """Add the growth of the server's own counters since its last status."""
        counters = {f"sent_bytes:{region}": float(count) for region, count in status.sent_bytes.items()}
        counters |= {f"received_bytes:{region}": float(count) for region, count in status.received_bytes.items()}
        counters |= {f"refused:{region}": float(count) for region, count in status.refused.items()}
        counters |= usage_meters(status.channel)
        counters["wait_seconds"] = status.wait_seconds
        counters |= _times_of(status)
        grown = {name: value - self._counted.get(name, 0.0) for name, value in counters.items()}
        self._counted, self._unstored = counters, {}
        self._store.add_to_meters(self._job, {name: value for name, value in grown.items() if value})
        self.add_server_time(now)

    def see_times(self, status: sync_pb2.PsStatus) -> None:
        """Take note of the times in a status that is not added to the sums yet."""
        self._unstored = {name: value - self._counted.get(name, 0.0) for name, value in _times_of(status).items()}

    def times(self, sums: dict[str, float]) -> dict[str, float]:
        """Return what the rounds have taken, by the fields of ``RoundTime``, from the result of `values`."""
        names = {name: f"time:{name}" for name in _TIMES}
        return {name: sums.get(key, 0.0) + self._unstored.get(key, 0.0) for name, key in names.items()}

    def invocation_begun(self, number: int, now: float, memory_mb: int, *, preemptible: bool) -> None:
        """Begin to count an invocation, stored under this number, from ``now`` (Unix seconds)."""
        self._open[number] = now, memory_mb, preemptible

    def invocation_ended(self, number: int, now: float) -> None:
        """Charge an invocation until ``now`` (Unix seconds), whether it succeeded or failed."""
        begun, memory_mb, preemptible = self._open.pop(number)
        self._store.invocation_ended(number, self._job, self._amounts(begun, now, memory_mb, preemptible))

    def add_outcome(self, outcome: Outcome) -> None:
        """Add what an invocation has computed and sent over the channel."""
        self._store.add_to_meters(
            self._job,
            {
                "compute_seconds": outcome.compute_seconds,
                "computed_samples": outcome.samples,
                "merge_seconds": outcome.merge_seconds,
                "computed_steps": outcome.steps,
                "steady_steps": outcome.steady_steps,
                "steady_seconds": outcome.steady_seconds,
                **usage_meters(outcome.channel),
            },
        )

    def channel_used(self, usage: Usage) -> None:
        """Add the agent's own use of the channel."""
        self._store.add_to_meters(self._job, usage_meters(asdict(usage)))

    def _amounts(self, begun: float, now: float, memory_mb: int, preemptible: bool) -> dict[str, float]:
        # The clock may have been set back.
        return invocation_amounts(max(0.0, now - begun), memory_mb, preemptible=preemptible, devices=self._devices)

    def add_server_time(self, now: float) -> None:
        """Charge the server's running time until ``now`` (seconds, monotonic)."""
        if self._server_since is not None:
            self._store.add_to_meters(self._job, {"ps_seconds": now - self._server_since})
            self._server_since = now


def _times_of(status: sync_pb2.PsStatus) -> dict[str, float]:
    return {f"time:{name}": getattr(status.time, name) for name in _TIMES}


def view_of(status: sync_pb2.PsStatus) -> PsView:
    """Return the fields of a status that the partition's state machine depends on."""
    error: GeofedError | None = error_of(status.error) if status.HasField("error") else None
    return PsView(status.phase, status.condition, status.round, error)


def report_of(
    machine: PartitionMachine,
    job: str,
    status: sync_pb2.PsStatus,
    meter: PartitionMeter,
    prices: PricesConfig | None,
    channel: ChannelPricesConfig | None = None,
) -> agent_pb2.PartitionReport:
    """Build the report on a partition. Its sums are cumulative, so the next report makes up for a lost one."""
    meters = meter.values(time.time())
    return agent_pb2.PartitionReport(
        job=job,
        epoch=machine.epoch,
        state=machine.state,
        condition=machine.condition,
        ps_address=machine.ps_address,
        ps_signs=True,
        error=to_proto(machine.error) if machine.error else None,
        attempt=machine.attempt,
        round=status.round,
        step=status.step,
        samples=status.samples,
        loss=status.loss,
        round_loss=status.round_loss if status.HasField("round_loss") else None,
        logged=status.logged,
        usage=status.usage,
        time=common_pb2.RoundTime(**meter.times(meters)),
        model_digest=status.model_digest,
        meter=meter.identity,
        totals=agent_pb2.MeterTotals(
            money=money_of(bill(meters, prices, channel) if prices else []),
            sent_bytes=_by_region(meters, "sent_bytes:"),
            received_bytes=_by_region(meters, "received_bytes:"),
        ),
        evaluation=agent_pb2.Evaluation(
            metrics=status.metrics,
            samples=status.metrics_samples,
            round=status.metrics_round,
            error=status.metrics_error,
            histograms=status.histograms,
        ),
        speed=_speed(meters, status.samples_per_second),
        exchange=_exchange(meters, status),
        links=_links(status),
    )


def _exchange(meters: dict[str, float], status: sync_pb2.PsStatus) -> agent_pb2.WanExchange:
    return agent_pb2.WanExchange(
        applied_updates=status.applied_updates,
        staleness=status.staleness,
        suspicion=status.suspicion,
        refused=_by_region(meters, "refused:"),
        interval=status.interval,
        codec=status.codec,
        update_bytes=status.update_bytes,
        routes=status.routes,
    )


def withhold(message: agent_pb2.PartitionReport, spent: agent_pb2.Privacy | None) -> None:
    """Take out of a report what was computed from the training data without noise, and put in what was spent."""
    _withhold_text(message.evaluation)
    message.loss = message.round_loss = math.nan
    message.ClearField("logged")
    message.privacy.CopyFrom(spent or agent_pb2.Privacy())


def withhold_metrics(evaluation: agent_pb2.Evaluation) -> None:
    """Take out of an evaluation all that it measured without noise, on data whose owner has a budget and has not stated
    of how many samples metrics may be told."""
    _withhold_text(evaluation)
    if evaluation.metrics or evaluation.histograms:
        evaluation.error = (
            "metrics of data with a budget of privacy have no noise, and stay in a region without minimumCount"
        )
    evaluation.ClearField("metrics")
    evaluation.ClearField("histograms")
    evaluation.samples = 0


def withhold_small_counts(evaluation: agent_pb2.Evaluation, least: int, config: object) -> None:
    """Take out of an evaluation what was measured on fewer than `least` samples, and bins that have fewer.

    Error texts stay, too: they may quote a sample. So do bin edges that are not in the job's ``task.config``, which
    the code may have computed from samples.
    """
    _withhold_text(evaluation)
    told, _ = from_messages(evaluation.histograms)
    evaluation.ClearField("histograms")
    if evaluation.samples < least:
        evaluation.ClearField("metrics")
        if evaluation.samples:
            evaluation.error = f"the test split has fewer samples than the region's minimumCount, {least}"
        evaluation.samples = 0
        return
    stated = set(_lists_of_numbers(config))
    for name, one in told.items():
        if one.edges and one.edges not in stated:
            evaluation.error = f"the bin edges of {name} are not in task.config, as the region's minimumCount requires"
        else:
            evaluation.histograms[name].CopyFrom(to_message(without_small_counts(one, least)))


def _withhold_text(evaluation: agent_pb2.Evaluation) -> None:
    """Replace the text of an error, which may quote a sample."""
    if evaluation.error:
        evaluation.error = "it has failed, or is not complete; the region's own log says why"


def _lists_of_numbers(value: object) -> Iterator[tuple[float, ...]]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _lists_of_numbers(one)
    elif isinstance(value, list):
        if all(isinstance(one, int | float) for one in value):
            yield tuple(map(float, value))
        for one in value:
            yield from _lists_of_numbers(one)


def _links(status: sync_pb2.PsStatus) -> dict[str, agent_pb2.LinkReport]:
    """Return what the parameter server has measured of its links, by region."""
    down = set(status.links_down)
    return {
        region: agent_pb2.LinkReport(
            rtt_ms=status.link_rtt_ms.get(region, 0.0),
            mbps=status.link_mbps.get(region, 0.0),
            streams=status.link_streams.get(region, 0),
            down=region in down,
        )
        for region in {*status.link_rtt_ms, *status.link_mbps, *status.link_streams, *down}
    }


def _speed(meters: dict[str, float], round_speed: float) -> agent_pb2.Speed:
    """Return the speed that follows from the meters.

    ``round_speed``: samples per second of the last round, the speed as long as the meters have no compute time.
    """
    compute = meters.get("compute_seconds", 0.0)
    return agent_pb2.Speed(
        samples_per_second=meters.get("computed_samples", 0.0) / compute if compute else round_speed,
        round_samples_per_second=round_speed,
        step_seconds=meters.get("steady_seconds", 0.0) / max(1.0, meters.get("steady_steps", 0.0)),
        merge_seconds=meters.get("merge_seconds", 0.0) / max(1.0, meters.get("computed_steps", 0.0)),
        compute_seconds=compute,
        wait_seconds=meters.get("wait_seconds", 0.0),
    )


def _by_region(meters: dict[str, float], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): int(value) for name, value in meters.items() if name.startswith(prefix)}
