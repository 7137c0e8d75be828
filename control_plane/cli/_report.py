"""Format jobs, plans and results as text, from dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from control_plane._figures import metric_text
from control_plane._plan_view import initial_model_text, plan_facts, range_text
from control_plane._view import Data, bytes_text, histogram_text, model_text, seconds_text, slack_text, usd_text
from control_plane.cli._output import columns, fields


def job_head(view: Data) -> str:
    """Format the identity and the state of a job."""
    name = f" ({view['name']})" if view["name"] not in view["id"] else ""
    error = view["error"]
    return fields(
        [
            ("job", view["id"] + name),
            ("user", view["user"]),
            ("state", view["state"]),
            ("condition", view["condition"]),
            ("error", f"{error['code']}: {error['message']}" if error else ""),
            ("hint", error["hint"] if error else ""),
            ("starts from", initial_model_text(view["initial_model"])),
            ("kept models", kept_models_text(view)),
            ("continues as", view["successor"]),
            ("submitted", view["created_at"]),
            ("started", view["started_at"]),
            ("ended", view["finished_at"]),
            ("deadline", _deadline(view)),
        ]
    )


def kept_models_text(view: Data) -> str:
    """Format which models of evaluated rounds are kept; empty if there is no other one than the final one."""
    models = view["models"]
    if not models or (view["state"] == "succeeded" and len(models) == 1):
        return ""
    if len(models) <= 3:
        return "; ".join(model_text(model) for model in models)
    best = [model_text(model) for model in models[:-1] if model["best"]]
    return "; ".join([f"{len(models)}, the last one of {model_text(models[-1])}", *best])


def _deadline(view: Data) -> str:
    """Format the promised deadline, and by how much it is or will be kept or missed."""
    if view["deadline_at"] is None:
        return ""
    return f"{view['deadline_at']}, {slack_text(view)}"


PARTITION_LEAVES = ("SAMPLES/S", "STEP", "WORKERS", "WAN SENT", "CONDITION", "METRICS", "USD")
"""Columns of a job's regions that a narrow terminal does not show, the first ones first."""


def partition_table(view: Data) -> str:
    """Format the current state of a job's regions, one row each."""
    rounds = view["rounds"]
    return columns(
        ["REGION", "STATE", "WORKERS", "ROUND", "STEP", "LOSS", "SAMPLES/S", "METRICS", "WAN SENT", "USD", "CONDITION"],
        [
            [
                part["region"],
                part["state"],
                f"{part['workers']}{' preemptible' if part['preemptible'] else ''}",
                f"{part['round']}/{rounds}",
                part["step"],
                number_text(part["loss"]),
                f"{part['samples_per_second']:.0f}",
                metrics_text(part["logged"] | part["metrics"]),
                bytes_text(sum(part["sent_bytes"].values())),
                usd_text(part["usd"]),
                part["condition"],
            ]
            for part in view["partitions"]
        ],
        leave_out=PARTITION_LEAVES,
    )


def status_text(view: Data) -> str:
    """Format the current state of a job, or its result if it has ended."""
    result = [result_text(view)] if view["result"] else []
    return "\n\n".join([job_head(view), *(result or [partition_table(view), *shard_table(view["shards"])])])


def description_text(view: Data) -> str:
    """Format everything known about a job."""
    parts = [job_head(view)]
    if view["plan"]:
        parts.append("PLAN\n" + plan_text(view["plan"]))
    if view["links"]:
        parts.append("WAN LINKS\n" + wan_table(view["links"]))
    if view["result"]:
        parts.append("RESULT\n" + result_text(view))
    else:
        parts += _account_so_far(view)
    return "\n\n".join(parts)


def _account_so_far(view: Data) -> list[str]:
    """Format where a job without a result stands, and what it has sent and cost."""
    now, so_far = ("NOW", " SO FAR") if view["finished_at"] is None else ("AT THE END", "")
    parts = [f"{now}\n" + "\n\n".join([partition_table(view), *shard_table(view["shards"])])]
    links = {f"{p['region']}>{other}": sent for p in view["partitions"] for other, sent in p["sent_bytes"].items()}
    links |= {f"{s['source']}>{s['destination']}": s["sent_bytes"] for s in view["shards"]}
    if links:
        parts.append(f"WAN BYTES{so_far}\n" + link_table(links, (view["plan"] or {}).get("estimate", {})))
    money = [{"region": part["region"], **charge} for part in view["partitions"] for charge in part["money"]]
    money += [{"region": shard["source"], **charge} for shard in view["shards"] for charge in shard["money"]]
    if money:
        parts.append(f"COST{so_far}\n" + money_table(money))
    return parts


