"""A real PostgreSQL server of one's own, and a relay before it that loses what it is told to lose."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest


def binaries() -> Path | None:
    found = [path.parent for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    on_path = shutil.which("initdb")
    return found[-1] if found else Path(on_path).resolve().parent if on_path else None


class Postgres:
    """A server on a socket in a folder."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.socket = str(folder / f".s.PGSQL.{port}")

    def url(self, name: str) -> str:
        return f"postgresql://geofed@/{name}?host={self.folder}&port={self.port}"

    def database(self) -> str:
        """Create a database; return its URL."""
        import psycopg

        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[call-overload]
        return self.url(name)

    @contextmanager
    def hung(self) -> Iterator[None]:
        """The server accepts connections, and answers nothing."""
        main = psutil.Process(int((self.folder / "data" / "postmaster.pid").read_text().split()[0]))
        processes = [main, *main.children()]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    found = binaries()
    if found is None:
        pytest.skip("PostgreSQL is not installed (Debian: postgresql)")
    as_user: list[str] = []
    # Not in pytest's folders: those are closed to others, and the server refuses to run as root.
    folder = Path(tempfile.mkdtemp(prefix="geofed-pg-"))
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("PostgreSQL refuses to run as root, and setpriv (util-linux) is missing")
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        shutil.chown(folder, "nobody", "nogroup")
    data = folder / "data"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def call(*words: str) -> None:
        done = subprocess.run([*as_user, *words], capture_output=True, text=True, cwd="/", timeout=60)
        assert done.returncode == 0, done.stderr + done.stdout

    call(str(found / "initdb"), "-D", str(data), "-U", "geofed", "-A", "trust", "--no-sync")
    options = f"-p {port} -k {folder} -c listen_addresses='' -c fsync=off"
    log = str(folder / "log")
    call(str(found / "pg_ctl"), "-D", str(data), "-o", options, "-l", log, "-w", "start")
    try:
        yield Postgres(folder, port)
    finally:
        call(str(found / "pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder)


class CommitRelay:
    """Passes connections on to a server; cuts one when a COMMIT passes, before or after the server has it."""

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.cut = ""
        """"before", "after" or "": whether the next COMMIT still reaches the server; its answer is lost in any case."""
        self.refuses = False
        """Whether connections are refused after the cut."""
        self.cuts = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, database_url: str) -> str:
        port = self._listener.getsockname()[1]
        return f"{database_url.partition('?')[0].replace('@/', f'@127.0.0.1:{port}/')}"

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refuses and self.cuts:
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server.socket)
                self._sockets += [client, server]
                threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, towards_server: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if towards_server and self.cut and b"COMMIT" in data:
                    how, self.cut = self.cut, ""
                    self.cuts += 1
                    # The client is cut off first, so that no answer reaches it.
                    source.shutdown(socket.SHUT_RDWR)
                    if how == "after":
                        target.sendall(data)
                    break
                target.sendall(data)
            target.shutdown(socket.SHUT_WR if towards_server else socket.SHUT_RDWR)
