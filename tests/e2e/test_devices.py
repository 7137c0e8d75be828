"""A region whose workers have devices that are billed: in the plan, the account, and what users see of the region."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.failures import told
from support.running import PRICES, Federation, Running, check_succeeded, digits_sites
from support.stand_in import in_place_of_devices

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

USD = 0.0005
DEVICES = {
    "capacity": {"workers": 1, "memoryMb": 1024, "devices": {"kind": "test device", "count": 1, "memoryMb": 2048}},
    "prices": {**PRICES, "deviceUsdPerSecond": USD},
}
# Workers compute on the CPU as if it were the device that the region states.
STAND_IN = in_place_of_devices("module._check_billed = lambda billed, seen: None")


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    sites = digits_sites(tmp_path, ["bergen", "oslo"])
    sites[1].config.update(DEVICES)
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Federation(tmp_path / "federation", sites) as federation:
        monkeypatch.delenv("PYTHONPATH")
        yield Running(federation, tmp_path)


def test_device_seconds_are_planned_and_billed(running: Running) -> None:
    shown = running.federation.control_plane("region", "describe", "oslo").stdout
    assert "1 x test device, 2048 MB each" in shown
    assert "device-seconds" not in shown
    assert "1 x test device" in running.federation.control_plane("region", "list").stdout
    ended = running.wait_end(running.submit("train.end.epochs=4", "train.evaluateEvery=0", "wan.interval=10"))
    check_succeeded(ended, accuracy=0.0)
    billed = [item for item in ended["result"]["money"] if item["item"] == "device-seconds"]
    (item,) = billed
    assert (item["region"], item["unit"]) == ("oslo", "s")
    assert item["usd"] == pytest.approx(USD * item["quantity"])
    functions = next(
        one for one in ended["result"]["money"] if (one["region"], one["item"]) == ("oslo", "function-seconds")
    )
    memory_mb = next(part["memory_mb"] for part in ended["plan"]["partitions"] if part["region"] == "oslo")
    assert item["quantity"] == pytest.approx(functions["quantity"] * 1024 / memory_mb)
    planned = [one for one in ended["plan"]["estimate"]["items"] if one["item"] == "device-seconds"]
    assert [one["region"] for one in planned] == ["oslo"]
    assert planned[0]["usd"] > 0
    # Without the stand-in the functions see no device, and nothing is computed that would be billed.
    running.federation.processes["oslo"].terminate()
    running.federation.processes["oslo"].wait(60)
    running.federation.start_agent("oslo")
    running.federation.wait_connected(["oslo"])
    job = running.job_folder() / "job.yaml"
    other = ("--set", "regions.use=[oslo]", "--set", "train.local=[none.*]")
    failure = told(running.federation.control_plane("submit", str(job), *other, check=False))
    assert failure.code == "GPUS_TOO_FEW"
    assert "the region bills 1 GPU for a worker, and a function sees none" in failure.text
    assert "no job was created" in failure.hint
