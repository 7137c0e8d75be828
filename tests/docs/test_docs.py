"""What the documentation names is there: files, commands, options, keys."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import lru_cache, partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import save_file
from support.commands import PROGRAMS, run_here
from support.failures import command

from control_plane.spec import load
from geofed_pb.errors import GeofedError
from geofed_pb.platforms import PLATFORMS
from region_agent.config import load_config
from region_agent.worker.data.spec import ClientColumn
from scheduler.simulate._trace import _CHRONUS, _HEADERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("deploy/templates/*/README.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
)  # fmt: skip
COMMANDS = ("geofed", "control-plane", "region-agent", "wan-emulator")
TASK = "def model(config): ...\ndef dataset(uri, split, config): ...\ndef loss(model, batch): ...\n"

TIED_TASK = """
import torch
def model(config):
    one, other = torch.nn.Linear(config["width"], config["width"]), torch.nn.Linear(config["width"], config["width"])
    other.weight = one.weight
    module = torch.nn.Sequential(one, torch.nn.BatchNorm1d(config["width"]), other)
    module.scale = torch.nn.Parameter(torch.tensor(2.5, dtype=torch.bfloat16))
    return module
"""
MAKE_EXPORT = """
from task import model as made
from sync.flat import FlatModel
from sync.ps.execution.export import to_safetensors
first = made({"width": 8})
flat = FlatModel(first)
open("model.safetensors", "wb").write(b"".join(to_safetensors(flat.layout, flat.vector(), {})))
"""
SHOW_LOADED = """
same = all(tensor.equal(first.state_dict()[name]) for name, tensor in trained.state_dict().items())
print(str(trained.scale.dtype)[6:], str(tuple(trained.scale.shape)), trained[0].weight is trained[2].weight, same)
"""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_of_the_project_are_there(page: Path) -> None:
    rooms = "control_plane|region_agent|sync|scheduler|proto|deploy|tests|docs"
    named = re.findall(rf"`((?:{rooms})/[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_site_is_built_and_every_page_is_in_its_navigation(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert not [page for page in pages if f" {page}\n" not in navigation]
    assert (tmp_path / ".site" / "index.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_nothing_is_installed_from_where_it_is_not(page: Path) -> None:
    # There is no such package in the index: it is installed from a clone.
    assert not re.findall(r"pip install \S*geofed", page.read_text())


def test_hints_name_extras_that_there_are_and_no_package_of_the_index() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rooms = ("geofed", "control_plane", "region_agent", "sync", "scheduler", "deploy", "proto/geofed_pb")
    text = "".join(path.read_text() for room in rooms for path in sorted((ROOT / room).rglob("*.py")))
    assert not re.findall(r"pip install \S*geofed", text)
    named = set(re.findall(r"""install_hint\(['"](\w+)['"]\)""", text))
    assert len(named) > 5
    assert named <= extras.keys()


def test_the_columns_of_a_trace_are_told() -> None:
    told = (ROOT / "docs" / "deadlines.md").read_text()
    columns = [*(name for names in _HEADERS.values() for name in names), *_CHRONUS, "best_effort", "global_batch_size"]
    assert [name for name in columns if f"`{name}`" not in told] == []


def test_an_exported_model_loads_as_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TIED_TASK)
    block, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL)
    program = f"{MAKE_EXPORT}\n{block}\n{SHOW_LOADED}"
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["bfloat16", "()", "True", "True"], ran.stdout


def _calls(text: str) -> list[str]:
    """Commands as they stand in blocks and in running text."""
    whole = text.replace("\\\n", " ")
    blocks = "\n".join([*re.findall(r"```.*?```", whole, re.DOTALL), *re.findall(r"^ {4}.*", whole, re.MULTILINE)])
    lines = re.findall(
        r"^(?: {4}|source <\()*(?:(?:kubectl|docker) [^\n]*(?: --| control-plane) )?"
        r"((?:geofed|control-plane|region-agent|wan-emulator)\b[^\n]*)",
        blocks,
        re.MULTILINE,
    )
    spans = re.findall(
        r"`((?:geofed|control-plane|region-agent|wan-emulator) [^`]+)`", re.sub(r"```.*?```", "", whole, flags=re.S)
    )
    return [*lines, *spans]


@lru_cache
def _help(*words: str) -> str | None:
    ask = partial(run_here, program=words[0]) if words[0] in PROGRAMS else partial(command, words[0])
    done = ask(*words[1:], "--help")
    return done.stdout if done.returncode == 0 else None


