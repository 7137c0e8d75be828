"""The alerts and the dashboard use metrics that the control plane has, and each alert has its line in the docs."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ruamel.yaml import YAML

from control_plane.service._metrics import MetricsExporter

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
RULES: list[dict[str, Any]] = YAML(typ="safe").load(FOLDER / "alerts.yaml")["groups"][0]["rules"]


def metrics() -> set[str]:
    """Names in the exposition of a control plane without jobs and regions."""

    async def nothing(_: object) -> dict[str, int]:
        return {}

    federation: Any = SimpleNamespace(jobs={}, regions={}, sessions={}, clock=lambda: 0.0, read=nothing)
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


def test_the_scrape_presents_the_token_over_a_verified_connection() -> None:
    (scrape,) = YAML(typ="safe").load(FOLDER / "prometheus.yaml")["scrape_configs"]
    assert scrape["scheme"] == "https"
    assert scrape["authorization"]["credentials_file"].endswith("metrics.token")
    assert "insecure_skip_verify" not in scrape["tls_config"]
