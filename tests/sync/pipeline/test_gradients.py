"""However a model is cut and run, the gradients are those of a single process."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.memory_channel import MemoryChannel
from support.pipelines import WorkerGroup, mse
from support.stores import RedisServer, S3Server, s3_server, start_redis
from torch import nn

from sync.channel import Channel
from sync.channel_clients import FileChannel, open_channel
from sync.collective import Settings
from sync.pipeline import Layers, Pipeline

WIDTHS = (5, 7, 4, 6, 3)


class _Frozen(nn.Linear):
    """A layer of which only the bias is trained."""

    def __init__(self, there: int, out: int) -> None:
        super().__init__(there, out)
        self.weight.requires_grad_(False)


def _model(layers: int, *, frozen: int = -1) -> Layers:
    widths = [WIDTHS[at % len(WIDTHS)] for at in range(layers + 1)]

    def layer(at: int) -> nn.Module:
        linear = (_Frozen if at == frozen else nn.Linear)(widths[at], widths[at + 1])
        # In place, as many models have it: what comes from another stage must bear that too.
        return nn.Sequential(nn.ReLU(inplace=True), linear) if at else nn.Sequential(nn.Tanh(), linear)

    return Layers.declared([lambda at=at: layer(at) for at in range(layers)], seed=3)


def _batch(samples: int, layers: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    out = WIDTHS[layers % len(WIDTHS)]
    return torch.randn(samples, 5, generator=draw, dtype=dtype), torch.randn(samples, out, generator=draw, dtype=dtype)


def _alone(layers: Layers, batch: Any, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """What a single process makes of all samples at once."""
    model = layers.stage(0, len(layers) - 1).to(dtype)
    loss = mse(model, (batch[0].clone(), batch[1]))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 5))
    cuts = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
    edges = [0, *sorted(cuts), layers]
    stages = tuple((a, b - 1) for a, b in itertools.pairwise(edges))
    degree = draw(st.integers(1, 3))
    return {
        "layers": layers,
        "shape": Pipeline(
            stages,
            degree,
            draw(st.integers(1, 4)),
            draw(st.sampled_from(["gpipe", "1f1b"])),
            tuple(draw(st.booleans()) for _ in stages),
        ),
        "samples": draw(st.integers(degree, 11)),
        "frozen": draw(st.integers(-1, layers - 1)),
        "overlap": draw(st.booleans()),
        "pattern": draw(st.sampled_from(["pipelined-scatter-reduce", "k-reduce", "all-reduce"])),
        "least_chunk": draw(st.sampled_from([1, 1024])),
    }


def _check(case: dict[str, Any], dtype: torch.dtype, open_one: Callable[[], Channel]) -> None:
    layers = _model(case["layers"], frozen=case["frozen"])
    batches = [_batch(case["samples"], case["layers"], dtype, seed) for seed in (0, 1)]
    chosen = Settings(pattern=case["pattern"], timeout_seconds=30)
    # What goes through a merge is rounded to float32, whatever the model is in.
    tolerance = 1e-6 if dtype is torch.float32 or case["shape"].degree > 1 else 1e-12
    with (
        # These models are small; with 1 what the first layers give is merged apart all the same.
        patch("sync.pipeline._merge._MIN_CHUNK_ELEMENTS", case["least_chunk"]),
        WorkerGroup(case["shape"], layers, open_one, settings=chosen, dtype=dtype, overlap=case["overlap"]) as group,
    ):
        for step, batch in enumerate(batches, 1):
            loss = group.step(step, batch, then=step == 1)
            expected_loss, expected = _alone(layers, batch, dtype)
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            for replica in range(case["shape"].degree):
                found = group.gradients(replica)
                for name, gradient in expected.items():
                    torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@settings(max_examples=budget(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=_cases(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_any_cut_degree_order_and_rematerialisation_gives_the_same(case: dict[str, Any], dtype: torch.dtype) -> None:
    store = MemoryChannel()
    _check(case, dtype, store.another)
    # All that one stage sends to another is consumed and deleted; what is left belongs to the merges of the last steps.
    assert [key for key in store.values if "/c" not in key] == []


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


SHAPE = Pipeline(((0, 0), (1, 2), (3, 3)), 2, 2, "1f1b", (True, False, False))
CASE = {"layers": 4, "shape": SHAPE, "samples": 9, "frozen": 1, "overlap": True, "pattern": "pipelined-scatter-reduce"}
CASE |= {"least_chunk": 1}


def test_over_files(tmp_path: Path) -> None:
    _check(CASE, torch.float32, lambda: FileChannel(str(tmp_path / "channel")))


@pytest.mark.processes
def test_over_redis(redis: RedisServer) -> None:
    _check(CASE, torch.float32, lambda: open_channel("redis", redis.unix("pipeline")))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.mark.processes
def test_over_an_object_store(s3: S3Server) -> None:
    _check(CASE, torch.float32, lambda: open_channel("s3", s3.address("pipeline")))


class _CountingBytes(MemoryChannel):
    """Counts the bytes that are put."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def put(self, key: str, pieces: Any) -> None:
        self.bytes += sum(len(piece) for piece in pieces)
        super().put(key, pieces)


