"""Nested values with tensors in them are written down and come back as they were."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.errors import GeofedError
from region_agent.worker.tensor_tree import Unsupported, dump_tree, load_tree
from sync import framing

_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.uint8]).flatmap(
        lambda dtype: st.integers(0, 3).map(lambda size: torch.arange(size).to(dtype))
    ),
)  # fmt: skip
_keys = st.one_of(st.text(), st.integers(), st.none(), st.booleans())
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(_keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _there_and_back(value: Any) -> Any:
    frame = framing.decode(b"".join(framing.encode(dump_tree(value, "x/"))))
    return load_tree(frame.tensors, "x/")


@given(_trees)
def test_a_tree_comes_back_as_it_was(value: Any) -> None:
    assert _same(_there_and_back(value), value)


def test_tensors_of_every_kind_come_back_bit_for_bit() -> None:
    for tensor in (
        torch.tensor(float("nan")),
        torch.ones(2, 0),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(2, 3, dtype=torch.complex64).conj() * 1j,
        torch.tensor([1, 2], dtype=torch.uint16),
        torch.ones(3).to(torch.float8_e5m2),
    ):
        back = _there_and_back([tensor])[0]
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        ours, theirs = (t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (back, tensor))
        assert torch.equal(ours, theirs)


def test_sparse_tensors_come_back() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2, 0]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], (4, 2), check_invariants=True)
    back = _there_and_back({"sum": sparse})["sum"]
    assert not back.is_coalesced()
    assert torch.equal(back.to_dense(), sparse.to_dense())


def test_ordered_dicts_and_numbers_of_numpy_become_plain_ones() -> None:
    assert _there_and_back(OrderedDict(a=np.float64(0.5), b=np.int64(3))) == {"a": 0.5, "b": 3}


@pytest.mark.parametrize("value", [{1, 2}, object(), {(1, 2): 3}, lambda: 0, b"bytes", torch.ones(1, device="meta")])
def test_what_cannot_be_written_down_is_named(value: object) -> None:
    with pytest.raises(Unsupported, match=r"\['state'\]\[1\]"):
        dump_tree({"state": [0, value]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        '["t",0,"float32",[1],1]',
        '["t",7,"float32",[1],1]',
        '["x"]',
        '["d",[[1],2]]',
        '["t",0,"__name__",[1],1]',
    ],
)
def test_what_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(GeofedError) as raised:
        load_tree({"tree": np.frombuffer(text.encode(), np.uint8), "0": np.zeros(3, np.uint8)})
    assert raised.value.code == "FRAME_INVALID"
