"""Values of every type travel as float32 coordinates that can be averaged, and come back exactly where nothing was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sync.coordinates import array_dtype, coding_of, decode, encode
from sync.means import weighted_mean

INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float32", "float64", "complex64")


def _values(dtype: str) -> st.SearchStrategy[Any]:
    # What float64 has beyond float32's range or below its least number cannot travel.
    elements = None
    if dtype == "float64":
        normal = st.floats(2.0**-60, 2.0**100)
        elements = st.one_of(st.just(0.0), normal, normal.map(lambda value: -value))
    return hnp.arrays(np.dtype(dtype), st.integers(0, 5), elements=elements)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
@given(data=st.data())
def test_what_is_the_same_everywhere_comes_back_bit_for_bit(dtype: str, data: st.DataObject) -> None:
    values = data.draw(_values(dtype))
    if dtype == "complex64":
        values = np.nan_to_num(values)
    coding = coding_of(dtype, marked=True)
    assert coding is not None
    weights = data.draw(st.lists(st.floats(0.5, 1000.0), min_size=1, max_size=4))
    coordinates = encode(values, coding)
    assert coordinates.shape == (values.size * coding.coordinates,)
    assert np.isfinite(coordinates).all()
    mean = weighted_mean([coordinates] * len(weights), weights)
    back = decode(mean, dtype, coding)
    assert np.array_equal(back, values, equal_nan=dtype in FLOATS)


@pytest.mark.parametrize("dtype", INTEGERS)
@given(data=st.data())
def test_the_mean_of_integers_is_the_mean_rounded(dtype: str, data: st.DataObject) -> None:
    one, other = (data.draw(hnp.arrays(np.dtype(dtype), 3)) for _ in range(2))
    coding = coding_of(dtype)
    assert coding is not None
    back = decode(weighted_mean([encode(one, coding), encode(other, coding)], [1, 1]), dtype, coding)
    for found, a, b in zip(back.tolist(), one.tolist(), other.tolist(), strict=True):
        # The mean of large ones is rounded as float32 is.
        assert abs(int(found) - (int(a) + int(b)) / 2) <= 0.5 + 2.0**-22 * max(abs(int(a)), abs(int(b)))


@pytest.mark.parametrize("dtype", INTEGERS)
@given(data=st.data())
def test_a_change_that_is_added_leads_to_the_other_value(dtype: str, data: st.DataObject) -> None:
    small = st.integers(0, 1) if dtype == "bool" else st.integers(0, 100)
    one, other = (data.draw(hnp.arrays(np.dtype(dtype), 3, elements=small)) for _ in range(2))
    coding = coding_of(dtype)
    assert coding is not None
    change = encode(other, coding) - encode(one, coding)
    assert np.array_equal(decode(encode(one, coding) + change, dtype, coding), other)


def test_what_is_infinite_for_one_is_infinite_for_all() -> None:
    coding = coding_of("float32", marked=True)
    assert coding is not None
    one, other = np.float32([np.inf, -np.inf, np.nan, 1.0]), np.float32([1.0, 1.0, 1.0, 3.0])
    back = decode(weighted_mean([encode(one, coding), encode(other, coding)], [1, 3]), "float32", coding)
    assert np.array_equal(back, np.float32([np.inf, -np.inf, np.nan, 2.5]), equal_nan=True)


def test_truths_are_decided_by_the_majority() -> None:
    coding = coding_of("bool")
    assert coding is not None
    votes = np.float32([0.0, 0.4, 0.6, 1.0])
    assert decode(votes, "bool", coding).tolist() == [False, False, True, True]


@pytest.mark.parametrize("dtype", ["complex128", "qint8", "float8_e8m0fnu", "int4"])
def test_types_that_no_file_has_a_name_for_cannot_travel(dtype: str) -> None:
    assert coding_of(dtype) is None


def test_what_is_trained_has_one_coordinate() -> None:
    assert [coding_of(dtype, trained=True) for dtype in ("float64", "bfloat16")] == [coding_of("float32")] * 2
    assert coding_of("int64", trained=True) is None
    assert array_dtype("bfloat16").itemsize == 2
