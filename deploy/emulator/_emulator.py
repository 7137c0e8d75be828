"""Python interface of the emulator: start it, run processes in it, change its links, and end it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from deploy.emulator import _namespaces as ns
from deploy.emulator import _state
from deploy.emulator._calibration import Calibration, calibrate
from deploy.emulator._link import Pair, WanProfile
from geofed_pb.errors import CATALOGUE, GeofedError

_ANSWER_S = 30.0
"""Timeout of an answer of the running emulator, in seconds."""


class Emulator:
    """One emulated WAN. As a context manager it lives as long as the block, and no longer than this process.

    >>> with Emulator(load_profile("seed-2")) as emu:  # doctest: +SKIP
    ...     emu.run("shanghai", ["curl", f"http://{emu.address('chongqing')}:8000/"])
    """

    def __init__(self, profile: WanProfile, *, state_dir: Path | str | None = None, backend: str | None = None) -> None:
        """``state_dir`` None: a temporary one; ``backend`` None: netem if the kernel has it."""
        self.profile: WanProfile | None = profile
        self._wanted = backend
        self._temporary = state_dir is None
        self._state_dir = Path(tempfile.gettempdir() if state_dir is None else state_dir).absolute()
        self._process: subprocess.Popen[str] | None = None
        self._about: dict[str, Any] = {}

    @staticmethod
    def supported() -> str | None:
        """Return the reason why no emulator can run here; None: it can."""
        return ns.unsupported()

    @classmethod
    def at(cls, state_dir: Path | str) -> Emulator:
        """Return the emulator of a state directory, running or not; only ``down`` works if it is not."""
        emulator = cls.__new__(cls)
        emulator.profile = None
        emulator._wanted = None
        emulator._temporary = False
        emulator._state_dir = Path(state_dir).absolute()
        emulator._process = None
        emulator._about = {}
        return emulator

    @classmethod
    def attach(cls, state_dir: Path | str) -> Emulator:
        """Return the running emulator of a state directory. Raises GeofedError EMULATOR_OFF."""
        emulator = cls.at(state_dir)
        emulator._about = emulator._ask("status")
        return emulator

    def start(self, *, daemon: bool = False) -> Self:
        """Start the emulator. With ``daemon`` it runs until ``down``, also after this process has ended.

        Raises GeofedError EMULATOR_UNSUPPORTED, or ILLEGAL_STATE if one is running in the same directory.
        """
        reason = self.supported()
        if reason is not None:
            raise GeofedError("EMULATOR_UNSUPPORTED", reason)
        assert self.profile is not None
        if self._temporary:
            self._state_dir = Path(tempfile.mkdtemp(prefix="geofed-emulator-"))
        self._state_dir.mkdir(parents=True, exist_ok=True)
        settings = {
            "profile": self.profile.as_dict(),
            "backend": self._wanted,
            "state_dir": str(self._state_dir),
            "id": secrets.token_hex(8),
            "owner": None if daemon else os.getpid(),
        }
        with open(self._state_dir / "emulator.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "deploy.emulator._core"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=_environment(),
            )
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            process.stdin.write(json.dumps(settings))
            process.stdin.close()
            answer = process.stdout.readline()
        if daemon or not answer.startswith('{"ok"'):
            process.wait()
        else:
            self._process = process
        if not answer:
            log_text = (self._state_dir / "emulator.log").read_text().strip()
            self._forget()
            raise GeofedError("INTERNAL", f"the emulator ended while starting: {log_text[-2000:]}")
        try:
            self._about = _unwrap(json.loads(answer))
        except GeofedError:
            self._forget()
            raise
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def backend(self) -> str:
        """Back-end that delays packets: ``netem`` or ``hold``."""
        return str(self._about["backend"])

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites: ``control`` and the regions."""
        return tuple(row["name"] for row in self._about["sites"])

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions."""
        return tuple(row["name"] for row in self._about["sites"] if row["region"])

    def address(self, site: str) -> str:
        """IPv4 address of a site, the same seen from every other site."""
        return str(self._site(site)["address"])

    def command(self, site: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` inside a site; it becomes ``argv`` by exec, so its pid is kept."""
        pid = self._about["pid"]
        user = [f"--user=/proc/{pid}/ns/user", "--preserve-credentials"] if self._about["rootless"] else []
        return ["nsenter", *user, f"--net=/proc/{pid}/fd/{self._site(site)['netns']}", "--", *argv]

    def environment(self, base: dict[str, str] | None = None) -> dict[str, str]:
        """Environment for a process inside a site: ``base`` (or this process's) and the emulator's mark."""
        return {**(os.environ if base is None else base), ns.MARK: str(self._about["id"])}

    def popen(self, site: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process inside a site. ``options`` are those of subprocess.Popen.

        Processes that still run when the emulator ends are terminated.
        """
        options["env"] = self.environment(options.get("env"))
        return subprocess.Popen(self.command(site, argv), **options)

    def run(self, site: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command inside a site to its end. ``options`` are those of subprocess.run."""
        options["env"] = self.environment(options.get("env"))
        return subprocess.run(self.command(site, argv), **options)  # type: ignore[no-any-return,unused-ignore]

    def set_link(self, src: str, dst: str, *, both: bool = False, **fields: float | None) -> None:
        """Change ``rate_mbps`` (None: unshaped), ``delay_ms``, ``jitter_ms`` or ``loss`` of a live link.

        Other fields stay. Packets that are already delayed keep their time.
        Raises GeofedError CONFIG_INVALID or REGION_NOT_FOUND.
        """
        pairs = [(src, dst), (dst, src)] if both else [(src, dst)]
        self._ask("set", pairs=pairs, fields=fields)

    def partition(self, site: str, *others: str) -> None:
        """Cut a site off from ``others``, or from every other site; packets are dropped without an answer."""
        peers = others or tuple(name for name in self.sites if name != site)
        self._ask("cut", pairs=[pair for peer in peers for pair in ((site, peer), (peer, site))])

    def cut(self, src: str, dst: str) -> None:
        """Cut one direction only."""
        self._ask("cut", pairs=[(src, dst)])

    def heal(self) -> None:
        """Undo every cut."""
        self._ask("heal")

    def status(self) -> dict[str, Any]:
        """Return the status: back-end, sites with addresses, links with shape and meters."""
        return self._ask("status")

    def bytes(self) -> dict[Pair, int]:
        """IP bytes, headers included, that left each directed link since the start."""
        return {(row["src"], row["dst"]): row["bytes"] for row in self.status()["links"]}

    def calibrate(self, *, seconds: float = 3.0, links: Sequence[Pair] | None = None) -> Calibration:
        """Measure round trips and throughput of the links (all between regions by default).

        The result states whether each is within 5 % of its shape; ``Calibration.require`` raises if one is not.
        """
        return calibrate(self, seconds=seconds, links=links)

    def down(self) -> None:
        """End the processes in the sites, and remove the network. Does nothing if the emulator is not running."""
        try:
            self._ask("down")
        except GeofedError as error:
            if error.code != "EMULATOR_OFF":
                self._kill_core()
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._sweep()

    def _sweep(self) -> None:
        deadline = time.monotonic() + 10
        while self._state_dir.exists():
            try:
                os.close(_sweep_locked(self._state_dir))
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._kill_core()
                time.sleep(0.01)
        self._forget()

    def _kill_core(self) -> None:
        try:
            state = json.loads((self._state_dir / "state.json").read_text())
            os.kill(state["pid"], signal.SIGKILL)
        except (OSError, ValueError):
            pass

    def _forget(self) -> None:
        if self._temporary:
            shutil.rmtree(self._state_dir, ignore_errors=True)

    def _site(self, name: str) -> dict[str, Any]:
        for row in self._about["sites"]:
            if row["name"] == name:
                return dict(row)
        raise GeofedError(
            "REGION_NOT_FOUND",
            f"no site {name!r}; there are: {', '.join(self.sites)}",
            hint="see `geofed emulator status`",
        )

    def _ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        try:
            directory = os.open(self._state_dir, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise GeofedError("EMULATOR_OFF", f"no emulator is running in {self._state_dir}") from error
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_ANSWER_S)
                connection.connect(_state.socket_path(directory))
                with connection.makefile("rw") as stream:
                    _send(stream, {"verb": verb, **arguments})
                    answer = stream.readline()
        except (FileNotFoundError, ConnectionError) as error:
            raise GeofedError("EMULATOR_OFF", f"no emulator is running in {self._state_dir}") from error
        except TimeoutError as error:
            raise GeofedError("INTERNAL", f"the emulator in {self._state_dir} does not answer") from error
        finally:
            os.close(directory)
        if not answer:
            raise GeofedError("EMULATOR_OFF", f"the emulator in {self._state_dir} has ended")
        return _unwrap(json.loads(answer))


def _send(stream: IO[str], request: dict[str, Any]) -> None:
    stream.write(json.dumps(request) + "\n")
    stream.flush()


def _unwrap(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        error = answer["error"]
        code = error["code"] if error["code"] in CATALOGUE else "INTERNAL"
        raise GeofedError(code, error["message"], hint=error["hint"])
    return dict(answer["ok"])


def _sweep_locked(state_dir: Path) -> int:
    handle = _state.lock(state_dir)
    _state.sweep(state_dir)
    return handle


def _environment() -> dict[str, str]:
    """The caller's environment, able to import this package from wherever the caller found it."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return {**os.environ, "PYTHONPATH": ":".join(paths), "PATH": path}
