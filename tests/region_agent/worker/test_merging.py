"""Which collective a partition's workers take, all alike."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from support.memory_channel import MemoryChannel

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import Invocation
from region_agent.worker.task import TaskModule
from region_agent.worker.training import merging
from region_agent.worker.training.merging import FencedChannel, Merging, PeerTimeout, merging_for
from sync.channel_clients import FileChannel, fence_key
from sync.collective import ChannelCosts
from sync.flat import FlatModel

CHEAP = asdict(ChannelCosts(1e-4, 1e-4, 1e9, 1e9))
SLOW = asdict(ChannelCosts(0.1, 0.02, 1e8, 1e8))


def _opened(tmp_path: Any, module: torch.nn.Module, **more: Any) -> Merging:
    call = Invocation(
        job="job-1", region="east", attempt=1, token="", ps_address="", ps_name="", ca_pem="",
        channel_address="", bundle_key="", module="", config={}, splits={}, region_batch=4, steps_per_round=1, rounds=1,
        seed=0, slice_seconds=1.0, **{"worker": 0, "workers": 4, "channel": "redis", **more},
    )  # fmt: skip
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return merging_for(
        call, TaskModule(tmp_path, {}, {}), optimizer, FlatModel(module), FileChannel(tmp_path), time.monotonic()
    )


def _merging(tmp_path: Any, size: int = 10, **more: Any) -> Merging:
    made = _opened(tmp_path, torch.nn.Linear(size, 1), **more)
    made.close()
    return made


def _steps(tmp_path: Any, **more: Any) -> list[np.ndarray[Any, Any]]:
    """Three steps of three workers, each with its own samples; the models that they end with."""
    tmp_path.mkdir()

    def work(worker: int) -> np.ndarray[Any, Any]:
        module = torch.nn.Linear(5, 4)
        module.register_buffer("seen", torch.zeros(1))  # A statistic, which no gradient trains.
        flat = FlatModel(module)
        flat.load(np.linspace(0.5, 1, flat.layout.size, dtype=np.float32))
        draw = torch.Generator().manual_seed(worker)
        merging = _opened(tmp_path, module, worker=worker, workers=3, channel="file", **more)
        for step in range(1, 4):
            module.zero_grad()
            x = torch.randn(4, 5, generator=draw)
            module(x).square().mean().backward()
            module.seen.fill_(step + worker)
            merging.step(None, step, 4, 0.0)  # type: ignore[arg-type]
        merging.settle(3)
        merging.close()
        return flat.vector()

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(work, range(3)))


def test_a_worker_alone_merges_with_nobody(tmp_path: Any) -> None:
    assert _merging(tmp_path, workers=1, collective="k-reduce").name == "a worker alone"


def test_in_shared_memory_the_server_merges_unless_the_job_says_otherwise(tmp_path: Any) -> None:
    assert _merging(tmp_path, channel="file", collective="auto").name == "server-reduce"
    assert _merging(tmp_path, channel="file", collective="k-reduce", merging={"k": 3}).name == "k-reduce with K = 3"


def test_small_models_are_merged_in_one_piece_where_requests_take_long(tmp_path: Any) -> None:
    assert _merging(tmp_path, collective="auto", channel_costs=SLOW).name in ("all-reduce", "k-reduce with K = 1")
    assert _merging(tmp_path, collective="k-reduce", channel_costs=SLOW).name == "k-reduce with K = 1"


def test_large_models_are_merged_in_parts(tmp_path: Any) -> None:
    name = _merging(tmp_path, 4_000_000, collective="auto", channel_costs=CHEAP).name
    assert name in ("pipelined-scatter-reduce", "k-reduce with K = 4")


def test_many_workers_merge_in_groups_where_an_owner_would_read_long(tmp_path: Any) -> None:
    asked = {"workers": 16, "collective": "k-reduce", "channel_costs": SLOW}
    assert _merging(tmp_path, 4_000_000, merging={"k": 4}, **asked).name == "k-reduce with K = 4 in 4 groups"
    assert _merging(tmp_path, 4_000_000, merging={"k": 4, "staleness": 1}, **asked).name == "k-reduce with K = 4"
    assert _merging(tmp_path, **asked).name == "k-reduce with K = 1"


def test_lists_go_to_all_where_that_is_asked_for_or_suits(tmp_path: Any) -> None:
    published = {"collective": "isp", "merging": {"k": 0}}
    assert _merging(tmp_path, **published).name == "isp"
    assert _merging(tmp_path, 4_000_000, workers=16, channel_costs=CHEAP, **published).name == "isp"
    assert _merging(tmp_path, collective="isp", channel_costs=SLOW).name == "isp"
    assert _merging(tmp_path, 4_000_000, workers=16, collective="isp", channel_costs=CHEAP).name.startswith("isp with")
    assert _merging(tmp_path, workers=2, channel="file", collective="isp").name == "isp"
    assert _merging(tmp_path, workers=3, channel="file", collective="isp").name == "isp with K = 3"


@pytest.mark.parametrize("k", [0, 2])
def test_a_step_of_changes_is_their_sum_or_their_mean(tmp_path: Any, k: int) -> None:
    everything = {"collective": "isp", "merging": {"k": k, "significance": 0.0}}
    begin = np.linspace(0.5, 1, 25, dtype=np.float32)[:24]
    means = _steps(tmp_path / "means", collective="k-reduce", merging={"k": 2})
    everything["merging"] = {"k": k, "significance": 0.0, "mean": 1.0}
    changes = _steps(tmp_path / "changes", **everything)
    for one in changes:
        assert np.array_equal(one, changes[0])
        np.testing.assert_allclose(one[:24], means[0][:24], rtol=1e-5)
        assert one[24] == 4.0, "of 3, 4 and 5: it is no part of the steps"
    everything["merging"] = {"k": k, "significance": 0.0}
    summed = _steps(tmp_path / "sums", **everything)
    assert np.linalg.norm(summed[0][:24] - begin) > 2 * np.linalg.norm(means[0][:24] - begin)


def test_workers_without_a_part_of_the_merge_process_more_samples(tmp_path: Any) -> None:
    settings = {"k": 1, "staleness": 1}
    weights = _merging(tmp_path, collective="k-reduce", merging={**settings, "ratio": 2.5}).weights
    assert sorted(weights) == [1.0, 2.5, 2.5, 2.5]
    assert not _merging(tmp_path, collective="k-reduce", merging=settings).weights
    assert set(_merging(tmp_path, collective="k-reduce", merging={**settings, "k": 4, "ratio": 2.5}).weights) == {1.0}


def test_there_are_never_more_parts_than_workers(tmp_path: Any) -> None:
    assert _merging(tmp_path, collective="isp", merging={"k": 9}).name == "isp with K = 4"


def test_settings_that_do_not_fit_are_refused(tmp_path: Any) -> None:
    with pytest.raises(GeofedError, match="isp does not support codec 'int8'"):
        _merging(tmp_path, collective="isp", merging_codec="int8")
    for collective in ("isp", "k-reduce"):
        made = _merging(tmp_path, collective=collective, merging_codec="int4", merging={"k": 4})
        assert made.name == f"{collective} with K = 4"


def test_who_looks_in_vain_sees_that_the_attempt_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = [100.0], MemoryChannel()
    monkeypatch.setattr(merging.time, "monotonic", lambda: clock[0])
    fenced = FencedChannel(store, 1)  # type: ignore[arg-type]
    store.put(fence_key(1), [b"over"])
    # Not where a value has only just been missed: every look is billed.
    for _ in range(3):
        assert fenced.get("k") is None
        clock[0] += 1
    store.put("there", [b"1"])
    assert fenced.get("there") is not None
    assert fenced.get("k") is None
    clock[0] += 4
    assert fenced.get("k") is None
    clock[0] += 4
    with pytest.raises(GeofedError) as raised:
        fenced.get("k")
    assert raised.value.code == "FENCED"


def test_a_wait_ends_with_the_invocation_or_after_many_of_the_longest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(merging.time, "monotonic", lambda: clock[0])
    timeout = PeerTimeout(deadline=2000.0)
    assert timeout() == 1000.0
    for seconds in (30.0, 2.0):
        timeout.begin_step()
        clock[0] += seconds
        timeout.end_step()
    assert timeout() == 600.0
    clock[0] = 1500.0
    assert timeout() == 500.0
    quick = PeerTimeout(deadline=9000.0)
    quick.begin_step()
    clock[0] += 1.0
    quick.end_step()
    assert quick() == 120.0