def test_bf16_halves_what_stages_send_and_comes_near() -> None:
    layers = _model(4)
    batch = _batch(64, 4, torch.float32)
    shape = Pipeline(((0, 1), (2, 3)), 1, 64)
    _, expected = _alone(layers, batch, torch.float32)
    sent = {}
    for codec in ("fp32", "bf16"):
        channel = _CountingBytes()
        with WorkerGroup(shape, layers, lambda channel=channel: channel, codec=codec) as group:
            group.step(1, batch)
            for name, gradient in expected.items():
                torch.testing.assert_close(group.gradients()[name], gradient, rtol=0.1, atol=5e-3)
        sent[codec] = channel.bytes
    assert sent["bf16"] < 0.65 * sent["fp32"]


def _dropping() -> Layers:
    return Layers.of(
        lambda: nn.Sequential(
            OrderedDict(
                a=nn.Linear(5, 16), drop=nn.Dropout(0.4), b=nn.Linear(16, 8), norm=nn.BatchNorm1d(8), c=nn.Linear(8, 3)
            )
        ),
        seed=1,
    )


# The generators belong to the process: with one micro-batch, or with one stage, only one thread at a time draws.
@pytest.mark.parametrize(
    ("micro_batch", "cases"),
    [
        (
            8,
            [
                (((0, 4),), "gpipe", (False,)),
                (((0, 1), (2, 4)), "1f1b", (True, False)),
                (((0, 1), (2, 4)), "gpipe", (True, True)),
                (((0, 0), (1, 3), (4, 4)), "1f1b", (False, True, False)),
            ],
        ),
        (3, [(((0, 4),), "gpipe", (False,)), (((0, 4),), "1f1b", (False,)), (((0, 4),), "1f1b", (True,))]),
    ],
    ids=["one micro-batch", "one stage"],
)
def test_what_layers_draw_at_random_does_not_depend_on_cut_order_or_rematerialisation(
    micro_batch: int, cases: list[Any]
) -> None:
    batch = _batch(8, 4, torch.float32)
    found = []
    for stages, order, again in cases:
        with WorkerGroup(Pipeline(stages, 1, micro_batch, order, again), _dropping(), MemoryChannel().another) as group:
            group.step(1, batch)
            state = {}
            for worker in group.workers:
                state |= {name: buffer.clone() for name, buffer in worker.layers.named_buffers()}
            found.append((group.gradients(), state))
    first, buffers = found[0]
    for gradients, state in found[1:]:
        for name, gradient in first.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
        assert state.keys() == buffers.keys()
        assert all(torch.allclose(state[name], buffers[name]) for name in buffers)
