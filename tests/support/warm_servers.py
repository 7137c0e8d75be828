"""Servers in processes of their own, forked from one parent that has imported what they need: to import it takes longer
than most of what a test has them do."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.failpoints import die_at

__all__ = ["ServerProcess", "WarmServers"]

_POLL_SECONDS = 0.005


class WarmServers:
    """A context manager; what it has forked ends with it."""

    def __init__(self, module: str = "sync.ps.__main__") -> None:
        """``module``: has `main`, and `FAILPOINTS` where it has more of them than operations on files."""
        self._module = module

    def __enter__(self) -> WarmServers:
        path = os.pathsep.join(path for path in sys.path if path)
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.warm_servers", self._folder.name, self._module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True,
            start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._folder.cleanup()

    def start(self, config: Path, log: Path, dies_at: int = -1) -> ServerProcess:
        """As ``python -m MODULE --config CONFIG`` whose standard error goes to the end of ``log``.

        ``dies_at``: the operation at which it kills itself (`support.failpoints`); -1: none.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{config}\t{log}\t{dies_at}\n")
        stdin.flush()
        pid, serial = stdout.readline().split()
        return ServerProcess(int(pid), Path(self._folder.name) / serial)


class ServerProcess:
    """One that was forked; has what is used of a `subprocess.Popen`."""

    def __init__(self, pid: int, status: Path) -> None:
        """``status``: the file that is there once it has ended."""
        self.pid, self._status = pid, status

    def poll(self) -> int | None:
        """Its exit status, less than zero where a signal ended it; None while it runs."""
        try:
            return int(self._status.read_text())
        except FileNotFoundError:
            return None

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a parameter server", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(line: str) -> int:
    """In the forked process."""
    import random

    module = importlib.import_module(sys.argv[2])
    config, log, dies_at = line.rstrip("\n").split("\t")
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    random.seed()
    nothing, told = os.open(os.devnull, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor, to in enumerate((nothing, nothing, told)):
        os.dup2(to, descriptor)
    sys.argv = [sys.argv[2], "--config", config]
    if int(dies_at) >= 0:
        die_at(int(dies_at), getattr(module, "FAILPOINTS", ()))
    return int(module.main())


def _reap(serials: dict[int, int], folder: Path) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            (folder / "next").write_text(str(os.waitstatus_to_exitcode(status)))
            (folder / "next").replace(folder / str(serials.pop(pid)))


def _await_child(folder: Path) -> str:
    """Fork whenever one is asked for, and tell of those that have ended. Returns in a child only, with its line."""
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    serials: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        for serial in itertools.count():
            while sys.stdin not in {key.fileobj for key, _ in selector.select()}:
                os.read(ended, 1 << 10)
                _reap(serials, folder)
            # One is written only after the answer to the one before: none waits in the buffer.
            line = sys.stdin.readline()
            if not line:
                os.killpg(0, signal.SIGKILL)
            pid = os.fork()
            if pid == 0:
                return line
            serials[pid] = serial
            print(pid, serial, flush=True)
    raise AssertionError("never ends so")


def main() -> int:
    """The parent: what to start in each line of standard input, in each of output the process's number and the name of
    the file that tells how it has ended. Ends with its standard input."""
    gc.disable()
    # What it imports is what the forked processes need not.
    importlib.import_module(sys.argv[2])
    gc.enable()
    gc.freeze()
    return _serve(_await_child(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
