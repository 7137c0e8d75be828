"""The first model does not travel where a region's own workers have made the same."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.exchange_site import Site
from support.pki import Authority

from sync import framing
from sync.channel_clients import FileChannel
from sync.codec import codec_named
from sync.layout import Layout, Slot
from sync.ps.core.actions import CheckInitialModel, StoreOwnUpdate
from sync.ps.core.background import Background
from sync.ps.core.events import Attached, Configured, OwnUpdateStored
from sync.ps.core.machine import FIRST_WEIGHT, Machine, Setup
from sync.ps.core.synchronous import Synchronous
from sync.ps.execution.executor import ActionExecutor
from sync.ps.execution.own_updates import FramedUpdate
from sync.ps.execution.storage import Storage
from sync.wan import policy_of

MIB = 1 << 20
SETUP = Setup("b", ("a", "b"), 1, 2, 1, 0)
LAYOUT = Layout((Slot("w", (1000,), "float32"), Slot("running_var", (7,), "float32")), 1)


def executor_of(folder: Path, region: str, model: np.ndarray[Any, np.dtype[np.float32]]) -> ActionExecutor:
    setup = replace(SETUP, region=region)
    storage = Storage(folder / region, setup)
    storage.keep_layout(LAYOUT)
    channel = FileChannel(folder / f"{region}-channel")
    channel.put("init/1/0", framing.encode({"model": model}))
    return ActionExecutor(setup, storage, channel, policy_of("ma"), codec_named("ternary"))


def test_both_regions_make_the_same_bytes_of_the_same_model(tmp_path: Path) -> None:
    model = np.random.default_rng(1).normal(size=LAYOUT.size).astype(np.float32)
    a = executor_of(tmp_path, "a", model)
    made = a.do(StoreOwnUpdate(0, 1, "init/1/0", "", FIRST_WEIGHT, 0), 1)
    assert isinstance(made, OwnUpdateStored)
    path = a.storage.path_of(made.manifest)
    same = executor_of(tmp_path, "b", model).reproduced(CheckInitialModel("init/1/0"))
    assert same is not None
    assert (same.digest, same.total_bytes) == (made.manifest.digest, made.manifest.total_bytes)
    assert b"".join(same.pieces) == path.read_bytes()
    other = executor_of(tmp_path / "other", "b", np.nextafter(model, np.float32(9))).reproduced(
        CheckInitialModel("init/1/0")
    )
    assert other is not None
    assert other.digest != made.manifest.digest


def test_a_worker_that_has_gone_or_made_no_numbers_is_no_fault(tmp_path: Path) -> None:
    executor = executor_of(tmp_path, "b", np.full(LAYOUT.size, np.nan, np.float32))
    assert executor.reproduced(CheckInitialModel("init/1/0")) is None
    assert executor.reproduced(CheckInitialModel("init/2/0")) is None


@pytest.mark.parametrize("kind", [Synchronous, Background])
def test_only_those_whose_model_does_not_count_look_and_they_look_once(kind: Callable[..., Machine]) -> None:
    for region, looks in (("a", 0), ("b", 1)):
        machine = kind(replace(SETUP, region=region, workers=2))
        actions = machine.handle(Configured(1, 1, ()))
        for call, key in ((1, ""), (2, "init/1/0"), (3, "init/1/0")):
            actions += machine.handle(Attached(call, call % 2, 1, key))
        assert sum(isinstance(action, CheckInitialModel) for action in actions) == looks
        assert sum(isinstance(action, StoreOwnUpdate) for action in actions) == 1 - looks


# Between two real sites

AUTHORITY = Authority()


@contextlib.asynccontextmanager
async def _two(folder: Path, **ports: Any) -> AsyncIterator[tuple[Site, Site]]:
    sites = [Site(name, ("east", "west"), folder / name, AUTHORITY.region(name)) for name in ("east", "west")]
    for site in sites:
        site.machine.sequence = -1
        await site.start(**ports)
    try:
        yield sites[0], sites[1]
    finally:
        for site in sites:
            await site.stop()


def _run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def _framed(data: bytes) -> FramedUpdate:
    # Pieces as a frame has them: of different sizes, the first one small.
    cuts = [0, 60, 64, len(data) // 2, len(data)]
    pieces = [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]
    return FramedUpdate(pieces, len(data), framing.digest_of([data]))


@pytest.mark.parametrize(("size", "bulk"), [(3000, 0), (8 * MIB, 0), (8 * MIB, None)])
def test_what_is_here_already_is_not_sent(tmp_path: Path, size: int, bulk: int | None) -> None:
    async def within() -> None:
        async with _two(tmp_path, bulk_port=bulk) as (east, west):
            data = np.random.default_rng(2).bytes(size)
            west.service._reproduced(_framed(data))
            manifest = east.make(0, data)
            await east.carry(west.peer(), manifest)
            assert west.path("east", 0).read_bytes() == data
            assert west.stored[0].content == manifest.content
            assert west.links.received_bytes == {}
            # What comes after it travels.
            await east.carry(west.peer(), east.make(1, data))
            assert west.links.received_bytes == {"east": size}

    _run(within)


@pytest.mark.parametrize("other", ["another model", "another round"])
def test_what_is_not_the_same_travels(tmp_path: Path, other: str) -> None:
    async def within() -> None:
        async with _two(tmp_path) as (east, west):
            data = np.random.default_rng(3).bytes(2 * MIB)
            west.service._reproduced(_framed(data[::-1] if other == "another model" else data))
            manifest = east.make(0 if other == "another model" else 1, data)
            await east.carry(west.peer(), manifest)
            assert west.path("east", manifest.sequence).read_bytes() == data
            assert west.links.received_bytes == {"east": len(data)}

    _run(within)


@pytest.mark.parametrize("bulk", [0, None])
def test_a_model_on_its_way_is_cut_short_when_our_own_workers_have_made_it(tmp_path: Path, bulk: int | None) -> None:
    async def within() -> None:
        async with _two(tmp_path, bulk_port=bulk) as (east, west):
            data = np.random.default_rng(4).bytes(16 * MIB)
            manifest = east.make(0, data)
            count = west.service.count_received

            def slowly(caller: str, received: int) -> None:
                # What is not read holds the sender back.
                count(caller, received)
                time.sleep(received / MIB * 0.15)

            west.service.count_received = slowly  # type: ignore[method-assign]
            carrying = asyncio.ensure_future(east.carry(west.peer(), manifest))
            while not west.links.received_bytes:  # noqa: ASYNC110 - threads count them
                await asyncio.sleep(0.01)
            west.service._reproduced(_framed(data))
            await west.until(functools.partial(bool, west.stored))
            assert west.path("east", 0).read_bytes() == data
            await carrying
            assert west.links.received_bytes["east"] < len(data) * 3 / 4
            assert west.stored[0].content == manifest.content
            meter = east.links.peer_senders["west"].meter
            assert meter.failures == 0
            assert meter.mbps == 0.0, "what was not sent tells no rate"
            # The way is fit for use.
            west.service.count_received = count  # type: ignore[method-assign]
            await east.carry(west.peer(), east.make(1, data))
            assert west.path("east", 1).read_bytes() == data

    _run(within)


def test_what_turns_out_to_be_damaged_comes_over_the_wire(tmp_path: Path) -> None:
    async def within() -> None:
        async with _two(tmp_path) as (east, west):
            data = np.random.default_rng(5).bytes(2 * MIB)
            west.service._reproduced(replace(_framed(data[::-1]), digest=framing.digest_of([data])))
            manifest = east.make(0, data)
            await east.carry(west.peer(), manifest)
            assert west.path("east", 0).read_bytes() == data
            assert west.links.received_bytes == {"east": len(data)}

    _run(within)


def test_one_whose_region_has_a_newer_epoch_by_now_is_taken_under_that(tmp_path: Path) -> None:
    async def within() -> None:
        async with _two(tmp_path) as (east, west):
            data = np.random.default_rng(6).bytes(2 * MIB)
            old = east.make(0, data)
            west.service._arrival(old)
            west.service._reproduced(_framed(data))
            await west.until(functools.partial(bool, west.stored))
            assert west.service._arrival(replace(old, epoch=2)).manifest.epoch == 2

    _run(within)


def test_a_model_that_came_first_leaves_nothing_behind(tmp_path: Path) -> None:
    async def within() -> None:
        async with _two(tmp_path) as (east, west):
            data = np.random.default_rng(7).bytes(3000)
            await east.carry(west.peer(), east.make(0, data))
            west.service._reproduced(_framed(data))
            assert west.service._first is None

    _run(within)
