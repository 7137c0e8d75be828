"""What a plan says, as names and texts that the commands and the dashboard show alike."""

from __future__ import annotations

from collections.abc import Callable

from control_plane._view import Data, bytes_text, seconds_text, usd_text

__all__ = [
    "batch_text",
    "budget_promise",
    "clients_text",
    "deadline_promise",
    "exchange_text",
    "initial_model_text",
    "length_text",
    "plan_facts",
    "privacy_text",
    "range_text",
    "usd_by_region",
]


def plan_facts(plan: Data) -> list[tuple[str, str]]:
    """Return what a plan says, without its warnings and tables, as pairs of a name and a text that is not empty."""
    estimate = plan["estimate"]
    facts = [
        ("waits for", plan.get("waits_for", "")),
        ("starts from", initial_model_text(plan.get("initial_model"))),
        ("batch", batch_text(plan)),
        ("rounds", length_text(plan)),
        ("clients", clients_text(plan)),
        ("merge", f"{_collective(plan)}; between regions by {plan['wan_policy']}, in {plan['codec']}"),
        ("exchange", exchange_text(plan)),
        ("privacy", privacy_text(plan)),
        ("time", range_text(estimate["seconds"], seconds_text)),
        ("WAN bytes", range_text(estimate["wan_bytes"], bytes_text)),
        ("cost", range_text(estimate["usd"], usd_text)),
        ("deadline", deadline_promise(plan)),
        ("budget", budget_promise(plan)),
        ("learning", _learning(plan)),
        ("model", _model(estimate)),
        ("based on", _BASIS.get(estimate["basis"], estimate["basis"])),
        ("start", _START.get(estimate.get("start_basis", ""), "")),
        ("isolation", _isolation(plan)),
    ]
    return [(name, text) for name, text in facts if text]


def usd_by_region(plan: Data) -> dict[str, float]:
    """Return the expected US dollars of each region of a plan."""
    usd = dict.fromkeys((part["region"] for part in plan["partitions"]), 0.0)
    for item in plan["estimate"]["items"]:
        usd[item["region"]] = usd.get(item["region"], 0.0) + item["usd"]
    return usd


def initial_model_text(model: Data | None) -> str:
    """Format the model that a job starts from; empty if it starts from the task's own."""
    if not model:
        return ""
    size = f" ({bytes_text(model['bytes'])})" if model["bytes"] else ""
    if model.get("file"):
        has = ""
        if model.get("adapter"):
            more = f" ({bytes_text(model['adapter_bytes'])})" if model["adapter_bytes"] else ""
            has = f" with the adapter {model['adapter_file']}{more}"
        as_far = ", as far as it has the model's tensors" if model["partial"] else ""
        return f"the file {model.get('uri') or model['file']}{size}{has}{as_far}"
    of_round = f", round {model['round']}" if model.get("round") else ""
    return f"the model of {model['job']}{of_round}{size}"


def exchange_text(plan: Data) -> str:
    """Format the topology and the time of one exchange over it; plans of older versions lack the time."""
    seconds = plan.get("exchange_seconds", 0.0)
    duration = f", {seconds_text(seconds)} a round" if seconds else ""
    mesh = plan["topology"] == "mesh"
    if len(plan["partitions"]) < 2:
        return "none: one region trains alone"
    how = "in the background, while training continues" if _in_background(plan) else "synchronous: all regions wait"
    pairs = "" if mesh else ", ".join(f"{a}-{b}" for a, b in plan.get("neighbours", []))
    return f"{how}; {plan['topology']}{duration}" + (f" ({pairs})" if pairs else "")


def length_text(plan: Data) -> str:
    """Format the rounds of a plan."""
    each = "local steps"
    if any(part.get("clients") for part in plan["partitions"]):
        each = "round of clients" if plan["interval"] == 1 else "rounds of clients"
    return f"{plan['rounds']}, each of {plan['interval']} {each}"


def batch_text(plan: Data) -> str:
    """Format the batch that the plan has chosen, or how workers divide the one that the job file states; empty: each
    worker takes that one."""
    tried = plan.get("batches", [])
    if not tried:
        divided = [part for part in plan["partitions"] if part.get("divided", 1) > 1]
        return "; ".join(
            f"every {part['divided']} workers in {part['region']} divide one, {part['batch']} samples of a step each"
            for part in divided
        )
    chosen = f"{plan['partitions'][0]['batch']} samples of a worker in a step"
    others = f"chosen of {', '.join(map(str, tried))}" if len(tried) > 1 else "no other was compared"
    return f"{chosen}, {others}; the learning rate stays, but for `train.learningRate.batch`"


def clients_text(plan: Data) -> str:
    """Format how many clients train in a round; empty: samples belong to none."""
    told = [
        f"{part['clients_per_round']:,} of {part['clients']:,} in {part['region']}"
        for part in plan["partitions"]
        if part.get("clients")
    ]
    return f"{', '.join(told)} train in a round" if told else ""


