"""One seeded run of three parameter servers: one dies at a failpoint and comes back, and somebody sends a message.

The servers are processes with real sockets and disks; workers are threads. The job must end with the model of a run
without any of that. Only where a region of the job has sent the message may it end with an error instead, which names
that region.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from support.pki import Authority
from support.server_process import NumpyWorker, Server
from support.warm_servers import WarmServers

from geofed_pb.errors import CATALOGUE
from tests.faults.messages import MEMBER, SENDERS, Sender, send, senders

__all__ = ["BOUND_SECONDS", "Outcome", "ServerRun", "Shared"]

PUSHES = {"east": 1.0, MEMBER: 5.0, "west": 3.0}
ROUNDS = 4
SAMPLES = 10.0
BOUND_SECONDS = 60.0
"""Of a run, which takes 2 s: one that is still under way then hangs."""
LIFE_OPERATIONS = 90
"""File operations in a server's life, about: a process that is to die later does not die."""
KINDS: tuple[dict[str, Any], ...] = (
    {}, {"codec": "int8"}, {"wan_policy": "diloco"}, {"wan_settings": {"background": 1.0, "guard": 0.0}},
    {"wan_settings": {"background": 1.0, "guard": 0.0}, "codec": "int8"},
    {"neighbours": (("east", MEMBER), ("east", "west")), "wan_settings": {"background": 1.0, "guard": 0.0}},
)  # fmt: skip
"""Settings of the jobs."""


@dataclass
class Outcome:
    """How a run has ended."""

    text: str
    whole: bool
    deaths: int = 0
    seconds: float = 0.0


@dataclass
class Shared:
    """What all runs use: it takes longer to make than a run."""

    folder: Path
    warm: WarmServers
    authority: Authority = field(default_factory=Authority)
    models: dict[int, Any] = field(default_factory=dict)
    """Final models of undisturbed runs, by kind."""

    @cached_property
    def senders(self) -> dict[str, Sender]:
        return senders(self.authority)

    def model(self, kind: int) -> Any:
        """The model that a job of a kind ends with."""
        if kind not in self.models:
            run = ServerRun(self, -1, kind)
            outcome = run.play()
            assert outcome.whole, outcome.text
            self.models[kind] = run.finals()[0]
        return self.models[kind]


