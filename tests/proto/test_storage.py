"""What is removed when: the rules by any items, and the removal of files by a disk that fails."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.storage import Stored, due, due_at, found, left_after, remove, totals, used_bytes

KINDS = ("models", "logs", "uploads")
TIMES = st.floats(-1e10, 1e10)
ITEMS = st.lists(
    st.builds(Stored, st.sampled_from(KINDS), st.text(max_size=3), st.integers(0, 1 << 40), TIMES, in_use=st.booleans())
)
KEEP = st.dictionaries(st.sampled_from(KINDS), st.none() | st.floats(0, 1e9))


@given(ITEMS, KEEP, TIMES)
def test_nothing_in_use_or_without_a_rule_is_due(
    items: list[Stored], keep: dict[str, float | None], now: float
) -> None:
    for item in due(items, keep, now):
        assert not item.in_use
        seconds = keep[item.kind]
        assert seconds is not None
        assert now >= item.since + seconds


@given(ITEMS, KEEP, TIMES, st.floats(0, 1e9))
def test_what_is_due_stays_due(items: list[Stored], keep: dict[str, float | None], now: float, later: float) -> None:
    after = due(items, keep, now + later)
    assert all(item in after for item in due(items, keep, now))


@given(ITEMS, KEEP, st.floats(0, 1e9), TIMES)
def test_a_longer_rule_removes_no_more(
    items: list[Stored], keep: dict[str, float | None], more: float, now: float
) -> None:
    longer = {kind: None if seconds is None else seconds + more for kind, seconds in keep.items()}
    sooner = due(items, keep, now)
    assert all(item in sooner for item in due(items, longer, now))


@given(ITEMS, KEEP, TIMES)
def test_totals_are_the_sums_and_tell_the_next_time(
    items: list[Stored], keep: dict[str, float | None], now: float
) -> None:
    told = totals(items, keep, now)
    assert sum(total.bytes for total in told) == sum(item.bytes for item in items)
    assert sum(total.due_bytes for total in told) == sum(item.bytes for item in due(items, keep, now))
    for total in told:
        later = [at for item in items if item.kind == total.kind and now < (at := due_at(item, keep)) < math.inf]
        assert total.next_at == min(later, default=None)


def test_files_and_folders_are_measured_with_their_latest_change(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "file").write_bytes(bytes(100_000))
    (tmp_path / "file").write_bytes(bytes(10_000))
    by_name = {one.path.name: one for one in found(tmp_path)}
    assert set(by_name) == {"folder", "file"}
    assert 100_000 <= by_name["folder"].bytes < 130_000
    assert by_name["folder"].bytes == used_bytes(tmp_path / "folder")
    assert by_name["folder"].changed_at >= (tmp_path / "folder" / "deep" / "file").stat().st_mtime
    assert found(tmp_path / "nowhere") == []
    assert used_bytes(tmp_path / "nowhere") == 0


def test_a_link_is_removed_and_not_what_it_names(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(bytes(100_000))
    (tmp_path / "link").symlink_to(kept)
    assert used_bytes(tmp_path / "link") < 10_000
    remove(tmp_path / "link")
    assert (kept / "file").exists()


def test_one_failure_stops_no_other_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One file can't be removed, one vanishes meanwhile, and the others go."""
    items = [Stored("logs", name, 5, 0.0) for name in ("a", "stuck", "gone", "b")]
    for name in ("a", "stuck", "b"):
        (tmp_path / name).write_text("x")
    unlink = Path.unlink

    def failing(self: Path, missing_ok: bool = False) -> None:
        if self.name == "stuck":
            raise PermissionError(13, "not permitted")
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", failing)
    with caplog.at_level(logging.INFO, "geofed.storage"):
        left = left_after(items, lambda item: remove(tmp_path / item.name))
    assert [item.name for item in left] == ["stuck"]
    assert [path.name for path in tmp_path.iterdir()] == ["stuck"]
    assert "logs stuck cannot be removed yet" in caplog.text
    assert "removed: 3 logs, 15 bytes" in caplog.text
