"""What every command promises: its formats, its envelope, its help; declared here, held against the real thing."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import boto3
import pytest
import typer
from ruamel.yaml import YAML
from support.commands import run_here
from support.timing import cpu_seconds

import geofed.cli
from control_plane.cli._settings import Format
from control_plane.cli.main import app
from tests.control_plane.cli.conftest import Federation, Run
from tests.control_plane.clouds.recorded import aws, serving

pytestmark = pytest.mark.processes

ALL = frozenset(format.value for format in Format)
NONE: frozenset[str] = frozenset()
EXAMPLE = "example"
"""In the place of a format in what the example of a command's help makes."""
RUNS = (*ALL, EXAMPLE)


@dataclass(frozen=True)
class Contract:
    """What a command promises."""

    arguments: str = ""
    """To run it with; {job} is a job that has succeeded, {file} a job file."""
    mutating: bool = False
    streaming: bool = False
    """It has a way to continue until the job has ended."""
    remote: bool = True
    """It speaks to the control plane."""
    formats: frozenset[str] = ALL
    refused: bool = False
    """No region has come here, so that it is inadmissible."""
    elsewhere: bool = False
    """It needs an identity provider, and is run in tests/control_plane/test_sign_in.py."""


CONTRACTS = {
    "submit": Contract("{file} --request-id contract", mutating=True, streaming=True),
    "explain": Contract("{file}"),
    "validate": Contract("{file}", remote=False),
    "profile": Contract("{file}"),
    "status": Contract("{job}", streaming=True),
    "list": Contract("--all"),
    "describe": Contract("{job}"),
    "top": Contract(),
    "wait": Contract("{job}"),
    "compare": Contract("{job} {cancelled}"),
    "scale": Contract("{running} a=1", mutating=True),
    "replan": Contract("{running}", mutating=True, refused=True),
    "finish": Contract("{running}", mutating=True),
    "cancel": Contract("{cancelled} --yes", mutating=True),
    "resume": Contract("{kept}", mutating=True, streaming=True),
    "delete": Contract("{ended} --yes", mutating=True),
    "storage": Contract(),
    "doctor": Contract(),
    "rename": Contract("{cancelled} renamed", mutating=True),
    "share": Contract("{job} ann", mutating=True),
    "unshare": Contract("{job} ann", mutating=True),
    "history": Contract("{job}"),
    "track": Contract("{job} {fresh}.csv", streaming=True),
    "logs": Contract("{job}", streaming=True),
    "events": Contract("{job}", streaming=True),
    "export": Contract("{job} --output-file model.safetensors"),
    "region list": Contract(),
    "region describe": Contract("a"),
    "region invite": Contract("c --ttl 5m", mutating=True),
    "region drain": Contract("d", mutating=True),
    "region undrain": Contract("d", mutating=True),
    "region revoke": Contract("v-{fresh} --yes", mutating=True),
    "region remove": Contract("r-{fresh} --yes", mutating=True),
    "rotate-ca": Contract("--yes --force", mutating=True),
    "context list": Contract(remote=False),
    "context add": Contract("lab {context}", remote=False),
    "context use": Contract("lab", remote=False),
    "context remove": Contract("r-{fresh}", remote=False),
    "user add": Contract("u-{fresh} --promised-workers 4", mutating=True),
    "user list": Contract(),
    "user key": Contract(),
    "user change": Contract("ann --promised-workers 3", mutating=True),
    "user remove": Contract("r-{fresh} --yes", mutating=True),
    "login": Contract(elsewhere=True),
    "logout": Contract(elsewhere=True),
    "catalogue regions": Contract("--cloud azure", remote=False),
    "catalogue prices": Contract("--cloud azure --region westeurope --type Standard_F16s_v2", remote=False),
    "catalogue shards": Contract("s3://catalogue/digits/ --endpoint-url {store}", remote=False),
    "catalogue import": Contract("{prices} --cloud aws --region r --type t --as-of 2026-11", remote=False),
    "template list": Contract(remote=False),
    "template show": Contract("text", remote=False),
    "new": Contract("text {fresh}", remote=False),
    "init": Contract("i-{fresh} --regions a,b", remote=False),
    "schema": Contract("job", remote=False),
    "version": Contract(remote=False),
    "completion": Contract(remote=False, formats=NONE),
    "support-bundle": Contract("{fresh}.tar.gz {job}"),
    "serve": Contract(remote=False, formats=NONE),
    "audit export": Contract("{fresh}.jsonl"),
    "audit verify": Contract("{log}", remote=False),
    "audit attest": Contract("{job} {fresh}.intoto.json"),
    "audit verify-model": Contract("{model} {statement}", remote=False),
    "backup": Contract("{fresh}.backup --state-dir {state}", remote=False),
    "restore": Contract("{backup} --state-dir s-{fresh} --yes", remote=False),
    "simulate": Contract("{trace} --cluster 1x4", remote=False),
}
OURS = ("control_plane.spec", "control_plane.client", "control_plane.server", "scheduler")
SDKS = ("boto3", "botocore", "libcloud", "tencentcloud")
HEAVY = ("grpc", "sqlalchemy", "alembic", "cryptography", "torch", "numpy", "ruamel", "uvicorn", "httpx2", *SDKS, *OURS)
"""Not pydantic: typer itself may use it."""


