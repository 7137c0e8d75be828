"""The examples run from start to end as their pages say."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.shell import END, PROLOGUE, blocks, environment, own_network

from control_plane.spec import load
from region_agent.config import load_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "examples"
NAMES = ("cost-study", "from-ddp", "from-flower", "nightly", "three-hospitals")
LIVE = "within sh -c '[ $(geofed region list -o json | grep -c live) -ge {} ]'\n"


def _page(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text()


def _commands(page: str) -> str:
    """The shell blocks of a page, each followed by what a reader waits for: daemons, jobs that wait for approval."""
    script, agents = "", 0
    for block in blocks(page, "sh"):
        script += block
        if "geofed serve" in block:
            script += "within geofed list\n"
        if started := block.count("geofed agent run"):
            agents += started * (3 if "for hospital in" in block else 1)
            script += LIVE.format(agents)
    return script


def _two_regions() -> str:
    """Those of the README, in the folder `federation`."""
    return (
        "cd federation\n"
        + _commands("".join(f"```sh\n{block}```\n" for block in blocks(README, "sh")[:3]))
        + """
export GEOFED_CONTEXT=$PWD/.geofed/control-plane/context.json SHARDS=$PWD/shards
cd ..
"""
    )


def _run(name: str, tmp_path: Path, *, regions: bool, seconds: int = 600) -> str:
    """What the commands of an example print, from a copy of its folder."""
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "federation").mkdir()
    (region,) = blocks(README, "yaml")
    (folder / "federation" / "home.yaml").write_text(region)
    script = PROLOGUE + END + (_two_regions() if regions else "") + _commands(_page(name))
    argv = [*own_network(), "bash", "-c", script]
    done = subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-4000:]}"
    print(done.stdout, done.stderr[-2000:])
    return done.stdout + done.stderr


def _accuracies(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"accuracy\W+([0-9.]+)", printed)]


def test_each_example_has_its_page_and_the_site_lists_it() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/README.md")} == set(NAMES)
    listed = (ROOT / "docs" / "examples.md").read_text()
    assert [name for name in NAMES if f"examples/{name}/" not in listed] == []
    assert "(docs/examples.md)" in README


@pytest.mark.parametrize("name", [name for name in NAMES if (EXAMPLES / name / "job").exists()])
def test_the_job_file_of_an_example_is_valid(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(EXAMPLES / name / "job", folder)
    if name == "nightly":
        shutil.copy(ROOT / "deploy" / "templates" / "image-classification" / "task.py", folder)
    assert load(folder / "job.yaml", []).spec.metadata.name


def test_a_second_start_in_a_night_finds_what_the_first_one_has_made(tmp_path: Path) -> None:
    """With a command in place of geofed that keeps request IDs as the control plane does."""
    shutil.copy(EXAMPLES / "nightly" / "nightly.sh", tmp_path)
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "geofed"
    fake.write_text(
        """#!/bin/sh
set -eu
case $1 in
submit)
    name=$4 asked=$*
    if [ -e "jobs/$name" ] && [ "$(cat "jobs/$name")" != "$asked" ]; then
        echo REQUEST_CONFLICT; exit 8
    fi
    echo "$asked" > "jobs/$name"; echo "submitted $name" ;;