def shard_table(shards: list[Data]) -> list[str]:
    """Format the shards that other regions process, as a list of one table, or of none if there are no such shards."""
    rows = [
        [
            shard["source"],
            shard["destination"],
            shard["state"],
            bytes_text(shard["bytes"]),
            bytes_text(shard["sent_bytes"]),
            usd_text(shard["usd"]),
            shard["condition"],
        ]
        for shard in shards
    ]
    heads = ["SHARD OF", "PROCESSED IN", "STATE", "SIZE", "WAN SENT", "USD", "CONDITION"]
    return [columns(heads, rows, leave_out=("SIZE", "USD", "CONDITION", "WAN SENT"))] * bool(rows)


def _epochs(part: Data, rounds: int) -> float:
    """Return the number of passes of a region over its data."""
    replicas = part["pipeline"]["degree"] if part.get("pipeline") else part["workers"]
    return float(rounds * part["steps_per_round"] * part["batch"] * replicas / part["samples"])


def plan_text(plan: Data) -> str:
    """Format a plan: the regions' workers, the predicted time and cost, and where shards may be processed."""
    estimate = plan["estimate"]
    head = fields([*(("warning", text) for text in plan.get("warnings", [])), *plan_facts(plan)])
    stages = [
        f"{part['region']}:\n" + "\n".join(f"  {text}" for text in part["pipeline"]["why"])
        for part in plan["partitions"]
        if part.get("pipeline")
    ]
    data = columns(["DATA OF", "PROCESSED"], [[region, where] for region, where in plan["residency"].items()])
    parts = [head, _phases_table(estimate), _regions_table(plan), *stages, data, _copies_table(plan.get("copies", []))]
    parts += [link_table(estimate["link_bytes"], {}), money_table(estimate["items"])]
    if plan.get("alternatives"):
        parts.append(_alternatives_table(plan["alternatives"]))
    return "\n\n".join(part for part in parts if part)


def _regions_table(plan: Data) -> str:
    return columns(
        ["REGION", "SAMPLES", "WORKERS", "BATCH", "STEPS/ROUND", "EPOCHS", "MEMORY MB", "SAMPLES/S"],
        [
            [
                part["region"],
                part["samples"],
                part["workers"],
                part["batch"],
                part["steps_per_round"],
                f"{_epochs(part, plan['rounds']):.3g}",
                part["memory_mb"],
                f"{part['samples_per_second']:.0f}",
            ]
            for part in plan["partitions"]
        ],
        leave_out=("MEMORY MB", "STEPS/ROUND", "SAMPLES/S", "BATCH"),
    )


def _alternatives_table(alternatives: list[Data]) -> str:
    """Format what was decided, what else was evaluated, and what decided."""
    rows = [[other.get("decision", ""), other["text"], other["why_not"]] for other in alternatives]
    return columns(["DECISION", "ALTERNATIVE", "WHY NOT"], rows)


def _phases_table(estimate: Data) -> str:
    """Format the expected time by phase; empty for plans of older versions, which lack ``phases``."""
    phases = estimate.get("phases", [])
    if not phases:
        return ""
    rows = [[phase["name"], phase["times"], seconds_text(phase["seconds"])] for phase in phases]
    total = ["total", "", seconds_text(estimate["seconds"]["expected"])]
    return columns(["PHASE", "COUNT", "TIME"], [*rows, total])


def _copies_table(copies: list[Data]) -> str:
    """Format the planned copies of shards to other regions."""
    rows = [
        [
            copy["source"],
            copy["destination"],
            f"{copy['bytes']:,}",
            seconds_text(copy["seconds"]),
            usd_text(copy["usd"]),
        ]
        for copy in copies
    ]
    return columns(["SHARD OF", "PROCESSED IN", "BYTES", "TIME", "USD"], rows) if rows else ""


def _early(result: Data) -> str:
    # Results of older versions lack the key.
    why = result.get("ended_early")
    return f", fewer than planned: {why}" if why else ""


def rounds_text(rounds: Sequence[int]) -> str:
    """Format the completed rounds of the regions, as a range where they differ: 12-14."""
    least, most = min(rounds, default=0), max(rounds, default=0)
    return str(least) if least == most else f"{least}-{most}"


def _time(result: Data) -> str:
    """Format the time since submission. The prediction covers only the part after waiting for workers."""
    # Results of older versions lack the key.
    queued = result.get("queued_seconds", 0.0)
    waited = f"waiting for workers {seconds_text(queued)}, " if queued >= 0.5 else ""
    return f"{seconds_text(result['seconds'])}, of which {waited}training {seconds_text(result['training_seconds'])}"


