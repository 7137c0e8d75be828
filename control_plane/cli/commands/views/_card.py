"""The model card of an exported model: what it history from, where, how, how good it is, and what it cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from control_plane._plan_view import exchange_text, privacy_text
from control_plane._view import Data, bytes_text, seconds_text, standing_text, usd_text

__all__ = ["model_card"]

_HEAD = """\
---
library_name: pytorch
tags:
- geofed
- federated-learning
---
"""
_LOADING = """\
## Loading

It needs the files of the task's folder, `{file}` and what that imports, which are not part of this folder: put them
beside this card.

```python
import json
from importlib import import_module
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

task = import_module({module})  # the task module that the model was trained with
config = json.loads(Path("config.json").read_text())
trained = task.model(config) if hasattr(task, "model") else nn.Sequential(*(layer() for layer in task.layers(config)))
trained.load_state_dict(load_file("model.safetensors"){strict})
trained.eval()
```
"""


def model_card(view: Data) -> str:
    """Return the card of ``view["model"]`` in Markdown, with the head that model hubs read."""
    plan, result, model = view["plan"], view["result"] or {}, view["model"]
    spec, regions = view["spec"], [part["region"] for part in plan["partitions"]]
    several = len(regions) > 1
    parts = [
        _HEAD,
        f"# {view['name']}\n",
        f"Trained by geofed in {_and(regions)}{', which exchanged updates of the model' * several}.\n",
        _facts(
            [
                ("job", f"`{view['id']}`, which {standing_text(view['state'])}"),
                ("ended", view["finished_at"] or "not yet"),
                ("model", f"`{model['digest']}`, {bytes_text(model['bytes'])}, of round {model['round']}"),
                ("starts from", _origin(view)),
            ]
        ),
        "## Data\n",
        f"Dataset `{_cell(spec['data']['dataset'])}`; residency: {_cell(spec['data']['residency'])}.\n",
        _table(
            ["region", "training samples", "raw data"],
            [
                [part["region"], f"{part['samples']:,}", plan["residency"].get(part["region"], "none here")]
                for part in plan["partitions"]
            ],
        ),
        "## Training\n",
        _facts(
            [
                (
                    "rounds of the job",
                    f"{result.get('rounds', model['round'])}, each of {plan['interval']} local steps",
                ),
                (
                    "between regions",
                    f"{plan['wan_policy']}, in {plan['codec']}; {exchange_text(plan)}" if several else "",
                ),
                ("privacy", privacy_text(plan)),
                ("ended early", _cell(result.get("ended_early") or "")),
            ]
        ),
        "## Evaluation\n",
        "Means over the test samples of all regions.\n",
        _table(["metric", "value"], [[name, f"{value:.6g}"] for name, value in sorted(model["metrics"].items())]),
        "## Account\n",
        _facts(_account(view, result, several)),
        _loading(spec),
        "`model.safetensors.manifest.json` has the job file (without `env` and `secrets`), plan and account.\n",
    ]
    return "\n".join(part for part in parts if part)


def _loading(spec: Data) -> str:
    file: str = spec["task"]["module"]
    local = bool(spec["train"]["local"])
    dotted = json.dumps(file.removesuffix(".py").replace("/", "."))
    note = "\nThe tensors of `train.local` stay in their regions: here they have the values that the task gives them.\n"
    return _LOADING.format(file=_cell(file), module=dotted, strict=", strict=False" * local) + note * local


def _account(view: Data, result: Data, several: bool) -> list[tuple[str, str]]:
    sent = sum(result.get("wan_bytes", {}).values())
    usd: float = result["usd"] if result else view["usd"]
    return [
        ("time", seconds_text(result["training_seconds"]) if result else ""),
        ("between regions", f"{bytes_text(sent)} sent" if result and several else ""),
        ("cost", f"{usd_text(usd)}, by the prices that the regions' operators state"),
    ]


def _origin(view: Data) -> str:
    initial = view["initial_model"]
    if not initial:
        return ""
    model = f"`{_cell(initial['file'])}`" if initial["file"] else f"the model of job {initial['job']}"
    of_adapter = ""
    if initial.get("adapter"):
        of_adapter = f", with the adapter `{_cell(initial['adapter_file'])}`, `{initial['adapter']}`"
    return f"{model}, `{initial['digest']}`{of_adapter}"


def _and(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    return "".join(f"- {name}: {text}\n" for name, text in facts if text)


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in lines)


def _cell(value: object) -> str:
    """Return text that stays in its cell: names of metrics and datasets are a user's own."""
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'")
