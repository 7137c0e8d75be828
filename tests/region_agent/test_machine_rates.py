"""Rates are measured over as much as says something, and never over more than there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from region_agent import machine_rates


def _taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    taken: list[int] = []
    empty = machine_rates.np.empty
    monkeypatch.setattr(machine_rates.np, "empty", lambda size, kind: taken.append(size) or empty(size, kind))
    return taken


def test_memory_is_taken_up_to_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "_FRESH_SECONDS", 1e9)
    monkeypatch.setattr(machine_rates, "_FRESH_BLOCK_BYTES", 1 << 20)
    taken = _taken(monkeypatch)
    for free, most in ((40 << 20, 10), (1 << 20, 1), (0, 1)):
        monkeypatch.setattr(machine_rates, "_available_bytes", lambda free=free: free)
        taken.clear()
        assert machine_rates.fresh_memory_rate() > 0.0
        assert taken == [1 << 20] * most


def test_memory_that_is_slow_to_have_is_taken_for_a_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(machine_rates, "_FRESH_BLOCK_BYTES", 1 << 20)
    taken = _taken(monkeypatch)
    assert machine_rates.fresh_memory_rate() > 0.0
    assert len(taken) == 1


def test_storing_leaves_nothing(tmp_path: Path) -> None:
    assert machine_rates.durable_write_rate(tmp_path) > 0.0
    assert list(tmp_path.iterdir()) == []
