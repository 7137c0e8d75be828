"""The images and the Compose file: built, and a job run in containers that may do nothing but what they need."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from ruamel.yaml import YAML
from support.docker_engine import Engine, debian_image, docker_engine
from support.running import UNHURRIED, Federation, Running, check_succeeded, digits_sites, eventually

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
PAGE = ROOT / "docs" / "containers.md"
OWN = {"label": "geofed.gateway"}
UNDERSTOOD = {
    "image", "build", "command", "networks", "volumes", "read_only", "tmpfs", "shm_size", "cap_drop", "security_opt",
    "ports", "restart", "stop_grace_period",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with docker_engine(tmp_path_factory.mktemp("docker")) as engine:
        debian_image(engine, "base", tmp_path_factory)
        for target in ("control-plane", "region-agent", "worker"):
            arguments = ["--file", "deploy/container/Dockerfile", "--target", target, "--tag", f"geofed-{target}"]
            engine("build", "--network=host", "--build-arg", "BASE=base", *arguments, ".", cwd=ROOT)
        yield engine


@pytest.fixture
def services(engine: Engine, tmp_path: Path) -> Iterator[Services]:
    with_services = Services(engine, tmp_path)
    try:
        yield with_services
    finally:
        with_services.remove()


class Services:
    """The services of the Compose file, as containers of the same settings: Compose itself is not at hand."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._file: dict[str, Any] = YAML(typ="safe").load(COMPOSE)
        for name in self._file["networks"]:
            engine("network", "create", name)

    def up(self, name: str) -> None:
        service = self._file["services"][name]
        assert set(service) <= UNDERSTOOD, "a setting that this test does not carry over"
        (network,) = service["networks"]
        mounts = [self._mount(volume) for volume in service["volumes"]]
        flags = {
            "network": [network], "volume": mounts, "tmpfs": service["tmpfs"], "cap-drop": service["cap_drop"],
            "security-opt": service["security_opt"], "restart": [service["restart"]],
            "shm-size": [service.get("shm_size", "64m")], "publish": service.get("ports", []),
        }  # fmt: skip
        arguments = [f"--{flag}={value}" for flag, values in flags.items() for value in values]
        arguments += ["--read-only"] if service["read_only"] else []
        image = re.fullmatch(r"\$\{\w+:-(.+)\}", service["image"])
        assert image is not None
        self._engine("run", "--detach", f"--name={name}", *arguments, image[1], *service["command"])

    def _mount(self, volume: str) -> str:
        return str(self._folder) + volume[1:] if volume.startswith("./") else volume

    def wait_healthy(self, name: str) -> None:
        """Like ``up --wait``."""
        self.wait(lambda: self._engine("inspect", "-f", "{{.State.Health.Status}}", name).strip() == "healthy", name)

    def wait(self, question: Any, name: str) -> None:
        deadline = time.monotonic() + 120
        while not question():
            assert time.monotonic() < deadline, self._engine.start("logs", "--tail=30", name)
            time.sleep(0.5)

    def run(self, name: str, *command: str) -> str:
        """Like ``exec``."""
        return self._engine("exec", name, *command)

    def remove(self) -> None:
        self._engine.start("rm", "--force", "--volumes", *self._file["services"])
        self._engine.start("volume", "rm", "--force", *self._file["volumes"])
        self._engine.start("network", "rm", *self._file["networks"])


