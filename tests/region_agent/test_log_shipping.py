"""Log lines are sent in bounded batches; the newest of them are kept, however long the control plane is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from geofed_pb.bounds import SESSION_MESSAGE_BYTES, TRUNCATED
from geofed_pb.v1 import agent_pb2
from region_agent.link.log_shipping import LogShipping
from region_agent.state.store import AgentStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AgentStore]:
    store = AgentStore(tmp_path / "agent.db")
    yield store
    store.close()


def _shipping(store: AgentStore) -> LogShipping:
    return LogShipping(store, lambda message: (store.add_report(message.SerializeToString()), None)[1])


def _sent(store: AgentStore) -> list[agent_pb2.LogBatch]:
    found, cursor = [], 0
    while batch := store.reports_after(cursor):
        found += [agent_pb2.FromAgent.FromString(raw).logs for _, raw in batch]
        cursor = batch[-1][0]
    return found


@pytest.mark.slow
def test_a_burst_is_bounded_and_says_what_it_lacks(store: AgentStore) -> None:
    shipping = _shipping(store)
    for number in range(100_000):
        shipping.add("job-1", "worker 0", f"line {number}")
    shipping.add("job-1", "worker 0", "NameError: undefined")
    shipping.add("job-2", "ps", "quiet")
    shipping.flush()
    batches = _sent(store)
    assert max(batch.ByteSize() for batch in batches) < SESSION_MESSAGE_BYTES
    records = [record for batch in batches for record in batch.records if record.job == "job-1"]
    assert sum(record.ByteSize() for record in records) < (1 << 20) + 100
    texts = [record.text for record in records]
    (gap,) = [index for index, text in enumerate(texts) if text.startswith("… ")]
    dropped = 100_001 - (len(texts) - 1)
    assert texts[gap] == f"… {dropped:,} lines dropped"
    assert texts[:gap] == [f"line {number}" for number in range(gap)]
    assert texts[-2:] == ["line 99999", "NameError: undefined"]
    assert [record.text for batch in batches for record in batch.records if record.job == "job-2"] == ["quiet"]


def test_while_the_control_plane_is_away_the_queue_is_bounded_and_the_newest_lines_are_kept(store: AgentStore) -> None:
    shipping = _shipping(store)
    for turn in range(20):
        for number in range(500):
            shipping.add("job-1", "worker 0", f"{turn} {number} ".ljust(3000, "x"))
        shipping.flush()
    assert store.report_bytes_waiting() < 6 << 20
    store.forget_reports(store.reports_acknowledged() + store.reports_waiting())
    shipping.flush()
    records = [record for batch in _sent(store) for record in batch.records]
    assert records[-1].text.startswith("19 499 ")
    assert [record for record in records if record.text.endswith("lines dropped")]


def test_a_line_is_cut_and_made_fit(store: AgentStore) -> None:
    shipping = _shipping(store)
    shipping.add("job-1", "worker 0", "caf\udce9\0" + "x" * 10_000)
    shipping.flush_job("job-1")
    ((record,),) = [batch.records for batch in _sent(store)]
    assert record.text.startswith(r"caf\xe9\x00xxx")
    assert record.text.endswith(TRUNCATED)
    assert len(record.text.encode()) == 4000
