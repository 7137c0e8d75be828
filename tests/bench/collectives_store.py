"""A store that is as slow as a profile says, in a process of its own: an S3 subset, and relays in front of Redis.

Each worker has a port of its own, which stands for its network: what goes through it takes the profile's latency, times
a log-normal jitter, and then its turn on a link of the profile's rate, one each way. Bytes really move, over loopback,
and are held back until they are due; TCP itself is not slowed down, so there is no slow start and no loss. A relay adds
half of the latency each way, and passes a connection's bytes on in order.

Run as a program with a profile in JSON it prints its ports. The first port is the control's:
``GET /-/counts`` answers the requests by kind and the bytes of values so far, and begins again; ``GET /-/drop`` forgets
all values.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import selectors
import socket
import sys
import time
import urllib.parse
from collections import Counter
from dataclasses import asdict, dataclass

_LISTED = 1000


@dataclass(frozen=True)
class Shape:
    """What a request takes; seconds and bytes a second. Zero: as fast as the machine."""

    workers: int
    put_seconds: float = 0.0
    get_seconds: float = 0.0
    """Also of looks and deletes."""
    list_seconds: float = 0.0
    bytes_per_second: float = 0.0
    """Of each worker, each way."""
    jitter: float = 0.0
    """Standard deviation of the latency's logarithm."""
    relay_to: int = 0
    """The port of a Redis server; 0: serve S3."""

    def json(self) -> str:
        return json.dumps(asdict(self))