def test_a_job_runs_in_containers_that_have_no_rights(engine: Engine, services: Services, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    init = "init federation --template text --regions east,west --own-machines --no-input"
    assert init in PAGE.read_text()
    mount = [f"--volume={tmp_path}:/work", "--workdir=/work", "--user=0:0", "--entrypoint=geofed"]
    engine("run", "--rm", "--network=none", *mount, "geofed-region-agent", *init.split())
    services.up("control-plane")
    services.wait_healthy("control-plane")
    for region in ("east", "west"):
        token = services.run("control-plane", "geofed", "region", "invite", region)
        (tmp_path / "federation" / f"{region}.token").write_text(token)
        services.up(region)
    listed = ("geofed", "region", "list", "-o", "json")
    for region in ("east", "west"):
        services.wait_healthy(region)
    regions = json.loads(services.run("control-plane", *listed))["data"]
    assert {(one["name"], one["state"], one["isolation"]) for one in regions} == {
        ("east", "live", "bubblewrap"), ("west", "live", "bubblewrap"),
    }  # fmt: skip
    services.run("control-plane", "geofed", "submit", "/job/job.yaml", "--watch", "--set", "train.end.epochs=1")
    (job,) = json.loads(services.run("control-plane", "geofed", "list", "--all", "-o", "json"))["data"]
    assert job["state"] == "succeeded"
    for name in ("control-plane", "east", "west"):
        assert services.run(name, "id", "-u").strip() == "10001"
        status = services.run(name, "cat", "/proc/1/status")
        assert re.search(r"CapEff:\s+0{16}", status)
    # The identity is in a volume, and the invitation is spent: an agent that starts anew joins no second time.
    engine("restart", "east")
    services.wait_healthy("east")
    services.wait(lambda: "live" in services.run("control-plane", "geofed", "region", "list"), "control-plane")


def test_nothing_but_the_product_is_sent_to_the_builder(engine: Engine) -> None:
    """A checkout may hold keys, data and virtual environments."""
    engine(
        "build",
        "--build-arg=BASE=base",
        "--file=deploy/container/Dockerfile",
        "--target=wheel",
        "--tag=w",
        ".",
        cwd=ROOT,
    )
    sent = set(engine("run", "--rm", "--network=none", "w", "ls", "-A", "/src").split())
    assert sent == {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}


def test_a_worker_answers_on_its_port(engine: Engine) -> None:
    name = "worker"
    options = ["--detach", f"--name={name}", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL"]
    engine("run", *options, "geofed-worker")
    try:
        ask = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8080/_/ready').read().decode())"
        deadline = time.monotonic() + 60
        while (done := engine.start("exec", name, "python", "-c", ask)).returncode:
            assert time.monotonic() < deadline, engine.start("logs", name)
            time.sleep(0.5)
        assert done.stdout.strip() == "OK"
        engine("stop", "--time=10", name)
        assert engine("inspect", "-f", "{{.State.ExitCode}}", name).strip() == "0", "SIGTERM ends it at once"
    finally:
        engine.start("rm", "--force", name)


def _image_of_the_page(engine: Engine, folder: Path) -> str:
    """Build the page's image of a job, with a small package in the place of its large one."""
    block = re.search(r"(?m)(?:^    .+\n)+", PAGE.read_text().partition("Jobs with `task.image`")[2])
    assert block is not None
    recipe = "".join(line.removeprefix("    ") for line in block[0].splitlines(keepends=True))
    for stated, own in (("registry.example.org/geofed-worker:0.1", "geofed-worker"), ("xgboost", "pyfiglet")):
        assert recipe.count(stated) == 1
        recipe = recipe.replace(stated, own)
    (folder / "Dockerfile").write_text(recipe)
    engine("build", "--network=host", "--tag=team/worker:1", str(folder))
    return "team/worker:1"


def test_workers_are_containers_that_see_their_shard_and_their_channel(engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("docker")
    from docker import DockerClient

    gateway = {"kind": "docker", "engine": engine.host, "image": "geofed-worker"}
    policy = {"isolation": "prefer", "allowImages": ["team/"]}
    sites = digits_sites(tmp_path, ["lille"], workers=2, gateway=gateway, policy=policy)
    (tmp_path / "image").mkdir()
    image = _image_of_the_page(engine, tmp_path / "image")
    client = DockerClient(engine.host)
    with contextlib.closing(client), Federation(tmp_path / "federation", sites) as federation:
        running = Running(federation, tmp_path)
        job = running.submit("train.workers=2", "train.end.epochs=12", "wan.interval=20")
        running.wait_round(job, 1)
        containers = client.containers.list(filters=OWN)
        assert len(containers) == 2
        for container in containers:
            host, mounts = container.attrs["HostConfig"], container.attrs["Mounts"]
            assert (host["ReadonlyRootfs"], host["CapDrop"], host["Memory"]) == (True, ["ALL"], host["MemorySwap"])
            written = [mount["Source"] for mount in mounts if mount["RW"] and mount["Type"] == "bind"]
            assert all(str(tmp_path / "channels") in path for path in written)
            assert any(str(tmp_path / "data") in mount["Source"] for mount in mounts if not mount["RW"])
            assert container.exec_run(["cat", str(tmp_path / "federation")]).exit_code != 0
        check_succeeded(running.wait_end(job), accuracy=0.5)
        eventually(lambda: not client.containers.list(all=True, filters=OWN, ignore_removed=True), "they are removed")
        settings = ("train.workers=2", "train.end.epochs=5000", "train.evaluateEvery=0", f"task.image={image}")
        again = running.submit(*settings, task=f"{UNHURRIED}\nimport pyfiglet\n")
        running.wait_round(again, 1)
        containers = client.containers.list(filters=OWN)
        # This machine reaches a container, which does not serve it without the job's token; another container does not.
        networks = containers[1].attrs["NetworkSettings"]["Networks"]
        (address,) = [network["IPAddress"] for network in networks.values()]
        assert httpx2.post(f"http://{address}:8080/", content=b"{}").status_code == 403
        connect = f"import socket; socket.create_connection(({address!r}, 8080), 3)"
        tried = containers[0].exec_run(["python", "-c", connect])
        assert (tried.exit_code, b"TimeoutError" in tried.output) == (1, True), tried.output
    assert client.containers.list(all=True, filters=OWN, ignore_removed=True) == client.networks.list(filters=OWN) == []
