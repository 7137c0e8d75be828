"""A control plane as a process, by a file of its settings: ``python -m tests.faults.serving --config FILE``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from control_plane.server import ServeConfig, serve
from control_plane.store import Store
from geofed_pb.errors import GeofedError
from geofed_pb.logs import configure_logs

FAILPOINTS = ((Store, "commit"), (Store, "put_meta"))
"""Where it may die beside operations on files: before and after what it stores, which SQLite writes itself."""


def main() -> int:
    """Serve until a stop signal."""
    configure_logs("text")
    given = json.loads(Path(sys.argv[2]).read_text())
    folders = {name: Path(given.pop(name)) for name in ("state_dir", "ready_file")}
    try:
        asyncio.run(serve(ServeConfig(**folders, **given)))
    except GeofedError as error:
        print(f"error[{error.code}]: {error.message}", file=sys.stderr)
        return int(error.exit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
