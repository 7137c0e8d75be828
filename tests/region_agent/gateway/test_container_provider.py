"""What the gateway asks of a Docker engine, and does with its containers' output; the engine is the test's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from region_agent.gateway import FunctionSpec
from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.containers import ContainerProvider
from region_agent.gateway.embedded.logs import LogQuery
from region_agent.gateway.embedded.replicas.running import Running

docker = pytest.importorskip("docker")

NO_NEIGHBOURS = {"com.docker.network.bridge.enable_icc": "false"}


class Network:
    def __init__(self, engine: Engine, name: str, **settings: Any) -> None:
        self.engine, self.name, self.settings = engine, name, settings
        self.attrs = {"Options": settings.get("options"), "IPAM": {"Config": [{"Gateway": "172.30.0.1"}]}}

    def remove(self) -> None:
        self.engine.present.remove(self)


class Container:
    """Its output is given in parts; ``taken`` counts those that were read."""

    def __init__(self, parts: list[bytes], fails: bool) -> None:
        self.parts, self.fails, self.taken, self.removed = parts, fails, 0, 0
        self.attrs = {"State": {"OOMKilled": False}}

    def start(self) -> None:
        if self.fails:
            raise docker.errors.APIError("the address is in use")

    def reload(self) -> None: ...

    def remove(self, **how: Any) -> None:
        self.removed += 1

    def logs(self, **how: Any) -> Iterator[bytes]:
        for part in self.parts:
            self.taken += 1
            yield part

    def wait(self) -> dict[str, int]:
        return {"StatusCode": 0}


class Engine:
    """Has networks, and containers with what they were created with."""

    def __init__(self) -> None:
        self.present: list[Network] = []
        self.created: list[dict[str, Any]] = []
        self.made: list[Container] = []
        self.pulled: list[str] = []
        self.start_fails = False
        self.networks = SimpleNamespace(list=self._networks, create=self._create_network, get=self._network)
        self.containers = SimpleNamespace(list=lambda **_: [], create=self._create)
        self.images = SimpleNamespace(pull=self.pulled.append)

    def _networks(self, names: list[str]) -> list[Network]:
        return [one for one in self.present if names[0] in one.name]

    def _network(self, name: str) -> Network:
        return next(one for one in self.present if one.name == name)

    def _create_network(self, name: str, **settings: Any) -> None:
        self.present.append(Network(self, name, **settings))

    def _create(self, image: str, **settings: Any) -> Container:
        if image == "elsewhere" and not self.pulled:
            raise docker.errors.ImageNotFound("no such image")
        self.created.append({"image": image, **settings})
        self.made.append(Container([], self.start_fails))
        return self.made[-1]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(docker, "DockerClient", lambda **_: made)
    return made


def _provider(folder: Path) -> ContainerProvider:
    return ContainerProvider(Config(state_dir=folder / "state", docker="unix:///engine"))


def _ran(provider: ContainerProvider, image: str) -> Any:
    async def scenario() -> Any:
        await provider.start()
        return provider._run(Running.create("f-1", FunctionSpec("f", image), provider.config, None))

    return asyncio.run(scenario())


def test_containers_cannot_connect_to_each_other(engine: Engine, tmp_path: Path) -> None:
    _provider(tmp_path)._open()
    (network,) = engine.present
    assert (network.settings["internal"], network.settings["options"]) == (True, NO_NEIGHBOURS)
    # One that an earlier version has left is replaced, a proper one and others stay.
    engine.present[:] = [Network(engine, network.name), Network(engine, network.name + "0")]
    _provider(tmp_path)._open()
    assert [one.settings.get("options") for one in engine.present] == [None, NO_NEIGHBOURS]
    before = list(engine.present)
    _provider(tmp_path)._open()
    assert engine.present == before


def test_a_container_that_does_not_start_is_removed(engine: Engine, tmp_path: Path) -> None:
    engine.start_fails = True
    with pytest.raises(docker.errors.APIError, match="in use"):
        _ran(_provider(tmp_path), "here")
    assert engine.made[0].removed == 1


def test_an_image_is_pulled_and_the_engines_log_is_bounded(engine: Engine, tmp_path: Path) -> None:
    container = _ran(_provider(tmp_path), "elsewhere")
    assert engine.created[0]["image"] == "elsewhere"
    assert (engine.pulled, engine.made, container.removed) == (["elsewhere"], [container], 0)
    assert engine.created[0]["log_config"] == {"type": "json-file", "config": {"max-size": "10m", "max-file": "1"}}


def test_shared_memory_is_as_large_as_the_functions_memory(engine: Engine, tmp_path: Path) -> None:
    async def scenario() -> None:
        provider = _provider(tmp_path)
        await provider.start()
        spec = FunctionSpec("f", "here", limits={"memory": "512Mi"})
        provider._run(Running.create("f-1", spec, provider.config, None))

    asyncio.run(scenario())
    assert engine.created[0]["shm_size"] == engine.created[0]["mem_limit"] == 512 * 2**20


def test_containers_see_the_gpus_that_the_region_states(engine: Engine, tmp_path: Path) -> None:
    _ran(_provider(tmp_path), "here")
    _ran(ContainerProvider(Config(tmp_path / "gpus", docker="unix:///engine", docker_gpus=4)), "here")
    none, (request,) = (one["device_requests"] for one in engine.created)
    assert none is None
    assert (request["Count"], request["Capabilities"]) == (4, [["gpu"]])


def _followed(provider: ContainerProvider, parts: list[bytes], secrets: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """Return how many parts were read while the gateway was busy, and all lines that it has in the end."""
    container, spec = Container(parts, fails=False), FunctionSpec("f", "image", secrets=secrets)
    running, loop = SimpleNamespace(spec=spec, name="f-1"), asyncio.new_event_loop()
    following: Any = (loop, running, container, provider._redaction(spec))
    thread = threading.Thread(target=provider._follow, args=following, daemon=True)
    thread.start()
    time.sleep(0.3)
    while_busy = container.taken

    async def lines() -> list[str]:
        await asyncio.to_thread(thread.join, 20)
        return [line.text for found in [one async for one in provider.logs.read(LogQuery("f"))] for line in found]

    found = loop.run_until_complete(lines())
    loop.close()
    provider.logs.end()
    assert container.removed == 1
    return while_busy, found


def test_output_waits_for_a_busy_gateway(tmp_path: Path) -> None:
    parts = [b"line %d\nline %d again\n" % (number, number) for number in range(50)]
    while_busy, lines = _followed(_provider(tmp_path), parts)
    assert while_busy <= 2
    assert lines == b"".join(parts).decode().splitlines()


def test_lines_without_end_are_cut(tmp_path: Path) -> None:
    _, lines = _followed(_provider(tmp_path), [b"x" * 10_000] * 100)
    assert {len(line) for line in lines[:-1]} == {16 << 10}
    assert sum(map(len, lines)) == 1_000_000


def test_values_of_secrets_are_not_in_the_logs(tmp_path: Path) -> None:
    provider = _provider(tmp_path)
    provider.secrets.create("token", b"hunter2-and-more\n")
    _, lines = _followed(provider, [b"it is hunter2-", b"and-more\n"], ("token",))
    assert lines == ["it is [secret token]"]
