"""A model in stages through a real agent's partition: its embedded gateway, its parameter server, its workers. The
model learns as in one process, and a stage that is killed costs no step."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.jobs import pack
from support.pki import Authority, write
from support.processes import running_as
from support.running import Running, check_succeeded, named
from torch import nn

from geofed_pb.v1 import agent_pb2
from region_agent.config import EmbeddedGateway, RegionConfig
from region_agent.embedded_gateway import WORKER_IMAGE, EmbeddedGatewayProcess
from region_agent.isolation import isolation_of
from region_agent.link.identity import Identity
from region_agent.partition.channel import RegionChannel
from region_agent.partition.context import PartitionContext
from region_agent.partition.events import PublishAsked, RecordEvent, Stopped
from region_agent.partition.runner import PartitionRunner
from region_agent.partition.server.process import PsProcess
from region_agent.state.store import AgentStore
from region_agent.tasks.folder import TaskFolder
from region_agent.worker.data.shard import BatchStream
from sync.framing import digest_of
from sync.pipeline import Layers
from tests.e2e.conftest import PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

JOB, SEED, STEPS, ROUNDS, BATCH = "job-1", 11, 10, 4, 16

TRANSFORMER = """
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

LETTERS, LENGTH, WIDTH = 27, 12, 32


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, x):
        return self.letters(x) + self.places(torch.arange(x.shape[1]))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.inner(x, src_mask=mask, is_causal=True)


def layers(config):
    return [Tokens, Block, Block, Block, lambda: nn.Linear(WIDTH, LETTERS)]


def dataset(uri, split, config):
    codes = torch.tensor([(ord(c) - 96) if c.isalpha() else 0 for c in Path(uri).read_text().lower()])
    codes = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return TensorDataset(codes[:, :-1], codes[:, 1:])


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
TEXT = "the quick brown fox jumps over the lazy dog and runs back into the wood " * 40


