"""What is coded slab by slab is what is coded whole."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from sync.codec import BFloat16, ChunkedTopK, Codec, ErrorFeedback, Exact, Float32, Int8Blocks, Mixed, Ternary
from sync.codec._slabs import join_slabs, slabs_of

Vector = npt.NDArray[np.float32]
CODECS: list[Codec] = [Float32(), BFloat16(), Int8Blocks(), ChunkedTopK(), Ternary(), Exact()]
SLABS = (1 << 15, 28 * 5 * 256)
sizes = st.one_of(
    st.integers(1, 3000), st.sampled_from([n * slab + d for slab in SLABS for n in (1, 2) for d in (-1, 0, 1)])
)


def mixed_up(size: int, seed: int, exponents: tuple[int, int]) -> Vector:
    """Normal numbers whose size differs from place to place by powers of two."""
    random = np.random.default_rng(seed)
    scales = np.ldexp(1.0, random.integers(*exponents, size // 200 + 1, endpoint=True)).repeat(200)[:size]
    return (random.normal(size=size) * scales).astype(np.float32)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(max_examples=budget(25), deadline=None)
@given(size=sizes, seed=st.integers(0, 99), trained=st.floats(0, 1))
def test_slabs_one_behind_the_other_are_the_whole(codec: Codec, size: int, seed: int, trained: float) -> None:
    vector = mixed_up(size, seed, (-100, 100))
    for one in (codec, Mixed(codec, int(trained * size))):
        parts = [part.encode(vector[slab]) for slab, part in slabs_of(one, size)]
        whole, made = one.encode(vector), join_slabs(one, parts)
        assert dict.fromkeys(whole) == dict.fromkeys(made)
        for name, array in whole.items():
            assert array.dtype == made[name].dtype
            assert np.array_equal(array, made[name]), name
        decoded = [
            part.decode(arrays, vector[slab].size)
            for (slab, part), arrays in zip(slabs_of(one, size), parts, strict=True)
        ]
        assert np.array_equal(np.concatenate(decoded), one.decode(whole, size))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(max_examples=budget(25), deadline=None)
@given(size=sizes, seed=st.integers(0, 99), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)), few=st.booleans())
def test_feedback_is_what_it_is_over_the_whole(
    codec: Codec, size: int, seed: int, ends: tuple[float, float], few: bool
) -> None:
    """The plain form: add the change, send, subtract what was sent."""
    part = slice(int(min(ends) * size), max(int(max(ends) * size), int(min(ends) * size) + 1))
    feedback, held = ErrorFeedback(codec), np.zeros(size, np.float32)
    start, bound = mixed_up(size, seed, (-3, 3)), np.float32(2.0**-10)
    for turn in range(3):
        end = start + mixed_up(size, seed + turn + 1, (-12, -8))
        tensors, sent = feedback.encode(end, part, (lambda sum_: np.abs(sum_) > bound) if few else None, since=start)
        held += end - start
        chosen = held[part].copy()
        if few:
            chosen[np.abs(chosen) <= bound] = 0.0
        expected = codec.encode(chosen)
        assert all(np.array_equal(tensors[name], array) for name, array in expected.items())
        assert np.array_equal(sent, codec.decode(expected, chosen.size))
        held[part] -= sent
        assert feedback.residual is not None
        assert np.array_equal(feedback.residual, held)
        start = end


@pytest.mark.parametrize("exponent", [-120, -70, -20, 0, 61, 100])
def test_a_ternary_scale_is_near_the_root_mean_square_of_any_size(exponent: int) -> None:
    """Squares that float32 does not hold included."""
    vector = np.ldexp(np.random.default_rng(3).normal(size=2560), exponent).astype(np.float32)
    exponents = Ternary().encode(vector)["exponents"]
    assert (np.abs(exponents.astype(int) - exponent) <= 1).all()
