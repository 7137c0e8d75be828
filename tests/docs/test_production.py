"""The commands of the runbook that belong together do together what it says."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from support.commands import run_here

from control_plane.server import ServeConfig
from geofed_pb.errors import CATALOGUE
from tests.control_plane.conftest import staged

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "production.md").read_text()


def _commands(begin: str) -> list[list[str]]:
    """The commands of the first block after a text."""
    block = re.search(r"(?:^ {4}\S.*\n)+", PAGE[PAGE.index(begin) :], re.MULTILINE)
    assert block is not None
    return [line.split() for line in block[0].splitlines()]


def test_the_drill_shows_what_the_backup_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restore, serve, *looks = _commands("**Drill.**")
    assert [command[1] for command in (restore, serve, *looks)] == ["restore", "serve", "list", "region"]
    assert len({word for word in serve if word.startswith("127.0.0.1:")}) == 3

    async def scenario() -> None:
        async with staged(_config(tmp_path / "state")) as stage:
            agent = await stage.agent("east")
            await agent.connect()
            backup = ["backup", "geofed.tar", "--state-dir", str(stage.config.state_dir)]
            assert (await asyncio.to_thread(run_here, *backup)).returncode == 0
            await agent.close()
        assert run_here(*restore[1:]).returncode == 0
        async with staged(_config(tmp_path / restore[restore.index("--state-dir") + 1])):
            for look in looks:
                told = await asyncio.to_thread(run_here, *look[1:], "-o", "json")
                assert told.returncode == 0, told.stderr
            (region,) = json.loads(told.stdout)["data"]
            assert region["name"] == "east"
            assert region["state"] != "live"

    monkeypatch.chdir(tmp_path)
    asyncio.run(scenario())


def _config(state: Path) -> ServeConfig:
    """Of a control plane at any free ports."""
    anywhere = "127.0.0.1:0"
    return ServeConfig(state, listen=anywhere, agent_listen=anywhere, metrics_listen=anywhere)


def test_the_codes_are_those_of_the_catalogue() -> None:
    table = PAGE[PAGE.index("## When something is wrong") :]
    codes = [
        code for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)
    ]
    assert len(codes) > 15
    assert sorted(set(codes) - set(CATALOGUE)) == []