def result_text(view: Data) -> str:
    """Format the result of an ended job."""
    result = view["result"]
    model = result["model"]
    head = fields(
        [
            *((name, number_text(value)) for name, value in sorted(result["metrics"].items())),
            *((name, histogram_text(one)) for name, one in sorted(result.get("histograms", {}).items())),
            ("left out", result.get("histograms_left_out") or ""),
            ("rounds", f"{rounds_text([region['rounds'] for region in result['regions']])}{_early(result)}"),
            ("time", _time(result)),
            ("model", f"{model['digest']} ({bytes_text(model['bytes'])}, {model['format']})" if model else "none"),
            ("privacy", _spent_text(result)),
        ]
    )
    regions = columns(
        ["REGION", "WORKERS", "STEPS", "SAMPLES", "SAMPLES/S", "METRICS", "USD"],
        [
            [
                region["name"],
                region["workers"],
                region["steps"],
                region["samples"],
                f"{region.get('samples_per_second', 0.0):.0f}",
                metrics_text(region.get("metrics", {})),
                usd_text(region.get("usd", 0.0)),
            ]
            for region in result["regions"]
        ],
        leave_out=("SAMPLES/S", "STEPS", "WORKERS", "SAMPLES"),
    )
    parts = [head, regions, link_table(result["wan_bytes"], result["predicted"]), money_table(result["money"])]
    return "\n\n".join([*(part for part in parts if part), comparison_table(result)])


def _spent_text(result: Data) -> str:
    """Format what a job with differential privacy has spent; empty: it has none."""
    spent = [(region["name"], region["privacy"]) for region in result["regions"] if region.get("privacy")]
    return "; ".join(
        f"epsilon {cost['epsilon']:.3g} at delta {cost['delta']:g} spent in {name}, by {cost['releases']} releases"
        for name, cost in spent
    )


def comparison_table(result: Data) -> str:
    """Format predicted and measured time, WAN bytes and cost."""
    rows = [("time", "seconds", seconds_text), ("WAN bytes", "wan_bytes", bytes_text), ("cost", "usd", usd_text)]
    return columns(
        ["", "PREDICTED", "MEASURED"],
        [
            [title, range_text(result["predicted"][key], write), write(result["measured"][key])]
            for title, key, write in rows
        ],
    )


def link_table(sent: dict[str, int], predicted: Data) -> str:
    """Format bytes sent by directed link, with the prediction if there is one."""
    expected = predicted.get("link_bytes", {})
    if not sent:
        return ""
    heads = ["LINK", "BYTES", *(["PREDICTED"] if expected else [])]
    return columns(
        heads,
        [
            [link.replace(">", " > "), f"{count:,}", *([f"{expected.get(link, 0):,}"] if expected else [])]
            for link, count in sorted(sent.items())
        ],
    )


def wan_table(links: list[Data]) -> str:
    """Format the current state of the WAN links."""
    return columns(
        ["LINK", "STATE", "RTT MS", "MBIT/S", "STREAMS", "CODEC", "STEPS", "SENT", "RECEIVED", "STALENESS", "REFUSED"],
        [
            [
                f"{link['source']} > {link['destination']}",
                link["state"],
                "-" if link["rtt_ms"] is None else f"{link['rtt_ms']:.1f}",
                "-" if link["goodput_mbps"] is None else f"{link['goodput_mbps']:.1f}",
                link["streams"] or "-",
                link["codec"] or "-",
                link["interval_steps"] or "-",
                bytes_text(link["sent_bytes"]),
                bytes_text(link["received_bytes"]),
                f"{link['staleness_rounds']:.1f}",
                link["refused_updates"],
            ]
            for link in links
        ],
        leave_out=("REFUSED", "RECEIVED", "STREAMS", "STALENESS", "STEPS", "RTT MS", "CODEC"),
    )


def money_table(items: list[Data]) -> str:
    """Format cost items with their total."""
    if not items:
        return ""
    rows = [
        [
            item["region"],
            item["item"],
            f"{item['quantity']:.6g}",
            "" if item["unit"] == "1" else item["unit"],
            usd_text(item["usd"]),
        ]
        for item in items
    ]
    total = ["total", "", "", "", usd_text(sum(item["usd"] for item in items))]
    return columns(["REGION", "ITEM", "QUANTITY", "UNIT", "USD"], [*rows, total], leave_out=("QUANTITY", "UNIT"))


def metrics_text(metrics: dict[str, float]) -> str:
    """Format metrics for one table cell."""
    return " ".join(f"{name} {number_text(value)}" for name, value in sorted(metrics.items()))


def number_text(value: Any) -> str:
    """Format a loss or a metric; a missing value is a dash."""
    return "-" if value is None else metric_text(value)
