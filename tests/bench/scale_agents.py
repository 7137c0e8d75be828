"""Agents of `scale.py`: real sessions over mutual TLS that obey commands, and report as if they trained."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from geofed_pb.rpc import CONTROL_PLANE_NAME, channel
from geofed_pb.v1 import agent_pb2, agent_pb2_grpc, common_pb2

HEARTBEAT_SECONDS = 10.0
"""A third of the lease, as real agents send them."""
_BACKOFF_FIRST_SECONDS, _BACKOFF_LONGEST_SECONDS = 0.2, 3.0
"""Time before a session is opened again, as of real agents."""


@dataclass
class Figures:
    """What all agents have measured, in seconds."""

    heartbeats: list[float] = field(default_factory=list)
    reports: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    sent_reports: int = 0


@dataclass
class Run:
    """A partition of a job in one region."""

    epoch: int
    state: str = ""
    rounds: int = 0
    order: int = 0
    workers: int = 1


class Agent:
    """One region."""

    def __init__(self, region: str, catalogue_json: str, keys: tuple[bytes, bytes, bytes], figures: Figures) -> None:
        self.region, self.catalogue_json, self.figures = region, catalogue_json, figures
        self.ca_pem, self.certificate_pem, self.key_pem = keys
        self.address = ""
        self.runs: dict[str, Run] = {}
        self.served = asyncio.Event()
        self.cursor = self.seq = self.acknowledged = self.welcomed_at = 0
        self._asked: list[float] = []
        self._sent: dict[int, float] = {}
        self._out: asyncio.Queue[agent_pb2.FromAgent] = asyncio.Queue()

    async def run(self, address: str) -> None:
        """Hold a session until cancelled; connect again as often as it ends."""
        self.address = address
        options = {"ca_pem": self.ca_pem, "certificate_pem": self.certificate_pem, "key_pem": self.key_pem}
        async with channel(self.address, name=CONTROL_PLANE_NAME, **options) as line:
            stub = agent_pb2_grpc.AgentHubStub(line)
            backoff = _BACKOFF_FIRST_SECONDS
            while True:
                beats = asyncio.create_task(self._beat())
                try:
                    async for message in stub.Session(self._outgoing(), wait_for_ready=True):
                        self._take(message)
                except grpc.RpcError as error:
                    self.figures.failures.append(f"{self.region}: {error.code()}")
                finally:
                    beats.cancel()
                    longer = min(2 * backoff, _BACKOFF_LONGEST_SECONDS)
                    backoff = _BACKOFF_FIRST_SECONDS if self.served.is_set() else longer
                    self.served.clear()
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _outgoing(self) -> AsyncIterator[agent_pb2.FromAgent]:
        self._out = asyncio.Queue()
        self._asked.clear()
        self._sent.clear()
        hello = agent_pb2.Hello(
            agent_version="bench",
            boot_id=f"boot-{self.region}",
            command_cursor=self.cursor,
            report_cursor=self.acknowledged,
            catalogue_json=self.catalogue_json,
        )
        yield agent_pb2.FromAgent(hello=hello)
        while True:
            yield await self._out.get()

    async def _beat(self) -> None:
        await self.served.wait()
        # Spread over the interval, as agents that were started one after another.
        await asyncio.sleep(HEARTBEAT_SECONDS * (hash(self.region) % 1000) / 1000)
        while True:
            self._asked.append(time.monotonic())
            self._out.put_nowait(agent_pb2.FromAgent(heartbeat=agent_pb2.Heartbeat(at=time.time())))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _take(self, message: agent_pb2.ToAgent) -> None:
        kind = message.WhichOneof("body")
        if message.seq:
            self.cursor = message.seq
            self._out.put_nowait(agent_pb2.FromAgent(command_ack=agent_pb2.CommandAck(seq=message.seq)))
        if kind == "welcome":
            self.seq = self.acknowledged = self.welcomed_at = message.welcome.report_cursor
            self.served.set()
        elif kind == "lease" and self._asked:
            self.figures.heartbeats.append(time.monotonic() - self._asked.pop(0))
        elif kind == "report_ack":
            self.acknowledged = message.report_ack.seq
            for seq in [seq for seq in self._sent if seq <= message.report_ack.seq]:
                self.figures.reports.append(time.monotonic() - self._sent.pop(seq))
        elif kind == "probe":
            self._tell_probe(message.probe)
        else:
            self._obey(kind or "", message)

    def _obey(self, kind: str, message: Any) -> None:
        command = getattr(message, kind)
        if kind == "start":
            self.runs[command.job] = Run(command.epoch, workers=command.plan.workers)
            self.report(command.job, "accepted")
            self.report(command.job, "ready", ps_address=f"{self.region}.example:9000")
        elif kind == "stop":
            if self.runs.pop(command.job, None) is not None:
                self.report(command.job, "stopped", epoch=command.epoch)
        # Heads of the audit log and lists of revoked certificates concern no job.
        elif (run := self.runs.get(getattr(command, "job", ""))) is None:
            return
        elif kind == "scale":
            run.order, run.workers = command.order, command.workers
        elif kind == "peers" and run.state != "training":
            self.report(command.job, "training")

    def _tell_probe(self, probe: agent_pb2.ProfileTask) -> None:
        steps = [agent_pb2.TimedStep(batch=probe.batch, seconds=0.02)]
        weight = agent_pb2.TaskWeight(parameters=1000, model_bytes=4000, steps=steps, start_seconds=1.0, last=True)
        self._out.put_nowait(agent_pb2.FromAgent(profile=agent_pb2.ProfileReport(id=probe.id, weight=weight)))

    def take(self, job: str, part: dict[str, Any]) -> None:
        """Run a partition that was put into the control plane's database, with its stored state."""
        rounds = part["report"]["round"] if part["report"] else 0
        self.runs[job] = Run(part["epoch"], "training", rounds, part["scale_order"], part["workers"] or 1)

    def progress(self, job: str) -> None:
        """Report one more round of a job."""
        run = self.runs[job]
        run.rounds += 1
        self.report(job, "training")

    def report(self, job: str, state: str, epoch: int = 0, **fields: Any) -> None:
        """Send a durable report."""
        run = self.runs.get(job) or Run(epoch)
        run.state = state
        self.seq += 1
        self._sent[self.seq] = time.monotonic()
        self.figures.sent_reports += 1
        other = "region-9999"
        report = agent_pb2.PartitionReport(
            job=job,
            epoch=run.epoch,
            state=state,
            round=run.rounds,
            step=run.rounds * 2,
            samples=run.rounds * 20,
            loss=1.0 / (run.rounds + 1),
            workers=run.workers,
            attempt=1,
            scale_order=run.order,
            meter=1,
            **fields,
        )
        report.totals.sent_bytes[other] = 1000 * run.rounds
        report.totals.money.append(
            common_pb2.Money(item="egress", quantity=1e-6, unit="GB", usd=1e-6 * run.rounds, source="bench")
        )
        report.speed.samples_per_second = report.speed.round_samples_per_second = 400.0
        report.exchange.update_bytes, report.exchange.codec = 1000, "fp32"
        report.links[other].rtt_ms, report.links[other].mbps = 80.0, 100.0
        self._out.put_nowait(agent_pb2.FromAgent(seq=self.seq, partition=report))


async def stopped(tasks: list[asyncio.Task[None]]) -> None:
    """End the sessions."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
