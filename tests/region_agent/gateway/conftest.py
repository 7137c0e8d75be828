"""Gateways to test against: an embedded one as a real process, or a real one named by the environment.

A real OpenFaaS gateway joins in when GEOFED_TEST_GATEWAY_URL is set, with GEOFED_TEST_GATEWAY_USER_FILE,
GEOFED_TEST_GATEWAY_PASSWORD_FILE, GEOFED_TEST_GATEWAY_CA (if it has TLS) and GEOFED_TEST_GATEWAY_IMAGE, an image
whose handler is ``handlers/gateway_probe.py``. Callbacks are tested against it when GEOFED_TEST_CALLBACK_URL
names an address at which it reaches this machine's port 8765.

Containers join in when GEOFED_TEST_DOCKER names the socket of an engine, as unix:///path: its images are built first.
The Jobs of a Kubernetes cluster are those of `support.kubernetes_cluster`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import importlib.util
import ipaddress
import itertools
import json
import os
import select
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.docker_engine import docker_engine, worker_image
from support.gateway_client import WholeClient
from support.processes import Start, are_wanted, running_as
from support.warm_functions import forked_from
from support.warm_servers import ServerProcess, WarmServers

from region_agent.gateway import BasicAuth, FunctionSpec, RetryPolicy, timeout_env
from region_agent.gateway.embedded.config import PROFILES
from region_agent.gateway.functions import Response
from region_agent.gateway.socket_folders import remove_short_folder

HANDLERS = Path(__file__).parent / "handlers"
PROBE = """\
FROM {worker}
COPY gateway_probe.py /opt/probe/gateway_probe.py
ENV PYTHONPATH=/opt/probe
ENTRYPOINT ["python", "-m", "region_agent.gateway.container", "--handler", "gateway_probe:handle"]
"""
QUICK = RetryPolicy(deadline=timedelta(seconds=2))
REMOTE = ("kubernetes", "lambda", "scf")
"""Platforms whose replicas connect to the gateway, each with a double in this process."""
_CLOUDS = (
    "boto3", "lightkube", "lightkube.resources.batch_v1", "lightkube.resources.core_v1",
    "tencentcloud.scf.v20180416.scf_client",
)  # fmt: skip
"""Clients of clouds, which gateways of these load."""
_FUNCTIONS = tuple(f"region_agent.gateway.serverless.{cloud}" for cloud in ("aws", "tencent"))
_numbers = itertools.count(1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def until(question: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Ask until the answer is true; for states that nothing announces."""
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < deadline, "it never came true"
        select.select([], [], [], 0.01)
    return answer


@dataclass
class Embedded:
    """An embedded gateway as a process of its own."""

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    """Further variables of its environment."""
    parent: WarmServers | None = None
    """What it is forked from; None: it is executed."""
    process: subprocess.Popen[bytes] | ServerProcess | None = None
    url: str = ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def state_dir(self) -> Path:
        return self.directory / "state"

    def start(self) -> None:
        ready, file = self.directory / "ready.json", self.directory / "gateway.json"
        ready.unlink(missing_ok=True)
        base = {
            "state_dir": str(self.state_dir),
            "ready_file": str(ready),
            "images": {"probe": "gateway_probe:handle", "broken": "no_such_module:handle"},
            "python_path": [str(HANDLERS)],
            "preload": [],
            "isolation": "none",
        }
        file.write_text(json.dumps(base | self.config))
        arguments, environ = ["--config", str(file), *self.arguments], {**os.environ, **self.variables}
        told = self.directory / "gateway.log"
        if self.parent is not None:
            argv = ["region_agent.gateway.embedded", *arguments, "--die-with-parent", str(self.parent.pid)]
            self.process = self.parent.run("region_agent.gateway.embedded.__main__", argv, told, environ)
        else:
            argv = [sys.executable, "-m", "region_agent.gateway.embedded", *arguments]
            with open(told, "ab") as log:
                self.process = subprocess.Popen([*argv, "--die-with-parent", str(os.getpid())], stderr=log, env=environ)
        process = self.process
        until(lambda: ready.exists() or process.poll() is not None, 30)
        assert process.poll() is None, told.read_text()
        self.url = json.loads(ready.read_text())["url"]

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(15)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(15)

    def clean(self) -> None:
        """Remove what one that was killed has left outside of its directories."""
        remove_short_folder(Path(self.config.get("state_dir", self.state_dir)) / "temporary-folders")

    def family(self) -> list[psutil.Process]:
        """The gateway's descendants: the warm parent, replicas, and what these started."""
        return psutil.Process(self.pid).children(recursive=True)

    def zygote(self) -> psutil.Process:
        found: list[psutil.Process] = until(lambda: running_as("zygote", psutil.Process(self.pid).children()))
        return found[0]


