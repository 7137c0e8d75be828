"""``python -m region_agent.gateway.serverless.tencent``: an invocation at Tencent Cloud SCF that is a replica.

It is the command of a job image function: SCF starts a container of it for each event, which it has in an environment
variable, and takes the container away when the command ends.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from geofed_pb.errors import Exit, GeofedError
from region_agent.gateway.container import HANDLER
from region_agent.gateway.serverless.invocation import serve
from region_agent.gateway.serverless.order import order_of

__all__ = ["main"]

_EVENT = "SCF_CUSTOM_CONTAINER_EVENT"


def main(arguments: list[str] | None = None) -> int:
    """Serve the event; returns the exit status."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m region_agent.gateway.serverless.tencent", description=__doc__)
    parser.add_argument("--handler", default=HANDLER, metavar="MODULE:FUNCTION")
    options = parser.parse_args(arguments)
    # The handler's process must not find it in this one's environment.
    event = os.environ.pop(_EVENT, "")
    if not event:
        print(f"error: {_EVENT} is missing: only Tencent Cloud SCF starts this", file=sys.stderr)
        return int(Exit.USAGE)
    try:
        order = order_of(event.encode())
        reason = serve(order, begun + order.life_seconds, options.handler)
    except (GeofedError, OSError) as error:
        print(f"the replica could not be served: {error}", file=sys.stderr, flush=True)
        return int(Exit.UNAVAILABLE)
    print(f"ended: {reason}", file=sys.stderr, flush=True)
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main())
