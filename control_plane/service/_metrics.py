"""Prometheus metrics of the federation, read at the time of the scrape."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter as CountOf
from collections.abc import Awaitable, Callable, Iterator, Sequence
from operator import itemgetter
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from control_plane.core import TERMINAL, Report, WanLink, wan_links
from control_plane.service.state._entries import JobEntry, newest
from control_plane.service.state._federation import Federation
from control_plane.service.state._job_lookup import ACTIVE
from geofed_pb.errors import GeofedError
from geofed_pb.security.access import wrapped

REGION_PHASES = ("invited", "live", "misconfigured", "draining", "unreachable", "lost", "revoked")
LINK_GAUGES: tuple[tuple[str, str, Callable[[WanLink], float | None]], ...] = (
    ("geofed_link_up", "1 if the last attempt to reach the destination succeeded", lambda link: link.state != "down"),
    ("geofed_link_rtt_seconds", "Round-trip time", lambda link: link.rtt_ms / 1e3 or None),
    (
        "geofed_link_goodput_bytes_per_second",
        "Payload rate of the last update",
        lambda link: link.goodput_mbps * 1e6 / 8 or None,
    ),
    ("geofed_link_sent_bytes", "Bytes sent, as counted by the source", lambda link: link.sent_bytes),
    ("geofed_link_received_bytes", "Bytes received, as counted by the destination", lambda link: link.received_bytes),
    (
        "geofed_link_staleness_rounds",
        "Mean age of the source's updates when they were merged",
        lambda link: link.staleness,
    ),
    ("geofed_link_interval_steps", "Steps of the source's current round", lambda link: link.interval or None),
    ("geofed_link_streams", "Streams of the last update; 0: sent through the exchange port", lambda link: link.streams),
    ("geofed_link_refused_updates", "Updates refused by the destination's guard", lambda link: link.refused),
)
"""Name, help text and value of the metrics of each link; None: not measured."""
PARTITION_GAUGES: tuple[tuple[str, str, Callable[[Report], float | None]], ...] = (
    (
        "geofed_partition_loss",
        "Loss of the workers in their last step",
        lambda report: report.loss if report.step else None,
    ),
    ("geofed_partition_round", "Completed rounds", lambda report: report.round),
    ("geofed_partition_workers", "Active workers", lambda report: report.workers),
    (
        "geofed_partition_samples_per_second",
        "Speed of all workers together",
        lambda report: report.speed.samples_per_second,
    ),
    ("geofed_partition_usd", "Metered cost so far", lambda report: report.totals.usd),
    (
        "geofed_partition_cpu_cores",
        "Busy cores of all workers in the last round",
        lambda report: report.usage.cpu_cores,
    ),
    (
        "geofed_partition_memory_bytes",
        "Peak memory of the largest worker",
        lambda report: report.usage.memory_bytes or None,
    ),
)
"""Name, help text and value of the metrics of each partition of an active job, from its last report."""


SHOWN_JOBS = 200
"""Number of active jobs with metrics of their own, the latest ones; `geofed_jobs_not_shown` counts the others. They are
some 30 lines each."""
SHOWN_LINKS = 1000
"""Number of links in `geofed_wan_bytes`, those with the most bytes; the others are summed under empty names."""


class MetricsExporter(grpc.aio.ServerInterceptor, Collector):
    """Exports metrics of the federation, and counts gRPC calls. Labels are bounded: regions, phases, `SHOWN_JOBS`
    and `SHOWN_LINKS`."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._pending: dict[str, int] = {}
        self._phases: dict[str, int] = {}
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "geofed_rpc_calls", "Ended gRPC calls, by outcome", ["method", "outcome"], registry=self._registry
        )
        self._registry.register(self)

    async def exposition(self) -> bytes:
        """Return the text of `/metrics`."""
        self._pending = await self._federation.read(lambda store: store.commands_pending())
        self._phases = await self._federation.read(lambda store: store.jobs_by_phase())
        # In a thread, since it takes long if there are many regions; what it reads is replaced, not changed.
        return await asyncio.to_thread(generate_latest, self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the federation's current state."""
        jobs = dict(self._federation.jobs)
        shown = newest(jobs, SHOWN_JOBS)
        yield from self._job_metrics(len(jobs) - len(shown), shown)
        yield from self._link_metrics(shown)
        yield from self._region_metrics()

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that registering needs no state."""
        return iter(())

    def _job_metrics(self, others: int, shown: Sequence[JobEntry]) -> Iterator[Metric]:
        by_phase = GaugeMetricFamily("geofed_jobs", "Jobs by state, including ended ones", labels=["state"])
        for phase in sorted(ACTIVE | TERMINAL):
            by_phase.add_metric([phase], self._phases.get(phase, 0))
        yield by_phase
        deadline = GaugeMetricFamily(
            "geofed_job_deadline_seconds", "Promised deadlines of active jobs, in Unix seconds", labels=["job"]
        )
        for entry in shown:
            if entry.state.deadline_at is not None:
                deadline.add_metric([entry.row.id], entry.state.deadline_at)
        yield deadline
        yield GaugeMetricFamily("geofed_jobs_not_shown", "Active jobs without metrics of their own", value=others)
        yield from self._partition_metrics(shown)
        rounds = GaugeMetricFamily("geofed_rounds", "Rounds completed by active jobs", labels=["region"])
        sent = GaugeMetricFamily(
            "geofed_wan_bytes", "Bytes sent over the WAN by active jobs", labels=["source", "destination"]
        )
        sums = self._federation.sums
        for region, count in sums.rounds().items():
            rounds.add_metric([region], count)
        by_link = sums.sent_bytes()
        most = sorted(by_link.items(), key=itemgetter(1), reverse=True)[:SHOWN_LINKS]
        for link, count in most:
            sent.add_metric(list(link), count)
        if others := sum(by_link.values()) - sum(count for _, count in most):
            sent.add_metric(["", ""], others)
        yield rounds
        yield sent

    def _partition_metrics(self, jobs: Sequence[JobEntry]) -> Iterator[Metric]:
        reports = [
            (entry.row.id, part.region, part.report)
            for entry in jobs
            for part in entry.state.partitions
            if part.report is not None
        ]
        for name, text, value in PARTITION_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["job", "region"])
            for job, region, report in reports:
                if (shown := value(report)) is not None:
                    gauge.add_metric([job, region], shown)
            yield gauge

    def _link_metrics(self, jobs: Sequence[JobEntry]) -> Iterator[Metric]:
        links = [(entry.row.id, link) for entry in jobs for link in wan_links(entry.state)]
        for name, text, value in LINK_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["job", "source", "destination"])
            for job, link in links:
                if (measured := value(link)) is not None:
                    gauge.add_metric([job, link.source, link.destination], measured)
            yield gauge
        info = InfoMetricFamily("geofed_link", "Present use of a link", labels=["job", "source", "destination"])
        for job, link in links:
            info.add_metric([job, link.source, link.destination], {"codec": link.codec, "state": link.state})
        yield info

    def _region_metrics(self) -> Iterator[Metric]:
        federation = self._federation
        now = federation.clock()
        up = GaugeMetricFamily("geofed_region_up", "1 if the region is live", labels=["region"])
        lease = GaugeMetricFamily("geofed_lease_remaining_seconds", "Time until the lease expires", labels=["region"])
        expires = GaugeMetricFamily(
            "geofed_region_certificate_expires_seconds", "Expiry of the certificate, in Unix seconds", labels=["region"]
        )
        regions = dict(federation.regions)
        for name, entry in regions.items():
            up.add_metric([name], entry.state.phase == "live")
            lease.add_metric([name], max(0.0, entry.state.lease_ends - now))
            expires.add_metric([name], entry.row.certificate_expires)
        yield from (up, lease, expires)
        states = GaugeMetricFamily("geofed_regions", "Regions by state", labels=["state"])
        counts = CountOf(entry.state.standing for entry in regions.values())
        for phase in REGION_PHASES:
            states.add_metric([phase], counts[phase])
        yield states
        yield GaugeMetricFamily("geofed_sessions", "Connected agents", value=len(federation.sessions))
        pending = GaugeMetricFamily("geofed_commands_pending", "Commands not yet acknowledged", labels=["region"])
        for name, count in self._pending.items():
            pending.add_metric([name], count)
        yield pending

    # --- counting calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap a call's handler so that its end is counted."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        count = self._counted_stream if handler.response_streaming else self._counted_answer
        return wrapped(handler, functools.partial(count, method=str(handler_call_details.method)))

    def _counted_answer(self, behaviour: Any, method: str) -> Any:
        @functools.wraps(behaviour)
        async def call(request: Any, context: Any) -> Any:
            with _CountedCall(self._calls, method):
                return await behaviour(request, context)

        return call

    def _counted_stream(self, behaviour: Any, method: str) -> Any:
        @functools.wraps(behaviour)
        async def call(request: Any, context: Any) -> Any:
            with _CountedCall(self._calls, method):
                async for message in behaviour(request, context):
                    yield message

        return call


class _CountedCall:
    """Counts one call by its outcome when it ends, also if it is cancelled."""

    def __init__(self, calls: Counter, method: str) -> None:
        self._calls, self._method = calls, method

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.labels(self._method, "ok" if error is None else _outcome(error)).inc()


def _outcome(error: BaseException) -> str:
    cause = error.__context__
    if isinstance(cause, GeofedError):
        return cause.code
    return "error" if isinstance(error, Exception) else "cancelled"
