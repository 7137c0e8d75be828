"""Corrections are in the channel once they are published, and are read from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from geofed_pb.errors import GeofedError
from sync.channel_clients import FileChannel
from sync.ps.core.machine import Setup
from sync.ps.execution.channel_store import ChannelStore
from sync.ps.execution.storage import Storage

VALUES = np.arange(5, dtype=np.float32)


def test_a_published_correction_is_read_from_the_channel(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path / "channel")
    storage = Storage(tmp_path / "state", Setup("a", ("a", "b"), 1, 2, 1, 1, background=True))
    store = ChannelStore(channel, storage, background=True, part_elements=0)
    assert store.correction("") is None
    key = store.keep_correction(3, "", VALUES.copy)
    store.publish_correction(key)
    found = store.correction(key)
    assert found is not None
    assert not found.flags.owndata
    np.testing.assert_array_equal(found, VALUES)
    # The workers were given it, so it stays beside the next one.
    newer = store.keep_correction(4, key, (2 * VALUES).copy)
    np.testing.assert_array_equal(store.correction(newer), 2 * VALUES)
    np.testing.assert_array_equal(store.correction(key), VALUES)
    store.keep_correction(5, newer, VALUES.copy)
    assert store.correction(key) is None
    assert not channel.has(key)
    store.publish_correction(newer)
    channel.delete(newer)
    with pytest.raises(GeofedError, match="no longer in the channel"):
        store.correction(newer)
