"""What lies in parts is what was put, whoever reads it and however much of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.memory_channel import MemoryChannel

from sync import chunked_values, framing


@given(size=st.integers(0, 40), elements=st.integers(0, 11), data=st.data())
def test_a_vector_is_read_whole_and_in_ranges(size: int, elements: int, data: st.DataObject) -> None:
    channel, vector = MemoryChannel(), np.arange(size, dtype=np.float32)
    chunked_values.put_vector(channel, "m/1", "model", vector, elements)
    read = chunked_values.read_vector(channel, "m/1", "model")
    assert read is not None
    assert np.array_equal(read, vector)
    edges = sorted(data.draw(st.lists(st.integers(0, size), min_size=4, max_size=4)))
    slices = [slice(edges[0], edges[1]), slice(edges[2], edges[3])]
    some = chunked_values.read_slices(channel, "m/1", "model", slices)
    assert some is not None
    assert np.array_equal(some, np.concatenate([vector[part] for part in slices]))
    chunked_values.forget(channel, "m/1")
    assert channel.values == {}
    assert chunked_values.read_vector(channel, "m/1", "model") is None


def test_only_what_is_wanted_is_read() -> None:
    channel = MemoryChannel()
    chunked_values.put_vector(channel, "m", "model", np.arange(1000, dtype=np.float32), 100)
    channel.gets = 0
    chunked_values.read_slices(channel, "m", "model", [slice(150, 160), slice(820, 901)])
    assert channel.gets == 4


def test_parts_that_hold_several_ranges_are_put_together() -> None:
    """As stages hand over their parameters and their statistics."""
    channel, whole = MemoryChannel(), np.arange(10, dtype=np.float32)
    channel.put("b.0", framing.encode({"model": np.concatenate([whole[0:4], whole[7:8]])}))
    channel.put("b.1", framing.encode({"model": np.concatenate([whole[4:7], whole[8:10]])}))
    chunked_values.put_index(channel, "b", [(0, 0, 4), (0, 7, 8), (1, 4, 7), (1, 8, 10)], parts=2)
    read = chunked_values.read_vector(channel, "b", "model")
    assert read is not None
    assert np.array_equal(read, whole)
    channel.delete("b.1")
    assert chunked_values.read_vector(channel, "b", "model") is None


@given(parameters=st.integers(0, 9), bytes_at_once=st.integers(1, 200), data=st.data())
def test_a_state_is_read_by_parameter(parameters: int, bytes_at_once: int, data: st.DataObject) -> None:
    channel = MemoryChannel()
    tensors = {f"{at}/momentum": np.full(at + 1, at, np.float32) for at in range(parameters)}
    facts = {f"{at}/step": float(at) for at in range(parameters)}
    chunked_values.put_state(channel, "s", framing.Frame(tensors, facts), bytes_at_once)
    first = data.draw(st.integers(0, parameters))
    mine = range(first, data.draw(st.integers(first, parameters)))
    for wanted in (None, mine):
        read = chunked_values.read_state(channel, "s", wanted)
        assert read is not None
        expected = range(parameters) if wanted is None else wanted
        assert read.facts == {f"{at}/step": float(at) for at in expected}
        assert read.tensors.keys() == {f"{at}/momentum" for at in expected}
        assert all(np.array_equal(read.tensors[name], tensors[name]) for name in read.tensors)
    chunked_values.forget(channel, "s")
    assert channel.values == {}


def test_a_state_that_was_put_whole_is_read_too() -> None:
    channel = MemoryChannel()
    channel.put("s", framing.encode({"0/m": np.ones(2, np.float32), "3/m": np.zeros(1, np.float32)}, {"3/step": 2.0}))
    read = chunked_values.read_state(channel, "s", range(2, 4))
    assert read is not None
    assert (read.tensors.keys(), read.facts) == ({"3/m"}, {"3/step": 2.0})