export) echo model > "$4" ;;
esac
"""
    )
    fake.chmod(0o755)
    (tmp_path / "jobs").mkdir()
    environment = {**os.environ, "PATH": f"{fake.parent}{os.pathsep}{os.environ['PATH']}"}
    printed = []
    for night in ("2026-11-01", "2026-11-01", "2026-11-02", "2026-11-02"):
        argv = ["sh", str(tmp_path / "nightly.sh"), night]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stdout
        printed.append(done.stdout.strip())
    assert printed == ["submitted nightly-2026-11-01", "", "submitted nightly-2026-11-02", ""]
    assert (tmp_path / "models" / "latest.safetensors").resolve().name == "2026-11-02.safetensors"


@pytest.mark.parametrize("hospital", ["north", "south", "west"])
def test_the_region_files_of_the_hospitals_state_their_owners_rules(hospital: str, tmp_path: Path) -> None:
    file = tmp_path / "region.yaml"
    key = "ed25519:11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="
    file.write_text((EXAMPLES / "three-hospitals" / f"{hospital}.yaml").read_text().replace("ANN_KEY", key))
    config = load_config(file)
    assert config.name == hospital
    assert config.policy.secure_regions == 3
    assert config.policy.allow_users == {"ann": key}


def _load(file: Path, name: str) -> Any:
    module = types.ModuleType(name)
    exec(compile(file.read_text(), file, "exec"), module.__dict__)
    return module


def _as_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages as plain objects: the package is not needed to run the functions of a ClientApp."""

    class Arrays(dict[str, torch.Tensor]):
        def to_torch_state_dict(self) -> dict[str, torch.Tensor]:
            return dict(self)

    class Message:
        def __init__(self, content: Any, reply_to: Any = None) -> None:
            self.content = content

    class ClientApp:
        def train(self) -> Any:
            return lambda function: function

        evaluate = train

    app, client = types.ModuleType("flwr.app"), types.ModuleType("flwr.clientapp")
    vars(app).update(ArrayRecord=Arrays, Context=object, Message=Message, MetricRecord=dict, RecordDict=dict)
    vars(client).update(ClientApp=ClientApp)
    for module in (types.ModuleType("flwr"), app, client):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_the_flower_client_and_its_task_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_flower(monkeypatch)
    before = _load(EXAMPLES / "from-flower" / "client_app.py", "client_app")
    after = _load(EXAMPLES / "from-flower" / "job" / "task.py", "flower_task")
    drawn = np.random.default_rng(0)
    y = drawn.integers(0, 10, 20)
    np.savez(tmp_path / "data.npz", x=drawn.integers(0, 255, (20, 8, 8), dtype=np.uint8), y=y)
    torch.manual_seed(0)
    model = after.model({})
    began = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    context = types.SimpleNamespace(node_config=dict.fromkeys(("train", "test"), tmp_path / "data.npz"))
    message = sys.modules["flwr.app"].Message({"arrays": sys.modules["flwr.app"].ArrayRecord(began)})
    sent = before.train(message, context).content
    # 20 samples are one batch: their order does not matter.
    optimizer = after.optimizer(model.parameters(), {})
    batch = after.dataset(tmp_path / "data.npz", "train", {}).tensors
    after.loss(model, batch).backward()
    optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(sent["arrays"][name], tensor, msg=name)
    assert sent["metrics"]["num-examples"] == 20
    message = sys.modules["flwr.app"].Message({"arrays": sys.modules["flwr.app"].ArrayRecord(model.state_dict())})
    with torch.no_grad():
        expected = after.metrics(model.eval(), [batch])["accuracy"]
    assert before.evaluate(message, context).content["metrics"]["accuracy"] == expected


def test_the_script_and_the_task_of_ddp_have_the_same_model() -> None:
    def body(file: Path, name: str) -> str:
        tree = ast.parse(file.read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        return "\n".join(map(ast.dump, found.body))

    folder = EXAMPLES / "from-ddp"
    assert body(folder / "ddp.py", "make_model") == body(folder / "job" / "task.py", "model")


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_from_flower(tmp_path: Path) -> None:
    printed = _run("from-flower", tmp_path, regions=True)
    assert _accuracies(printed)[-1] > 0.93
    assert (tmp_path / "from-flower" / "model.safetensors").stat().st_size > 10_000


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_from_ddp(tmp_path: Path) -> None:
    alone, *_, together = _accuracies(_run("from-ddp", tmp_path, regions=True))
    assert together > 0.9
    assert together > alone - 0.05
    trained = safetensors.torch.load_file(tmp_path / "from-ddp" / "model.safetensors")
    assert trained.keys() == torch.load(tmp_path / "from-ddp" / "model.pt").keys()


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_nightly(tmp_path: Path) -> None:
    printed = _run("nightly", tmp_path, regions=True)
    models = tmp_path / "nightly" / "models"
    assert (models / "latest.safetensors").resolve() == (models / "2026-11-02.safetensors").resolve()
    ((first, second),) = re.findall(r"^accuracy +([0-9.]+) +([0-9.]+)$", printed, re.MULTILINE)
    assert float(second) > max(0.9, float(first) - 0.02)


@pytest.mark.soak
@pytest.mark.timeout(700)
def test_three_hospitals(tmp_path: Path) -> None:
    printed = _run("three-hospitals", tmp_path, regions=False)
    assert _accuracies(printed)[-1] > 0.9
    assert "PRIVACY_EXHAUSTED" in printed
    statement = json.loads((tmp_path / "three-hospitals" / "tumours.intoto.json").read_text())
    assert statement["payloadType"] == "application/vnd.in-toto+json"


@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_cost_study(tmp_path: Path) -> None:
    _run("cost-study", tmp_path, regions=False, seconds=1200)
    table = (tmp_path / "cost-study" / "study" / "study.csv").read_text().splitlines()
    assert len(table) == 7
    assert any(line.startswith("time,") for line in table)