class ServerRun:
    """A run that a seed describes; -1: one in which nothing happens."""

    def __init__(self, shared: Shared, seed: int, kind: int | None = None) -> None:
        self._shared, self._seed = shared, seed
        self._draw = random.Random(seed)
        self._kind = self._draw.randrange(len(KINDS)) if kind is None else kind
        self._victim, self._dies_at = self._draw.choice(tuple(PUSHES)), self._draw.randrange(LIFE_OPERATIONS)
        self._sender = self._draw.choice(SENDERS)
        self._target = self._draw.choice(tuple(region for region in PUSHES if region != MEMBER))
        self._at_round = self._draw.randint(0, ROUNDS)
        self._sent = "" if seed >= 0 else "nothing"
        self._folder = shared.folder / f"servers-{seed}-{self._kind}"
        self._begun: set[str] = set()
        self._deaths = 0
        self.servers: dict[str, Server] = {}
        self.workers: dict[str, NumpyWorker] = {}

    def play(self) -> Outcome:
        """Run the job to its end."""
        begun = time.monotonic()
        try:
            self._start()
            while not (outcome := self._state()):
                if time.monotonic() - begun > BOUND_SECONDS:
                    outcome = Outcome(f"HANGS: {self._conditions()}", whole=False)
                    break
                self._go_on()
                time.sleep(0.01)
        finally:
            for worker in self.workers.values():
                worker.stop.set()
            for server in self.servers.values():
                server.kill()
            for worker in self.workers.values():
                worker.join(30)
        if not outcome.whole:
            outcome.text += f"; {self}; kept in {self._folder}"
        else:
            shutil.rmtree(self._folder)
        outcome.deaths, outcome.seconds = self._deaths, time.monotonic() - begun
        return outcome

    def __str__(self) -> str:
        message = f"{self._sent or 'nothing'} of {self._sender} to {self._target} in round {self._at_round}"
        return f"kind {self._kind}, {self._victim} dies at operation {self._dies_at}, {message}"

    def finals(self) -> list[Any]:
        """The models that workers have ended with."""
        return [worker.finals[0] for worker in self.workers.values() if worker.finals]

    def _start(self) -> None:
        for region in PUSHES:
            self.servers[region] = Server(
                self._folder / region, self._shared.authority, region, tuple(PUSHES), warm=self._shared.warm,
                rounds=ROUNDS, round_samples=dict.fromkeys(PUSHES, SAMPLES), patience_seconds=2 * BOUND_SECONDS,
                **KINDS[self._kind],
            )  # fmt: skip
        for region, server in self.servers.items():
            server.launch(dies_at=self._dies_at if self._seed >= 0 and region == self._victim else -1)

    def _ready(self, server: Server) -> bool:
        """Whether a server listens, and knows the others: told once in each life."""
        if server.region in self._begun:
            return True
        if not (server.folder / "ready.json").exists():
            return False
        server.await_ready()
        self._begun.add(server.region)
        if server.region not in self.workers:
            self.workers[server.region] = NumpyWorker(server, PUSHES[server.region], samples=SAMPLES, begins_again=True)
            self.workers[server.region].start()
        return True

    def _go_on(self) -> None:
        for server in self.servers.values():
            assert server.process is not None
            if server.process.poll() == -9:
                self._deaths += 1
                begun = bool(server.ports)
                self._begun.discard(server.region)
                server.launch(begun=begun)
        before = set(self._begun)
        with contextlib.suppress(AssertionError):
            ready = [self._ready(server) for server in self.servers.values()]
            if all(ready):
                if before != self._begun:
                    self._introduce()
                elif not self._sent and self._reached():
                    target = self.servers[self._target]
                    self._sent = send(self._draw, self._shared.senders[self._sender], target, ROUNDS)

    def _introduce(self) -> None:
        """Tell all servers of all others, as the control plane does after each new address."""
        for server in self.servers.values():
            try:
                server.configure(*(other for other in self.servers.values() if other is not server))
            except Exception as error:
                if getattr(error, "code", None) is None:
                    raise
                # It is about to die, or has failed.
                self._begun.discard(server.region)

    def _reached(self) -> bool:
        """Whether the target's worker has handed the round over, or a later one: what it hands over is deleted."""
        handed_over = self.servers[self._target].channel_folder.glob("b/*/*/model")
        worker = self.workers[self._target]
        return bool(worker.finals) or any(int(path.parent.name) >= self._at_round for path in handed_over)

    def _state(self) -> Outcome | None:
        """How the run has ended; None: it has not."""
        for server in self.servers.values():
            if server.process is not None and (status := server.process.poll()) not in (None, -9):
                return self._failed(server, status)
        if failed := [worker for worker in self.workers.values() if worker.failure is not None]:
            # A server that fails tells its workers before it ends, or dies at its failpoint.
            server, error = failed[0].server, failed[0].failure
            return self._judged(server, f"error[{error.code}]: {error.message}")
        if not self._sent or len(self.finals()) < len(PUSHES):
            return None
        if self._seed < 0:
            return Outcome("the model", whole=True)
        expected = self._shared.model(self._kind)
        background = "wan_settings" in KINDS[self._kind]
        for model in self.finals():
            same = np.allclose(model, expected, rtol=1e-5) if background else np.array_equal(model, expected)
            if not same:
                return Outcome(f"ANOTHER MODEL: {model[:3]} instead of {expected[:3]}", whole=False)
        return self._without_traceback(Outcome("the same model", whole=True))

    def _failed(self, server: Server, status: int | None) -> Outcome:
        lines = server.log.read_text(errors="replace").splitlines()
        said = next((line for line in lines if line.startswith("error[")), f"ended with {status}")
        return self._judged(server, said)

    def _judged(self, server: Server, said: str) -> Outcome:
        code = said.partition("[")[2].partition("]")[0]
        blamed = self._sender == "member" and self._sent and code in CATALOGUE and code != "INTERNAL" and MEMBER in said
        return self._without_traceback(Outcome(f"{server.region}: {said[:200]}", whole=bool(blamed)))

    def _without_traceback(self, outcome: Outcome) -> Outcome:
        for server in self.servers.values():
            if "Traceback" in server.log.read_text(errors="replace"):
                return Outcome(f"A TRACEBACK in {server.log}; {outcome.text}", whole=False)
        return outcome

    def _conditions(self) -> list[str]:
        told = []
        for server in self.servers.values():
            with contextlib.suppress(Exception):
                status = server.status()
                told.append(f"{server.region}: {status.phase} {status.round} {status.condition}")
        return told
