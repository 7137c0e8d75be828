"""One seeded run of a control plane with two agents: it dies at a failpoint and comes back, and somebody sends a
message to its agents' port.

The control plane is a process with real sockets and a real database; the agents play their part of a job by its
protocol. The job must end with their model, priced once. Only where a region of the job has sent the message may it end
otherwise, with a code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
from support.warm_servers import ServerProcess, WarmServers

from control_plane.client import Context, ControlClient
from control_plane.server import ServeConfig
from control_plane.spec import load, pack
from geofed_pb.errors import CATALOGUE, GeofedError
from tests.control_plane.conftest import JOB, TASK, staged
from tests.control_plane.fake_agent import FakeAgent, Identity, digest_of, join
from tests.control_plane.scenario import MODEL, figures
from tests.faults.agent_messages import send_as_agent
from tests.faults.servers import BOUND_SECONDS, Outcome

__all__ = ["ControlPlaneRun", "Known"]

_ANYWHERE = "127.0.0.1:0"
_LIFE_OPERATIONS = 70
"""Operations in a control plane's life in which a job runs, about: one that is to die later does not die."""
_RETRIED = ("UNAVAILABLE", "STANDBY")
_STEPS = 4
"""Commands that an agent gets: start, peers, publish or stop, stop."""


@dataclass
class Known:
    """A federation to begin with, whose folder each run copies: to make its keys takes longer than a run."""

    folder: Path
    warm: WarmServers

    @cached_property
    def identities(self) -> dict[str, Identity]:
        """Of the regions of the job, a and b, and of another one."""
        state = self.folder / "federation"
        config = ServeConfig(state, listen=_ANYWHERE, agent_listen=_ANYWHERE, metrics_listen=_ANYWHERE)

        async def joined() -> dict[str, Identity]:
            async with staged(config) as stage:
                return {name: await join((await stage.client.invite(name)).token) for name in ("a", "b", "c")}

        found = asyncio.run(joined())
        (state / "task").mkdir()
        (state / "task" / "job.yaml").write_text(JOB)
        (state / "task" / "task.py").write_text(TASK)
        return found


