"""A real `control-plane serve`, scripted agents in a process of their own, and the command run as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_here

ROOT = Path(__file__).parents[3]
JOB = """\
apiVersion: geofed/v1
kind: TrainingJob
metadata: {name: digits}
task: {module: task.py, config: {play: finish}}
data: {dataset: digits}
train: {batch: 10, end: {steps: 4}}
advanced: {wan: {interval: 2}}
"""
TASK = """\
def model(config): ...
def dataset(uri, split, config): ...
def loss(model, batch): ...
"""
HOLD = ("--set", "task.config.play=hold")
KEEP = tuple(
    word
    for setting in (
        "task.config.play=keep", "train.end.steps=8", "train.evaluateEvery=1", "train.keep=all",
        "train.best={metric: accuracy, mode: max}",
    )
    for word in ("--set", setting)
)  # fmt: skip
"""Two rounds are evaluated and kept; then nothing happens."""


@dataclass(frozen=True)
class Ran:
    """What a run of the command left."""

    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Of the one envelope on stdout."""
        envelope = json.loads(self.out)
        assert envelope["status"] == "ok", envelope
        return envelope["data"]

    @property
    def error(self) -> dict[str, Any]:
        envelope = json.loads(self.out)
        assert (envelope["schema_version"], envelope["status"]) == (1, "error")
        told: dict[str, Any] = envelope["error"]
        return told


Run = Callable[..., Ran]


@pytest.fixture
def run() -> Run:
    """The command, in this process: fast, and all that it leaves open is seen."""

    def call(*arguments: str) -> Ran:
        done = run_here(*arguments)
        return Ran(done.returncode, done.stdout, done.stderr)

    return call


@dataclass
class Federation:
    """A control plane that can be killed and started again where it was, with two regions."""

    folder: Path
    ports: dict[str, Any] = field(default_factory=dict)
    serve: subprocess.Popen[bytes] | None = None

    @property
    def context(self) -> Path:
        return self.folder / "state" / "context.json"

    def start(self) -> None:
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        listen = [f"127.0.0.1:{self.ports.get(name, 0)}" for name in ("control", "agent", "metrics")]
        options = ["--state-dir", str(self.folder / "state"), "--ready-file", str(ready)]
        for option, address in zip(("--listen", "--agent-listen", "--metrics-listen"), listen, strict=True):
            options += [option, address]
        self.serve = self.spawn("-m", "control_plane.cli.main", "serve", *options)
        self.await_file(ready)
        self.ports = json.loads(ready.read_text())

    def kill(self) -> None:
        assert self.serve is not None
        self.serve.send_signal(signal.SIGKILL)
        self.serve.wait()

    def spawn(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            told = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "cwd": self.folder, **options}
            environment = {**os.environ, "GEOFED_CONTEXT": str(self.context), "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
            return subprocess.Popen([sys.executable, *arguments], env=environment, **told)

    def command(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command in the foreground of a process of its own."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.spawn("-m", "control_plane.cli.main", *arguments, **pipes)

    def await_file(self, path: Path) -> None:
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.02)


@contextlib.contextmanager
def running_federation(folder: Path) -> Iterator[Federation]:
    stage = Federation(folder)
    stage.start()
    script = str(Path(__file__).with_name("scripted_agents.py"))
    agents = stage.spawn(script, str(stage.context), str(stage.folder / "agents-ready"))
    try:
        stage.await_file(stage.folder / "agents-ready")
        yield stage
    finally:
        for process in (agents, stage.serve):
            assert process is not None
            process.terminate()
            process.wait(10)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One for all tests of a module, which do not kill it."""
    with running_federation(tmp_path_factory.mktemp("federation")) as stage:
        yield stage


@pytest.fixture
def live(federation: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Federation:
    """The federation, as this test's context; the working folder is empty."""
    monkeypatch.setenv("GEOFED_CONTEXT", str(federation.context))
    monkeypatch.chdir(tmp_path)
    return federation


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.yaml").write_text(JOB)
    (tmp_path / "job" / "task.py").write_text(TASK)
    return str(tmp_path / "job" / "job.yaml")
