"""The images and the Compose file: built, and a job run in containers that may do nothing but what they need."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from ruamel.yaml import YAML
from support.docker_engine import Engine, debian_image, docker_engine, product_image
from support.running import UNHURRIED, Federation, Running, check_succeeded, digits_sites, eventually

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "containers.md"
OWN = {"label": "geofed.gateway"}
SERVERS = """\
FROM base
RUN mkdir -p /etc/postgresql-common && echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.conf \\
    && apt-get update && apt-get install --yes --no-install-recommends postgresql redis-server prometheus \\
    && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/ && install --directory --owner nobody /prometheus \\
    && install --directory --mode 0700 --owner postgres /var/lib/postgresql/data && chmod 3777 /run/postgresql
COPY start /start
USER nobody
ENTRYPOINT ["/start"]
"""
START = """\
#!/bin/sh
# As the published images start: PostgreSQL by its variables, Prometheus with options, a command as it is.
set -eu
data=/var/lib/postgresql/data
if [ -n "${POSTGRES_USER:-}" ]; then
    if [ ! -s "$data/PG_VERSION" ]; then
        initdb -D "$data" --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth-host=scram-sha-256
        echo "host all all all scram-sha-256" >> "$data/pg_hba.conf"
        echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -D "$data" postgres
    fi
    exec postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories=/run/postgresql
fi
case "${1:-}" in
    "") exec sleep infinity ;;
    --*) exec prometheus "$@" ;;
esac
exec "$@"
"""
COMPOSE_1 = """\
import sys
from docker.types import HostConfig

made = HostConfig.__init__
PROC = "systempaths=unconfined"


def init(self, *arguments, **options):
    made(self, *arguments, **options)
    if PROC in (given := self.get("SecurityOpt") or []):
        self.update(SecurityOpt=[one for one in given if one != PROC], MaskedPaths=[], ReadonlyPaths=[])


HostConfig.__init__ = init
from compose.cli.main import main

sys.argv[0] = "docker-compose"
main()
"""
"""Debian's docker-compose, with the option that Docker's own command and Compose 2 translate so for the engine."""
COMPOSE_2 = """\
wait_healthy() {
    for try in $(seq 240); do
        states=$(command docker ps --all --format '{{.Status}}' --filter label=com.docker.compose.project)
        # Grafana's and Prometheus' images have no health check.
        grep --quiet --extended-regexp 'unhealthy|starting|Exited|Restarting|Created' <<< "$states" || return 0
        sleep 0.5
    done
    echo "$states"
    return 1
}
docker() {
    if [ "$1" != compose ]; then command docker "$@"; return; fi
    shift
    case "$1" in
        build) ;;  # They are built already, from the base that there is.
        up) /usr/bin/python3 compose_1.py "${@/--wait/--no-color}"; wait_healthy ;;
        exec) shift; [ "$1" != -T ] || shift; /usr/bin/python3 compose_1.py exec -T "$@" ;;
        *) return 2 ;;
    esac
}
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with docker_engine(tmp_path_factory.mktemp("docker")) as engine:
        debian_image(engine, "base", tmp_path_factory)
        for target in ("control-plane", "region-agent", "worker"):
            product_image(engine, target, "base")
        yield engine


@pytest.fixture
def compose(engine: Engine, tmp_path: Path) -> Iterator[Compose]:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed: apt-get install docker-compose")
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "Dockerfile").write_text(SERVERS)
    (tmp_path / "image" / "start").write_text(START)
    (tmp_path / "image" / "start").chmod(0o755)
    engine("build", "--network=host", "--tag=servers", str(tmp_path / "image"))
    for folder in ("compose", "monitoring"):
        shutil.copytree(ROOT / "deploy" / folder, tmp_path / "deploy" / folder)
    # Others may be let into none of these folders.
    tmp_path.chmod(0o700)
    files = Compose(engine, tmp_path / "deploy" / "compose")
    try:
        yield files
    finally:
        files.down()


