"""The agent's session: what must not be lost is not lost, what was done is not done twice, whatever breaks."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from support.control_plane_script import Agent, ControlPlane, Session, play, soon

from geofed_pb.bounds import TRUNCATED
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2, common_pb2
from sync.framing import digest_of


def _report(state: str, job: str = "job-1") -> agent_pb2.PartitionReport:
    return agent_pb2.PartitionReport(job=job, state=state)


def _start(session: Session, seq: int) -> None:
    session.say(seq, start=agent_pb2.StartPartition(job="job-1", region="east"))


async def _until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - what is waited for knows of no event loop
        await asyncio.sleep(0.005)


def test_commands_are_taken_once_and_the_cursor_survives_a_break(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        assert session.agent == "east"
        assert (await session.welcome()).command_cursor == 0
        _start(session, 1)
        assert (await session.heard("command_ack")).command_ack.seq == 1
        session.say(2, peers=agent_pb2.Peers(job="job-1"))
        assert (await session.heard("command_ack")).command_ack.seq == 2
        session.end()
        again = await control.next_session()
        assert (await again.welcome()).command_cursor == 2
        for seq in (1, 2, 3):
            _start(again, seq)
            assert (await again.heard("command_ack")).command_ack.seq == seq
        assert agent.taken == [("start", 1), ("peers", 2), ("start", 3)]

    play(scene, tmp_path)


def test_a_session_that_begins_again_says_what_there_is_now(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        await (await control.next_session()).welcome()
        await soon(_until(lambda: agent.hub.connected))
        agent.hub.open_new_session()
        again = await control.next_session()
        await again.welcome()
        _start(again, 1)
        assert (await again.heard("command_ack")).command_ack.seq == 1

    play(scene, tmp_path)


def test_a_session_that_begins_or_ends_is_told_to_who_waits_for_it(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        begun = asyncio.create_task(agent.hub.session_changed(3600.0))
        await session.welcome()
        await soon(begun)
        assert agent.hub.connected
        ended = asyncio.create_task(agent.hub.session_changed(3600.0))
        session.end()
        await soon(ended)
        await agent.hub.session_changed(0.0)

    play(scene, tmp_path)


def test_the_other_control_plane_is_tried_where_one_does_not_answer(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        await session.welcome()
        session.end()
        await (await control.next_session()).welcome()

    # Nobody listens on port 1.
    play(scene, tmp_path, before="127.0.0.1:1, ")


def test_a_command_that_could_not_be_stored_comes_again(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        agent.refuse_once = GeofedError("DISK_FULL", "no space")
        first = await control.next_session()
        await first.welcome()
        _start(first, 1)
        second = await control.next_session()
        assert (await second.welcome()).command_cursor == 0
        assert not [message for message in first.heard_so_far() if message.HasField("command_ack")]
        _start(second, 1)
        assert (await second.heard("command_ack")).command_ack.seq == 1

    play(scene, tmp_path)


def test_a_durable_report_is_sent_until_it_is_acknowledged(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        first = await control.next_session()
        await first.welcome()
        agent.hub.report(_report("ready"), durable=True)
        agent.hub.report(_report("training"), durable=True)
        assert [(await first.heard("partition")).seq for _ in range(2)] == [1, 2]
        first.end()
        second = await control.next_session()
        await second.welcome(report_cursor=1)
        message = await second.heard("partition")
        assert (message.seq, message.partition.state) == (2, "training")
        second.say(report_ack=agent_pb2.ReportAck(seq=2))
        await soon(_until(lambda: agent.store.reports_waiting() == 0))
        second.end(GeofedError("UNAVAILABLE", "restarting"))
        third = await control.next_session()
        await third.welcome(report_cursor=2)
        agent.hub.report(_report("finished"), durable=True)
        assert (await third.heard("partition")).seq == 3

    play(scene, tmp_path)


def test_what_was_reported_while_there_was_no_session_arrives(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        for number in range(600):
            agent.hub.report(_report("training", f"job-{number}"), durable=True)
        await session.welcome()
        begun = time.monotonic()
        seen = [(await session.heard("partition")).seq for _ in range(600)]
        assert seen == list(range(1, 601))
        assert time.monotonic() - begun < 5, "the next batch waited for a heartbeat"

    play(scene, tmp_path)


def test_no_older_state_arrives_behind_a_newer_one(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        agent.hub.report(_report("training"), durable=False)
        agent.hub.report(_report("finished"), durable=True)
        agent.hub.report(_report("training", "job-2"), durable=False)
        await session.welcome()
        states = [(await session.heard("partition")).partition for _ in range(2)]
        assert [(state.job, state.state) for state in states] == [("job-1", "finished"), ("job-2", "training")]

    play(scene, tmp_path)


def test_of_passing_reports_the_newest_is_sent(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        for step in range(50):
            agent.hub.report(agent_pb2.PartitionReport(job="job-1", step=step), durable=False)
        await session.welcome()
        assert (await session.heard("partition")).partition.step == 49

    play(scene, tmp_path)


def test_heartbeats_keep_the_lease(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        await session.welcome(lease_seconds=0.6)
        for _ in range(6):
            await session.heard("heartbeat")
            session.say(lease=agent_pb2.LeaseGrant(lease_seconds=0.6))
        assert control.sessions.empty()
        assert agent.hub.connected

    play(scene, tmp_path)


def test_a_silent_session_is_given_up(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        await session.welcome(lease_seconds=0.2)
        again = await control.next_session()
        assert agent.hub.refusal is not None
        assert "within the lease" in agent.hub.refusal.message
        await again.welcome()
        await soon(_until(lambda: agent.hub.connected))
        assert agent.hub.refusal is None

    play(scene, tmp_path)


def test_an_agent_that_was_replaced_ends(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        session.end(GeofedError("FENCED", "another session of east"))
        with pytest.raises(GeofedError, match="another session of east") as raised:
            await soon(agent.running)
        assert raised.value.code == "FENCED"

    play(scene, tmp_path)


def test_an_agent_whose_certificate_is_over_ends(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        with pytest.raises(GeofedError) as raised:
            await soon(agent.running)
        assert raised.value.code == "CERTIFICATE_EXPIRED"

    play(scene, tmp_path, begins=timedelta(hours=-2), life=timedelta(hours=1))


# Beside the session


def test_blobs_are_fetched_whole_and_verified(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        data = bytes(range(256)) * 20
        control.blobs[digest_of([data])] = data
        assert await agent.hub.fetch_blob(digest_of([data])) == data
        control.blobs["sha256:0"] = data
        with pytest.raises(GeofedError) as raised:
            await agent.hub.fetch_blob("sha256:0")
        assert raised.value.code == "DIGEST_MISMATCH"
        with pytest.raises(GeofedError) as raised:
            await agent.hub.fetch_blob("sha256:1")
        assert raised.value.code == "MODEL_NOT_FOUND"

    play(scene, tmp_path)


def test_a_file_is_fetched_from_where_it_was_and_verified(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        data = bytes(range(256)) * 20
        digest, place = digest_of([data]), tmp_path / "model"
        partial = tmp_path / "model.partial"
        control.blobs[digest] = data
        partial.write_bytes(data[:3000])
        await agent.hub.fetch_file(digest, place)
        assert place.read_bytes() == data
        assert control.fetched == [3000]
        await agent.hub.fetch_file(digest, place)
        assert control.fetched == [3000], "what is there is not fetched again"
        place.unlink()
        partial.write_bytes(b"x" * 100)
        with pytest.raises(GeofedError, match="DIGEST_MISMATCH"):
            await agent.hub.fetch_file(digest, place)
        assert not place.exists()
        await agent.hub.fetch_file(digest, place)
        assert (place.read_bytes(), control.fetched) == (data, [3000, 100, 0])

    play(scene, tmp_path)


async def put(agent: Agent, data: bytes, digest: str) -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        await agent.hub.put_blob(file, digest)


def test_a_blob_is_handed_in_from_where_it_was(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        data = bytes(3 << 20)
        digest = digest_of([data])
        control.partial[digest] = bytearray(data[: 1 << 20])
        await put(agent, data, digest)
        assert control.offsets == [1 << 20, 2 << 20]
        assert control.blobs[digest] == data
        await put(agent, data, digest)
        assert len(control.offsets) == 2

    play(scene, tmp_path)


def test_the_end_of_a_session_does_not_cut_a_blob(tmp_path: Path) -> None:
    """Closing one would cancel the other's task, which then tells nobody."""

    async def scene(control: ControlPlane, agent: Agent) -> None:
        session = await control.next_session()
        await session.welcome()
        data = bytes(2 << 20)
        digest = digest_of([data])
        control.blobs["sha256:x"] = b"y" * 5000
        control.hold_blobs.clear()
        putting = asyncio.create_task(put(agent, data, digest))
        fetching = asyncio.create_task(agent.hub.fetch_blob("sha256:x"))
        await soon(_until(lambda: control.offsets))
        session.end(GeofedError("UNAVAILABLE", "restarting"))
        await (await control.next_session()).welcome()
        control.hold_blobs.set()
        await soon(putting)
        assert control.blobs[digest] == data
        with pytest.raises(GeofedError, match="arrived damaged"):
            await soon(fetching)

    play(scene, tmp_path)


