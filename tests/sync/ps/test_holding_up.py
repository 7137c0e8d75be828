"""How long the engine has workers wait for regions that are late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from sync.channel import FileChannel
from sync.codec import codec_named
from sync.ps import engine as engine_module
from sync.ps.core.actions import StartPatience, StartPause
from sync.ps.core.background import Background
from sync.ps.core.events import Stored
from sync.ps.core.machine import Setup
from sync.ps.core.membership import Punctuality
from sync.ps.engine import Engine
from sync.ps.execution.executor import ActionExecutor
from sync.ps.execution.storage import Storage
from sync.transfer.manifest import Manifest
from sync.wan import policy_of

NOW = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: NOW))


def _engine(folder: Path, quorum: int = 0) -> Engine:
    """Of a region `a`; it and others have made a round each second, the last a second ago."""
    setup = Setup("a", ("a", "b", "c"), 2, 40, 1, 0, quorum=quorum, lead=8, background=True)
    storage = Storage(folder / "ps", setup)
    engine = Engine(
        ActionExecutor(setup, storage, FileChannel(folder / "channel"), policy_of("ma"), codec_named("fp32"))
    )
    for region in setup.regions:
        for ago in range(10, 0, -1):
            engine._punctuality.came(region, NOW - ago)
    return engine


def _waits(folder: Path, *asked: StartPatience, quorum: int = 0, round_seconds: float = 0.0) -> list[float]:
    """Seconds that each of these begins to wait for; ``round_seconds``: what the region's own rounds take."""

    async def waits() -> list[float]:
        engine, found = _engine(folder, quorum), []
        assert isinstance(engine.machine, Background)
        for _ in range(3):
            engine.machine._tempo.made("a", round_seconds)
        for patience in asked:
            engine._hold_up(patience)
            assert engine._patience is not None
            found.append(engine._patience.when() - asyncio.get_running_loop().time())
        engine._wait_no_more()
        await engine.close()
        return found

    return asyncio.run(waits())


def _pauses(folder: Path, silent_seconds: float) -> float:
    """How long it keeps step with `b`, whose rounds take two seconds, and of which nothing has come for so long."""

    async def pauses() -> float:
        engine = _engine(folder)
        engine._cadence.next_round(NOW - 0.5)
        engine._cadence.came("b", 10, NOW - silent_seconds)
        engine._punctuality = Punctuality()
        for number in range(5):
            engine._punctuality.came("b", NOW - silent_seconds - 2.0 * (4 - number))
        seconds = engine._pause_seconds(StartPause(11, (("b", 2.0),)))
        await engine.close()
        return seconds

    return asyncio.run(pauses())


def test_of_a_region_that_may_be_slow_only_what_comes_after_it_was_due_is_spared(tmp_path: Path) -> None:
    (seconds,) = _waits(tmp_path, StartPatience(20, ("b",)))
    assert seconds == pytest.approx(0.5 + 0.25, abs=0.1), "due in half a second, a quarter of a round spared"


def test_a_region_that_others_hear_is_waited_for_with_what_is_spared_alone(tmp_path: Path) -> None:
    (seconds,) = _waits(tmp_path, StartPatience(20, ("b",), elsewhere=("b",)))
    assert seconds == pytest.approx(0.25, abs=0.1)
    (seconds,) = _waits(tmp_path / "both", StartPatience(20, ("b", "c"), elsewhere=("b",)))
    assert seconds == pytest.approx(0.75, abs=0.1), "the other one may be slow"


def test_who_waits_because_of_its_lead_buffer_pool_nothing(tmp_path: Path) -> None:
    (seconds,) = _waits(tmp_path, StartPatience(20, ("b",), elsewhere=("b",)), quorum=1)
    assert seconds == pytest.approx(1.25, abs=0.1)


def test_a_region_that_would_be_alone_waits_for_two_seconds_at_no_charge(tmp_path: Path) -> None:
    alone = StartPatience(20, ("b", "c"), alone=True)
    first, second = _waits(tmp_path, alone, StartPatience(21, ("b",), elsewhere=("b",)))
    assert first == pytest.approx(2.0, abs=0.1)
    assert second == pytest.approx(0.25, abs=0.1)


def test_a_region_of_our_pace_that_is_late_has_been_away(tmp_path: Path) -> None:
    (seconds,) = _waits(tmp_path, StartPatience(20, ("b",)), round_seconds=1.0)
    assert seconds == pytest.approx(0.25, abs=0.1), "only what is spared"
    (seconds,) = _waits(tmp_path / "faster", StartPatience(20, ("b",)), round_seconds=0.5)
    assert seconds == pytest.approx(0.75, abs=0.1), "it is slow: due in half a second"


def test_a_region_keeps_step_as_long_as_the_slower_one_is_not_silent(tmp_path: Path) -> None:
    assert _pauses(tmp_path / "on time", 0.5) == pytest.approx(1.5)
    assert _pauses(tmp_path / "late", 4.5) == pytest.approx(0.0), "it should be there already"
    assert _pauses(tmp_path / "gone", 60.0) == 0.0


def test_what_a_region_says_of_its_rounds_holds_nobody_up_for_longer_than_its_silence(tmp_path: Path) -> None:
    async def pauses() -> float:
        engine = _engine(tmp_path)
        engine._cadence.next_round(NOW)
        engine._cadence.came("b", 10, NOW - 1.0)
        seconds = engine._pause_seconds(StartPause(11, (("b", 1e300),)))
        await engine.close()
        return seconds

    assert asyncio.run(pauses()) == pytest.approx(1.5), "two and a half seconds after its last update"


def test_a_region_goes_on_once_the_slower_one_has_ended_the_round_sooner(tmp_path: Path) -> None:
    async def pauses() -> list[float]:
        engine, loop = _engine(tmp_path), asyncio.get_running_loop()
        engine._cadence.next_round(NOW - 0.5)
        engine._cadence.came("b", 10, NOW - 0.5)
        found = []
        for sequence in (0, 11):
            if sequence:
                engine.feed(Stored(Manifest("b", 1, sequence, "sha256:b", 1, 1.0)))
            else:
                engine._pause(StartPause(11, (("b", 2.0),)))
            assert engine._pause_timer is not None
            found.append(engine._pause_timer.when() - loop.time())
        await asyncio.sleep(0.05)
        assert engine._pause_timer is None
        await engine.close()
        return found

    assert asyncio.run(pauses()) == pytest.approx([1.5, 0.0], abs=0.1)