def _wrong(call: str) -> str | None:
    """What a command names that it does not have."""
    bare = re.split(r"\s(?:#|\||[0-9]?>|&)|\)$", call)[0]
    words = [word for word in shlex.split(bare.replace("…", "")) if word != "--debug"]
    path = [words[0]]
    text = _help(*path) or ""
    for word in words[1:]:
        if word.startswith("-") or not re.search(rf"^\W*{re.escape(word)}\b", text, re.MULTILINE):
            break
        path.append(word)
        text = _help(*path) or ""
    if len(words) > len(path) and " COMMAND " in text and not words[len(path)].startswith("-"):
        return f"{call}: {' '.join(path)} has no command {words[len(path)]}"
    options = [word.partition("=")[0] for word in words[len(path) :] if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)]
    missing = [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)]
    return f"{call}: {' '.join(path)} has no {', '.join(missing)}" if missing else None


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_and_options_are_there(page: Path) -> None:
    assert not [wrong for call in _calls(page.read_text()) if (wrong := _wrong(call))]


def _yaml(page: str) -> str:
    return _yamls(page)[0]


def _yamls(page: str) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_region_file_of_the_documentation_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "region.yaml"
    file.write_text(_yaml("region-file.md"))
    config = load_config(file)
    assert config.name == "frankfurt"
    whole, models, allowed, secrets, packages, *channels = _yamls("region-file.md")
    file.write_text(whole + models)
    assert [folder.store for folder in load_config(file).models] == ["main", ""]
    file.write_text((whole + models).replace("store: main}\n  - {uri: file", "store: gone}\n  - {uri: file"))
    with pytest.raises(GeofedError, match=r"`models.0.store`: 'gone' is not in stores"):
        load_config(file)
    file.write_text(whole + packages)
    assert load_config(file).installs
    file.write_text(re.sub(r"^(policy|datasets):\n(?:  .*\n)+", "", whole, flags=re.MULTILINE) + allowed)
    assert load_config(file).users_of("scans") == {"ann", "eve"}
    file.write_text(re.sub(r"^policy:\n(?:  .*\n)+", "", whole, flags=re.MULTILINE) + secrets)
    assert load_config(file).secrets["warehouse"].users == ("ann",)
    for kind, channel in zip(("redis", "s3"), channels, strict=True):
        file.write_text(re.sub(r"^channel:.*\n", channel, whole, flags=re.MULTILINE))
        assert load_config(file).channel.kind == kind
    file.write_text(whole)
    gateway = re.search(r"^    gateway:\n(?:     .*\n)+", (ROOT / "docs" / "production.md").read_text(), re.MULTILINE)
    assert gateway is not None
    other = "".join(line.removeprefix("    ") + "\n" for line in gateway[0].splitlines())
    file.write_text(re.sub(r"^gateway:.*\n", other, _yaml("region-file.md"), flags=re.MULTILINE))
    assert load_config(file).gateway.kind == "openfaas"
    cluster, server = re.fullmatch(r"(gateway:.*)(server:.*)", _yaml("kubernetes.md"), re.DOTALL).groups()  # type: ignore[union-attr]
    changed = re.sub(r"^gateway:.*\n", cluster, _yaml("region-file.md"), flags=re.MULTILINE)
    file.write_text(re.sub(r"^server:.*\n(?: .*\n)*", "", changed, flags=re.MULTILINE) + server)
    config = load_config(file)
    assert (config.gateway.kind, config.start_seconds) == ("kubernetes", 300)
    sections = re.fullmatch(r"(gateway:.*)(capacity:.*)(server:.*)", _yaml("lambda.md"), re.DOTALL)
    assert sections is not None
    changed = re.sub(r"^(gateway|capacity|server):.*\n(?: .*\n)*", "", _yaml("region-file.md"), flags=re.MULTILINE)
    file.write_text(changed + "".join(sections.groups()))
    config = load_config(file)
    assert (config.gateway.kind, config.start_seconds, config.capacity.workers) == ("lambda", 180, 16)

    sections = re.fullmatch(r"(gateway:.*)", _yaml("scf.md"), re.DOTALL)
    assert sections is not None
    changed = re.sub(
        r"^(gateway|capacity|channel|server):.*\n(?: .*\n)*", "", _yaml("region-file.md"), flags=re.MULTILINE
    )
    file.write_text(changed + sections[0])
    config = load_config(file)
    assert (config.gateway.kind, config.channel.kind, config.capacity.memory_mb) == ("scf", "s3", 3072)