def test_a_renewed_certificate_is_for_the_same_key(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        identity = agent.identity
        key, before = identity.key_file.read_bytes(), identity.certificate
        assert identity.renewal_due_in(time.time()) < 0
        await agent.hub.renew()
        assert identity.key_file.read_bytes() == key
        assert identity.certificate.public_key() == before.public_key()
        assert identity.certificate.serial_number != before.serial_number
        assert identity.renewal_due_in(time.time()) > 0
        identity.check()

    play(scene, tmp_path, begins=timedelta(minutes=-40), life=timedelta(hours=1))


def test_what_cannot_be_reached_is_an_error_of_the_catalogue(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        await control._server.stop(0)
        for call in (agent.hub.fetch_blob("sha256:1"), put(agent, b"x", "sha256:1"), agent.hub.renew()):
            with pytest.raises(GeofedError) as raised:
                await soon(call)
            assert raised.value.code == "UNAVAILABLE"

    play(scene, tmp_path)


# What cannot be delivered, or not be carried out


@pytest.mark.slow
def test_a_report_that_an_earlier_version_stored_too_large_is_cut(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        error = common_pb2.Error(code="TASK_FAILED", message="unexpected keys: " + "layer, " * 1_200_000)
        whole = agent_pb2.PartitionReport(job="job-1", state="failed", error=error, condition=error.message)
        agent.store.add_report(agent_pb2.FromAgent(partition=whole).SerializeToString())
        agent.hub.report(_report("training", "job-2"), durable=True)
        session = await control.next_session()
        await session.welcome()
        cut = (await session.heard("partition")).partition
        assert (cut.job, cut.state, cut.error.code) == ("job-1", "failed", "TASK_FAILED")
        assert cut.error.message.startswith("unexpected keys: layer, ")
        assert cut.error.message.endswith(TRUNCATED)
        assert (await session.heard("partition")).partition.job == "job-2"
        assert agent.store.set_aside() == []

    play(scene, tmp_path)


def test_a_stored_report_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        agent.store.add_report(b"\xff" * 10)
        agent.hub.report(_report("training"), durable=True)
        session = await control.next_session()
        await session.welcome()
        told = await session.heard("happening")
        assert (told.seq, told.happening.kind) == (1, "message.undeliverable")
        assert (await session.heard("partition")).seq == 2
        ((kind, seq, reason, raw),) = agent.store.set_aside()
        assert (kind, seq, raw) == ("report", 1, b"\xff" * 10)
        assert reason.startswith("FRAME_INVALID: ")

    play(scene, tmp_path)


def test_a_report_with_which_sessions_break_is_set_aside_and_its_job_fails(tmp_path: Path) -> None:
    """As a control plane of an earlier version breaks off, again and again, when it cannot take a report."""

    async def scene(control: ControlPlane, agent: Agent) -> None:
        for job in ("job-1", "job-2", "job-3"):
            agent.hub.report(_report("training", job), durable=True)
        acknowledged = 0
        told: list[agent_pb2.FromAgent] = []
        while len(told) < 3:
            session = await control.next_session()
            await session.welcome(report_cursor=acknowledged)
            while len(told) < 3:
                message = await session.heard("partition")
                if message.partition.job == "job-2" and message.partition.state == "training":
                    session.end(GeofedError("FRAME_INVALID", "no"))
                    break
                assert message.seq == acknowledged + 1
                acknowledged = message.seq
                told.append(message)
                session.say(report_ack=agent_pb2.ReportAck(seq=acknowledged))
        states = [(message.partition.job, message.partition.state, message.partition.error.code) for message in told]
        assert states == [("job-1", "training", ""), ("job-2", "failed", "FRAME_INVALID"), ("job-3", "training", "")]
        assert "FRAME_INVALID: no" in told[1].partition.error.message
        assert [(kind, seq) for kind, seq, *_ in agent.store.set_aside()] == [("report", 2)]

    play(scene, tmp_path)


def test_reports_that_sessions_break_on_for_passing_reasons_are_kept(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        agent.hub.report(_report("training"), durable=True)
        for _ in range(6):
            session = await control.next_session()
            await session.welcome()
            assert (await session.heard("partition")).partition.state == "training"
            session.end(GeofedError("UNAVAILABLE", "stopping"))
        assert agent.store.set_aside() == []
        assert agent.store.reports_waiting() == 1

    play(scene, tmp_path)


@pytest.mark.slow
def test_a_command_that_cannot_be_carried_out_is_set_aside_and_its_job_fails(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        agent.refuse_once = ValueError("no such plan")
        session = await control.next_session()
        await session.welcome()
        _start(session, 1)
        failed = (await session.heard("partition")).partition
        assert (failed.job, failed.state, failed.error.code) == ("job-1", "failed", "INTERNAL")
        assert "no such plan" in failed.error.message
        _start(session, 2)
        while (await session.heard("command_ack")).command_ack.seq < 2:
            pass
        assert agent.taken == [("start", 2)]
        assert [(kind, seq) for kind, seq, *_ in agent.store.set_aside()] == [("command", 1)]

    play(scene, tmp_path)


def test_an_agent_with_an_older_state_takes_over_the_numbers_of_the_control_plane(tmp_path: Path) -> None:
    async def scene(control: ControlPlane, agent: Agent) -> None:
        agent.hub.report(_report("training"), durable=True)
        session = await control.next_session()
        assert (await session.welcome(report_cursor=19)).report_cursor == 0
        assert (await session.heard("partition")).seq == 20
        assert agent.restored == 1
        session.end()
        again = await control.next_session()
        await again.welcome(report_cursor=20)
        agent.hub.report(_report("finished"), durable=True)
        assert (await again.heard("partition")).seq == 21
        assert agent.restored == 1

    play(scene, tmp_path)
