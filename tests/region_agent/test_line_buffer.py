"""Of a burst of lines the first and the newest are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from region_agent.link.line_buffer import LineBuffer, dropped_text


@given(st.lists(st.integers(1, 30), max_size=200), st.integers(4, 200))
def test_what_is_held_is_bounded_in_order_and_counted(sizes: list[int], most_bytes: int) -> None:
    buffer = LineBuffer[int](most_bytes)
    for number, size in enumerate(sizes):
        buffer.add(number, size)
    first, dropped, newest = buffer.take()
    assert [*first, *newest] == [*range(len(first)), *range(len(sizes) - len(newest), len(sizes))]
    assert len(first) + dropped + len(newest) == len(sizes)
    if sizes:
        assert newest[-1:] == [len(sizes) - 1] or len(first) == len(sizes)
        assert sum(sizes[number] for number in [*first, *newest[:-1]]) <= most_bytes
    assert not buffer
    assert buffer.take() == ([], 0, [])


def test_few_lines_pass_whole() -> None:
    buffer = LineBuffer[str](1000)
    for line in "abc":
        buffer.add(line, 100)
    assert buffer.take() == (["a", "b"], 0, ["c"])
    assert dropped_text(93_120) == "… 93,120 lines dropped"
