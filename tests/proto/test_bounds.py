"""Text and batches that are fit to be stored and sent, whatever they are made of."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.bounds import MOST_METRICS, NAME_BYTES, TEXT_BYTES, TRUNCATED, bounded_metrics, clean, parts_of
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import to_proto

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=80)


@given(ANY_TEXT, st.integers(20, 120))
def test_clean_text_is_bounded_valid_and_stays_as_it_is(text: str, most_bytes: int) -> None:
    cleaned = clean(text, most_bytes)
    encoded = cleaned.encode()
    assert len(encoded) <= most_bytes
    assert not [char for char in cleaned if ord(char) < 0x20 and char not in "\t\n"]
    assert "\0" not in cleaned
    assert clean(cleaned, most_bytes) == cleaned
    assert cleaned.endswith(TRUNCATED) or len(encoded) >= len(text)


@given(st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=80))
def test_text_that_is_fit_is_not_touched(text: str) -> None:
    assert clean(text) == text


def test_what_cannot_be_shown_is_told_apart() -> None:
    assert clean(os.fsdecode(b"caf\xe9.txt")) == r"caf\xe9.txt"
    assert clean("a\0b\x1b[31m\ud800\n\tc\r") == "a\\x00b\\x1b[31m\\ud800\n\tc\\x0d"


def test_a_character_that_would_be_cut_through_is_left_out() -> None:
    cut = clean("x" + "ü" * 100, 50)
    assert cut == "x" + "ü" * 18 + TRUNCATED
    assert len(cut.encode()) == 50


def test_every_error_is_bounded_when_it_is_made() -> None:
    error = GeofedError("TASK_FAILED", "caf\udce9 " * 2_000_000, hint="h\0" * 100_000)
    assert len(to_proto(error).SerializeToString()) < 2 * TEXT_BYTES + 100
    assert error.message.startswith(r"caf\xe9 caf\xe9")
    assert error.message.endswith(TRUNCATED)
    assert str(error) == f"TASK_FAILED: {error.message}"


def test_metrics_are_bounded_in_number_and_name() -> None:
    few = {"accuracy": 0.5, "n\udce9" * 1000: float("nan")}
    kept, left_out = bounded_metrics(few)
    assert (len(kept), left_out) == (2, "")
    assert all(len(name.encode()) <= NAME_BYTES for name in kept)
    many = {f"recall of {n}": 0.5 for n in range(60_000)}
    kept, left_out = bounded_metrics(many)
    assert list(kept) == list(many)[:MOST_METRICS]
    assert "more than 1,000 metrics" in left_out


@given(st.lists(st.binary(max_size=40)), st.integers(1, 100), st.integers(1, 7))
def test_parts_are_bounded_and_lose_nothing(items: list[bytes], most_bytes: int, most_items: int) -> None:
    parts = list(parts_of(items, len, most_bytes, most_items))
    assert [item for part in parts for item in part] == items
    for part in parts:
        assert 1 <= len(part) <= most_items
        assert len(part) == 1 or sum(map(len, part)) <= most_bytes
    for part, after in pairwise(parts):
        assert len(part) == most_items or sum(map(len, part)) + len(after[0]) > most_bytes


@pytest.mark.parametrize("text", ["", "x" * TEXT_BYTES])
def test_the_bound_itself_is_no_cut(text: str) -> None:
    assert clean(text) == text