def commands(command: Any, path: str = "") -> dict[str, Any]:
    children: dict[str, Any] = getattr(command, "commands", {})
    if not children:
        return {path: command}
    return {
        name: leaf for key, child in children.items() for name, leaf in commands(child, f"{path} {key}".strip()).items()
    }


def options_of(command: Any) -> dict[str, Any]:
    return {name: parameter for parameter in command.params for name in parameter.opts}


def test_every_command_is_declared_and_has_the_options_of_its_kind() -> None:
    found = commands(typer.main.get_command(app))
    assert set(found) == set(CONTRACTS)
    for name, command in found.items():
        contract, options = CONTRACTS[name], options_of(command)
        assert ("--output" in options) == bool(contract.formats), name
        assert ("--context" in options) == contract.remote, name
        assert bool({"--watch", "--follow"} & set(options)) == contract.streaming, name
    mutating = {name for name, contract in CONTRACTS.items() if contract.mutating}
    of_users = {"user add", "user change", "user remove"}
    of_regions = {f"region {what}" for what in ("invite", "drain", "undrain", "revoke", "remove")}
    of_jobs = {"submit", "scale", "replan", "finish", "cancel", "delete", "rename", "resume", "share", "unshare"}
    assert mutating == of_jobs | of_regions | of_users | {"rotate-ca"}
    assert "--request-id" in options_of(found["submit"])
    assert all("--yes" in options_of(found[name]) for name in ("cancel", "delete", "user remove", "region remove"))


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """An object store with a shard, and credentials for it."""
    with pytest.MonkeyPatch.context() as patch, serving(aws({})) as site:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        client = boto3.client("s3", endpoint_url=site.url, region_name="us-east-1")
        client.create_bucket(Bucket="catalogue")
        client.put_object(Bucket="catalogue", Key="digits/train.npz", Body=b"123")
        yield site.url


