"""``python -m region_agent.gateway.serverless.aws``: the runtime of an AWS Lambda function that is a replica.

It takes events from Lambda's runtime API (version 2018-06-01, as custom runtimes and container images do) and is a
replica for each, one after the other. AWS's own runtime client is not needed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time

from geofed_pb.errors import GeofedError
from region_agent.gateway.container import HANDLER
from region_agent.gateway.serverless.invocation import serve
from region_agent.gateway.serverless.order import order_of

__all__ = ["main"]

_ROOT = "/2018-06-01/runtime/invocation"


def main(arguments: list[str] | None = None) -> None:
    """Serve events for ever; Lambda ends the process."""
    parser = argparse.ArgumentParser(prog="python -m region_agent.gateway.serverless.aws", description=__doc__)
    parser.add_argument("--handler", default=HANDLER, metavar="MODULE:FUNCTION")
    options = parser.parse_args(arguments)
    address = os.environ.get("AWS_LAMBDA_RUNTIME_API", "")
    if not address:
        print("error: AWS_LAMBDA_RUNTIME_API is missing: only AWS Lambda starts this", file=sys.stderr)
        sys.exit(2)
    while True:
        headers, event = _asked(address, "GET", "next", b"")
        identity = headers["Lambda-Runtime-Aws-Request-Id"] or ""
        left = int(headers["Lambda-Runtime-Deadline-Ms"] or "0") / 1000 - time.time()
        try:
            reason = serve(order_of(event), time.monotonic() + left, options.handler)
        except (GeofedError, OSError) as error:
            print(f"the replica could not be served: {error}", file=sys.stderr, flush=True)
            told = {"errorType": getattr(error, "code", type(error).__name__), "errorMessage": str(error)}
            _asked(address, "POST", f"{identity}/error", json.dumps(told).encode())
            continue
        _asked(address, "POST", f"{identity}/response", json.dumps({"ended": reason}).encode())


def _asked(address: str, method: str, path: str, body: bytes) -> tuple[http.client.HTTPMessage, bytes]:
    """Send a request to the runtime API; the next event may come minutes later, and the process is frozen meanwhile."""
    connection = http.client.HTTPConnection(address, timeout=None)
    try:
        connection.request(method, f"{_ROOT}/{path}", body, {"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status >= 400:
            raise RuntimeError(f"Lambda's runtime API answers {answer.status} to {path}")
        return answer.headers, content
    finally:
        connection.close()


if __name__ == "__main__":
    main()
