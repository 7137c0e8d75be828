"""A job's trace over processes: its IDs, W3C's trace context, and spans sent by OpenTelemetry's protocol.

IDs follow from the job's ID and a part's name: who knows both needs no other process to tell them, and a part that is
sent again is the same span.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

__all__ = ["JobTrace", "flush", "partition_key", "round_key", "span_of", "trace_of", "traceparent"]

_log = logging.getLogger("geofed.tracing")
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
"""W3C's `traceparent`, version 0: trace, span, flags (https://www.w3.org/TR/trace-context/)."""
_SAMPLED = 1
"""Flag of `traceparent`: spans are wanted."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's variables that name a collector; without one of them nothing is made."""
_MOST_UNSENT = 2048
"""Spans that wait for a collector, some 2 MB; further ones are dropped."""
_MOST_SENT = 512
"""Spans of a request, as OpenTelemetry has it."""
_SEND_MS = 5000.0
"""Time between two deliveries."""
_FLUSH_SECONDS = 2.0
"""Time that a process which ends gives its last spans."""


def trace_of(job: str) -> int:
    """Return the ID of a job's trace, 128 bits."""
    return int.from_bytes(hashlib.sha256(job.encode()).digest()[:16])


def span_of(job: str, key: str) -> int:
    """Return the ID of the span of a job's part, 64 bits; the key "" is the whole job."""
    return int.from_bytes(hashlib.sha256(f"{job}/{key}".encode()).digest()[:8])


def partition_key(region: str) -> str:
    """Return the key of a region's part of a job."""
    return f"region/{region}"


def round_key(region: str, number: int) -> str:
    """Return the key of a region's round, counted from 1."""
    return f"{partition_key(region)}/round/{number}"


def traceparent(job: str, key: str, *, wanted: bool) -> str:
    """Return W3C's `traceparent` of a job's part. ``wanted``: whether spans are."""
    return f"00-{trace_of(job):032x}-{span_of(job, key):016x}-{_SAMPLED if wanted else 0:02x}"


@dataclass(frozen=True)
class JobTrace:
    """Spans of one process in a job's trace; nothing where spans are not wanted or no collector is named."""

    job: str = ""
    parent: int = 0
    """ID of the span that those without another one are part of."""
    service: str = ""
    attributes: tuple[tuple[str, str | int], ...] = ()
    """Of every span."""

    @classmethod
    def of(cls, context: str, job: str, service: str, **attributes: str | int) -> JobTrace:
        """Return the spans of a process that was told the context, a `traceparent`; one that is none turns them off."""
        found = _FORM.fullmatch(context)
        if found is None or not int(found[3], 16) & _SAMPLED or int(found[1], 16) != trace_of(job):
            return cls()
        if not any(os.environ.get(name) for name in _ENDPOINTS) or _processor(service) is None:
            return cls()
        named = {"geofed.job": job, **{f"geofed.{name}": value for name, value in attributes.items()}}
        return cls(job, int(found[2], 16), service, tuple(named.items()))

    def add(self, name: str, began: float, attributes: Mapping[str, str | int], *, error: str = "") -> None:
        """Send a span that ends now. ``began``: Unix seconds."""
        if self.service and (processor := _processor(self.service)) is not None:
            named = {f"geofed.{key}": value for key, value in attributes.items()}
            processor.on_end(self._made(name, began, error, {**dict(self.attributes), **named}))

    def _made(self, name: str, began: float, error: str, attributes: dict[str, Any]) -> ReadableSpan:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        trace, flags = trace_of(self.job), TraceFlags(_SAMPLED)
        return ReadableSpan(
            name,
            SpanContext(trace, secrets.randbits(64) | 1, False, flags),
            SpanContext(trace, self.parent, True, flags),
            Resource({"service.name": self.service, "process.pid": os.getpid()}),
            attributes,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=int(began * 1e9),
            end_time=time.time_ns(),
        )

    @contextmanager
    def span(self, name: str, **attributes: str | int) -> Iterator[None]:
        """Send a span of what is done within, which has failed if it raises a ``GeofedError``."""
        began = time.time()
        try:
            yield
        except GeofedError as error:
            self.add(name, began, attributes, error=error.code)
            raise
        self.add(name, began, attributes)


@cache
def _processor(service: str) -> BatchSpanProcessor | None:
    """Return what sends this process's spans, in a thread of its own; None: the exporter is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        _log.warning("%s sends no spans: OpenTelemetry's exporter is not installed, geofed[otlp]", service)
        return None
    # Address, headers such as a token, and certificates come from OTEL_EXPORTER_OTLP_*.
    return BatchSpanProcessor(OTLPSpanExporter(), _MOST_UNSENT, _SEND_MS, _MOST_SENT)


def flush(service: str) -> None:
    """Send what waits, for two seconds at most; called when a process ends."""
    if _processor.cache_info().currsize and (processor := _processor(service)) is not None:
        sending = threading.Thread(target=processor.force_flush, daemon=True)
        sending.start()
        sending.join(_FLUSH_SECONDS)