class Link:
    """One direction of one worker's network."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._free = bytes_per_second, 0.0

    def due(self, size: int) -> float:
        """When so many bytes, which are ready now, are through."""
        now = time.monotonic()
        self._free = max(now, self._free) + (size / self._rate if self._rate else 0.0)
        return self._free


async def until(when: float) -> None:
    left = when - time.monotonic()
    if left > 0:
        await asyncio.sleep(left)


class Requests:
    """One connection: what comes in over it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._left, self.loop = sock, bytearray(), asyncio.get_running_loop()

    async def head(self) -> tuple[str, str, dict[str, str]] | None:
        while (end := self._left.find(b"\r\n\r\n")) < 0:
            data = await self.loop.sock_recv(self.sock, 1 << 16)
            if not data:
                return None
            self._left += data
        first, *lines = bytes(self._left[:end]).decode().split("\r\n")
        del self._left[: end + 4]
        method, target, _ = first.split(" ")
        parted = (line.partition(":") for line in lines)
        return method, target, {name.lower(): value.strip() for name, _, value in parted}

    async def body(self, headers: dict[str, str]) -> bytearray:
        size = int(headers.get("content-length", "0"))
        if "100-continue" in headers.get("expect", ""):
            await self.loop.sock_sendall(self.sock, b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray(size)
        have = min(size, len(self._left))
        body[:have] = self._left[:have]
        del self._left[:have]
        with memoryview(body) as view:
            while have < size:
                got = await self.loop.sock_recv_into(self.sock, view[have:])
                if not got:
                    raise ConnectionError("broken off")
                have += got
        return body

    async def answer(
        self, status: str, body: bytes | memoryview = b"", *, says: int | None = None, **more: str
    ) -> None:
        """``says``: the length that the head tells, of an answer without a body."""
        length = len(body) if says is None else says
        lines = [
            f"HTTP/1.1 {status}",
            f"Content-Length: {length}",
            *(f"{k.replace('_', '-')}: {v}" for k, v in more.items()),
        ]
        await self.loop.sock_sendall(self.sock, ("\r\n".join(lines) + "\r\n\r\n").encode())
        if len(body):
            await self.loop.sock_sendall(self.sock, body)


class Store:
    """Values under keys, and a count of what was asked."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._values: dict[str, tuple[memoryview, str]] = {}
        self._numbers, self._rng = itertools.count(1), random.Random(7)
        self.counts: Counter[str] = Counter()

    def jittered(self, seconds: float) -> float:
        return seconds * self._rng.lognormvariate(0.0, self._shape.jitter) if self._shape.jitter else seconds

    async def control(self, requests: Requests) -> None:
        while (head := await requests.head()) is not None:
            if head[1] == "/-/drop":
                self._values.clear()
            body = json.dumps(self.counts).encode()
            self.counts.clear()
            await requests.answer("200 OK", body)

    async def serve(self, requests: Requests, up: Link, down: Link) -> None:
        while (head := await requests.head()) is not None:
            begun, (method, target, headers) = time.monotonic(), head
            path, _, query = target.partition("?")
            key, asked = urllib.parse.unquote(path), urllib.parse.parse_qs(query, keep_blank_values=True)
            if method == "PUT":
                await self._put(requests, key, headers, begun, up)
            elif method == "GET" and "list-type" in asked:
                await self._list(requests, key, asked, begun)
            elif method == "GET":
                await self._get(requests, key, headers, begun, down)
            elif method == "HEAD":
                self.counts["looks"] += 1
                there = self._values.get(key)
                await until(begun + self.jittered(self._shape.get_seconds))
                status = "404 Not Found" if there is None else "200 OK"
                await requests.answer(status, says=0 if there is None else len(there[0]))
            elif method == "DELETE" or (method == "POST" and "delete" in asked):
                body = await requests.body(headers)
                self.counts["deletes"] += 1
                await until(begun + self.jittered(self._shape.get_seconds))
                keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
                for name in [f"{key.rstrip('/')}/{one}" for one in keys] if method == "POST" else [key]:
                    self._values.pop(name, None)
                await requests.answer(
                    "200 OK" if method == "POST" else "204 No Content", b"<DeleteResult/>" if keys else b""
                )
            else:
                await requests.body(headers)
                self.counts["failures"] += 1
                await requests.answer("501 Not Implemented", _error("NotImplemented"))

    async def _put(self, requests: Requests, key: str, headers: dict[str, str], begun: float, up: Link) -> None:
        body = await requests.body(headers)
        await until(begun + self.jittered(self._shape.put_seconds))
        await until(up.due(len(body)))
        mark = f'"{next(self._numbers):x}"'
        self._values[key] = memoryview(body), mark
        self.counts.update(puts=1, bytes_in=len(body))
        await requests.answer("200 OK", ETag=mark)

    async def _get(self, requests: Requests, key: str, headers: dict[str, str], begun: float, down: Link) -> None:
        there = self._values.get(key)
        await until(begun + self.jittered(self._shape.get_seconds))
        if there is None:
            self.counts["misses"] += 1
            await requests.answer("404 Not Found", _error("NoSuchKey"))
            return
        value, mark = there
        if headers.get("if-match", mark) != mark:
            self.counts["misses"] += 1
            await requests.answer("412 Precondition Failed", _error("PreconditionFailed"))
            return
        self.counts["gets"] += 1
        first, _, last = headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        if int(first) >= len(value) and "range" in headers:
            await requests.answer("416 Range Not Satisfiable", _error("InvalidRange"))
            return
        part = value[int(first) : int(last) + 1 if last else None]
        self.counts["bytes_out"] += len(part)
        await until(down.due(len(part)))
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(value)}"
        await requests.answer("206 Partial Content", part, ETag=mark, Content_Range=span)

    async def _list(self, requests: Requests, bucket: str, asked: dict[str, list[str]], begun: float) -> None:
        self.counts["lists"] += 1
        await until(begun + self.jittered(self._shape.list_seconds))
        root, prefix = f"{bucket.rstrip('/')}/", asked.get("prefix", [""])[0]
        after = asked.get("continuation-token", [""])[0]
        names = sorted(key.removeprefix(root) for key in self._values if key.startswith(root + prefix))
        names = [name for name in names if name > after]
        page = names[:_LISTED]
        more = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if len(names) > len(page) else ""
        found = "".join(f"<Contents><Key>{name}</Key></Contents>" for name in page)
        text = f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{found}</ListBucketResult>"
        await requests.answer("200 OK", text.encode(), Content_Type="application/xml")


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


async def relay(near: socket.socket, port: int, delay: float, up: Link, down: Link) -> None:
    loop = asyncio.get_running_loop()
    far = socket.socket()
    far.setblocking(False)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await loop.sock_connect(far, ("127.0.0.1", port))

    async def pump(source: socket.socket, sink: socket.socket, link: Link) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def pass_on() -> None:
            while True:
                due, data = await waiting.get()
                await until(due)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                await loop.sock_sendall(sink, data)

        passing = asyncio.create_task(pass_on())
        data = b"-"
        while data:
            data = await loop.sock_recv(source, 1 << 17)
            await waiting.put((link.due(len(data)) + delay, data))
        await passing

    try:
        await asyncio.gather(pump(near, far, up), pump(far, near, down))
    finally:
        far.close()


async def serve(shape: Shape) -> None:
    loop, store, tasks = asyncio.get_running_loop(), Store(shape), set[asyncio.Task[None]]()

    async def accept(listening: socket.socket, worker: int | None) -> None:
        up, down = Link(shape.bytes_per_second), Link(shape.bytes_per_second)

        async def one(sock: socket.socket) -> None:
            try:
                if worker is None:
                    await store.control(Requests(sock))
                elif shape.relay_to:
                    await relay(sock, shape.relay_to, shape.get_seconds / 2, up, down)
                else:
                    await store.serve(Requests(sock), up, down)
            except (ConnectionError, OSError):
                pass
            finally:
                sock.close()

        while True:
            sock, _ = await loop.sock_accept(listening)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = asyncio.create_task(one(sock))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    ports, accepting = [], []
    for worker in (None, *range(shape.workers)):
        listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        listening.setblocking(False)
        ports.append(listening.getsockname()[1])
        accepting.append(accept(listening, worker))
    print(json.dumps(ports), flush=True)
    await asyncio.gather(*accepting)


def main() -> None:
    # Epoll rounds pauses up to milliseconds, select does not.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    asyncio.set_event_loop(loop)
    loop.run_until_complete(serve(Shape(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
