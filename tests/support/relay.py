"""A wire that a test can cut: bytes pass unchanged until it breaks the connection, swallows them or holds them
up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_PIECE = 1 << 16


class Relay:
    """Listens on a port of its own and passes everything on to another; cuts once after so many bytes."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.to = ("127.0.0.1", 0)
        self.cut_after: int | None = None
        """Bytes towards the server until the one cut; None: never."""
        self.stays_cut = False
        """Whether nobody gets through after the cut."""
        self.opens = threading.Event()
        """Cleared: who dials waits at the door."""
        self.opens.set()
        self.shuts = False
        """Whether the cut leaves the door shut, until `opens` is set."""
        self.flows = threading.Event()
        """Cleared: what is on its way, or sets out, comes later."""
        self.flows.set()
        self.late_seconds = 0.0
        """Of whatever goes towards the server."""
        self.cuts = 0
        self.passed = 0
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._silent: list[socket.socket] = []

    def silence(self) -> None:
        """What comes over the connections that there are gets lost from now on, without their breaking."""
        self._silent = [*self._sockets]

    def __enter__(self) -> Relay:
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.opens.set()
        self.flows.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break()
        for thread in self._threads:
            thread.join(10)

    def _run(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.opens.wait()
            if self.cuts and self.stays_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(self.to)
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            self._run(self._pass, near, far, True)
            self._run(self._pass, far, near, False)

    def _pass(self, source: socket.socket, to: socket.socket, forward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                if source in self._silent:
                    continue
                self.flows.wait()
                if forward:
                    time.sleep(self.late_seconds)
                to.sendall(data)
                if forward:
                    self.passed += len(data)
                    if self.cut_after is not None and self.passed >= self.cut_after:
                        self.cut_after, self.cuts = None, self.cuts + 1
                        if self.shuts:
                            self.opens.clear()
                        self._break()
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _break(self) -> None:
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._sockets.clear()
