"""Prometheus metrics under the names of the OpenFaaS gateway."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]


class Metrics:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._started = Counter(
            "gateway_function_invocation_started",
            "Calls of functions that were begun",
            ["function_name"],
            registry=self._registry,
        )
        self._ended = Counter(
            "gateway_function_invocation",
            "Calls of functions that have ended",
            ["function_name", "code"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "gateway_functions_seconds",
            "Duration of calls",
            ["function_name", "code"],
            registry=self._registry,
        )
        self._replicas = Gauge(
            "gateway_service_count", "Replicas that answer", ["function_name"], registry=self._registry
        )

    def started(self, function: str) -> None:
        """A call has begun."""
        self._started.labels(function).inc()

    def ended(self, function: str, status: int, seconds: float) -> None:
        """A call has ended."""
        self._ended.labels(function, str(status)).inc()
        self._seconds.labels(function, str(status)).observe(seconds)

    def text(self, replicas: Mapping[str, int]) -> bytes:
        """Return the Prometheus exposition, with the present number of replicas by function."""
        self._replicas.clear()
        for function, count in replicas.items():
            self._replicas.labels(function).set(count)
        return generate_latest(self._registry)
