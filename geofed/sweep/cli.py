"""The command `geofed sweep`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from control_plane._view import Data, seconds_text, usd_text
from control_plane.cli._connect import ask_control_plane, confirm
from control_plane.cli._output import columns, emit, say
from control_plane.cli._plan import plan_summary
from control_plane.cli._settings import can_ask
from geofed._client import AsyncClient
from geofed.sweep._file import load_sweep
from geofed.sweep._run import planned_sweep, run_sweep

if TYPE_CHECKING:
    from control_plane.client import ControlClient

_T = TypeVar("_T")


def sweep_command(context: Path | None, sweep_file: Path, *, dry_run: bool, yes: bool) -> None:
    """Show or run a sweep, and write its trials."""
    loaded = load_sweep(sweep_file)

    def ask(request: Callable[[AsyncClient], Awaitable[_T]], detach: str = "") -> _T:
        async def with_client(client: ControlClient) -> _T:
            return await request(AsyncClient.of(client))

        return ask_control_plane(context, with_client, detach=detach)

    if dry_run:
        emit(ask(lambda client: planned_sweep(client, loaded)), table=_plan_text, name=lambda data: str(data["sweep"]))
        return
    if not yes and can_ask():
        say(_plan_text(ask(lambda client: planned_sweep(client, loaded))) + "\n")
        confirm("Run this sweep?", yes=False)
    detach = f"detached; trials that run continue. Run it again to continue: geofed sweep {sweep_file}"
    told = ask(lambda client: run_sweep(client, loaded, lambda row: say(_line(row, loaded.metric))), detach)
    emit(told, table=_trials_text, name=lambda data: str(data["best"]["job"]) if data["best"] else "")


def _plan_text(data: Data) -> str:
    plan, count = data["plan"], data["trials"]
    cost = usd_text(count * plan["estimate"]["usd"]["expected"])
    values = _values_text(data["parameters"])
    return f"{count} trials, about {cost} if all cost as much as the first one ({values}):\n\n{plan_summary(plan)}"


def _line(row: Data, metric: str) -> str:
    value = f"{metric} {row['value']:.4g}" if row["value"] is not None else row["state"]
    note = f"; {row['note']}" if row["note"] else ""
    return f"trial {row['trial']}: {_values_text(row['parameters'])}: {value}{note}"


def _values_text(values: Data) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_value_text(value)}" for key, value in values.items())


def _value_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _trials_text(data: Data) -> str:
    metric, highest = data["metric"], data["mode"] == "max"
    rows = [row for row in data["trials"] if row["value"] is not None]
    rows.sort(key=lambda row: row["value"], reverse=highest)
    rows += [row for row in data["trials"] if row["value"] is None]
    # Of a trial of an earlier run the values may be unknown.
    keys = list(max((row["parameters"] for row in data["trials"]), key=len, default={}))
    table = columns(
        ["job", *(key.rpartition(".")[2] for key in keys), metric, "time", "cost", "state"],
        [
            [
                row["job"] or f"trial {row['trial']}", *(_value_text(row["parameters"].get(key, "-")) for key in keys),
                "-" if row["value"] is None else f"{row['value']:.4g}", seconds_text(row["seconds"]),
                usd_text(row["usd"]), row["state"],
            ]
            for row in rows
        ],
        leave_out=["state", "time", "cost"],
    )  # fmt: skip
    lines = [table, "", f"{len(data['trials'])} trials, {usd_text(data['usd'])}"]
    if data["stopped"]:
        lines.append(f"stopped: {data['stopped']}")
    if data["best"]:
        lines.append(f"the best model: geofed export {data['best']['job']} --output-file model.safetensors")
    return "\n".join(lines)