@pytest.fixture(scope="module")
def jobs(federation: Federation, store: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A job that has succeeded and one that was cancelled, and what else the commands are given."""
    folder = tmp_path_factory.mktemp("jobs")
    from tests.control_plane.cli.conftest import HOLD, JOB, KEEP, TASK

    (folder / "job.yaml").write_text(JOB)
    (folder / "task.py").write_text(TASK)

    def told(*arguments: str) -> str:
        ran = run_here(*arguments, GEOFED_CONTEXT=str(federation.context))
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    file = str(folder / "job.yaml")
    for user in ("ann", *(f"r-fresh-{format}" for format in RUNS)):
        told("user", "add", user)
    for region in ("d", *(f"{kind}-fresh-{format}" for kind in "rv" for format in RUNS)):
        told("region", "invite", region)
    held = told("submit", file, "-o", "name", *HOLD)
    told("cancel", held, "--yes")
    kept = told("submit", file, "-o", "name", *KEEP)
    while not json.loads(told("status", kept, "-o", "json"))["data"]["models"]:
        pass
    told("cancel", kept, "--yes")
    run_here("wait", kept, GEOFED_CONTEXT=str(federation.context))
    ended = told("submit", file, "-o", "name", *HOLD)
    told("cancel", ended, "--yes")
    running = told("submit", file, "-o", "name", "--set", "train.workers=1", *HOLD)
    prices = folder / "prices.csv"
    prices.write_text("cloud,region,instance_type,purchase,usd_per_hour\naws,r,t,on_demand,0.5\n")
    trace = folder / "trace.csv"
    heads = "job_id,user,num_gpu,submit_time,iterations,model_name,duration,expect_time_list,expect_value_list,job_type"
    trace.write_text(f"{heads}\n0,u,1,5,100,m,50,90-120,10-5,soft\n")
    given = {"file": file, "running": running, "prices": str(prices), "store": store, "trace": str(trace)}
    state, backup = str(federation.context.parent), str(folder / "backup")
    told("backup", backup, "--state-dir", state)
    told("audit", "export", str(folder / "log"))
    given |= {"state": state, "backup": backup, "log": str(folder / "log"), "context": str(federation.context)}
    given |= {"cancelled": held, "ended": ended, "kept": kept}
    job = told("submit", file, "--wait", "-o", "name")
    model, statement = str(folder / "model.safetensors"), str(folder / "statement.json")
    told("export", job, "--output-file", model)
    told("audit", "attest", job, statement)
    return {"job": job, "model": model, "statement": statement, **given}


@pytest.fixture
def contexts(live: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """Contexts of this test's user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("lab", *(f"r-fresh-{format}" for format in RUNS)):
        assert run("context", "add", name, str(live.context)).status == 0


def _example(name: str) -> list[str]:
    """The words after the command's name of the example that its help shows."""
    shown = " ".join(" ".join(run_here(*name.split(), "--help", program="geofed").stdout.split("│")).split())
    (words,) = re.findall(rf"Example: geofed {name} ?(.*)", shown)
    return shlex.split(words.partition(">")[0])


def _positional(command: typer.core.TyperCommand, words: list[str]) -> tuple[list[str], list[str]]:
    """Those words that are arguments, and those that are options with their values."""
    rest, arguments, options = list(words), [], []
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("-"):
            arguments.append(word)
            continue
        options.append(word)
        if not options_of(command)[word].is_flag:
            options.append(rest.pop(0))
    return arguments, options


def _check_example(name: str, jobs: dict[str, str]) -> None:
    """It runs with the jobs, regions and files that there are in the place of the example's."""
    command = commands(typer.main.get_command(app))[name]
    there = CONTRACTS[name].arguments.format(**jobs, fresh=f"fresh-{EXAMPLE}").split()
    arguments, options = _positional(command, _example(name))
    mine, needed = _positional(command, there)
    assert len(arguments) == len(mine) or name == "context add", "what the command needs here"
    ran = run_here(*name.split(), *mine, *needed, *options, program="geofed")
    assert ran.returncode == (9 if CONTRACTS[name].refused else 0), ran.stderr


@pytest.mark.usefixtures("contexts")
@pytest.mark.parametrize(
    "name", [name for name, contract in CONTRACTS.items() if contract.formats and not contract.elsewhere]
)
def test_stdout_holds_the_data_in_every_format_and_the_example_runs(
    live: Federation, jobs: dict[str, str], run: Run, name: str
) -> None:
    for format in sorted(CONTRACTS[name].formats):
        arguments = CONTRACTS[name].arguments.format(**jobs, fresh=f"fresh-{format}").split()
        ran = run(*name.split(), *arguments, "-o", format)
        if CONTRACTS[name].refused:
            assert ran.status == 9, ran.err
            assert ran.err.startswith("error[INADMISSIBLE]: ")
            assert bool(ran.out) == (format in ("json", "jsonl", "yaml"))
            continue
        assert ran.status == 0, ran.err
        assert "error" not in ran.err
        if format == "json":
            envelopes = [json.loads(ran.out)]
        elif format == "yaml":
            envelopes = [YAML(typ="safe").load(ran.out)]
        elif format == "jsonl":
            envelopes = [json.loads(line) for line in ran.out.splitlines()]
        else:
            assert ran.out.strip()
            assert "schema_version" not in ran.out
            assert "\x1b" not in ran.out + ran.err
            continue
        assert envelopes
        for envelope in envelopes:
            assert set(envelope) == {"schema_version", "status", "data"}
            assert (envelope["schema_version"], envelope["status"]) == (1, "ok")
    _check_example(name, jobs)


@pytest.mark.parametrize("name", [name for name, contract in CONTRACTS.items() if contract.remote])
def test_without_a_control_plane_there_is_an_envelope_too(
    run: Run, job_file: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEOFED_CONTEXT", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    filled = CONTRACTS[name].arguments.format(
        job="j", cancelled="j", ended="j", running="j", kept="j", file=job_file, fresh="u"
    )
    ran = run(*name.split(), *filled.split(), "-o", "json")
    assert ran.status == 6
    assert ran.error["code"] == "UNAVAILABLE"
    assert ran.error["retryable"]
    assert ran.err.startswith("error[UNAVAILABLE]: ")
    assert "\nhint: " in ran.err


@pytest.mark.parametrize("group", ["agent", "emulator"])
def test_the_other_programs_are_groups_with_examples(group: str) -> None:
    """The examples themselves are run in tests/e2e/test_first_hour.py and in tests/deploy/emulator/test_cli.py."""
    found = commands(typer.main.get_command(geofed.cli.app).commands[group])
    assert len(found) > 8
    for name, command in found.items():
        _, options = _positional(command, _example(f"{group} {name}"))
        assert set(filter(lambda word: word.startswith("--"), options)) <= set(options_of(command))


def test_a_failure_of_a_group_is_told_as_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_here("emulator", "status", "-o", "json", program="geofed")
    assert (ran.returncode, json.loads(ran.stdout)["error"]["code"]) == (4, "EMULATOR_OFF")
    ran = run_here("agent", "status", program="geofed")
    assert (ran.returncode, ran.stderr.partition(":")[0]) == (6, "error[UNAVAILABLE]")


def test_contexts_have_names(live: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.delenv("GEOFED_CONTEXT")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert run("region", "list").status == 6
    assert run("context", "add", "lab", str(live.context)).status == 0
    elsewhere = {**json.loads(live.context.read_text()), "address": "127.0.0.1:1"}
    (tmp_path / "other.json").write_text(json.dumps(elsewhere))
    assert run("context", "add", "other", str(tmp_path / "other.json")).status == 0
    assert run("region", "list").status == 0, "the first one is the current one"
    assert run("context", "use", "other").status == 0
    current = {view["name"]: view["current"] for view in run("context", "list", "-o", "json").data}
    assert current == {"lab": False, "other": True}
    assert run("region", "list", "--context", "lab").status == 0
    assert run("context", "remove", "other").status == 0
    assert run("region", "list").status == 6
    for wrong in (("use", "nowhere"), ("add", "a/b", str(live.context))):
        assert (ran := run("context", *wrong)).status == 2, ran.err


def test_help_loads_nothing_heavy() -> None:
    code = f"""
import sys
from geofed.cli import app
for words in {[[*name.split(), "--help"] for name in [*CONTRACTS, "agent run", "emulator up"]]}:
    try:
        app(words, prog_name="geofed")
    except SystemExit as end:
        assert not end.code, (words, end.code)
print(sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr.strip() == "[]"


def test_help_answers_at_once() -> None:
    def seconds() -> float:
        argv = [sys.executable, "-m", "geofed.cli", "--help"]
        return cpu_seconds(lambda: subprocess.run(argv, capture_output=True, check=True))

    # Less than half a second on an idle machine; with torch among what it imports it would be two.
    assert min(seconds() for _ in range(4)) < 0.8


def test_the_version_is_an_option_too(run: Run) -> None:
    assert run("--version").out == run("version").out == f"{installed_version('geofed')}\n"