@dataclass
class Target:
    """A gateway under test, with a client for this test's event loop."""

    client: WholeClient
    http: httpx2.AsyncClient
    image: str
    embedded: Embedded | None
    auth: BasicAuth | None
    _deployed: list[str] = field(default_factory=list)

    async def deploy(self, replicas: int = 1, **members: Any) -> Probe:
        """A new function with the probe handler, ready to answer."""
        name = f"probe-{os.getpid()}-{next(_numbers)}"
        members["env_vars"] = {**timeout_env(timedelta(seconds=20)), **members.get("env_vars", {})}
        spec = FunctionSpec(service=name, image=members.pop("image", self.image), **members)
        self._deployed.append(name)
        await self.client.deploy(spec)
        if replicas != 1:
            await self.client.scale(name, replicas)
        await self.client.wait_ready(name, replicas, timedelta(seconds=60))
        return Probe(self, spec)

    def keep(self) -> None:
        """Leave what was deployed so far to others."""
        self._deployed.clear()

    async def clean(self) -> None:
        for name in self._deployed:
            with contextlib.suppress(Exception):
                await self.client.delete(name)


@dataclass
class Probe:
    """A deployed probe function."""

    target: Target
    spec: FunctionSpec

    @property
    def name(self) -> str:
        return self.spec.service

    async def __call__(self, do: str = "echo", body: bytes = b"", **options: Any) -> Response:
        headers = {"X-Do": do, **options.pop("headers", {})}
        return await self.target.client.invoke(self.name, body, headers=headers, **options)

    async def pid(self) -> int:
        return int(json.loads((await self("describe")).body)["pid"])

    async def process(self) -> tuple[str, int]:
        """Its replica, and the process in that."""
        seen = json.loads((await self("describe", idempotent=True)).body)
        return seen["hostname"], seen["pid"]


@contextlib.asynccontextmanager
async def open_target(
    embedded: Embedded, auth: BasicAuth | None = None, ca: Path | None = None
) -> AsyncIterator[Target]:
    async with open_url(embedded.url, auth, ca, "probe", embedded) as target:
        yield target


@contextlib.asynccontextmanager
async def open_url(
    url: str, auth: BasicAuth | None, ca: Path | None, image: str, embedded: Embedded | None
) -> AsyncIterator[Target]:
    context = ssl.create_default_context(cafile=ca)
    async with (
        WholeClient(url, auth=auth, verify=context, retry=QUICK) as client,
        httpx2.AsyncClient(base_url=url, verify=context, timeout=30, trust_env=False) as http,
    ):
        target = Target(client, http, image, embedded, auth)
        yield target
        await target.clean()


@pytest.fixture(scope="session")
def gateways() -> Iterator[WarmServers]:
    """The parent of gateways."""
    clouds = [module for module in _CLOUDS if importlib.util.find_spec(module.partition(".")[0]) is not None]
    with WarmServers("region_agent.gateway.embedded.__main__", *clouds) as parent:
        yield parent


@pytest.fixture(scope="session")
def start_function() -> Iterator[Start]:
    """What starts functions of clouds' doubles: forked from a process that has loaded what they need."""
    with WarmServers("support.warm_functions", "region_agent.gateway.container", *_FUNCTIONS) as parent:
        yield forked_from(lambda: parent)


@pytest.fixture
def launch(tmp_path: Path, gateways: WarmServers) -> Iterator[Callable[..., Embedded]]:
    """Start embedded gateways of one's own; they end with the test. ``forked``: from a process that has loaded what
    they need, also for a cloud, which takes most of their start; else they are executed."""
    started: list[Embedded] = []

    def start(*arguments: str, variables: dict[str, str] | None = None, forked: bool = True, **config: Any) -> Embedded:
        directory = tmp_path / f"gateway-{len(started)}"
        directory.mkdir()
        embedded = Embedded(directory, config, arguments, variables or {}, gateways if forked else None)
        started.append(embedded)
        embedded.start()
        return embedded

    yield start
    for embedded in started:
        embedded.kill()
        embedded.clean()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """One embedded gateway with the default configuration for all tests that leave it whole."""
    embedded = Embedded(tmp_path_factory.mktemp("shared"), {"drain_timeout": "1s"})
    embedded.start()
    yield embedded
    embedded.kill()
    embedded.clean()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for loopback, which is its own authority, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway under test")])
    now = datetime.datetime.now(datetime.UTC)
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), loopback]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = directory / "cert.pem", directory / "key.pem"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_file, key_file