class Compose:
    """The page's commands, by Debian's Compose 1: it has no `--wait`, and asks for a terminal."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        (folder / "compose_1.py").write_text(COMPOSE_1)
        stand_ins = dict.fromkeys(("POSTGRES", "REDIS", "PROMETHEUS", "GRAFANA"), "servers")
        self._environment = {
            **os.environ,
            "DOCKER_HOST": engine.host,
            "COMPOSE_PROJECT_NAME": "federation",
            **stand_ins,
        }

    def bash(self, script: str) -> None:
        (self._folder / "script").write_text(f"{COMPOSE_2}{script}")
        argv = ["bash", "-eu", "script"]
        done = subprocess.run(
            argv, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:] + self("logs", "--tail=15")

    def __call__(self, *arguments: str, check: bool = True) -> str:
        argv = ["/usr/bin/python3", "compose_1.py", "--ansi=never", *arguments]
        done = subprocess.run(
            argv, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def run(self, name: str, *command: str) -> str:
        return self._engine("exec", f"federation_{name}_1", *command)

    def down(self) -> None:
        self("down", "--volumes", "--timeout=1", check=False)


def test_the_commands_of_the_page_start_a_federation_that_may_do_nothing_but_what_it_needs(compose: Compose) -> None:
    block = re.search(r"(?m)(?:^    .+\n)+", PAGE.read_text().partition("## A federation on one machine")[2])
    assert block is not None
    script = "".join(line.removeprefix("    ") for line in block[0].splitlines(keepends=True))
    compose.bash(script.replace("--watch", "--watch --set train.end.epochs=1"))
    regions = json.loads(compose.run("control-plane", "geofed", "region", "list", "-o", "json"))["data"]
    assert {(one["name"], one["state"], one["isolation"]) for one in regions} == {
        ("east", "live", "bubblewrap"), ("west", "live", "bubblewrap"),
    }  # fmt: skip
    (job,) = json.loads(compose.run("control-plane", "geofed", "list", "--all", "-o", "json"))["data"]
    assert job["state"] == "succeeded"
    for name in ("control-plane", "east", "west"):
        assert compose.run(name, "id", "-u").strip() == "10001"
    for name in ("control-plane", "database", "east", "east-redis", "prometheus"):
        assert re.search(r"CapEff:\s+0{16}", compose.run(name, "cat", "/proc/1/status")), name
    check_where_state_is(compose, job["id"])
    check_networks(compose)
    check_monitoring(compose)
    # The identity is in a volume, and the invitation is spent: an agent that starts again joins no second time.
    compose("restart", "east")
    compose.bash("wait_healthy")
    eventually(lambda: "away" not in compose.run("control-plane", "geofed", "region", "list"), "east is back")


def check_where_state_is(compose: Compose, job: str) -> None:
    assert "state.db" not in compose.run("control-plane", "ls", "/var/lib/geofed")
    query = ["psql", "--username=geofed", "--tuples-only", "--command=SELECT id FROM jobs", "geofed"]
    assert compose.run("database", *query).split() == [job]
    for region in ("east", "west"):
        ask = 'REDISCLI_AUTH="$(cat /run/secrets/*-redis)" redis-cli INFO commandstats'
        said = compose.run(f"{region}-redis", "sh", "-c", ask)
        assert re.search(r"cmdstat_xadd:calls=[1-9]", said), "its workers exchanged nothing"
        assert "NOAUTH" in compose.run(f"{region}-redis", "redis-cli", "PING")


def check_networks(compose: Compose) -> None:
    """Who reaches whom, by addresses: a name that does not resolve keeps nobody out."""
    addresses = {
        name: compose.run(name, "hostname", "-i").split()[0] for name in ("database", "east-redis", "west-redis")
    }
    ports = {"database": 5432, "east-redis": 6379, "west-redis": 6379}
    script = (
        "import socket, sys\ntry: socket.create_connection((sys.argv[1], int(sys.argv[2])), 1); print('reached')\n"
        "except OSError as error: print(error)"
    )
    for source, reached in (("east", "east-redis"), ("west", "west-redis"), ("control-plane", "database")):
        for name, address in addresses.items():
            said = compose.run(source, "python", "-c", script, address, str(ports[name])).strip()
            assert (said == "reached") == (name == reached), f"{source} to {name}: {said}"


def check_monitoring(compose: Compose) -> None:
    """What Grafana is told: its data source answers the queries of its dashboard, from where Grafana is."""
    folder = "/etc/grafana/provisioning"
    (source,) = YAML(typ="safe").load(compose.run("grafana", "cat", f"{folder}/datasources/geofed.yaml"))["datasources"]
    (provider,) = YAML(typ="safe").load(compose.run("grafana", "cat", f"{folder}/dashboards/geofed.yaml"))["providers"]
    listed = compose.run("grafana", "ls", provider["options"]["path"]).split()
    assert listed == ["geofed.json"]
    dashboard = json.loads(compose.run("grafana", "cat", f"{provider['options']['path']}/{listed[0]}"))
    script = (
        "import sys, urllib.parse as p, urllib.request as r\n"
        "source, what, query = sys.argv[1:]\n"
        "print(r.urlopen(f'{source}/api/v1/{what}?' + p.urlencode({'query': query})).read().decode())"
    )

    def ask(what: str, query: str = "") -> Any:
        answer = json.loads(compose.run("grafana", "python3", "-c", script, source["url"], what, query))
        assert answer["status"] == "success", answer
        return answer["data"]

    ended = 'geofed_jobs{state="succeeded"}'
    eventually(lambda: [one["value"][1] for one in ask("query", ended)["result"]] == ["1"], "the job is counted")
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            ask("query", target["expr"].replace("$job", ".*"))
    (up,) = ask("query", 'up{job="geofed"}')["result"]
    assert up["value"][1] == "1"
    rules = YAML(typ="safe").load(ROOT / "deploy" / "monitoring" / "alerts.yaml")["groups"][0]["rules"]
    assert len(ask("rules")["groups"][0]["rules"]) == len(rules)


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
