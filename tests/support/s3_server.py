"""An S3 server for tests: moto, behind a count of every request that it gets.

Run as a program it prints its port. ``GET /-/counts`` answers the counts so far, and begins again.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Counting:
    """Passes requests on, and counts them by what they ask and how they are answered."""

    def __init__(self, inner: Wsgi) -> None:
        self._inner, self._counts, self._lock = inner, Counter[str](), threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/-/counts":
            with self._lock:
                body, self._counts = json.dumps(self._counts).encode(), Counter()
            start_response("200 OK", [("Content-Type", "application/json")])
            return [body]

        def counted(status: str, *arguments: Any, **options: Any) -> Any:
            with self._lock:
                self._counts[_kind(environ, int(status.split()[0]))] += 1
            return start_response(status, *arguments, **options)

        return self._inner(environ, counted)


def _kind(environ: dict[str, Any], status: int) -> str:
    method = environ["REQUEST_METHOD"]
    query = urllib.parse.parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    if method == "HEAD":
        return "looks"
    if method == "DELETE" or (method == "POST" and "delete" in query):
        return "deletes"
    if method in ("PUT", "POST"):
        return "puts" if status < 300 else "failures"
    if "list-type" in query:
        return "lists"
    return {200: "gets", 206: "gets", 416: "gets", 404: "misses", 412: "misses"}.get(status, "failures")


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Counting(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
