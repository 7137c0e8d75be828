"""Codecs and error feedback: what is sent plus what is held back is all there was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from support.budget import budget
from support.damage import damaged
from support.feedback import assert_nothing_is_lost

from geofed_pb.errors import GeofedError
from sync import framing
from sync.codec import (
    BFloat16,
    ChunkedTopK,
    Codec,
    Decoding,
    ErrorFeedback,
    Exact,
    Float32,
    Int8Blocks,
    Mixed,
    Ternary,
    _check,
    codec_by_mark,
    codec_named,
)

CODECS = [Float32(), BFloat16(), Int8Blocks(), ChunkedTopK(), Ternary(), Exact()]
LOSSY = [codec for codec in CODECS if codec.lossy]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
tame = st.one_of(st.just(0.0), st.floats(2**-10, 2**10, width=32), st.floats(-(2**10), -(2**-10), width=32))


def vectors(elements: st.SearchStrategy[float], most: int = 9000) -> st.SearchStrategy[npt.NDArray[np.float32]]:
    sizes = st.one_of(st.integers(1, 600), st.sampled_from([4095, 4096, 4097, most]))
    return st_numpy.arrays(np.float32, sizes, elements=elements, fill=st.just(0.0))


def through_a_frame(codec: Codec, vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    frame = framing.decode(b"".join(bytes(piece) for piece in framing.encode(codec.encode(vector))))
    return codec.decode(frame.tensors, vector.size)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_ranges_of_a_large_vector_decode_as_it_does(codec: Codec) -> None:
    """Over several chunks, some with few values, of any length."""
    rng = np.random.default_rng(1)
    for size in (4097, 30_001):
        vector = rng.normal(size=size).astype(np.float32)
        vector[4096:12_000] *= rng.random(vector[4096:12_000].size) < 0.002
        tensors = codec.encode(vector)
        whole, ranged = codec.decode(tensors, size), Decoding(codec, tensors, size)
        for begin, stop in np.sort(rng.integers(0, size + 1, (40, 2)), axis=1):
            assert np.array_equal(ranged[begin:stop], whole[begin:stop])


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(max_examples=budget(30))
@given(data=st.data())
def test_a_range_decodes_as_it_does_among_the_others(codec: Codec, data: st.DataObject) -> None:
    vector = data.draw(vectors(tame))
    begin, stop = sorted(data.draw(st.tuples(*2 * [st.integers(0, vector.size)])))
    trained = data.draw(st.integers(0, vector.size))
    for one in (codec, Mixed(codec, trained)):
        tensors = one.encode(vector)
        expected = one.decode(tensors, vector.size)
        assert np.array_equal(Decoding(one, tensors, vector.size)[begin:stop], expected[begin:stop])


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@settings(max_examples=budget(50))
@given(data=st.data())
def test_what_is_held_back_is_exact(codec: Codec, data: st.DataObject) -> None:
    vector = data.draw(vectors(finite))
    decoded = through_a_frame(codec, vector)
    assert np.isfinite(decoded).all()
    held_back = vector - decoded
    exact = vector.astype(np.float64) - decoded.astype(np.float64)
    # Beyond the smallest normal number nothing can be halved without loss, in any format.
    assert np.array_equal(held_back.astype(np.float64), exact)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@given(data=st.data())
def test_a_codec_knows_to_the_bit_what_others_will_decode(codec: Codec, data: st.DataObject) -> None:
    vector = data.draw(vectors(finite, most=Ternary.slab + 300))
    sent = np.full(vector.size, np.nan, np.float32)
    arrays, as_it_is = codec.encode_into(vector, sent), codec.encode(vector)
    assert sent.tobytes() == codec.decode(as_it_is, vector.size).tobytes()
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in as_it_is.items()
    }


@pytest.mark.parametrize("codec", [Float32(), Exact()], ids=lambda codec: codec.name)
@given(data=st.data())
def test_what_is_not_lossy_is_not(codec: Codec, data: st.DataObject) -> None:
    vector = data.draw(vectors(finite))
    assert np.array_equal(through_a_frame(codec, vector), vector)


@pytest.mark.parametrize(
    ("codec", "updates", "bits"),
    [(Int8Blocks(), 1, 8), (Int8Blocks(), 60, 16), (Ternary(), 60, 8), (ChunkedTopK(), 60, 8), (Float32(), 3, 32)],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_a_sum_takes_twice_the_bits_of_what_it_is_of(codec: Codec, updates: int, bits: float) -> None:
    """Though the scales of a block differ from one to the next."""
    random, feedback = np.random.default_rng(2), ErrorFeedback(codec)
    total = np.zeros(1 << 17, np.float32)
    for sequence in range(updates):
        total += feedback.encode(random.normal(0, 1e-3 * (1 + sequence % 3), total.size).astype(np.float32))[1]
    pieces = framing.encode(Exact().encode(total))
    assert sum(piece.nbytes for piece in pieces) * 8 / total.size <= bits + 0.1


def test_what_of_a_sum_needs_more_bits_gets_them() -> None:
    parts = [
        np.zeros(256),
        np.arange(-128, 128).clip(-127) * 2.0**-20,
        np.arange(256) * 101.0,
        np.linspace(0, 1, 256) ** 3,
    ]
    vector = np.concatenate(parts).astype(np.float32)
    tensors = Exact().encode(vector)
    assert tensors["widths"].tolist() == [0, 1, 2, 4]
    assert np.array_equal(Exact().decode(tensors, vector.size), vector)


@given(vectors(st.floats(-(2.0**100), 2.0**100, width=32)))
def test_dense_codecs_are_as_near_as_their_bits_allow(vector: npt.NDArray[np.float32]) -> None:
    normal = np.abs(vector) >= 2.0**-120
    error = np.abs(through_a_frame(BFloat16(), vector) - vector)
    assert (error[normal] <= np.abs(vector[normal]) * 2.0**-8).all()
    largest = np.abs(vector).max(initial=0.0)
    if largest > 2.0**-100:
        error = np.abs(through_a_frame(Int8Blocks(), vector) - vector)
        assert (error <= largest / 127 + 1e-30).all()


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
@settings(max_examples=budget(30))
@given(data=st.data())
def test_sent_plus_residual_is_all_there_was(codec: Codec, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 255, 257, 4097]))
    rounds = data.draw(
        st.lists(st_numpy.arrays(np.float32, size, elements=tame, fill=st.just(0.5)), min_size=1, max_size=6)
    )
    assert_nothing_is_lost(ErrorFeedback(codec), rounds)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_a_constant_change_arrives_in_the_end(codec: Codec) -> None:
    delta = np.random.default_rng(0).normal(0, 1e-3, 20_000).astype(np.float32)
    feedback = ErrorFeedback(codec)
    sent = np.zeros(delta.size)
    for _ in range(200):
        sent += feedback.encode(delta)[1]
    assert np.linalg.norm(sent / 200 - delta) < 0.25 * np.linalg.norm(delta)


@pytest.mark.parametrize(
    ("codec", "bits"),
    [(BFloat16(), 16.1), (Int8Blocks(), 8.1), (ChunkedTopK(), 0.25)],
    ids=lambda value: getattr(value, "name", value),
)
def test_size(codec: Codec, bits: float) -> None:
    vector = np.random.default_rng(1).normal(0, 1, 1 << 20).astype(np.float32)
    pieces = framing.encode(codec.encode(vector))
    assert sum(piece.nbytes for piece in pieces) * 8 / vector.size <= bits


def test_top_k_keeps_the_largest_and_sends_no_zeros() -> None:
    vector = np.zeros(8192, np.float32)
    vector[[5, 700, 5000]] = [3.0, -1.0, 0.5]
    decoded = ChunkedTopK().decode(ChunkedTopK().encode(vector), vector.size)
    assert set(np.flatnonzero(decoded)) <= {5, 700, 5000}
    assert decoded[5] > 0 > decoded[700] or decoded[700] == 0
    assert decoded[5000] > 0


_HARD = {
    "normal": lambda random, size: random.normal(size=size),
    "alike": lambda random, size: np.full(size, -0.25),
    "of few values": lambda random, size: random.integers(-2, 3, size).astype(float),
    "sorted": lambda random, size: np.sort(random.normal(size=size)),
    "mostly zeros": lambda random, size: np.where(random.random(size) < 0.005, random.normal(size=size), 0.0),
    "large at every 256th": lambda random, size: random.normal(size=size) + 50.0 * (np.arange(size) % 256 == 7),
    "tiny": lambda random, size: random.normal(size=size) * 2.0**-140,
}


@pytest.mark.parametrize("size", [1, 63, 64, 4095, 4096, 4097, 3 * 32 * 4096 + 70])
@pytest.mark.parametrize("kind", _HARD)
def test_top_k_sends_the_largest_of_each_chunk(kind: str, size: int) -> None:
    """By the plain form: sort each chunk, and take the first 64."""
    vector = _HARD[kind](np.random.default_rng(size), size).astype(np.float32)
    decoded = ChunkedTopK().decode(ChunkedTopK().encode(vector), size)
    assert (decoded[decoded != 0] * vector[decoded != 0] > 0).all(), "signs"
    for at in range(0, size, 4096):
        chunk, found = np.abs(vector[at : at + 4096]), np.abs(decoded[at : at + 4096])
        largest = np.sort(chunk)[::-1][:64]
        unit = np.ldexp(1.0, max(int(np.frexp(largest.mean(dtype=np.float64) / 2)[1]), -126))
        sent = found != 0
        assert np.array_equal(np.sort(chunk[sent])[::-1], largest[largest >= unit / 2])
        assert np.array_equal(found[sent], np.where(chunk[sent] >= 2 * unit, 3 * unit, unit))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(max_examples=budget(50))
@given(data=st.data())
def test_damaged_arrays_are_refused_or_decode_to_the_right_shape(codec: Codec, data: st.DataObject) -> None:
    vector = data.draw(vectors(tame, most=5000))
    tensors: dict[str, Any] = dict(codec.encode(vector))
    name = data.draw(st.sampled_from(sorted(tensors)))
    array = np.array(tensors[name])
    match data.draw(st.sampled_from(["drop", "cut", "type", "bytes"])):
        case "drop":
            del tensors[name]
        case "cut":
            tensors[name] = array[:-1] if array.size else np.zeros(3, array.dtype)
        case "type":
            tensors[name] = array.astype(np.float64)
        case _:
            raw = data.draw(st.binary(min_size=array.nbytes, max_size=array.nbytes))
            tensors[name] = np.frombuffer(raw, array.dtype)
    with contextlib.suppress(GeofedError):
        decoded = codec.decode(tensors, vector.size)
        assert decoded.shape == vector.shape
        assert decoded.dtype == np.float32


def test_a_damaged_number_that_signals_comes_out_as_none() -> None:
    """What merges looks for it; decoding must not fail on it, nor warn."""
    tensors = Exact().encode(np.full(1, -512.1406, np.float32))
    damaged = np.array(tensors["float32"])
    damaged.view(np.uint32)[0] = 0x7F800001
    assert np.isnan(Exact().decode({**tensors, "float32": damaged}, 1)[0])


def test_a_damaged_scale_comes_out_as_infinite() -> None:
    tensors = Exact().encode(np.full(1, -512.1406, np.float32))
    damaged = np.array(tensors["float32"])
    damaged.view(np.uint32)[0] = 0x7A000000
    exponents = np.full_like(tensors["exponents"], 127)
    assert np.isinf(Exact().decode({**tensors, "float32": damaged, "exponents": exponents}, 1)[0])


def test_names_and_marks() -> None:
    assert [codec_named(codec.name).name for codec in CODECS] == ["fp32", "bf16", "int8", "topk", "ternary", "exact"]
    assert [codec_by_mark(codec.mark).name for codec in CODECS] == ["fp32", "bf16", "int8", "topk", "ternary", "exact"]
    with pytest.raises(GeofedError, match="gzip") as caught:
        codec_named("gzip")
    assert (
        caught.value.hint
        == "known: bf16, bf16-masked, exact, fp32, fp32-masked, int8, int8-masked, sparse, ternary, topk"
    )
    with pytest.raises(GeofedError, match="unknown codec number"):
        codec_by_mark(99)


def test_a_codec_of_another_package_has_a_mark_of_its_own() -> None:
    """Frames name a codec by its mark alone: two with one mark would decode each other's updates."""

    class Theirs(Float32):
        name, mark = "theirs", 12

    class Another(Float32):
        name, mark = "another", 12

    class Ours(Float32):
        name, mark = "ours", 2

    assert _check(Theirs(), {}) == ""
    assert _check(Another(), {"theirs": Theirs()}) == "its mark 12 is that of codec 'theirs'"
    assert _check(Ours(), {}) == "its mark must be 12 to 15, not 2"


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "topk", "ternary", "sparse", "exact"])
@pytest.mark.parametrize("trained", [None, 5000])
def test_an_update_passes_the_check_if_it_can_be_decoded(name: str, trained: int | None) -> None:
    """Whatever its arrays hold, and however long they are: the check is what an acknowledgement rests on."""
    codec: Codec = codec_named(name) if trained is None else Mixed(codec_named(name), trained)
    vector = np.random.default_rng(1).standard_normal(9000).astype(np.float32)
    vector[::3] = 0.0
    good = codec.encode(vector)
    outcomes = {True: 0, False: 0}
    for tensor, array in good.items():
        for data in damaged(array.tobytes(), budget(200)):
            whole = data[: len(data) // array.itemsize * array.itemsize]
            tensors = {**good, tensor: np.frombuffer(whole, array.dtype)}
            passes = _raises_nothing(lambda tensors=tensors: codec.check(tensors, vector.size))
            assert passes == _raises_nothing(lambda tensors=tensors: codec.decode(tensors, vector.size))
            outcomes[passes] += 1
    assert min(outcomes.values()) > 0


def _raises_nothing(call: Callable[[], object]) -> bool:
    try:
        call()
    except GeofedError as error:
        if error.code != "FRAME_INVALID":
            raise
        return False
    return True
