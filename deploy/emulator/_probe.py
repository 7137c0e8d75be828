"""Senders and receivers that measure a link from inside its two sites.

Run as ``python -m deploy.emulator._probe KIND ...``; each prints one line of JSON. They import only the standard
library, so that they start fast.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import sys
import time

_CHUNK_BYTES = 1 << 18
"""Bytes that a throughput probe sends or receives in a call.

A choice: few enough system calls to fill a link, and small next to its buffers.
"""
_DATAGRAM_BYTES = 1472
"""Payload of a datagram that fills an Ethernet packet."""
_SO_TIMESTAMPNS = 35
"""Linux's number of the option by which a datagram comes with the time of its arrival; Python has no name for it."""
_TIMESPEC = struct.Struct("@ll")
"""That time: seconds and nanoseconds."""
PAYLOAD_PER_PACKET = 1448 / 1500
"""TCP payload per IP byte of full packets with timestamps: the largest fraction of a link's rate that TCP can reach."""


def ping(address: str, count: int, interval_s: float) -> dict[str, object]:
    """Send echo requests, which the other side's kernel answers; returns round-trip times in milliseconds."""
    rtts: list[float] = []
    sent: dict[int, float] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        ident = os.getpid() & 0xFFFF
        begin = last = time.perf_counter()
        number = 0
        while len(rtts) < count:
            now = time.perf_counter()
            due = begin + number * interval_s
            if number < count and now >= due:
                sent[number] = last = time.perf_counter()
                raw.sendto(_echo_request(ident, number), (address, 0))
                number += 1
                continue
            limit = due if number < count else last + 1 + 2 * max(rtts, default=0) / 1000
            raw.settimeout(max(1e-6, limit - now))
            try:
                packet = raw.recv(2048)
            except TimeoutError:
                # On busy cores answers wait here though their time is over.
                if number == count and now >= limit:
                    break
                continue
            kind, _, _, got, sequence = struct.unpack_from("!BBHHH", packet, (packet[0] & 15) * 4)
            if kind == 0 and got == ident and sequence in sent:
                rtts.append((time.perf_counter() - sent.pop(sequence)) * 1000)
    return {"sent": count, "rtts_ms": [round(rtt, 3) for rtt in rtts]}


def _echo_request(ident: int, sequence: int) -> bytes:
    body = struct.pack("!BBHHH", 8, 0, 0, ident, sequence) + b"geofed--" * 4
    total = sum(struct.unpack(f"!{len(body) // 2}H", body))
    total = (total >> 16) + (total & 0xFFFF)
    total += total >> 16
    return body[:2] + struct.pack("!H", ~total & 0xFFFF) + body[4:]


def tcp_receive(seconds: float, warm_s: float) -> dict[str, object]:
    """Accept one connection and count the bytes received between ``warm_s`` and ``seconds``."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        server.settimeout(20)
        connection, _ = server.accept()
        buffer = bytearray(_CHUNK_BYTES)
        marks: list[tuple[float, int]] = []
        with connection:
            connection.settimeout(20)
            total, begin = 0, time.perf_counter()
            while got := connection.recv_into(buffer):
                now = time.perf_counter() - begin
                total += got
                if now >= warm_s:
                    marks.append((now, total))
                if now >= seconds:
                    break
    if len(marks) < 2:
        return {"mbps": 0.0}
    (first_s, first), (last_s, last) = marks[0], marks[-1]
    return {"mbps": round((last - first) * 8e-6 / (last_s - first_s), 3)}


def tcp_send(address: str, port: int) -> dict[str, object]:
    """Send until the receiver closes the connection."""
    payload = memoryview(bytes(_CHUNK_BYTES))
    with socket.create_connection((address, port), timeout=20) as connection:
        try:
            while True:
                connection.sendall(payload)
        except (ConnectionError, TimeoutError):
            return {}


def udp_receive(seconds: float, warm_s: float) -> dict[str, object]:
    """Count datagrams until none arrives for a while; returns the rate after ``warm_s``, and the fraction lost.

    Each counts at the time at which the kernel has received it: on busy cores this process reads it later.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        receiver.bind(("0.0.0.0", 0))
        print(json.dumps({"port": receiver.getsockname()[1]}), flush=True)
        receiver.settimeout(20)
        numbers: list[int] = []
        window: list[float] = []
        begin = None
        while True:
            try:
                datagram, (stamp,), _, _ = receiver.recvmsg(2048, socket.CMSG_SPACE(_TIMESPEC.size))
            except TimeoutError:
                break
            whole, nanoseconds = _TIMESPEC.unpack(stamp[2])
            now = whole + nanoseconds * 1e-9
            begin = now if begin is None else begin
            receiver.settimeout(2)
            number = struct.unpack_from("!I", datagram)[0]
            if number == 0xFFFFFFFF:
                break
            numbers.append(number)
            if warm_s <= now - begin <= seconds:
                window.append(now)
    if len(window) < 2:
        return {"mbps": 0.0, "received": len(numbers), "loss": 1.0}
    rate = (len(window) - 1) * (_DATAGRAM_BYTES + 28) * 8e-6 / (window[-1] - window[0])
    return {
        "mbps": round(rate, 3),
        "received": len(numbers),
        "loss": round(1 - len(numbers) / (max(numbers) + 1), 6),
    }


def udp_send(address: str, port: int, mbps: float, seconds: float) -> dict[str, object]:
    """Send numbered datagrams at a rate of IP bytes, then send an end mark several times."""
    interval_s = (_DATAGRAM_BYTES + 28) * 8e-6 / mbps
    filler = bytes(_DATAGRAM_BYTES - 4)
    number = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((address, port))
        begin = time.perf_counter()
        while (now := time.perf_counter() - begin) < seconds:
            due = int(now / interval_s) + 1
            while number < due:
                sender.send(struct.pack("!I", number) + filler)
                number += 1
            time.sleep(max(0.0, number * interval_s - (time.perf_counter() - begin), 0.001))
        for _ in range(20):
            time.sleep(0.05)
            try:
                sender.send(b"\xff" * 8)
            except ConnectionRefusedError:  # the receiver has closed its socket
                break
    return {"sent": number}


def spread(rtts_ms: list[float]) -> dict[str, float]:
    """Median, extremes and standard deviation of round-trip times."""
    return {
        "median_ms": round(statistics.median(rtts_ms), 3),
        "min_ms": min(rtts_ms),
        "max_ms": max(rtts_ms),
        "stdev_ms": round(statistics.pstdev(rtts_ms), 3),
    }


def main(arguments: list[str]) -> int:
    """Run the probe that the arguments name, and print its result as JSON."""
    kind, *rest = arguments
    match kind:
        case "ping":
            result = ping(rest[0], int(rest[1]), float(rest[2]))
        case "tcp-receive":
            result = tcp_receive(float(rest[0]), float(rest[1]))
        case "tcp-send":
            result = tcp_send(rest[0], int(rest[1]))
        case "udp-receive":
            result = udp_receive(float(rest[0]), float(rest[1]))
        case "udp-send":
            result = udp_send(rest[0], int(rest[1]), float(rest[2]), float(rest[3]))
        case _:
            raise SystemExit(f"no probe {kind!r}")
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
