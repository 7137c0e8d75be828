"""Names of jobs, regions and users for the shell's completion, from the control plane."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from control_plane.cli._connect import find_context
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient

Offer = tuple[str, str]
"""A word, and what the shell shows beside it."""
_ANSWER_SECONDS = 2.0
"""Time for the control plane to answer; somebody waits for the completion of a word."""
_JOBS = 100
"""Most jobs that are offered, the newest."""


def complete_job(context: typer.Context, incomplete: str) -> list[Offer]:
    """Return IDs of jobs, also of ended ones."""

    async def ask(client: ControlClient) -> list[Offer]:
        return [(job.id, job.state) for job in await client.jobs(ended=True, limit=_JOBS)]

    return _offered(context, incomplete, ask)


def complete_region(context: typer.Context, incomplete: str) -> list[Offer]:
    """Return names of regions."""
    return _offered(context, incomplete, _regions)


def complete_region_workers(context: typer.Context, incomplete: str) -> list[Offer]:
    """Return names of regions, to be followed by numbers of workers."""
    return [(f"{name}=", help) for name, help in _offered(context, incomplete, _regions)]


def complete_user(context: typer.Context, incomplete: str) -> list[Offer]:
    """Return names of users."""

    async def ask(client: ControlClient) -> list[Offer]:
        return [(user.name, "") for user in await client.users()]

    return _offered(context, incomplete, ask)


async def _regions(client: ControlClient) -> list[Offer]:
    return [(region.name, region.state) for region in await client.regions()]


def _offered(
    context: typer.Context, incomplete: str, ask: Callable[[ControlClient], Awaitable[list[Offer]]]
) -> list[Offer]:
    """Return what begins with the incomplete word; nothing where the control plane does not answer."""
    import asyncio

    from control_plane.client import Context, ControlClient

    given = context.params.get("context") or os.environ.get("GEOFED_CONTEXT")

    async def connected() -> list[Offer]:
        async with ControlClient.connect(Context.load(find_context(Path(given) if given else None))) as client:
            return await ask(client)

    async def in_time() -> list[Offer]:
        return await asyncio.wait_for(connected(), _ANSWER_SECONDS)

    try:
        return [offer for offer in asyncio.run(in_time()) if offer[0].startswith(incomplete)]
    except (GeofedError, OSError):
        # Also TimeoutError. A message would stand in the middle of the command line.
        return []
