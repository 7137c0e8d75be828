"""Meters and what they cost: what is billed equals what was used."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.v1 import common_pb2, sync_pb2
from region_agent.config import PricesConfig
from region_agent.partition.billing import bill, invocation_amounts
from region_agent.partition.machine import PartitionMachine
from region_agent.partition.report import PartitionMeter, report_of
from region_agent.state.store import AgentStore
from region_agent.worker.invocation import Outcome

PRICES = PricesConfig(
    source="list", as_of="2026-01", function_usd_per_gb_second=2e-5, function_usd_per_request=2e-7,
    server_usd_per_hour=0.05, egress_usd_per_gb=0.1, egress_to={"west": 0.02},
)  # fmt: skip


@given(st.floats(0, 1e5), st.integers(128, 1 << 16))
def test_time_is_rounded_up_to_the_millisecond(seconds: float, memory_mb: int) -> None:
    amounts = invocation_amounts(seconds, memory_mb)
    billed = amounts["gb_seconds"] * 1024 / memory_mb
    assert seconds - 1e-9 <= billed < seconds + 0.001 + 1e-9
    assert billed * 1000 == pytest.approx(round(billed * 1000), abs=1e-6)
    assert amounts["calls"] == 1.0


def test_every_meter_is_billed_at_its_price() -> None:
    meters = {"gb_seconds": 1e6, "calls": 5e6, "ps_seconds": 7200.0, "sent_bytes:west": 3e9, "sent_bytes:north": 2e9,
              "received_bytes:west": 9e9, "compute_seconds": 5.0}  # fmt: skip
    lines = {item.item: (item.quantity, item.unit, item.usd) for item in bill(meters, PRICES)}
    assert lines == {
        "function-seconds": (1e6, "GB-s", pytest.approx(20.0)),
        "function-calls": (5e6, "1", pytest.approx(1.0)),
        "parameter-server": (2.0, "h", pytest.approx(0.1)),
        "egress to west": (3.0, "GB", pytest.approx(0.06)),
        "egress to north": (2.0, "GB", pytest.approx(0.2)),
    }
    assert all(item.source == "list" for item in bill(meters, PRICES))


def test_workers_that_may_be_taken_away_are_billed_apart() -> None:
    told = PRICES.model_copy(update={"preemptible_usd_per_gb_second": 4e-6})
    meters = invocation_amounts(10.0, 1024) | {"calls": 2.0}
    meters |= {"preemptible_gb_seconds": invocation_amounts(5.0, 2048, preemptible=True)["preemptible_gb_seconds"]}
    lines = {item.item: (item.quantity, item.usd) for item in bill(meters, told)}
    assert lines["function-seconds"] == (10.0, pytest.approx(2e-4))
    assert lines["preemptible-function-seconds"] == (10.0, pytest.approx(4e-5))
    untold = {item.item: item.usd for item in bill(meters, PRICES)}
    assert untold["preemptible-function-seconds"] == pytest.approx(2e-4), (
        "a price that is not told any more is not zero"
    )


def test_devices_are_billed_by_the_second() -> None:
    told = PRICES.model_copy(update={"device_usd_per_second": 0.001})
    meters = invocation_amounts(10.0, 2048, devices=2)
    assert meters["device_seconds"] == 20.0
    lines = {item.item: (item.quantity, item.unit, item.usd) for item in bill(meters, told)}
    assert lines["device-seconds"] == (20.0, "s", pytest.approx(0.02))
    assert lines["function-seconds"][0] == 20.0
    untold = {item.item: (item.quantity, item.usd) for item in bill(meters, PRICES)}
    assert untold["device-seconds"] == (20.0, 0.0), "what was used is told without a price, too"
    assert "device-seconds" not in {item.item for item in bill(invocation_amounts(10.0, 2048), PRICES)}


@pytest.fixture
def store(tmp_path: Path) -> AgentStore:
    return AgentStore(tmp_path / "agent.db")


def _status(sent: int, received: int, waited: float = 0.0) -> sync_pb2.PsStatus:
    return sync_pb2.PsStatus(sent_bytes={"west": sent}, received_bytes={"west": received}, wait_seconds=waited)


def test_a_servers_counters_are_added_over_its_lives(store: AgentStore) -> None:
    meter = PartitionMeter(store, "job-1")
    meter.server_started(100.0)
    meter.add_server_status(_status(10, 1), 101.0)
    meter.add_server_status(_status(15, 2, 0.5), 104.0)
    meter.server_ended(105.0)
    again = PartitionMeter(store, "job-1")
    again.server_started(0.0)
    again.add_server_status(_status(7, 7, 0.25), 2.0)
    again.add_server_status(_status(7, 7, 0.25), 3.0)
    assert again.values() == {
        "sent_bytes:west": 22.0, "received_bytes:west": 9.0, "wait_seconds": 0.75, "ps_seconds": 8.0,
    }  # fmt: skip


def test_times_of_rounds_are_reported_before_they_are_stored(store: AgentStore) -> None:
    def reported(meter: PartitionMeter) -> common_pb2.RoundTime:
        status = sync_pb2.PsStatus()
        return report_of(PartitionMachine("east", 1, epoch=3), "job-1", status, meter, PRICES).time

    def status(compute: float) -> sync_pb2.PsStatus:
        return sync_pb2.PsStatus(time=common_pb2.RoundTime(compute=compute, wait=1.0))

    meter = PartitionMeter(store, "job-1")
    meter.server_started(0.0)
    meter.add_server_status(status(2.0), 1.0)
    meter.see_times(status(2.5))
    assert reported(meter) == common_pb2.RoundTime(compute=2.5, wait=1.0)
    meter.add_server_status(status(3.0), 2.0)
    meter.see_times(status(3.0))
    assert reported(meter) == common_pb2.RoundTime(compute=3.0, wait=1.0)
    meter.server_ended(3.0)
    meter.server_started(4.0)
    assert reported(meter) == common_pb2.RoundTime(compute=3.0, wait=1.0)
    meter.see_times(status(0.5))
    assert reported(meter) == common_pb2.RoundTime(compute=3.5, wait=2.0)


def test_a_report_carries_the_account(store: AgentStore) -> None:
    meter = PartitionMeter(store, "job-1")
    meter.add_outcome(Outcome(status="continue", samples=500, compute_seconds=2.0, steady_steps=3, steady_seconds=6.0))
    meter.add_outcome(Outcome(status="done", steady_steps=1, steady_seconds=4.0))
    store.add_to_meters("job-1", invocation_amounts(1.5, 2048) | {"sent_bytes:west": 1e9})
    report = report_of(PartitionMachine("east", 1, epoch=3), "job-1", sync_pb2.PsStatus(step=9), meter, PRICES)
    assert (report.job, report.epoch, report.step, report.speed.samples_per_second) == ("job-1", 3, 9, 250.0)
    assert report.speed.step_seconds == 2.5
    assert report.totals.sent_bytes == {"west": 10**9}
    assert {line.item: line.quantity for line in report.totals.money} == {
        "function-seconds": 3.0, "function-calls": 1.0, "parameter-server": 0.0, "egress to west": 1.0,
    }  # fmt: skip


def test_unknown_prices_are_not_taken_for_zero(store: AgentStore) -> None:
    report = report_of(
        PartitionMachine("east", 1, epoch=1), "job-1", sync_pb2.PsStatus(), PartitionMeter(store, "job-1"), None
    )
    assert list(report.totals.money) == []
