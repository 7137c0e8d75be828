"""A region and the control plane continue together, whichever of them is put back from an older copy of its state."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.budget import budget

from control_plane.blobs import BlobStore
from control_plane.server import ServeConfig
from control_plane.service import Federation
from control_plane.service.rpc._agents import AgentHubService
from control_plane.service.rpc._session import AgentSession
from control_plane.service.state._certificates import unseen_region
from control_plane.store import CommandRow, open_store
from geofed_pb.v1 import agent_pb2
from region_agent.link.outgoing import ReportQueue
from region_agent.state.store import AgentStore
from tests.control_plane.conftest import staged
from tests.control_plane.fake_agent import FakeAgent, catalogue
from tests.control_plane.scenario import bring_up, finish, run, train

REGION = "a"


class Conversation(RuleBasedStateMachine):
    """Both ends with their real stores; what lies between them is a list of messages that may be lost."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp())
        self._loop = asyncio.new_event_loop()
        self._made = 0
        self._boots = 0
        self._restored = False
        self._applied: list[str] = []
        self._taken: list[str] = []
        self._owed_reports: set[str] = set()
        self._owed_commands: set[str] = set()
        for end in ("agent", "control"):
            (self._folder / end).mkdir()
        self._start_control()
        self._start_agent()
        self._loop.run_until_complete(self._invite())
        for end in ("agent", "control"):
            self.copy(end)

    def teardown(self) -> None:
        self._stop_control()
        self._agent.close()
        self._loop.close()
        shutil.rmtree(self._folder)

    # The two ends

    def _start_control(self) -> None:
        self._store = open_store(f"sqlite:///{self._folder / 'control' / 'state.db'}")
        blobs = BlobStore(self._folder / "blobs")
        self._federation = Federation(self._store, blobs, lambda: 1000.0, timedelta(seconds=30), "test")
        self._hub = AgentHubService(self._federation, None, None, timedelta(days=1))  # type: ignore[arg-type]
        self._loop.run_until_complete(self._federation.load())

    def _stop_control(self) -> None:
        self._loop.run_until_complete(self._federation.close())
        self._store.close()

    def _start_agent(self) -> None:
        self._boots += 1
        self._agent = AgentStore(self._folder / "agent" / "agent.db")
        self._queue = ReportQueue(self._agent)

    async def _invite(self) -> None:
        async with self._federation.change() as draft:
            draft.put_region(unseen_region(REGION))

    # What happens to each

    @rule()
    def report(self) -> None:
        self._made += 1
        text = f"report {self._made}"
        happening = agent_pb2.Happening(kind="told", text=text)
        assert self._agent.add_report(agent_pb2.FromAgent(happening=happening).SerializeToString())
        self._owed_reports.add(text)

    @rule()
    def command(self) -> None:
        self._made += 1
        text = f"command {self._made}"
        self._loop.run_until_complete(self._give(text))
        self._owed_commands.add(text)

    async def _give(self, text: str) -> None:
        async with self._federation.change() as draft:
            draft.commands.append(CommandRow(REGION, "job", text.encode()))

    @rule(end=st.sampled_from(["agent", "control"]))
    def restart(self, end: str) -> None:
        self._down(end)
        self._up(end)

    @rule(end=st.sampled_from(["agent", "control"]))
    def copy(self, end: str) -> None:
        self._down(end)
        shutil.rmtree(self._folder / f"{end}-copy", ignore_errors=True)
        shutil.copytree(self._folder / end, self._folder / f"{end}-copy")
        self._up(end)

    @rule(end=st.sampled_from(["agent", "control"]))
    def put_back(self, end: str) -> None:
        """The last copy; the first one of an agent is of an empty disk."""
        self._down(end)
        shutil.rmtree(self._folder / end)
        shutil.copytree(self._folder / f"{end}-copy", self._folder / end)
        self._up(end)
        self._restored = True
        # What was said before is told again by the orders that follow; what is said from now on must arrive.
        self._owed_reports.clear()
        self._owed_commands.clear()

    def _down(self, end: str) -> None:
        if end == "agent":
            self._agent.close()
        else:
            self._stop_control()

    def _up(self, end: str) -> None:
        if end == "agent":
            self._start_agent()
        else:
            self._start_control()

    # Between them

    @rule(reports=st.integers(0, 4), commands=st.integers(0, 4), acknowledged=st.booleans())
    def broken_session(self, reports: int, commands: int, acknowledged: bool) -> None:
        self._loop.run_until_complete(self._talk(reports, commands, acknowledged))

    @rule()
    def session(self) -> None:
        self._loop.run_until_complete(self._talk(10_000, 10_000, True))
        assert self._owed_reports <= set(self._applied)
        assert self._owed_commands <= set(self._taken)
        assert self._agent.reports_waiting() == 0
        assert self._store.commands_pending() == {}
        self._owed_reports.clear()
        self._owed_commands.clear()

    @invariant()
    def nothing_is_done_twice(self) -> None:
        if not self._restored:
            assert len(set(self._applied)) == len(self._applied)
            assert len(set(self._taken)) == len(self._taken)

    async def _talk(self, reports: int, commands: int, acknowledged: bool) -> None:
        hello = agent_pb2.Hello(
            boot_id=f"boot {self._boots}",
            command_cursor=self._agent.command_cursor(),
            catalogue_json=json.dumps(asdict(catalogue(REGION))),
            report_cursor=self._agent.reports_acknowledged(),
        )
        session = await self._federation.connect(REGION, hello)
        self._queue.resume(session.report_cursor)
        cursor = session.report_cursor
        while reports and (batch := self._queue.after(cursor)):
            for seq, raw in batch[:reports]:
                message = self._queue.sendable(seq, raw)
                await self._hub._apply_or_skip(session, message)
                self._applied.append(message.happening.text)
                cursor, reports = seq, reports - 1
            self._hear(session, acknowledged)
        sent = hello.command_cursor
        while commands and (waiting := self._store.commands_after(REGION, sent)):
            for command in waiting[:commands]:
                sent, commands = command.seq, commands - 1
                assert command.seq > self._agent.command_cursor()
                self._agent.took(command.seq)
                self._taken.append(command.payload.decode())
            if acknowledged:
                await self._federation.acknowledge_commands(session, sent)
        if acknowledged and commands:
            await self._federation.acknowledge_commands(session, self._agent.command_cursor())
        await self._federation.disconnect(session)

    def _hear(self, session: AgentSession, acknowledged: bool) -> None:
        messages, session._messages = session._messages, []
        for message in messages:
            if acknowledged and message.HasField("report_ack"):
                self._queue.acknowledged(message.report_ack.seq)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["agent", "control"])
