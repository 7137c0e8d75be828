"""Logs of functions: whoever reads slowly gets the newest lines, and hears how many were dropped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from region_agent.gateway.embedded.logs import LogQuery, LogStore


def _texts(lines: list[object]) -> list[str]:
    return [line.text for line in lines]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_follower_that_lags_behind_misses_the_middle(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = LogStore(tmp_path, lines_in_memory=50, file_bytes=1 << 20)
        store.append("f", "f-1", "past")
        reading = store.read(LogQuery("f", follow=True))
        assert _texts([*await anext(reading)]) == ["past"]
        for number in range(100_000):
            store.append("f", "f-1", f"line {number}")
        store.append("other", "o-1", "not asked for")
        store.end("f")
        found = _texts([line async for lines in reading for line in lines])
        (gap,) = [index for index, text in enumerate(found) if text.startswith("… ")]
        assert found[gap] == f"… {100_000 - (len(found) - 1):,} lines dropped"
        assert found[:gap] == [f"line {number}" for number in range(gap)]
        assert found[-1] == "line 99999"
        newest = [line async for lines in store.read(LogQuery("f", tail=2)) for line in lines]
        assert _texts([*newest]) == ["line 99998", "line 99999"]
        assert len([line async for lines in store.read(LogQuery("f")) for line in lines]) == 50
        store.end()

    asyncio.run(scenario())


def test_the_files_are_bounded_and_go_on(tmp_path: Path) -> None:
    store = LogStore(tmp_path, lines_in_memory=5, file_bytes=10_000)
    for number in range(300):
        store.append("f", "f-1", f"line {number}")
    store.end("f")
    store.append("f", "f-1", "the last")
    store.end()
    now, before = tmp_path / "f.log", tmp_path / "f.log.1"
    assert now.stat().st_size + before.stat().st_size < 21_000
    texts = [json.loads(line)["text"] for path in (before, now) for line in path.read_text().splitlines()]
    assert texts[-1] == "the last"
    assert texts[:-1] == [f"line {number}" for number in range(300 - len(texts) + 1, 300)]


def test_lines_of_only_the_latest_functions_stay_in_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = LogStore(tmp_path, lines_in_memory=5, file_bytes=10_000)
        for number in range(40):
            store.append("lasting", "l-1", "line")
            store.append(f"f{number}", "f-1", "line")
            store.end(f"f{number}")

        async def past(name: str) -> int:
            return len([line async for lines in store.read(LogQuery(name)) for line in lines])

        assert [await past(name) for name in ("lasting", "f39", "f10", "f5", "f0")] == [5, 1, 1, 0, 0]
        store.end()

    asyncio.run(scenario())
