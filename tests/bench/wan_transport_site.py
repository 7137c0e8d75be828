"""The two sides of `wan_transport.py`, each a process in its region."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.exchange_site import Site
from support.pki import Authority

from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.tcp_streams.sockets import Tls
from sync.tcp_streams.stream_count import largest_chunk_bytes

__all__ = ["serve"]

_LENGTH = struct.Struct(">Q")
_PIECE = 1 << 20


def serve(arguments: list[str]) -> int:
    """`take FOLDER ADDRESS` or `give FOLDER ADDRESS PORTS`."""
    role, folder, address = arguments[:3]
    work = _take(Path(folder), address) if role == "take" else _give(Path(folder), address, json.loads(arguments[3]))
    asyncio.run(work)
    return 0


def _site(folder: Path, region: str) -> Site:
    kept = folder / f"{region}.json"
    pems = json.loads(kept.read_text())
    identity = Tls(*(pem.encode() for pem in pems))
    return Site(region, ("east", "west"), folder / region, identity, stall_seconds=30.0)


def _say(message: object) -> None:
    print(json.dumps(message), flush=True)


async def _take(folder: Path, address: str) -> None:
    authority = Authority()
    folder.mkdir(parents=True)
    for region in ("east", "west"):
        tls = authority.region(region)
        pems = [tls.ca_pem.decode(), tls.certificate_pem.decode(), tls.key_pem.decode()]
        (folder / f"{region}.json").write_text(json.dumps(pems))
    site = _site(folder, "west")
    await site.start(address)
    listener = socket.create_server((address, 0), backlog=64)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    _say({"exchange": site.port, "raw": listener.getsockname()[1]})
    while True:
        await site.until(lambda: site.stored, seconds=1e9)
        # Room for the next one.
        for manifest in site.stored:
            site.path(manifest.region, manifest.sequence - 1).unlink(missing_ok=True)
        site.stored.clear()


def _accept(listener: socket.socket) -> None:
    while True:
        line, _ = listener.accept()
        threading.Thread(target=_swallow, args=(line,), daemon=True).start()


def _swallow(line: socket.socket) -> None:
    buffer = memoryview(bytearray(_PIECE))
    while head := line.recv(_LENGTH.size, socket.MSG_WAITALL):
        left = _LENGTH.unpack(head)[0]
        while left:
            left -= line.recv_into(buffer[: min(left, _PIECE)])
        line.sendall(b"!")


class _Raw:
    """Warm connections with default sockets."""

    def __init__(self, address: tuple[str, int], streams: int) -> None:
        self._lines = [socket.create_connection(address) for _ in range(streams)]

    def send(self, data: memoryview) -> float:
        share = -(-len(data) // len(self._lines))
        parts = [data[place * share : (place + 1) * share] for place in range(len(self._lines))]
        begun = time.monotonic()
        threads = [
            threading.Thread(target=self._one, args=(line, part)) for line, part in zip(self._lines, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - begun

    @staticmethod
    def _one(line: socket.socket, part: memoryview) -> None:
        line.sendall(_LENGTH.pack(len(part)))
        line.sendall(part)
        line.recv(1)


async def _give(folder: Path, address: str, ports: dict[str, int]) -> None:
    site = _site(folder, "east")
    await site.start()
    peer = PeerAddress("west", 1, f"{address}:{ports['exchange']}")
    raw = {f"raw {count}": _Raw((address, ports["raw"]), count) for count in (1, 4, 8)}
    data = b""
    sequence = 0
    _say("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        if len(data) != order["bytes"]:
            data = os.urandom(order["bytes"])
        if order["way"] == "ours":
            sequence += 1
            _say(await _carry(site, peer, site.make(sequence, sequence.to_bytes(8) + data[8:])))
            site.path("east", sequence).unlink()
        else:
            seconds = await asyncio.to_thread(raw[order["way"]].send, memoryview(data))
            _say({"way": order["way"], "seconds": seconds})


async def _carry(site: Site, peer: PeerAddress, manifest: Manifest) -> dict[str, Any]:
    peer_sender = site.links.peer_senders.get(peer.region)
    before = (peer_sender.meter.sent_bytes, peer_sender.meter.failures) if peer_sender else (0, 0)
    begun = time.monotonic()
    await site.carry(peer, manifest, seconds=600)
    seconds = time.monotonic() - begun
    meter = site.links.peer_senders[peer.region].meter
    rtt_seconds = meter.rtt_ms / 1e3
    return {
        "way": "ours",
        "seconds": seconds,
        "sent_bytes": meter.sent_bytes - before[0],
        "failures": meter.failures - before[1],
        "streams": meter.streams,
        "rtt_ms": meter.rtt_ms,
        "chunk_bytes": largest_chunk_bytes(max(1, meter.streams), meter.mbps / 8 * 1e6 * rtt_seconds),
        "slow_path": meter.slow_path,
    }
