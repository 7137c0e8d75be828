"""The closed framing: what goes in comes out, and nothing else comes in."""

from __future__ import annotations

import contextlib
import resource
import struct
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.budget import budget
from support.damage import damaged

from geofed_pb.errors import GeofedError
from sync import framing

_NAMES = st.text(max_size=40)
_DTYPES = st.sampled_from(["<f4", "<f8", "<f2", "<u2", "<i8", "<i4", "|i1", "|u1", "|b1"])
_ARRAYS = _DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)))
_FRAMES = st.tuples(
    st.dictionaries(_NAMES, _ARRAYS, max_size=4), st.dictionaries(_NAMES, st.floats(width=64), max_size=3)
)


def _bytes(tensors: dict[str, framing.Array], facts: dict[str, float] | None = None) -> bytes:
    return b"".join(framing.encode(tensors, facts))


def _same(frame: framing.Frame, tensors: dict[str, framing.Array], facts: dict[str, float]) -> bool:
    return (
        frame.tensors.keys() == tensors.keys()
        and all(
            (frame.tensors[n].shape, frame.tensors[n].dtype, frame.tensors[n].tobytes())
            == (a.shape, a.dtype, a.tobytes())
            for n, a in tensors.items()
        )
        and {n: struct.pack("<d", v) for n, v in frame.facts.items()}
        == {n: struct.pack("<d", v) for n, v in facts.items()}
    )


@given(_FRAMES)
def test_what_goes_in_comes_out(held: tuple[dict[str, framing.Array], dict[str, float]]) -> None:
    tensors, facts = held
    frame = framing.decode(_bytes(tensors, facts))
    assert _same(frame, tensors, facts)
    assert all(
        not array.flags.writeable and array.ctypes.data % array.itemsize == 0 for array in frame.tensors.values()
    )


def test_views_and_strides_are_written_as_they_look() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array.T, array[::2, 1::2], array[:, :0], np.float32(3.0), np.asfortranarray(array)):
        frame = framing.decode(_bytes({"x": np.asarray(view)}))
        assert frame.tensors["x"].shape == np.shape(view)
        assert np.array_equal(frame.tensors["x"], view)


def test_the_values_are_not_copied() -> None:
    array = np.zeros(1000, np.float32)
    pieces = framing.encode({"x": array})
    array[0] = 7.0
    buffer = b"".join(pieces)
    decoded = framing.decode(buffer).tensors["x"]
    assert decoded[0] == 7.0
    assert np.shares_memory(decoded, np.frombuffer(buffer, np.uint8))


