"""How long the engine has workers wait for regions that are late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from sync.channel import FileChannel
from sync.codec import codec_named
from sync.ps import engine as engine_module
from sync.ps.actions import StartPatience
from sync.ps.engine import Engine
from sync.ps.machine import Setup
from sync.ps.storage import Storage
from sync.ps.works import Works
from sync.wan import policy_named

NOW = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: NOW))


def _waits(folder: Path, *asked: StartPatience, quorum: int = 0) -> list[float]:
    """Seconds that each of these begins to wait for: a region `a`, and others that have made a round each second."""

    async def waits() -> list[float]:
        setup = Setup("a", ("a", "b", "c"), 2, 40, 1, 0, quorum=quorum, lead=8, background=True)
        storage = Storage(folder / "ps", setup)
        engine = Engine(Works(setup, storage, FileChannel(folder / "channel"), policy_named("ma"), codec_named("fp32")))
        found = []
        for region in setup.regions:
            for ago in range(10, 0, -1):
                engine._punctuality.came(region, NOW - ago)
        for patience in asked:
            engine._hold_up(patience)
            assert engine._patience is not None
            found.append(engine._patience.when() - asyncio.get_running_loop().time())
        engine._patience.cancel()  # type: ignore[union-attr]  # each has begun one
        await engine.close()
        return found

    return asyncio.run(waits())


def test_of_a_region_that_may_be_slow_only_what_comes_after_it_was_due_is_spared(tmp_path: Path) -> None:
    (seconds,) = _waits(tmp_path, StartPatience(20, ("b",)))
    assert seconds == pytest.approx(0.5 + 0.25, abs=0.1), "due in half a second, a quarter of a round spared"


def test_a_region_that_others_hear_is_waited_for_with_what_is_spared_alone(tmp_path: Path) -> None:
    (seconds,) = _waits(tmp_path, StartPatience(20, ("b",), elsewhere=("b",)))
    assert seconds == pytest.approx(0.25, abs=0.1)
    (seconds,) = _waits(tmp_path / "both", StartPatience(20, ("b", "c"), elsewhere=("b",)))
    assert seconds == pytest.approx(0.75, abs=0.1), "the other one may be slow"


def test_who_waits_because_of_its_lead_spares_nothing(tmp_path: Path) -> None:
    (seconds,) = _waits(tmp_path, StartPatience(20, ("b",), elsewhere=("b",)), quorum=1)
    assert seconds == pytest.approx(1.25, abs=0.1)


def test_a_region_that_would_be_alone_waits_for_two_seconds_at_no_charge(tmp_path: Path) -> None:
    alone = StartPatience(20, ("b", "c"), alone=True)
    first, second = _waits(tmp_path, alone, StartPatience(21, ("b",), elsewhere=("b",)))
    assert first == pytest.approx(2.0, abs=0.1)
    assert second == pytest.approx(0.25, abs=0.1)
