"""The ``hold`` back-end: packets wait in the kernel's queues until user space says that they are due."""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import select
import threading
import time
from collections import deque
from dataclasses import dataclass

from deploy.emulator._link import Link
from deploy.emulator._namespaces import wake_exactly
from deploy.emulator._nfqueue import PacketQueue

_SEGMENTED_BELOW_MBPS = 50
_BURST = 64


def whole_segments(link: Link) -> bool:
    """True where TCP segments of up to 64 KiB may pass as one.

    Loss and jitter are drawn per packet, and on a slow link one large segment would block it for long.
    """
    return not link.drawn and (link.rate_mbps is None or link.rate_mbps > _SEGMENTED_BELOW_MBPS)


@dataclass
class _Held:
    """One directed link as the relay sees it."""

    queue: PacketQueue
    link: Link


class Relay:
    """A thread that receives the ids of packets, draws their fate and releases each when it is due."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._by_fd: dict[int, _Held] = {}
        self._due: list[tuple[float, int, int]] = []  # (time, packet, queue number)
        self._inbox: deque[tuple[int, Link]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self.lost: dict[int, int] = {}
        """Packets dropped by chance, by queue number."""
        self.late_ms = 0.0
        """The longest that a packet left after it was due, since the last look."""

    def start(self) -> None:
        """Begin; queues are bound in the network namespace of the calling thread."""
        self._thread.start()

    def shape(self, number: int, link: Link) -> None:
        """Give the queue with this number a shape; from any thread. Packets on their way keep their time."""
        if number not in self._held:
            held = _Held(PacketQueue(number, whole_segments=whole_segments(link)), link)
            self.lost.setdefault(number, 0)
            self._held[number] = held
            self._by_fd[held.queue.fileno()] = held
            self._epoll.register(held.queue.fileno(), select.EPOLLIN)
        else:
            self._inbox.append((number, link))
            os.eventfd_write(self._wake, 1)

    def cpu_s(self) -> float:
        """Processor time that the relay has used."""
        ident = self._thread.ident
        return 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            # a relay that ends for whatever reason must not leave an emulator that looks alive
            os._exit(1)

    def _loop(self) -> None:
        wake_exactly()
        _prefer_this_thread()
        numbers: dict[int, int] = {}
        while True:
            timeout = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            # epoll alone counts in milliseconds, select in microseconds
            select.select([self._epoll], [], [], timeout)
            for fd, _ in self._epoll.poll(0):
                if fd == self._wake:
                    self._take_changes()
                    continue
                number = numbers.get(fd)
                if number is None:
                    numbers = {held.queue.fileno(): n for n, held in self._held.items()}
                    number = numbers[fd]
                self._receive(number, self._by_fd[fd])
            self._release(time.monotonic())

    def _take_changes(self) -> None:
        os.eventfd_read(self._wake)
        while self._inbox:
            number, link = self._inbox.popleft()
            self._held[number].link = link
            self._held[number].queue.set_whole_segments(whole_segments(link))

    def _receive(self, number: int, held: _Held) -> None:
        queue, link = held.queue, held.link
        delay, jitter, loss = link.delay_ms / 1000, link.jitter_ms / 1000, link.loss
        now = time.monotonic()
        for _ in range(_BURST):
            packet = queue.receive()
            if packet is None:
                return
            if loss and random.random() < loss:
                queue.drop(packet)
                self.lost[number] += 1
                continue
            due = now + delay + (random.uniform(-jitter, jitter) if jitter else 0.0)
            heapq.heappush(self._due, (due, packet, number))

    def _release(self, now: float) -> None:
        in_order: dict[int, int] = {}
        due = self._due
        if due and due[0][0] <= now:
            self.late_ms = max(self.late_ms, (now - due[0][0]) * 1000)
        while due and due[0][0] <= now:
            _, packet, number = heapq.heappop(due)
            held = self._held[number]
            if held.link.jitter_ms:
                held.queue.accept(packet)
            else:
                in_order[number] = packet
        for number, packet in in_order.items():
            self._held[number].queue.accept_up_to(packet)


def _prefer_this_thread() -> None:
    """Run ahead of ordinary processes: a busy machine must not show as a slower network."""
    # without privilege the accuracy is what the machine's load leaves
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