@pytest.fixture(scope="session")
def embedded_sessions(
    tmp_path_factory: pytest.TempPathFactory, authority: tuple[Path, Path], gateways: WarmServers
) -> Iterator[dict[str, tuple[Embedded, BasicAuth, Path]]]:
    """An embedded gateway of each profile, with TLS and authentication, for all contract tests."""
    certificate, key = authority
    started = {}
    for profile in PROFILES:
        directory = tmp_path_factory.mktemp(f"gateway-{profile}")
        (directory / "user").write_text("admin\n")
        (directory / "password").write_text("correct horse\n")
        embedded = Embedded(
            directory,
            {
                "auth_user_file": str(directory / "user"),
                "auth_password_file": str(directory / "password"),
                "tls_cert": str(certificate),
                "tls_key": str(key),
                "profile": profile,
            },
            parent=gateways,
        )
        embedded.start()
        started[profile] = embedded, BasicAuth("admin", "correct horse"), certificate
    yield started
    for embedded, _, _ in started.values():
        embedded.stop()


def _kinds() -> list[str]:
    named = {"docker": "GEOFED_TEST_DOCKER", "real": "GEOFED_TEST_GATEWAY_URL"}
    return [*PROFILES, *REMOTE, *(kind for kind, variable in named.items() if os.environ.get(variable))]


@pytest.fixture(scope="session")
def docker_session(
    tmp_path_factory: pytest.TempPathFactory, authority: tuple[Path, Path]
) -> Iterator[tuple[Embedded, str]]:
    """An embedded gateway whose replicas are containers of the engine at GEOFED_TEST_DOCKER, and its image."""
    pytest.importorskip("docker")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(docker_engine(tmp_path_factory.mktemp("docker")))
        worker = worker_image(engine, tmp_path_factory)
        folder = tmp_path_factory.mktemp("probe")
        shutil.copy(HANDLERS / "gateway_probe.py", folder)
        (folder / "Dockerfile").write_text(PROBE.format(worker=worker))
        engine("build", "--tag", "geofed-probe", str(folder))
        embedded = Embedded(tmp_path_factory.mktemp("gateway-docker"), {"docker": engine.host, "drain_timeout": "1s"})
        embedded.start()
        yield embedded, "geofed-probe"
        embedded.stop()


@pytest.fixture(scope="session")
def kubernetes_session(
    tmp_path_factory: pytest.TempPathFactory, start_function: Start, gateways: WarmServers
) -> Iterator[Embedded]:
    """An embedded gateway whose replicas are Jobs of a cluster in this process."""
    pytest.importorskip("lightkube")
    from support.kubernetes_cluster import Cluster, worker_command

    command = worker_command("--handler", "gateway_probe:handle", path=str(HANDLERS))
    with Cluster(tmp_path_factory.mktemp("cluster"), {"probe": command}, start=start_function) as cluster:
        settings = {"kind": "kubernetes", "image": "probe", "kubeconfig": str(cluster.kubeconfig())}
        config = {"kubernetes": settings, "owner": "contract", "drain_timeout": "1s"}
        embedded = Embedded(tmp_path_factory.mktemp("gateway-kubernetes"), config, parent=gateways)
        embedded.start()
        yield embedded
        embedded.stop()


@pytest.fixture(scope="session")
def lambda_session(
    tmp_path_factory: pytest.TempPathFactory, start_function: Start, gateways: WarmServers
) -> Iterator[Embedded]:
    """An embedded gateway whose replicas are invocations of a service's functions in this process."""
    pytest.importorskip("boto3")
    from support.lambda_service import IMAGE, ROLE, Service, function_command

    command = function_command("--handler", "gateway_probe:handle", path=str(HANDLERS))
    with Service(tmp_path_factory.mktemp("lambda"), {"probe": command, IMAGE: command}, start_function) as service:
        service.pending_seconds = service.unknown_seconds = 0.0
        settings = {"kind": "lambda", "image": IMAGE, "role": ROLE}
        config = {"serverless": settings, "owner": "contract", "drain_timeout": "1s"}
        folder = tmp_path_factory.mktemp("gateway-lambda")
        embedded = Embedded(folder, config, variables=service.variables, parent=gateways)
        embedded.start()
        yield embedded
        embedded.stop()