@given(_FRAMES, st.data())
def test_a_changed_byte_of_the_header_is_refused(
    held: tuple[dict[str, framing.Array], dict[str, float]], data: st.DataObject
) -> None:
    whole = bytearray(_bytes(*held))
    header = 28 + struct.unpack_from("<I", whole, 12)[0]
    at = data.draw(st.integers(0, header - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(GeofedError) as raised:
        framing.decode(whole)
    assert raised.value.code == "FRAME_INVALID"


@given(_FRAMES, st.data())
def test_a_frame_that_is_cut_or_continued_is_refused(
    held: tuple[dict[str, framing.Array], dict[str, float]], data: st.DataObject
) -> None:
    whole = _bytes(*held)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0"):
        with pytest.raises(GeofedError) as raised:
            framing.decode(wrong)
        assert raised.value.code == "FRAME_INVALID"


@given(st.binary(max_size=300), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=budget(300))
def test_any_header_that_checks_is_read_or_refused(table: bytes, entries: int, facts: int) -> None:
    """Somebody who computes the checksum may write anything; it must never be more than refused."""
    prefix = struct.pack("<4sIIIQ", b"GFT1", entries, facts, len(table), 28 + len(table))
    # Nothing but FRAME_INVALID: whatever else is raised fails the test.
    with contextlib.suppress(GeofedError):
        framing.decode(prefix + struct.pack("<I", zlib.crc32(table, zlib.crc32(prefix))) + table)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_million_damaged_frames_are_read_or_refused() -> None:
    """With a right checksum, so that the table itself is read; what is read has no more bytes than the frame."""
    tensors = {"delta": np.arange(20, dtype=np.float32), "state": np.zeros((2, 3), np.int64)}
    whole = _bytes(tensors, {"codec": 2.0, "from": 1.0})
    header_bytes = struct.unpack_from("<I", whole, 12)[0]
    outcomes = {"refused": 0, "read": 0}
    for data in damaged(whole[: 28 + header_bytes], 1_000_000):
        frame = bytearray(data[:24].ljust(24, b"\0") + bytes(4) + data[28:] + whole[28 + header_bytes :])
        length = min(max(0, len(data) - 28), 1 << 16)
        struct.pack_into("<IQ", frame, 12, length, len(frame))
        crc = zlib.crc32(frame[28 : 28 + length], zlib.crc32(frame[:24]))
        struct.pack_into("<I", frame, 24, crc)
        try:
            read = framing.decode(frame)
        except GeofedError as error:
            assert error.code == "FRAME_INVALID"  # noqa: PT017 - one of a million, counted below
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        assert sum(array.nbytes for array in read.tensors.values()) <= len(frame)
    assert min(outcomes.values()) > 1000, outcomes


@pytest.mark.parametrize(
    "shape", [(1 << 40,), (1 << 63, 1 << 63), (2**64 - 1, 0), (0, 2**64 - 1), (1 << 33, 1 << 33, 4)]
)
def test_sizes_are_checked_before_memory_is_taken(shape: tuple[int, ...]) -> None:
    entry = b"\x01x" + struct.pack(f"<BB{len(shape)}QQ", 0, len(shape), *shape, 64 * (1 + (28 + 8 * len(shape)) // 64))
    total = 128
    prefix = struct.pack("<4sIIIQ", b"GFT1", 1, 0, len(entry), total)
    frame = prefix + struct.pack("<I", zlib.crc32(entry, zlib.crc32(prefix))) + entry
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(GeofedError) as raised:
        framing.decode(frame + bytes(total - len(frame)))
    assert raised.value.code == "FRAME_INVALID"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 14


def test_a_reader_may_bound_what_it_takes() -> None:
    whole = _bytes({"x": np.zeros(100, np.float32)})
    assert framing.decode(whole, max_elements=100).tensors["x"].size == 100
    with pytest.raises(GeofedError):
        framing.decode(whole, max_elements=99)


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([None]), np.zeros(2, np.complex64), np.zeros(2, ">f4"), np.zeros((1,) * 9)]
)
def test_what_the_framing_does_not_know_is_refused(array: framing.Array) -> None:
    with pytest.raises(GeofedError) as raised:
        framing.encode({"x": array})
    assert raised.value.code == "FRAME_INVALID"


def test_a_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(GeofedError, match="longer than 255"):
        framing.encode({"x" * 256: np.zeros(1, np.float32)})


@pytest.mark.slow
def test_many_tensors_fit() -> None:
    tensors = {str(number): np.zeros((), np.float32) for number in range(70_000)}
    assert len(framing.decode(_bytes(tensors)).tensors) == 70_000


def test_the_digest_is_of_the_bytes_however_they_are_cut() -> None:
    assert framing.digest_of([b"ab", b"", memoryview(b"c")]) == framing.digest_of([b"abc"])
    assert framing.digest_of([b"abc"]) == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@given(hnp.arrays("<f4", st.integers(0, 300)), st.dictionaries(_NAMES, st.floats(width=64), max_size=3))
def test_a_vector_in_blocks_makes_the_same_frame(vector: npt.NDArray[np.float32], facts: dict[str, float]) -> None:
    total, pieces = framing.encode_blocks("v", vector.size, np.array_split(vector, 3), facts)
    data = b"".join(pieces)
    assert data == _bytes({"v": vector}, facts) == b"".join(framing.encode({"v": np.array_split(vector, 3)}, facts))
    assert len(data) == total
