"""The alerts and the dashboard use metrics that the control plane has, and each alert has its line in the docs."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

from control_plane.pki import Authority, utc_now
from control_plane.service._metrics import MetricsExporter
from control_plane.service.state._sums import JobSums

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
RULES: list[dict[str, Any]] = YAML(typ="safe").load(FOLDER / "alerts.yaml")["groups"][0]["rules"]


def metrics() -> set[str]:
    """Names in the exposition of a control plane without jobs and regions."""

    async def nothing(_: object) -> dict[str, int]:
        return {}

    federation: Any = SimpleNamespace(jobs={}, regions={}, sessions={}, clock=lambda: 0.0, read=nothing, sums=JobSums())
    text = asyncio.run(MetricsExporter(federation).exposition()).decode()
    return set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


def used(expression: str) -> set[str]:
    return set(re.findall(r"\bgeofed_\w+", expression))


def test_alerts_and_dashboard_use_metrics_that_there_are() -> None:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    shown = {name for panel in panels for target in panel["targets"] for name in used(target["expr"])}
    alerting = {name for rule in RULES for name in used(rule["expr"])}
    assert len(shown) > 8
    assert shown | alerting <= metrics()


def test_each_alert_says_what_to_do() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert re.findall(r"^\| `(Geofed\w+)`", page, re.MULTILINE) == [rule["alert"] for rule in RULES]


@pytest.mark.processes
def test_alerts_fire_when_they_say_they_do(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    error = 'geofed_rpc_calls_total{method="Submit",outcome="INTERNAL"}'
    running = 'geofed_partition_workers{job="a",region="east"}'
    rounds = 'geofed_partition_round{job="a",region="east"}'
    two = {f'up{{job="geofed",instance="{one}"}}': f"{one}x10" for one in (0, 1)}
    cases: list[tuple[str, dict[str, str], dict[str, bool]]] = [
        # Alert; series by minutes; whether it fires at an instant.
        ("GeofedControlPlaneDown", {}, {"5m": True}),
        ("GeofedControlPlaneDown", {'up{job="geofed",instance="a"}': "0x10"}, {"5m": True}),
        ("GeofedControlPlaneDown", two, {"5m": False}),
        ("GeofedErrorsInside", {error: "_x20 1x60"}, {"15m": False, "22m": True, "40m": False}),
        ("GeofedErrorsInside", {error: "1x30 2x60"}, {"29m": False, "33m": True, "55m": False}),
        # A first round of 50 minutes, and one that never ends.
        ("GeofedJobStands", {running: "4x400", rounds: "0x50 1x50 2x300"}, {"40m": False, "90m": False, "4h": True}),
        ("GeofedJobStands", {running: "4x400", rounds: "0x400"}, {"55m": False, "80m": True}),
    ]  # fmt: skip
    tests = []
    for alert, series, instants in cases:
        # What fires, without its labels, which differ from alert to alert.
        expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
        tests.append({
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in series.items()],
            "promql_expr_test": [
                {"expr": expression, "eval_time": at, "exp_samples": [{"labels": "{}", "value": 1}] if fires else []}
                for at, fires in instants.items()
            ],
        })  # fmt: skip
        assert alert in {rule["alert"] for rule in RULES}
    file = tmp_path / "tests.yaml"
    file.write_text(
        json.dumps({"rule_files": [str(FOLDER / "alerts.yaml")], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scrape_presents_the_token_over_a_verified_connection(tmp_path: Path) -> None:
    (scrape,) = YAML(typ="safe").load(FOLDER / "prometheus.yaml")["scrape_configs"]
    assert scrape["scheme"] == "https"
    assert scrape["authorization"]["credentials_file"].endswith("metrics.token")
    assert "insecure_skip_verify" not in scrape["tls_config"]
    assert scrape["honor_labels"], "else the label `job` of a metric is renamed"
    pki = tmp_path / "pki"
    ca_file = Authority.open(pki, "geofed", utc_now(0)).ca_file
    assert Path(scrape["tls_config"]["ca_file"]).relative_to("/geofed") == ca_file.relative_to(tmp_path)