@pytest.fixture(scope="session")
def scf_session(
    tmp_path_factory: pytest.TempPathFactory, start_function: Start, gateways: WarmServers
) -> Iterator[Embedded]:
    """The same for Tencent Cloud SCF."""
    pytest.importorskip("tencentcloud.scf")
    from support.lambda_service import function_command
    from support.scf_service import IMAGE, REGION, Service

    command = function_command("--handler", "gateway_probe:handle", path=str(HANDLERS))
    with Service(tmp_path_factory.mktemp("scf"), {"probe": command, IMAGE: command}, start_function) as service:
        service.pending_seconds = service.unknown_seconds = 0.0
        settings = {"kind": "scf", "image": IMAGE, "tencentRegion": REGION, "endpoint": service.url}
        config = {"serverless": settings, "owner": "contract", "drain_timeout": "1s"}
        folder = tmp_path_factory.mktemp("gateway-scf")
        embedded = Embedded(folder, config, variables=service.variables, parent=gateways)
        embedded.start()
        yield embedded
        embedded.stop()


@contextlib.asynccontextmanager
async def _opened(request: pytest.FixtureRequest, kind: str) -> AsyncIterator[Target]:
    if kind in PROFILES:
        embedded, auth, ca = request.getfixturevalue("embedded_sessions")[kind]
        async with open_target(embedded, auth, ca) as target:
            yield target
        return
    if kind == "docker":
        embedded, image = request.getfixturevalue("docker_session")
        async with open_url(embedded.url, None, None, image, embedded) as target:
            yield target
        return
    if kind in REMOTE:
        async with open_target(request.getfixturevalue(f"{kind}_session")) as target:
            yield target
        return
    setting = os.environ.get
    files = setting("GEOFED_TEST_GATEWAY_USER_FILE"), setting("GEOFED_TEST_GATEWAY_PASSWORD_FILE")
    real_auth = BasicAuth.from_files(Path(files[0]), Path(files[1])) if files[0] and files[1] else None
    authority_file = setting("GEOFED_TEST_GATEWAY_CA")
    image = os.environ["GEOFED_TEST_GATEWAY_IMAGE"]
    url = os.environ["GEOFED_TEST_GATEWAY_URL"]
    async with open_url(url, real_auth, Path(authority_file) if authority_file else None, image, None) as target:
        yield target


@pytest.fixture(params=_kinds())
async def gateway(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Target]:
    """The gateway that the contract is checked on."""
    async with _opened(request, request.param) as target:
        yield target


@pytest.fixture(scope="module")
def standing(request: pytest.FixtureRequest) -> Iterator[dict[str, FunctionSpec | BaseException]]:
    """A probe at each kind of gateway that tests of a module use, or why there is none: one platform that fails is no
    failure of the others' tests."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    parameters = [item.callspec.params for item in tests if item.module is request.module and hasattr(item, "callspec")]
    specs: dict[str, FunctionSpec | BaseException] = {}

    async def deploy(kind: str) -> None:
        async with _opened(request, kind) as target:
            specs[kind] = (await target.deploy()).spec
            target.keep()

    async def delete(kind: str, service: str) -> None:
        async with _opened(request, kind) as target:
            await target.client.delete(service)

    for kind in sorted({given["gateway"] for given in parameters if "gateway" in given}):
        try:
            asyncio.run(deploy(kind))
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # the tests of this kind raise it
            specs[kind] = error
    yield specs
    for kind, spec in specs.items():
        if isinstance(spec, FunctionSpec):
            with contextlib.suppress(Exception):
                asyncio.run(delete(kind, spec.service))


@pytest.fixture
def probe(request: pytest.FixtureRequest, gateway: Target, standing: dict[str, FunctionSpec | BaseException]) -> Probe:
    """A probe with one replica, for tests that leave it whole."""
    spec = standing[request.node.callspec.params["gateway"]]
    if isinstance(spec, BaseException):
        raise spec
    return Probe(gateway, spec)


@pytest.fixture(scope="session", autouse=True)
def _gateways_live_longer_than_a_test(request: pytest.FixtureRequest) -> None:
    """Started before the first test looks at what is there, so that none of them counts as left behind."""
    if are_wanted(request.session, Path(__file__).parent):
        for name in ("gateways", "shared", "embedded_sessions"):
            request.getfixturevalue(name)
        if any("[docker" in item.nodeid for item in request.session.items):
            request.getfixturevalue("docker_session")
        for kind in REMOTE:
            if any(f"[{kind}" in item.nodeid for item in request.session.items):
                request.getfixturevalue(f"{kind}_session")
