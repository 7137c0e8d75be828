"""What a courier says of its link while it has nothing to carry."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from sync.ps.events import Manifest, Peer
from sync.ps.link import Courier


def test_an_idle_link_is_as_fast_as_it_was() -> None:
    """The update was forgotten, because the peer's own updates have told that it has it."""

    async def idle() -> tuple[int, float]:
        courier = Courier("j", lambda: None, lambda manifest: Path("/nonexistent"), lambda *_: None, 5.0)

        async def carry(manifest: Manifest) -> bool:
            raise FileNotFoundError

        courier._carry = carry  # type: ignore[method-assign]
        courier.meter.mbps = 20.0
        running = asyncio.create_task(courier.run())
        courier.ship(Peer("b", 1, "127.0.0.1:1"), (Manifest("a", 1, 1, "d", 100_000, 1.0),))
        await asyncio.sleep(0.3)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await courier.close()
        return len(courier._waiting), courier.mbps

    assert asyncio.run(idle()) == (0, 20.0)