@pytest.mark.parametrize("more", [0, 1, 2, 3])
def test_what_is_said_after_a_copy_was_put_back_arrives_however_much_it_is(end: str, more: int) -> None:
    """Also where it is as much as, or more than, what the other side has of before."""
    talk = Conversation()
    try:
        talk.report()
        talk.command()
        talk.session()
        talk.copy(end)
        for _ in range(2):
            talk.report()
            talk.command()
        talk.session()
        talk.put_back(end)
        for _ in range(more):
            talk.report()
            talk.command()
        talk.restart(end)
        talk.report()
        talk.session()
        talk.report()
        talk.command()
        talk.session()
    finally:
        talk.teardown()


Conversation.TestCase.settings = settings(
    deadline=None, max_examples=budget(10), stateful_step_count=20, suppress_health_check=list(HealthCheck)
)
TestConversation = Conversation.TestCase


async def _agent_put_back(agent: FakeAgent, cursor: int) -> None:
    """An agent with the state of an older copy: it has forgotten commands, reports, and what it was at."""
    await agent.close()
    agent.cursor, agent._seq, agent.boot_id = cursor, 0, f"{agent.boot_id}+"
    agent.commands.clear()
    agent.unacknowledged.clear()
    await agent.connect()


@pytest.mark.slow
def test_a_region_with_an_older_state_gets_its_orders_again(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            cursor = b.cursor
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            for agent in (a, b):
                await agent.settled()
            b.strict = False
            await _agent_put_back(b, cursor)
            start = await b.command("start")
            assert (start.job, start.resumed) == (job, True)
            b.report(job, "ready", ps_address="b.example:9001")
            await b.command("peers")
            b.report(job, "training")
            await finish(job, a, b)
            assert (await stage.client.job(job)).state == "succeeded"
            assert "region.restored" in await stage.events("")

    run(scenario())


def test_what_a_region_does_for_a_job_that_has_ended_is_stopped(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            await finish(job, a, b)
            b.strict = False
            await _agent_put_back(b, b.cursor)
            for work in (job, "a-job-that-nobody-knows"):
                # Its own stop may still have been on its way, and is then here already: no other one is sent.
                b.report(work, "training")
                await b.told_to_stop(work)
                b.report(work, "stopped")
                await b.settled()

    run(scenario())


@pytest.mark.slow
def test_reports_that_an_older_agent_has_forgotten_are_not_waited_for(
    serve_config: ServeConfig, job_file: Path
) -> None:
    """It does not say which ones: their numbers are missing."""

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            await a.settled()
            a.commands.clear()
            a._seq += 5
            happening: Any = agent_pb2.Happening(kind="ps-ended", text="it is back")
            a.send(agent_pb2.FromAgent(happening=happening))
            await a.settled()
            assert (await a.command("start")).job == job
            kinds = await stage.events("")
            assert kinds.index("region.restored") < kinds.index("ps-ended")

    run(scenario())
