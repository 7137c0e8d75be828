"""Format what a user decides by before submitting a job: the plan in short, and what differs between two plans."""

from __future__ import annotations

from typing import Any

from control_plane._plan_view import (
    batch_text,
    budget_promise,
    clients_text,
    deadline_promise,
    exchange_text,
    length_text,
    privacy_text,
    range_text,
    usd_by_region,
)
from control_plane._view import Data, bytes_text, seconds_text, usd_text
from control_plane.cli._output import columns, fields

__all__ = ["diff_text", "differing", "plan_diff", "plan_summary"]


def plan_summary(plan: Data) -> str:
    """Format regions, time, bytes, cost, promises and warnings of a plan."""
    estimate, usd = plan["estimate"], usd_by_region(plan)
    regions = columns(
        ["REGION", "SAMPLES", "WORKERS", "MEMORY MB", "USD"],
        [
            [part["region"], part["samples"], part["workers"], part["memory_mb"], usd_text(usd[part["region"]])]
            for part in plan["partitions"]
        ],
    )
    head = fields(
        [
            ("time", range_text(estimate["seconds"], seconds_text)),
            ("WAN bytes", range_text(estimate["wan_bytes"], bytes_text)),
            ("cost", range_text(estimate["usd"], usd_text)),
            ("batch", batch_text(plan)),
            ("clients", clients_text(plan)),
            ("exchange", exchange_text(plan)),
            ("privacy", privacy_text(plan)),
            ("deadline", deadline_promise(plan)),
            ("budget", budget_promise(plan)),
            ("waits for", plan.get("waits_for", "")),
            *(("warning", text) for text in plan.get("warnings", [])),
        ]
    )
    return f"{regions}\n\n{head}"


def plan_diff(spec_before: Data, spec_after: Data, before: Data, after: Data) -> list[Data]:
    """Return what differs between two job files, then between their plans; time, bytes and cost in any case."""
    rows = [_row(row["key"], *map(_shown, row["values"])) for row in differing([spec_before, spec_after])]
    facts, new = _facts(before), _facts(after)
    rows += [
        _row(name, facts.get(name, "-"), new.get(name, "-"))
        for name in dict.fromkeys([*facts, *new])
        if name in _ALWAYS or facts.get(name) != new.get(name)
    ]
    return rows


def differing(specs: list[Data]) -> list[Data]:
    """Return the keys in which some job files differ, with the value of each; None: it has none."""
    flat = [_flat(spec) for spec in specs]
    keys = sorted({key for one in flat for key in one})
    rows = [{"key": key, "values": [one.get(key) for one in flat]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def diff_text(data: Data) -> str:
    """Format the result of `plan_diff` with the names of the files, and the warnings of both plans."""
    rows = [[row["what"], row["before"], row["after"]] for row in data["changes"]]
    table, told = columns(["", data["before"], data["after"]], rows), data["warnings"]
    lines = [("warning", text) for text in told["before"] if text in told["after"]]
    for one, other in (("before", "after"), ("after", "before")):
        lines += [(f"warning of {data[one]}", text) for text in told[one] if text not in told[other]]
    return f"{table}\n\n{fields(lines)}" if lines else table


_ALWAYS = ("time", "WAN bytes", "cost")
_EXACT = 1e15
"""Whole numbers below are written without an exponent."""


def _facts(plan: Data) -> dict[str, str]:
    estimate = plan["estimate"]
    facts = {
        "rounds": length_text(plan),
        "clients": clients_text(plan) or "-",
        "policy": f"{plan['wan_policy']}, in {plan['codec']}",
        "exchange": exchange_text(plan),
        "privacy": privacy_text(plan) or "-",
    }
    for part in plan["partitions"]:
        workers = "worker" if part["workers"] == 1 else "workers"
        facts[part["region"]] = f"{part['workers']} {workers} of {part['memory_mb']} MB, batch {part['batch']}"
    return facts | {
        "time": range_text(estimate["seconds"], seconds_text),
        "WAN bytes": range_text(estimate["wan_bytes"], bytes_text),
        "cost": range_text(estimate["usd"], usd_text),
    }


def _row(what: str, before: str, after: str) -> Data:
    return {"what": what, "before": before, "after": after}


def _shown(value: Any) -> str:
    """Return a value as files have it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return str(int(value))
    return "-" if value is None else str(value)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values of a nested dictionary by their dotted keys."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        key: leaf for name, child in value.items() for key, leaf in _flat(child, f"{path}.{name}".strip(".")).items()
    }