class _Player:
    """An agent that does its part of a job over any number of connections."""

    def __init__(self, agent: FakeAgent, other: str) -> None:
        self.agent, self._other, self._done = agent, other, 0
        agent.strict = False

    async def play(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(GeofedError, grpc.RpcError, EOFError, TimeoutError):
                async with self.agent:
                    while self.agent.failure is None:
                        await self._obey()
            await asyncio.sleep(0.05)

    async def _obey(self) -> None:
        agent = self.agent
        while self._done < len(agent.commands):
            command = agent.commands[self._done]
            kind = command.WhichOneof("body")
            part = getattr(command, kind)
            if kind == "start":
                agent.report(part.job, "accepted", part.epoch)
                agent.report(part.job, "ready", part.epoch, ps_address=f"{agent.region}.example:9000")
            elif kind == "peers":
                agent.report(part.job, "training", part.epoch)
                told = figures(agent.region, self._other, 2)
                agent.report(part.job, "finished", part.epoch, model_digest="m", **told)
            elif kind == "publish":
                await agent.put(MODEL)
                told = figures(agent.region, self._other, 2)
                digest = digest_of(MODEL)
                agent.report(part.job, "published", part.epoch, model_digest="m", blob_digest=digest, **told)
            elif kind == "stop":
                agent.report(part.job, "stopped", part.epoch)
            self._done += 1
        with contextlib.suppress(TimeoutError):
            await agent._until(lambda: len(agent.commands) > self._done or agent.failure is not None, 1.0)
        agent.heartbeat()


class ControlPlaneRun:
    """A run that a seed describes."""

    def __init__(self, known: Known, seed: int) -> None:
        self._known, self._seed = known, seed
        self._draw = random.Random(f"control plane {seed}")
        self._dies_at = self._draw.randrange(_LIFE_OPERATIONS)
        self._sender = self._draw.choice(("b", "c"))
        self._after = self._draw.randrange(_STEPS)
        self._sent, self._deaths = "", 0
        self._folder = known.folder / f"control-plane-{seed}"
        self._process: ServerProcess | None = None
        self._job = ""

    def __str__(self) -> str:
        message = f"{self._sent or 'nothing'} of {self._sender} after {self._after} commands"
        return f"the control plane dies at operation {self._dies_at}, {message}"

    def play(self) -> Outcome:
        """Run the job to its end."""
        begun = time.monotonic()
        assert self._known.identities
        shutil.copytree(self._known.folder / "federation", self._folder / "state")
        try:
            outcome = asyncio.run(self._play())
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
        if outcome.whole:
            shutil.rmtree(self._folder)
        else:
            outcome.text += f"; {self}; kept in {self._folder}"
        outcome.deaths, outcome.seconds = self._deaths, time.monotonic() - begun
        return outcome

    async def _play(self) -> Outcome:
        facts = await self._start({}, self._dies_at)
        players = []
        for name, other in (("a", "b"), ("b", "a")):
            identity = replace(self._known.identities[name], address=f"127.0.0.1:{facts['agent']}")
            players.append(_Player(FakeAgent(identity), other))
        tasks = [asyncio.create_task(self._keep(facts)), *(asyncio.create_task(player.play()) for player in players)]
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                return await self._judged(players, facts)
        except TimeoutError:
            return Outcome(f"HANGS: {[p.agent.commands[-1:] for p in players]}", whole=False)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, facts: dict[str, Any], dies_at: int) -> dict[str, Any]:
        ready, config = self._folder / "ready.json", self._folder / "serve.json"
        while True:
            ready.unlink(missing_ok=True)
            listen = {
                f"{name}listen": f"127.0.0.1:{facts.get(port, 0)}"
                for name, port in (("", "control"), ("agent_", "agent"), ("metrics_", "metrics"))
            }
            config.write_text(json.dumps({"state_dir": f"{self._folder}/state", "ready_file": str(ready)} | listen))
            self._process = self._known.warm.start(config, self._folder / "log", dies_at)
            while not ready.exists() and self._process.poll() is None:  # noqa: ASYNC110 - a file of another process
                await asyncio.sleep(0.01)
            if ready.exists():
                return dict(json.loads(ready.read_text()))
            assert self._process.poll() == -9, (self._folder / "log").read_text()
            self._deaths, dies_at = self._deaths + 1, -1

    async def _keep(self, facts: dict[str, Any]) -> None:
        """Start it again once it has died."""
        while True:
            assert self._process is not None
            if self._process.poll() == -9:
                self._deaths += 1
                await self._start(facts, -1)
            await asyncio.sleep(0.01)

    async def _judged(self, players: list[_Player], facts: dict[str, Any]) -> Outcome:
        context = replace(Context.load(self._folder / "state" / "context.json"))
        state = self._folder / "state"
        context = replace(context, ca_file=state / "pki" / context.ca_file.name, token_file=state / "admin.token")
        loaded = load(state / "task" / "job.yaml")
        packed = pack(loaded.folder, loaded.spec.task.module)
        content, digest = packed.content, packed.digest
        async with ControlClient.connect(context) as client:

            async def submit() -> Any:
                regions = await client.regions()
                if sum(region.state == "live" for region in regions) < len(players):
                    raise GeofedError("UNAVAILABLE", "not all regions are here")
                await client.put_bundle(content, digest)
                return await client.submit(loaded.json, digest, "r1")

            self._job = (await _retried(submit)).job.id
            sending = asyncio.create_task(self._send(players[0], facts))
            while not (await _retried(lambda: client.job(self._job))).finished_at:  # noqa: ASYNC110 - it may die
                await asyncio.sleep(0.05)
            await sending
            return self._outcome(await _retried(lambda: client.job(self._job)))

    async def _send(self, player: _Player, facts: dict[str, Any]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                while len(player.agent.commands) < self._after:  # noqa: ASYNC110 - over its connections
                    await asyncio.sleep(0.01)
        identity = replace(self._known.identities[self._sender], address=f"127.0.0.1:{facts['agent']}")
        self._sent = await send_as_agent(self._draw, identity, self._job, member=self._sender == "b")

    def _outcome(self, job: Any) -> Outcome:
        log = (self._folder / "log").read_text(errors="replace")
        if "Traceback" in log or "traceback" in log:
            return Outcome("A TRACEBACK in the log", whole=False)
        if job.state == "succeeded":
            result = json.loads(job.result_json)
            same = result["model"]["digest"] == digest_of(MODEL)
            if same and (result["usd"] == 0.5 or self._sender == "b"):
                return Outcome("the same model", whole=True)
            return Outcome(f"ANOTHER RESULT: {job.result_json[:300]}", whole=False)
        code = job.error.code
        blamed = self._sender == "b" and self._sent and code in CATALOGUE and code != "INTERNAL"
        return Outcome(f"{job.state}: error[{code}]: {job.error.message[:200]}", whole=bool(blamed))


async def _retried(ask: Callable[[], Awaitable[Any]]) -> Any:
    """The answer, once there is one."""
    while True:
        try:
            return await ask()
        except GeofedError as error:
            if error.code not in _RETRIED:
                raise
        await asyncio.sleep(0.05)
