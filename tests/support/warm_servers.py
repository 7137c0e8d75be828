"""Programs in processes of their own, forked from one parent that has imported what they need: to import it takes
longer than most of what a test has them do."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import selectors
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import setproctitle
from support.failpoints import die_at

__all__ = ["ServerProcess", "WarmServers"]

_POLL_SECONDS = 0.005
_ZYGOTES, _WAITS = "--zygotes", "--waits-for-disk"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Libraries of numbers start no threads, which forked processes would lack."""


class WarmServers:
    """A context manager; what it has forked ends with it."""

    def __init__(self, *modules: str, zygotes: bool = False, waits_for_disk: bool = True) -> None:
        """``modules``: what the parent imports. Those that run have `main`, and `FAILPOINTS` where they have more of
        them than operations on files. None given: parameter servers. ``zygotes``: it loads what zygotes need, too.
        ``waits_for_disk``: what is written durably is on the disk. A killed process loses nothing without it."""
        self._modules = modules or ("sync.ps.__main__",)
        self._options = [_ZYGOTES] * zygotes + [_WAITS] * waits_for_disk
        self._turn = threading.Lock()

    def __enter__(self) -> WarmServers:
        path = os.pathsep.join(path for path in sys.path if path)
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.warm_servers", self._folder.name, *self._options, *self._modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, **_ONE_THREAD},
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
        module = self._modules[0]
        return self.run(module, [module, "--config", str(config)], log, dies_at=dies_at)

    @property
    def pid(self) -> int:
        """Of the parent."""
        return self._process.pid

    def run(
        self, module: str, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None,
        *, dies_at: int = -1, network: Path | None = None,
    ) -> ServerProcess:  # fmt: skip
        """Run the main function of a module. Its output goes to the end of ``log``. ``environment``: None: the
        parent's. ``network``: file of the network namespace that it enters."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        request = {
            "module": module, "argv": list(argv), "log": str(log), "dies_at": dies_at, "cwd": os.getcwd(),
            "network": network and str(network),
            "environment": None if environment is None else dict(environment),
        }  # fmt: skip
        with self._turn:
            stdin.write(json.dumps(request) + "\n")
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

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def returncode(self) -> int | None:
        return self.poll()


class _WithoutDisk(sqlite3.Connection):
    """Does not wait until what it commits is on the disk, also where that is asked for."""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        asks = sql.lower().startswith("pragma synchronous")
        return super().execute("pragma synchronous = off" if asks else sql, *parameters)


def _serve(line: str) -> int:
    """In the forked process."""
    import random

    request = json.loads(line)
    module = importlib.import_module(request["module"])
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    random.seed()
    nothing = os.open(os.devnull, os.O_RDWR)
    told = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor, to in enumerate((nothing, told, told)):
        os.dup2(to, descriptor)
    os.chdir(request["cwd"])
    if request["network"] is not None:
        from deploy.emulator._namespaces import enter

        with open(request["network"]) as namespace:
            enter(namespace.fileno())
    if request["environment"] is not None:
        os.environ.clear()
        os.environ.update(request["environment"])
    sys.argv = request["argv"]
    setproctitle.setproctitle(" ".join(sys.argv))
    if request["dies_at"] >= 0:
        die_at(request["dies_at"], getattr(module, "FAILPOINTS", ()))
    return int(module.main() or 0)


def _run(line: str) -> NoReturn:
    """In the forked process: run it, and end as Python ends, but for taking apart what the parent has imported, which
    takes more than a second where torch is among it."""
    # Of the parent's modules; what the process itself adds is called at its end.
    cast("Any", weakref.finalize)._registry.clear()
    status = 1
    try:
        status = _serve(line)
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
    except BaseException:  # a forked child must never return into its parent's code
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            cast("Any", threading)._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _reap(serials: dict[int, int], folder: Path) -> None:
    with contextlib.suppress(ChildProcessError):
        # How it has ended is told while its process ID is taken: who sees that it is gone knows the status.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            pid = ended.si_pid
            status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            (folder / "next").write_text(str(status))
            (folder / "next").replace(folder / str(serials.pop(pid)))
            os.waitpid(pid, 0)


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


def main() -> NoReturn:
    """The parent: what to start in each line of standard input, in each of output the process's number and the name of
    the file that tells how it has ended. Ends with its standard input."""
    # Finds the memory of the title, which it cannot once the environment has changed.
    setproctitle.getproctitle()
    gc.disable()
    # What it imports is what the forked processes need not.
    folder, *modules = sys.argv[1:]
    if modules[0] == _ZYGOTES:
        from support.warm_zygotes import fork_zygotes

        from region_agent import machine_rates

        modules = modules[1:]
        fork_zygotes()
        # A region's first profile would take 2 s of processor time and 4 GiB for the rate at which memory is to be had.
        machine_rates._FRESH_BYTES, machine_rates._TRIAL_BYTES = 256 << 20, 16 << 20
    if modules[0] == _WAITS:
        modules = modules[1:]
    else:
        # Several milliseconds of the disk's time for each, dozens a round.
        cast("Any", os).fsync = cast("Any", os).fdatasync = lambda _: None
        for owner in (sqlite3, sqlite3.dbapi2):
            cast("Any", owner).connect = functools.partial(sqlite3.connect, factory=_WithoutDisk)
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()
    _run(_await_child(Path(folder)))


if __name__ == "__main__":
    main()
