"""A control plane on real TLS sockets, and what a user has on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.migrated import migrated_once
from support.postgres import Postgres, postgres_server
from support.small_job import JOB, TASK

from control_plane.client import Context, ControlClient
from control_plane.server import ServeConfig, running
from control_plane.spec import load, pack
from tests.control_plane.fake_agent import FakeAgent, join


@pytest.fixture(scope="session", autouse=True)
def _migrated_once() -> Iterator[None]:
    with migrated_once():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    (folder / "task.py").write_text(TASK)
    return folder / "job.yaml"


@dataclass
class Stage:
    """A control plane with a client, and agents that have joined."""

    config: ServeConfig
    ports: Any
    client: ControlClient
    context: Context

    async def agent(self, region: str) -> FakeAgent:
        """Invite and join a region."""
        return FakeAgent(await join((await self.client.invite(region)).token))

    async def submit(self, job_file: Path, request_id: str = "r1", overrides: tuple[str, ...] = ()) -> Any:
        loaded = load(job_file, overrides)
        packed = pack(loaded.folder, loaded.spec.task.module)
        content, digest = packed.content, packed.digest
        await self.client.put_bundle(content, digest)
        return await self.client.submit(loaded.json, digest, request_id)

    async def until(self, condition: Callable[[], Awaitable[bool]], seconds: float = 15) -> None:
        """Wait for events until the condition holds."""
        async with asyncio.timeout(seconds):
            if await condition():
                return
            async for _ in self.client.watch(""):
                if await condition():
                    return
        raise AssertionError("the events have ended")

    async def phase_is(self, region: str, phase: str) -> bool:
        return any(r.state == phase for r in await self.client.regions() if r.name == region)

    async def events(self, job: str) -> list[str]:
        return [event.kind async for event in self.client.watch(job, follow=False)]


@pytest.fixture
def serve_config(tmp_path: Path) -> ServeConfig:
    anywhere = "127.0.0.1:0"
    return ServeConfig(
        tmp_path / "state", listen=anywhere, agent_listen=anywhere, metrics_listen=anywhere, lease=timedelta(seconds=30)
    )


@asynccontextmanager
async def staged(config: ServeConfig) -> AsyncIterator[Stage]:
    """Run a control plane in this process."""
    async with running(config) as ports:
        context = replace(Context.load(config.state_dir / "context.json"))
        async with ControlClient.connect(context) as client:
            yield Stage(config, ports, client, context)
