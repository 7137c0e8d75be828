"""A collector of OpenTelemetry's protocol over HTTP, which keeps what it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

__all__ = ["Collector", "running_collector"]


class Collector(ThreadingHTTPServer):
    """Takes spans, or refuses them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.requests: list[Any] = []
        self.paths: list[str] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def place(self) -> str:
        """For `--track`."""
        return f"otlp:{self.url}"

    @property
    def spans(self) -> list[Any]:
        return [span for _, span in self.spans_of_services]

    @property
    def spans_of_services(self) -> list[tuple[str, Any]]:
        """Spans with the name of the service that has sent them and, where it says so, the number of its process."""
        return [
            (_service(of_resource.resource), span)
            for request in list(self.requests)
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]


def _service(resource: Any) -> str:
    found = {one.key: one.value for one in resource.attributes}
    pid = f"/{found['process.pid'].int_value}" if "process.pid" in found else ""
    return f"{found['service.name'].string_value}{pid}"


class _Taking(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.paths.append(self.path)
        if self.server.status == 200:
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running_collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
