"""The ``hold`` back-end: packets wait in the kernel's queues until a relay in user space releases them."""

from __future__ import annotations

import contextlib
import gc
import heapq
import json
import os
import random
import select
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from deploy.emulator._link import EmulatedLink
from deploy.emulator._namespaces import use_exact_timers
from deploy.emulator._nfqueue import PacketQueue

_SEGMENTED_BELOW_MBPS = 10
"""Rate below which large TCP segments are cut into packets."""
_BURST = 64
"""Packets of one queue that are received at a time."""
_GATHER_S = 0.0001
"""Pause after an arrival, to receive the next packets together."""


def whole_segments(link: EmulatedLink) -> bool:
    """Whether TCP segments of up to 64 KiB may be queued as one packet.

    Loss and jitter are drawn per packet, and a large segment would block a slow link for long.
    """
    return not link.drawn and (link.rate_mbps is None or link.rate_mbps > _SEGMENTED_BELOW_MBPS)


@dataclass
class _Held:
    """A directed link in the relay, with its queue and number of losses."""

    queue: PacketQueue
    link: EmulatedLink
    lost: int = 0


class PacketRelay:
    """Receives the ids of packets, draws loss and delay of each, and releases it when it is due.

    It runs in a process of its own, so that work of the core (starting ``tc``, answering requests) delays no packet.
    """

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._stream = orders.makefile("rw")
        self._held: dict[int, _Held] = {}
        self._by_fd: dict[int, int] = {}
        self._due: list[tuple[float, int, int]] = []  # (time, packet, queue number)
        self._late_s = 0.0
        self._epoll = select.epoll()
        self._epoll.register(orders, select.EPOLLIN)

    def run(self) -> None:
        """Run until the core closes the socket."""
        use_exact_timers()
        _prefer_this_process()
        gc.disable()
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            # select has a resolution of microseconds, epoll only of milliseconds
            select.select([self._epoll], [], [], wait_s)
            ready = self._epoll.poll(0)
            for fd, _ in ready:
                if fd != self._orders.fileno():
                    self._receive(self._by_fd[fd])
                elif not self._run_command():
                    return
            self._release(time.monotonic())
            if ready:
                self._gather()

    def _run_command(self) -> bool:
        """Carry out one line of commands; False at the end of the stream."""
        line = self._stream.readline()
        if not line:
            return False
        answer: dict[str, Any] = {}
        orders = json.loads(line)
        try:
            for number, fields in orders["shape"]:
                self._shape(number, EmulatedLink(**fields))
        except OSError as error:
            answer["error"] = str(error)
        answer |= {
            "pid": os.getpid(),
            "cpu_s": round(time.process_time(), 3),
            "late_ms": round(self._late_s * 1000, 3),
            "lost": {number: held.lost for number, held in self._held.items()},
        }
        self._late_s = 0.0
        self._stream.write(json.dumps(answer) + "\n")
        self._stream.flush()
        return True

    def _shape(self, number: int, link: EmulatedLink) -> None:
        """Set the shape of a link. Packets that are already delayed keep their time."""
        if number in self._held:
            self._held[number].link = link
            self._held[number].queue.set_whole_segments(whole_segments(link))
            return
        queue = PacketQueue(number, whole_segments=whole_segments(link))
        self._held[number] = _Held(queue, link)
        self._by_fd[queue.fileno()] = number
        self._epoll.register(queue.fileno(), select.EPOLLIN)

    def _gather(self) -> None:
        """Pause briefly after an arrival: packets come in bursts, and receiving several at a time is cheaper."""
        pause_s = self._due[0][0] - time.monotonic() if self._due else _GATHER_S
        if pause_s > 0:
            time.sleep(min(pause_s, _GATHER_S))

    def _receive(self, number: int) -> None:
        held = self._held[number]
        queue, link = held.queue, held.link
        delay, jitter, loss = link.delay_ms / 1000, link.jitter_ms / 1000, link.loss
        now = time.monotonic()
        for _ in range(_BURST):
            packet = queue.receive()
            if packet is None:
                return
            if loss and random.random() < loss:
                queue.drop(packet)
                held.lost += 1
                continue
            due = now + delay + (random.uniform(-jitter, jitter) if jitter else 0.0)
            heapq.heappush(self._due, (due, packet, number))

    def _release(self, now: float) -> None:
        in_order: dict[int, int] = {}
        due = self._due
        if due and due[0][0] <= now:
            self._late_s = max(self._late_s, now - due[0][0])
        while due and due[0][0] <= now:
            _, packet, number = heapq.heappop(due)
            held = self._held[number]
            if held.link.jitter_ms:
                held.queue.accept(packet)
            else:
                in_order[number] = packet
        for number, packet in in_order.items():
            self._held[number].queue.accept_up_to(packet)


def _prefer_this_process() -> None:
    """Run before ordinary processes, so that a busy machine does not appear as a slower network."""
    # without the privilege, accuracy depends on the machine's load
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


class RelayProcess:
    """The core's side of a relay: starts it, sends it commands, and notices its end."""

    def __init__(self) -> None:
        """Fork the relay; its queues belong to the network namespace of the caller."""
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _relay_until_closed(theirs)
        theirs.close()
        self.ended = os.pidfd_open(self.pid)
        """Becomes readable when the relay has ended; its links are cut then."""
        self._socket = ours
        self._stream = ours.makefile("rw")

    def shape(self, links: Mapping[int, EmulatedLink]) -> dict[str, Any]:
        """Set the shapes of queues; returns the relay's report. Raises OSError."""
        orders = {"shape": [[number, asdict(link)] for number, link in links.items()]}
        self._stream.write(json.dumps(orders) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise OSError("the relay has ended")
        report: dict[str, Any] = json.loads(line)
        if "error" in report:
            raise OSError(report["error"])
        return report

    def close(self) -> None:
        """End the relay and wait for it."""
        self._stream.close()
        self._socket.close()
        os.waitpid(self.pid, 0)


def _relay_until_closed(orders: socket.socket) -> NoReturn:
    status = 1
    try:
        PacketRelay(orders).run()
        status = 0
    except BaseException:  # noqa: BLE001 - a fork must never return into the core's code
        traceback.print_exc()
    finally:
        os._exit(status)
