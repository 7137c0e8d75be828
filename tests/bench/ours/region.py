"""One region of ours: the real parameter server as its own process, and the real worker loop in this one.

Started in the region's namespace. Regions find each other's ports in a folder that they share, as agents would be told
them by the control plane.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.jobs import call, invocation
from support.pki import Authority
from support.server_process import Server, wait_until

from sync.tcp_streams.sockets import Tls

BENCH = Path(__file__).resolve().parents[1]
LONG_SECONDS = 100_000.0


class _Server(Server):
    """Its exchange port is at the region's address."""

    @property
    def address(self) -> str:
        host = str(self.settings["exchange_listen"]).rpartition(":")[0]
        return f"{host}:{self.ports['exchange']}"


class _Issued(Authority):
    """An authority whose certificates were made before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def region(self, name: str, **_: Any) -> Tls:
        return Tls(*(pem.encode() for pem in json.loads((self._folder / f"{name}.json").read_text())))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--told", type=Path, required=True, help="JSON file of what to run")
    parser.add_argument("--region", required=True)
    given = parser.parse_args()
    told = json.loads(given.told.read_text())
    shared, regions, address = given.told.parent, told["regions"], told["addresses"][given.region]
    server = _Server(
        shared / given.region,
        _Issued(shared),
        given.region,
        tuple(regions),
        stall_seconds=30.0,
        exchange_listen=f"{address}:0",
        bulk_port=0,
        **told["settings"],
    )
    channel = Path("/dev/shm") / f"geofed-bench-{shared.name}-{given.region}"
    server.channel_folder = channel
    server.settings["channel_address"] = str(channel)
    server.launch()
    server.await_ready()
    server.settings["exchange_listen"] = f"{address}:{server.ports['exchange']}"
    ready = shared / f"{given.region}.port"
    ready.with_suffix(".partial").write_text(str(server.ports["exchange"]))
    ready.with_suffix(".partial").replace(ready)
    _meet(server, shared, told)
    task = f"PEERS = {str(BENCH / 'peers')!r}\n" + (BENCH / "ours" / "sleeping_task.py").read_text()
    options = {**told["options"], "rank": regions.index(given.region), "marks": told["marks"][given.region]}
    body = invocation(
        server, task, Path(__file__), config={"options": options}, slice_seconds=LONG_SECONDS, region_batch=1
    )
    outcome = call(body)
    print(outcome, flush=True)
    with contextlib.suppress(Exception):
        print(server.status(), flush=True)


def _meet(server: Server, shared: Path, told: dict[str, Any]) -> None:
    """Tell the server of the others, once they are up."""
    from geofed_pb.v1 import sync_pb2, sync_pb2_grpc

    peers = []
    for region in told["regions"]:
        if region == server.region:
            continue
        port = shared / f"{region}.port"
        wait_until(port.exists, f"{region} to come up", 60.0)
        peers.append(sync_pb2.PsPeer(region=region, address=f"{told['addresses'][region]}:{port.read_text()}", epoch=1))
    with server.exchange() as line:
        sync_pb2_grpc.PsAdminStub(line).Configure(sync_pb2.PsConfig(epoch=1, peers=peers), timeout=10)
    time.sleep(0.2)


if __name__ == "__main__":
    main()
