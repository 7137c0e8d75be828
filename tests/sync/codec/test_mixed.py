"""State that gradients do not train travels as it is, whatever the bulk is coded with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from support.budget import budget
from support.feedback import assert_nothing_is_lost

from geofed_pb.errors import GeofedError
from sync import framing
from sync.codec import (
    ChunkedTopK,
    Codec,
    ErrorFeedback,
    Int8Blocks,
    Mixed,
    Ternary,
    codec_by_mark,
    codec_named,
    with_state,
)
from sync.policy import Contribution, DiLoCo, GradientSum, StateAveraged

TRAINED, SIZE = 1300, 1365
"""The last 65: running variances of 64 channels, and num_batches_tracked."""
BULKS = [Int8Blocks(), ChunkedTopK(), Ternary()]
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
tame = st.one_of(st.just(0.0), st.floats(2**-10, 2**10, width=32), st.floats(-(2**10), -(2**-10), width=32))


def changes(elements: st.SearchStrategy[float]) -> st.SearchStrategy[npt.NDArray[np.float32]]:
    return st_numpy.arrays(np.float32, SIZE, elements=elements, fill=st.just(0.0))


def through_a_frame(codec: Codec, vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    frame = framing.decode(b"".join(bytes(piece) for piece in framing.encode(codec.encode(vector))))
    return codec.decode(frame.tensors, vector.size)


def test_which_codecs_leave_the_state_aside() -> None:
    for name, mark in (("int8", 18), ("topk", 19), ("ternary", 23)):
        codec = with_state(codec_named(name), TRAINED, SIZE)
        assert (codec.name, codec.mark) == (name, mark)
        assert codec_by_mark(mark, TRAINED).name == name
        assert with_state(codec_named(name), SIZE, SIZE).mark == mark - 16
        # Of a part that holds nothing but state.
        vector = np.arange(7, dtype=np.float32)
        assert np.array_equal(through_a_frame(with_state(codec_named(name), -3, 7), vector), vector)
    assert with_state(codec_named("bf16"), TRAINED, SIZE).mark == 1
    with pytest.raises(GeofedError, match="unknown codec number"):
        codec_by_mark(18)


@pytest.mark.parametrize("bulk", BULKS, ids=lambda codec: codec.name)
@settings(max_examples=budget(30), deadline=None)
@given(vector=changes(finite))
def test_what_is_held_back_is_exact(bulk: Codec, vector: npt.NDArray[np.float32]) -> None:
    decoded = through_a_frame(Mixed(bulk, TRAINED), vector)
    assert np.isfinite(decoded).all()
    exact = vector.astype(np.float64) - decoded.astype(np.float64)
    assert np.array_equal((vector - decoded).astype(np.float64), exact)


@pytest.mark.parametrize("bulk", BULKS, ids=lambda codec: codec.name)
@settings(max_examples=budget(20), deadline=None)
@given(rounds=st.lists(changes(tame), min_size=1, max_size=4))
def test_sent_plus_residual_is_all_there_was(bulk: Codec, rounds: list[npt.NDArray[np.float32]]) -> None:
    assert_nothing_is_lost(ErrorFeedback(Mixed(bulk, TRAINED)), rounds)


@pytest.mark.parametrize("bulk", BULKS, ids=lambda codec: codec.name)
def test_a_counter_does_not_spoil_the_variances_beside_it(bulk: Codec) -> None:
    change = np.zeros(SIZE, np.float32)
    change[-65:-1] = np.linspace(-0.9, 0.1, 64)
    change[-1] = 150
    got = through_a_frame(Mixed(bulk, TRAINED), change)
    assert np.abs(got[-65:-1] - change[-65:-1]).max() == 0
    # Alone the bulk's codec would move them by more than half, some to below zero.
    alone = through_a_frame(bulk, change)
    assert np.abs(alone[-65:-1] - change[-65:-1]).max() > 0.5


def test_an_update_of_another_model_is_refused() -> None:
    codec = Mixed(Int8Blocks(), TRAINED)
    tensors = codec.encode(np.ones(SIZE, np.float32))
    with pytest.raises(GeofedError, match="float32"):
        codec.decode(tensors, SIZE - 1)
    with pytest.raises(GeofedError):
        codec.decode({**tensors, "state": np.zeros(3, np.float32)}, SIZE)
    with pytest.raises(GeofedError):
        codec.decode({}, SIZE)


@pytest.mark.parametrize("policy", [GradientSum(), DiLoCo(1.0, 0.9)], ids=["asgd", "diloco"])
def test_running_variances_are_averaged_under_every_policy(policy: GradientSum | DiLoCo) -> None:
    base = np.array([0.0, 0.0, 1.0], np.float32)
    delta = np.array([1.0, 2.0, -0.9], np.float32)
    both = [Contribution(region, 1.0, delta) for region in ("a", "b")]
    memory: dict[str, npt.NDArray[np.float32]] = {}
    kept = StateAveraged(policy, trainable=2).merge(base, both, memory)
    bare = policy.merge(base, both, memory)
    assert np.array_equal(kept.model[:2], bare.model[:2])
    assert kept.model[2] == np.float32(1.0) - np.float32(0.9)
    assert bare.model[2] < 0
