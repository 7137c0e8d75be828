"""What the first layers of a stage give is merged apart, since it comes last."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.memory_channel import MemoryChannel
from support.pipelines import WorkerGroup
from torch import nn

from sync.channel import Channel
from sync.collective import ChannelCosts, Settings
from sync.flat import FlatModel
from sync.merging import Member
from sync.pipeline import GroupMerge, Layers, Pipeline

DEGREE = 4
SETTINGS = Settings(pattern="pipelined-scatter-reduce", timeout_seconds=10)
COSTS = ChannelCosts(0.01, 0.01, 1e8, 1e8)


def _layers(first: int = 128) -> Layers:
    return Layers.declared([lambda: nn.Linear(64, first), lambda: nn.Linear(first, 64), lambda: nn.Linear(64, 64)], 0)


def _merged_apart(settings: Settings, *, first: int = 128, overlap: bool = True) -> list[int]:
    """Merged chunks of each vector that is merged by itself, by where it begins."""
    store, told = MemoryChannel(), list[str]()
    store.before = lambda what, key: told.append(key) if what == "put" and "/m/" in key else None
    batch = torch.randn(8, 64), torch.randn(8, 64)
    shape = Pipeline(((0, 2),), DEGREE, 2, "gpipe")
    with WorkerGroup(shape, _layers(first), store.another, settings=settings, overlap=overlap) as group:
        # The first step shows what the module does.
        group.step(1, batch)
        told.clear()
        group.step(2, batch)
    starts = sorted(int(key.split("/")[3]) for key in told)
    return [starts.count(start) for start in sorted(set(starts))]


def test_every_replica_owns_as_much_of_what_comes_last_as_of_the_rest() -> None:
    assert _merged_apart(SETTINGS) == [DEGREE, DEGREE]


@pytest.mark.parametrize(
    "settings",
    [
        replace(SETTINGS, asked=COSTS),
        replace(SETTINGS, pattern="scatter-reduce"),
    ],
)
def test_all_is_one_vector_where_requests_count_and_where_the_pattern_is_another(settings: Settings) -> None:
    assert _merged_apart(settings) == [DEGREE]


def test_all_is_one_vector_where_it_leaves_at_once_and_where_it_is_small() -> None:
    assert _merged_apart(SETTINGS, overlap=False) == [DEGREE]
    assert _merged_apart(SETTINGS, first=8) == [DEGREE]


def test_what_is_held_back_is_taken_up_by_the_next_invocation() -> None:
    store = MemoryChannel()
    batch = torch.randn(8, 64), torch.randn(8, 64)
    shape = Pipeline(((0, 2),), DEGREE, 2, "gpipe")
    settings = replace(SETTINGS, codec="bf16")
    with WorkerGroup(shape, _layers(), store.another, settings=settings) as group:
        group.step(1, batch)
        held = group.workers[1].merge.state()
        again: Channel = store.another()  # type: ignore[assignment]
        other = GroupMerge(FlatModel(_layers().stage(0, 2)), settings, Member(1, DEGREE, 1), again, "p/1/c0")
        other.restore(held)
        found = other.state()
        other.close()
    assert {name.split("/")[0] for name in held.tensors} == {"0", str(64 * 128 + 128)}
    assert found.facts == held.facts
    assert found.tensors.keys() == held.tensors.keys()
    assert all((found.tensors[name] == held.tensors[name]).all() for name in held.tensors)
