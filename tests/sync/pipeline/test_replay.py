"""What came over the cuts is enough to make a stage's steps again, alone, and whatever its replicas were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.memory_channel import MemoryChannel
from support.pipelines import WorkerGroup, cut, mse, shares
from torch import nn

from sync.channel import Channel
from sync.collective import Settings
from sync.flat import FlatModel
from sync.merging import Member
from sync.pipeline import GroupMerge, Layers, Pipeline, ReplayLog, StageRunner, logged_keys

LAYERS = 4


def _layers() -> Layers:
    # Running statistics: what must come out the same is more than a function of the inputs. Nothing random, since
    # the group's threads share one generator, which workers in processes of their own do not.
    def layer(at: int) -> nn.Module:
        return nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6))

    return Layers.declared([lambda at=at: layer(at) for at in range(LAYERS)], seed=2)


@st.composite
def _shapes(draw: st.DrawFn) -> Pipeline:
    ends = sorted(draw(st.sets(st.integers(0, LAYERS - 2), min_size=1, max_size=LAYERS - 1)))
    stages = tuple(zip([0, *(end + 1 for end in ends)], [*ends, LAYERS - 1], strict=True))
    again = tuple(draw(st.booleans()) for _ in stages)
    order = draw(st.sampled_from(["gpipe", "1f1b"]))
    return Pipeline(stages, draw(st.integers(1, 3)), draw(st.sampled_from([2, 4])), order, again)


@settings(max_examples=budget(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_shapes(), st.integers(0, 9), st.sampled_from(["fp32", "bf16"]))
def test_a_step_made_again_is_the_step_that_was_made(shape: Pipeline, seed: int, codec: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    batch = torch.randn(12, 6, generator=draw), torch.randn(12, 6, generator=draw)
    channel, layers = MemoryChannel(), _layers()
    samples = tuple(shares(12, shape.degree))
    settings_ = Settings(pattern="pipelined-scatter-reduce", timeout_seconds=10)
    with WorkerGroup(
        shape, layers, channel.another, settings=settings_, codec=codec, timeout_seconds=10, logs=True
    ) as group:
        loss = group.step(1, batch)
        made = [
            (worker.flat.gradient(), {name: value.clone() for name, value in worker.layers.named_buffers()})
            for worker in group.workers
        ]
    logged = ReplayLog("p/1", shape, samples)
    starts = [sum(samples[:replica]) for replica in range(shape.degree)]
    parts = [
        cut(tuple(part[start : start + count] for part in batch), shape.sizes(count))
        for start, count in zip(starts, samples, strict=True)
    ]
    # Alone in its stage, and with a merge that would wait for nobody.
    alone = Pipeline(shape.stages, 1, 1, shape.order, shape.rematerialise)
    for stage in range(len(shape.stages)):
        assert all(channel.has(key) for key in logged_keys(logged, stage, 1))
        before = dict(channel.values)
        module = layers.stage(*shape.stages[stage])
        flat, own = FlatModel(module), channel.another()
        told: Channel = own  # type: ignore[assignment]
        merge = GroupMerge(flat, settings_, Member(0, 1, 2), told, f"p/2/c{stage}")
        runner = StageRunner(alone, stage, module, mse, told, "p/2", merge, codec=codec)
        try:
            done = runner.replay(logged, 1, parts if runner.reads_data else [])
        finally:
            runner.close()
        gradient, buffers = made[stage * shape.degree]
        torch.testing.assert_close(torch.from_numpy(flat.gradient()), torch.from_numpy(gradient), atol=2e-6, rtol=1e-5)
        for name, value in module.named_buffers():
            if "num_batches" not in name:
                torch.testing.assert_close(value, buffers[name], atol=1e-6, rtol=1e-5)
        if runner.is_last:
            assert done.loss == pytest.approx(loss, rel=1e-5)
        # Nothing was sent, and nothing that another might need was taken away.
        assert channel.values == before


def test_what_nobody_logs_is_deleted() -> None:
    channel = MemoryChannel()
    shape = Pipeline(((0, 1), (2, 3)), 1, 4, "1f1b")
    batch = torch.randn(12, 6), torch.randn(12, 6)
    with WorkerGroup(shape, _layers(), channel.another) as group:
        group.step(1, batch)
    logged = ReplayLog("p/1", shape, (12,))
    assert not [key for stage in range(2) for key in logged_keys(logged, stage, 1) if channel.has(key)]


def test_every_replica_of_every_stage_receives_in_a_folder_of_its_own() -> None:
    # Where a channel is a folder, each value that comes into it wakes all who wait for one there.
    shape = Pipeline(((0, 1), (2, 2), (3, 3)), 2, 3, "1f1b")
    logged = ReplayLog("p/1", shape, (6, 6))
    by_stage = [
        {key.rpartition("/")[0] for step in (1, 2) for key in logged_keys(logged, stage, step)} for stage in range(3)
    ]
    assert [len(folders) for folders in by_stage] == [2, 2, 2]
    assert len(set().union(*by_stage)) == 6
