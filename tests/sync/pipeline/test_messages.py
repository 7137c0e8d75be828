"""What a message takes is measured, and nothing of it stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.memory_channel import MemoryChannel

from geofed_pb.errors import GeofedError
from sync.channel_clients import FileChannel
from sync.pipeline import measure_messages


def test_a_message_takes_what_its_requests_take() -> None:
    channel = MemoryChannel(before=lambda what, key: time.sleep({"put": 0.02}.get(what, 0.0)))
    found = measure_messages(channel, "probe/messages")
    assert 0.02 <= found.seconds < 0.2
    # Waiting keeps no core busy.
    assert 0.0 < found.core_seconds < 0.015
    assert channel.values == {}


def test_nothing_stays_in_a_folder(tmp_path: Path) -> None:
    found = measure_messages(FileChannel(tmp_path), "probe/messages")
    assert 0.0 < found.seconds < 1.0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_the_channel_raises_is_told() -> None:
    def full(what: str, key: str) -> None:
        if what == "put" and key.endswith("/7"):
            raise GeofedError("DISK_FULL", "no room")

    with pytest.raises(GeofedError, match="DISK_FULL"):
        measure_messages(MemoryChannel(before=full), "probe/messages")