class Region:
    """One region with one partition; the control plane's part is the test's."""

    def __init__(self, folder: Path, pipeline: agent_pb2.Pipeline, workers: int) -> None:
        self.folder = folder
        # Workers see no state of the agent's, and must see the shard and the channel.
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.shard = self.shared / "text.txt"
        self.shard.write_text(TEXT)
        split = {"uri": str(self.shard), "samples": len(TEXT) // 13}
        config = RegionConfig.model_validate(
            {
                "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
                "capacity": {"workers": workers}, "policy": {"shipLogs": False},
                "channel": {"path": str(self.shared / "channel")},
                "datasets": {"d": {"splits": {"train": split, "test": split}}},
                "server": {"exchangeHost": "127.0.0.1"},
            }
        )  # fmt: skip
        self.config, self.state = config, folder / "state"
        identity = Identity(self.state)
        write(Authority().region("east"), identity.folder)
        self.identity = identity
        self.store = AgentStore(self.state / "agent.db")
        self.events: list[RecordEvent] = []
        self.lines: list[str] = []
        self.reports: list[agent_pb2.PartitionReport] = []
        self.bundle = pack({"task.py": TRANSFORMER})
        self.model: bytes = b""
        self.start = agent_pb2.StartPartition(
            job=JOB, region="east", epoch=1, regions=["east"],
            task=agent_pb2.TaskRef(bundle_digest=digest_of([self.bundle]), module="task.py", dataset="d"),
            plan=agent_pb2.PartitionPlan(
                workers=workers, batch=BATCH // pipeline.degree, steps_per_round=STEPS, rounds=ROUNDS, memory_mb=512,
                slice_seconds=60.0, channel="file", wan_policy="ma", codec="fp32", evaluate_every=1, seed=SEED,
                pipeline=pipeline,
            ),
        )  # fmt: skip
        self.store.took_start(1, JOB, self.start.SerializeToString(), "a key of the right length for a test of it")

    @contextlib.asynccontextmanager
    async def partition(self) -> Any:
        """The partition at work, over a gateway of its own."""
        (self.shared / "channel").mkdir(exist_ok=True)
        gateway = EmbeddedGatewayProcess(self.state, EmbeddedGateway(), isolation="prefer")
        client = await gateway.start()
        around = PartitionContext(
            config=self.config,
            identity=self.identity,
            store=self.store,
            gateway=client,
            state_dir=self.state,
            channel=RegionChannel(self.config.channel, self.shared / "channel", "east"),
            image=WORKER_IMAGE,
            fetch_task=self._fetch,
            fetch_model=self._no_model,
            publish_model=self._publish,
            report=lambda message, durable: self.reports.append(message),
            record_event=lambda _, action: self.events.append(action),
            log=lambda job, source, line: self.lines.append(f"{source}: {line}"),
            isolation=await isolation_of(self.config, client),
        )
        partition = PartitionRunner(around, self.start)
        partition.begin()
        try:
            yield partition
        finally:
            partition.feed(Stopped("the test is over", discard=True))
            await partition.drained()
            await client.aclose()
            await gateway.stop()
            self.store.close()

    async def _fetch(self, digest: str) -> TaskFolder:
        return TaskFolder(self.bundle)

    async def _no_model(self, digest: str, into: Path) -> None:
        raise AssertionError("the job begins with what its task makes")

    async def _publish(self, job: str, ps: PsProcess, round_: int) -> str:
        self.model = b"".join([chunk.data async for chunk in ps.model(round_)])
        return "sha256:published"

    async def until(self, holds: Callable[[], object], what: str, seconds: float = 150) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not holds():  # noqa: ASYNC110 - what is waited for knows of no event loop
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{what}\n" + "\n".join(map(str, [*self.events[-5:], *self.lines[-20:]]))) from None


def _pipeline(*stages: tuple[int, int], degree: int = 1, **more: Any) -> agent_pb2.Pipeline:
    cut = [agent_pb2.Stage(first_layer=first, last_layer=last) for first, last in stages]
    return agent_pb2.Pipeline(stages=cut, degree=degree, micro_batch=4, **more)


def _alone(shard: Path) -> dict[str, torch.Tensor]:
    """The model that a single process makes of the same samples."""
    namespace: dict[str, Any] = {}
    exec(TRANSFORMER, namespace)
    layers = Layers.declared(namespace["layers"]({}), SEED)
    model, data = layers.stage(0, 4).train(), namespace["dataset"](str(shard), "train", {})
    optimizer = namespace["optimizer"](model.parameters(), {})
    stream = BatchStream(data, SEED, "east", 0, 1, BATCH)
    for step in range(1, STEPS * ROUNDS + 1):
        optimizer.zero_grad()
        namespace["loss"](model, stream.batch(step)).backward()
        optimizer.step()
    return dict(model.named_parameters())


def _tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = (8 + size + at for at in entry["data_offsets"])
            found[name] = torch.frombuffer(bytearray(data[start:stop]), dtype=torch.float32).reshape(entry["shape"])
    return found


async def _to_its_end(region: Region, partition: PartitionRunner) -> None:
    await region.until(lambda: partition.machine.state in ("finished", "failed"), "the end")
    assert partition.machine.error is None, [partition.machine.error, *region.lines[-20:]]
    partition.feed(PublishAsked())
    await region.until(lambda: partition.machine.state == "published", "the model")


def _check(region: Region) -> None:
    """The same model as one process makes, and every sample counted once."""
    assert region.reports[-1].samples == STEPS * ROUNDS * BATCH
    made, expected = _tensors(region.model), _alone(region.shard)
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(made[name], tensor.detach(), rtol=0, atol=1e-3)
    losses = [report.evaluation.metrics["loss"] for report in region.reports if "loss" in report.evaluation.metrics]
    assert losses[-1] < 0.75 * nn.functional.cross_entropy(torch.zeros(1, 27), torch.zeros(1, dtype=torch.long))


def test_a_transformer_in_stages_learns_as_in_one_process(tmp_path: Path) -> None:
    """Two stages of two workers each; three of one are those of the next test."""
    region = Region(tmp_path, _pipeline((0, 2), (3, 4), degree=2, order="gpipe"), 4)

    async def run() -> None:
        async with region.partition() as partition:
            await _to_its_end(region, partition)

    asyncio.run(run())
    assert "worker-failed" not in {action.kind for action in region.events}
    _check(region)


def _training() -> list[psutil.Process]:
    """Worker replicas: processes that the gateway's warm parent has forked."""
    gateways = running_as("region_agent.gateway.embedded", psutil.Process().children())
    parents = [parent for gateway in gateways for parent in running_as("zygote", gateway.children())]
    return sorted((p for parent in parents for p in parent.children()), key=lambda process: process.create_time())


def test_a_stage_that_is_killed_costs_no_step(tmp_path: Path) -> None:
    region = Region(tmp_path, _pipeline((0, 1), (2, 2), (3, 4)), 3)

    async def run() -> None:
        async with region.partition() as partition:
            await region.until(lambda: partition.machine._view.round >= 1, "the first round")
            replicas = _training()
            assert len(replicas) == 3, replicas
            replicas[1].kill()
            await _to_its_end(region, partition)

    asyncio.run(run())
    kinds = [action.kind for action in region.events]
    assert "worker-failed" in kinds
    _check(region)


def test_a_job_asks_for_a_pipeline_and_gets_it(running_pair: Running) -> None:
    """From the job file to the result: profiled, planned, priced, run in stages in both regions."""
    running, federation = running_pair, running_pair.federation
    job = str(running.job_folder(named("pipeline")) / "job.yaml")
    federation.control_plane("profile", job, timeout=150)
    two_stages = ("--set", "parallelism.pipeline.stages=2", "--set", "train.end.epochs=6")
    submitted = running.submit(*two_stages[1::2])
    plan = running.describe(submitted)["plan"]
    assert [len(part["pipeline"]["stages"]) for part in plan["partitions"]] == [2, 2]
    ended = running.wait_end(submitted)
    check_succeeded(ended)
    used = [event for event in running.events(submitted) if event["kind"] == "collective.used"]
    assert {event["region"] for event in used} == set(PAIR)
    assert all("a pipeline of 2 stages" in event["data"]["collective"] for event in used)
    # Later plans rest on what its steps took.
    later = json.loads(federation.control_plane("explain", job, *two_stages, "-o", "json", timeout=60).stdout)["data"]
    for ran, again in zip(ended["result"]["regions"], later["partitions"], strict=True):
        pace = min(max(ran["step_seconds"] / ran["predicted_step_seconds"], 0.5), 4.0)
        assert again["pipeline"]["pace"] == pytest.approx(pace, abs=0.001)
        assert again["pipeline"]["why"][-1].startswith("a step is expected to take ")