def privacy_text(plan: Data) -> str:
    """Format what hides the updates of single regions; empty: nothing does."""
    settings, told = plan.get("wan_settings", {}), []
    if settings.get("secure"):
        told.append(f"secure aggregation: only the sum over all {len(plan['partitions'])} regions can be read")
    if settings.get("noise"):
        what = "samples" if settings["sampled"] or settings.get("measured") else "regions"
        noise = f"noise {settings['noise']:.3g} x norm {settings['clip']:g}"
        cost = f"epsilon {settings['epsilon']:.3g} at delta {settings['delta']:g} when all rounds are made"
        if settings.get("measured"):
            noise = f"noise {settings['noise']:.3g} on counts of a histogram, times the square root of their number"
        told.append(f"differential privacy of {what}: {noise}, {cost}")
    return "; ".join(told)


def _in_background(plan: Data) -> bool:
    return bool(plan.get("wan_settings", {}).get("background"))


def deadline_promise(plan: Data) -> str:
    """Format the deadline that the plan promises; plans of older versions do not say."""
    promise, most = plan.get("promise"), seconds_text(plan["estimate"]["seconds"]["high"])
    if not promise or not promise["deadline_asked"]:
        return ""
    if promise["deadline_at"] is None:
        return "none can be promised; the job is admitted nevertheless, as `objective.soft` allows"
    later = "" if promise["deadline_step"] == 0 else f", number {promise['deadline_step']} of `objective.soft`"
    return f"{promise['deadline_at']} is promised{later}; training takes {most} at most"


def budget_promise(plan: Data) -> str:
    """Format the budget that the plan keeps; plans of older versions do not say."""
    budget = (plan.get("promise") or {}).get("budget_usd")
    most = usd_text(plan["estimate"]["usd"]["high"])
    if not budget:
        return ""
    a_round = usd_text(plan["estimate"]["usd"]["high"] / max(1, plan["rounds"]))
    ends = f"if it costs more, the job ends within a round ({a_round})"
    return f"{usd_text(budget)} is kept: {most} at most is expected; {ends}"


def _collective(plan: Data) -> str:
    if plan["collective"] == "auto":
        return "within a region by the fastest collective there"
    k = plan.get("merging", {}).get("k")
    # Without K the agent chooses it; 0 is `isp` as published.
    owners = "" if k is None else f" (K = {k:.0f})" if k else " (each to all others)"
    return f"within a region by {plan['collective']}{owners}"


def _isolation(plan: Data) -> str:
    """Name how the regions isolate job code; empty if none of them has told."""
    by_kind: dict[str, list[str]] = {}
    for region, kind in plan.get("isolation", {}).items():
        by_kind.setdefault(kind or "not known", []).append(region)
    return (
        "" if set(by_kind) == {"not known"} else "; ".join(f"{kind} in {', '.join(by_kind[kind])}" for kind in by_kind)
    )


def _learning(plan: Data) -> str:
    """Format what a plan is expected to give up in learning; plans of older versions do not say."""
    learning = plan.get("learning")
    if not learning:
        return ""
    of = "as profiled" if learning["basis"] == "measured" else "assumed: no profile"
    return (
        f"{learning['samples_factor']:.2f} times the samples of the smallest batch for the same progress (noise scale "
        f"{learning['noise_samples']:.0f} samples, {of}); may give up {learning['points']:.2g} points of the metric"
    )


_BASIS = {
    "measured": "earlier runs of this task",
    "profiled": "a profile: steps of the task by one worker in each region",
    "other batch": "earlier runs of this task with another batch",
    "probed": "a probe: a few steps of the task by one worker",
    "likened": "a probe in one region: the others count as equally fast, unless their operators state other speeds",
    "stated": "the speeds that the regions' operators state",
    "prior": "default speeds: none were stated or measured",
}
"""What the predicted speeds are based on, by ``estimate.basis``."""
_MODEL = {
    "measured": "known from earlier runs",
    "counted": "counted by an agent",
    "prior": "a default: not measured yet",
}
"""Where the model's size comes from, by ``estimate.model_basis``."""
_START = {
    "measured": "as in earlier runs",
    "probed": "as measured by the probe",
    "prior": "a default: not measured yet",
}
"""Where the start time comes from, by ``estimate.start_basis``."""


def _model(estimate: Data) -> str:
    """Format the model's size and where it comes from; empty for plans of older versions, which lack it."""
    basis = estimate.get("model_basis", "")
    return f"{bytes_text(estimate['model_bytes'])}, {_MODEL.get(basis, basis)}" if basis else ""


def range_text(bounds: Data, write: Callable[[float], str]) -> str:
    """Format the expected value with its range."""
    return f"{write(bounds['expected'])} ({write(bounds['low'])} to {write(bounds['high'])})"