def test_the_documented_limits_of_function_services_are_those_that_are_used() -> None:
    for name in ("lambda", "scf"):
        text = " ".join((ROOT / "docs" / f"{name}.md").read_text().split())
        platform = PLATFORMS[name]
        assert platform.memory_mb is not None
        least, most = platform.memory_mb
        assert f"{least} to {most} MB of memory" in text
        assert f"ends after {platform.life_seconds:g} s at most" in text
        assert f"has {platform.event_bytes} bytes at most" in text


def test_the_documented_table_of_platforms_is_the_one_that_is_used() -> None:
    text = (ROOT / "docs" / "gateway.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| the (\w+) \| (\w+) \| (\d+) s \|$", text, re.MULTILINE)
    answer = {True: "yes", False: "no"}
    assert rows == [
        (
            one.name,
            answer[one.local_files],
            "the agent's sandboxes" if one.sandboxed else "containers",
            "function" if one.dials_out else "agent",
            answer[one.shared],
            f"{one.start_seconds:g}",
        )
        for one in PLATFORMS.values()
    ]


def test_the_datasets_of_the_documentation_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "region.yaml"
    for block in _yamls("data.md"):
        file.write_text(re.sub(r"^datasets:\n(?: .*\n)+", block, _yaml("region-file.md"), flags=re.MULTILINE))
        assert all(held.format is not None for held in load_config(file).datasets.values())


def test_the_clients_of_the_documentation_are_valid(tmp_path: Path) -> None:
    of_job, of_region = _yamls("clients.md")
    file = tmp_path / "region.yaml"
    file.write_text(re.sub(r"^datasets:\n(?: .*\n)+", of_region, _yaml("region-file.md"), flags=re.MULTILINE))
    held = load_config(file).datasets
    assert [one.format and one.format.clients for one in held.values()] == [
        ClientColumn(column="patient"),
        "folder",
        None,
    ]
    assert held["branches"].splits["train"].clients == 1000
    file = tmp_path / "job.yaml"
    yaml = YAML(typ="safe")
    own, page = yaml.load(of_job), yaml.load(_yaml("job-file.md"))
    page["train"] |= own["train"]
    page["advanced"] = {}
    file.write_text(json.dumps(page | {"clients": own["clients"]}))
    (tmp_path / "task.py").write_text(TASK)
    spec = load(file, []).spec
    assert spec.clients is not None
    assert (spec.clients.fraction, spec.clients.min, spec.clients.epochs, spec.train.batch) == (0.1, 10, 2, 2)


def test_the_job_file_of_the_documentation_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(_yaml("job-file.md"))
    (tmp_path / "task.py").write_text(TASK)
    assert load(file, []).spec.metadata.name == "digits"


def test_the_gpus_of_the_documentation_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    whole, several, *_ = _yamls("job-file.md")
    (tmp_path / "task.py").write_text(TASK)
    file.write_text(re.sub(r"^function:.*\n(?: .*\n)*", several, whole, flags=re.MULTILINE))
    assert load(file).spec.function.gpus == 4


def test_the_pretrained_weights_of_the_documentation_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    whole, _, example, read_by_regions, with_adapter = _yamls("job-file.md")
    file.write_text(re.sub(r"^train:\n(?: .*\n)+", example, whole, flags=re.MULTILINE))
    (tmp_path / "task.py").write_text(TASK)
    save_file({"w": np.zeros(2, ml_dtypes.bfloat16)}, tmp_path / "weights.safetensors")
    loaded = load(file)
    assert loaded.spec.train.initial_model is not None
    assert loaded.spec.train.initial_model.partial
    assert list(loaded.weights.values()) == [(tmp_path / "weights.safetensors").resolve()]
    file.write_text(re.sub(r"^train:\n(?: .*\n)+", read_by_regions, whole, flags=re.MULTILINE))
    loaded = load(file)
    assert loaded.spec.train.initial_model is not None
    assert (loaded.weights, loaded.spec.train.initial_model.uri) == ({}, "s3://models/gpt2/model.safetensors")
    file.write_text(re.sub(r"^train:\n(?: .*\n)+", with_adapter, whole, flags=re.MULTILINE))
    adapter = tmp_path / "adapter.safetensors"
    save_file({"lora_B": np.zeros(2, np.float32)}, adapter)
    loaded = load(file)
    assert list(loaded.weights.values()) == [adapter.resolve()]


def test_the_batch_and_the_kept_models_of_the_documentation_are_valid(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(_yaml("job-file.md"))
    (tmp_path / "task.py").write_text(TASK)
    auto, kept = (json.dumps(YAML(typ="safe").load(text)["train"]) for text in _yamls("planning.md")[:2])
    assert load(file, [f"train={auto}"]).spec.train.batch == "auto"
    assert load(file, [f"train={kept}"]).spec.train.end.patience == 5
