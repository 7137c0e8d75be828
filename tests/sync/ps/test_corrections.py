"""The channel holds the correction that the workers were given last, and no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from geofed_pb.errors import GeofedError
from sync.channel_clients import FileChannel
from sync.codec import codec_named
from sync.layout import Vector
from sync.ps.core.machine import Setup
from sync.ps.execution.channel_store import ChannelStore
from sync.ps.execution.replica import Replica, ReplicaState
from sync.ps.execution.storage import Storage
from sync.wan import ExchangeSettings, policy_of

VALUES = np.arange(5, dtype=np.float32)


def _replica(values: Vector) -> Replica:
    """One that is to be corrected by these values."""
    state = ReplicaState(2 * values, np.zeros_like(values))
    return Replica(policy_of("ma"), ExchangeSettings(background=1.0), codec_named("fp32"), state)


@pytest.mark.parametrize("part_elements", [0, 2])
def test_the_channel_holds_the_correction_that_was_given_last(tmp_path: Path, part_elements: int) -> None:
    channel = FileChannel(tmp_path / "channel")
    storage = Storage(tmp_path / "state", Setup("a", ("a", "b"), 1, 2, 1, 1, background=True))
    store = ChannelStore(channel, storage, background=True, part_elements=part_elements)
    store.give_correction("", _replica(VALUES))
    assert store.correction("") is None
    store.give_correction("correction/3", _replica(VALUES))
    found = store.correction("correction/3")
    np.testing.assert_array_equal(found, VALUES)
    # After a crash the same is made again.
    again = ChannelStore(channel, storage, background=True, part_elements=part_elements)
    again.given = "correction/3"
    again.give_correction("correction/3", _replica(VALUES))
    np.testing.assert_array_equal(again.correction("correction/3"), VALUES)
    again.give_correction("correction/4", _replica(2 * VALUES))
    assert not channel.has("correction/3")
    # Whoever still reads it has it.
    np.testing.assert_array_equal(found, VALUES)
    again.give_correction("", _replica(VALUES))
    assert not channel.has("correction/4")
    with pytest.raises(GeofedError, match="no longer in the channel"):
        again.correction("correction/4")
