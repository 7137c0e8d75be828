"""Figures of a partition's report in groups: totals, evaluation, speed, exchange and links."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "2026_11_27_reports"
down_revision = "2026_11_26_shared"
branch_labels = None
depends_on = None

_GROUPS = {
    "totals": ("money", "sent_bytes", "received_bytes"),
    "evaluation": ("metrics", "metrics_samples", "metrics_round", "metrics_error"),
    "speed": (
        "samples_per_second",
        "round_samples_per_second",
        "step_seconds",
        "merge_seconds",
        "compute_seconds",
        "wait_seconds",
        "merged_by",
    ),
    "exchange": ("applied_updates", "staleness", "refused", "interval", "codec", "update_bytes", "routes"),
}
"""Former names by group."""
_LINKS = {"link_rtt_ms": "rtt_ms", "link_mbps": "mbps", "link_streams": "streams"}


def upgrade() -> None:
    """Regroup the reports in the states of jobs."""
    jobs = sa.table("jobs", sa.column("id", sa.String), sa.column("state_json", sa.Text))
    connection = op.get_bind()
    for job, text in connection.execute(sa.select(jobs.c.id, jobs.c.state_json)).all():
        state = json.loads(text)
        for holder in (*state.get("partitions", ()), *state.get("copies", ())):
            if holder.get("report"):
                holder["report"] = _grouped(holder["report"])
        connection.execute(jobs.update().where(jobs.c.id == job).values(state_json=json.dumps(state)))


def _grouped(report: dict[str, Any]) -> dict[str, Any]:
    moved = {name for names in _GROUPS.values() for name in names} | {*_LINKS, "links_down"}
    made: dict[str, Any] = {name: value for name, value in report.items() if name not in moved}
    for group, names in _GROUPS.items():
        made[group] = {name.removeprefix("metrics_"): report[name] for name in names if name in report}
    links: dict[str, dict[str, Any]] = {region: {"down": True} for region in report.get("links_down", ())}
    for former, name in _LINKS.items():
        for region, value in report.get(former, {}).items():
            links.setdefault(region, {})[name] = value
    return made | {"links": links}
