"""The sandboxes of functions: what is visible, writable and reachable in them, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support import hostile
from support.sandboxes import needs_sandboxes

from geofed_pb.errors import GeofedError
from region_agent.gateway.embedded.replicas import process_limit
from region_agent.gateway.functions import Grants

from .conftest import HANDLERS, Embedded, open_target, until
from .test_embedded import SOON, gone

pytestmark = [pytest.mark.anyio, pytest.mark.processes, needs_sandboxes]


@pytest.fixture
def sandboxed(launch):
    return lambda *arguments, **config: launch(*arguments, isolation="require", **config)


def test_groups_of_a_gateway_that_runs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts beside it may find a group whose first process has not entered it yet."""
    monkeypatch.setattr(process_limit, "_parent", lambda: tmp_path)
    with subprocess.Popen(["true"]) as ended:
        pass
    runs = tmp_path / f"geofed-{os.getppid()}-trial-0"
    for folder in (runs, tmp_path / f"geofed-{ended.pid}-trial-0", tmp_path / f"geofed-{os.getpid()}-trial-0"):
        folder.mkdir()
    process_limit.remove_old_groups()
    assert list(tmp_path.iterdir()) == [runs]


async def test_isolation_is_told_as_it_was_tried(sandboxed) -> None:
    async with open_target(sandboxed()) as target:
        isolation = (await target.client.info())["provider"]["isolation"]
        assert (isolation["kind"], isolation["reason"]) == ("bubblewrap", "")


async def test_function_sees_its_own_files_only(sandboxed, tmp_path: Path) -> None:
    for name in ("own", "other", "channel"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("PRIVATE")
    embedded = sandboxed()
    grants = Grants(read=(str(tmp_path / "own"),), write=(str(tmp_path / "channel"),))
    async with open_target(embedded) as target:
        await target.client.create_secret("other", b"PRIVATE")
        probe = await target.deploy(annotations=grants.annotations())
        assert (await probe(f"read?path={tmp_path / 'own' / 'file'}")).body == b"PRIVATE"
        assert (await probe(f"overwrite?path={tmp_path / 'own' / 'file'}")).body == b"[30, 30, 1]", "EROFS"
        assert json.loads((await probe(f"overwrite?path={tmp_path / 'channel' / 'file'}")).body)[:2] == [0, 0]
        assert (tmp_path / "channel" / "folder").is_dir()
        hidden = (
            tmp_path / "other" / "file",
            embedded.directory / "gateway.json",
            embedded.state_dir / "secrets/other",
        )
        for path in hidden:
            assert (await probe(f"read?path={path}")).status == 404
            assert "PRIVATE" not in (await probe(f"uncover?path={path}")).body.decode()
        assert sorted(json.loads((await probe(f"list?path={tmp_path}")).body)) == ["channel", "own"]
        assert (await probe("touch")).body == b"written"
        assert (await probe("listen")).body == b"heard"


async def test_state_directory_is_covered_in_what_a_function_reads(sandboxed, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("x")
    embedded = sandboxed(state_dir=str(tmp_path / "data" / "state"))
    async with open_target(embedded) as target:
        probe = await target.deploy(annotations=Grants(read=(str(tmp_path / "data"),)).annotations())
        assert (await probe(f"read?path={tmp_path / 'data' / 'file'}")).body == b"x"
        assert (await probe(f"list?path={tmp_path / 'data' / 'state'}")).body == b"[]"


async def test_handler_in_the_folder_for_temporary_files_is_found(sandboxed) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / "greeter.py").write_text("def handle(event, context):\n    return 'found'\n")
        async with open_target(sandboxed(images={"greeter": "greeter:handle"}, python_path=[folder])) as target:
            greeter = await target.deploy(image="greeter")
            assert (await greeter()).body == b"found"


async def test_environment_names_places_in_the_sandbox(sandboxed) -> None:
    embedded = sandboxed(preload=["torch"])
    async with open_target(embedded) as target:
        await target.client.create_secret("own", b"its secret")
        probe = await target.deploy(secrets=("own",))
        seen = json.loads((await probe("env")).body)
        assert seen["environ"]["HOME"] == seen["cwd"] == "/home/function"
        assert (await probe("scratch")).body.startswith(b"/tmp/scratch-"), "not the warm parent's folder"
        assert (await probe("secret?name=own")).body == b"its secret"


@pytest.mark.parametrize("isolation", ["require", "none"])
async def test_hostile_function_gets_nothing(launch, tmp_path: Path, isolation: str) -> None:
    """Without a sandbox it gets what it tries, as far as that harms nobody."""
    (tmp_path / "secret").write_text("PRIVATE")
    (tmp_path / "data").write_text("x")
    (tmp_path / "channel").mkdir()
    support = str(Path(hostile.__file__).parent)
    listen = f"unix:{tmp_path}/api"
    embedded = launch("--listen", listen, python_path=[str(HANDLERS), support], isolation=isolation)
    with socket.create_server(("127.0.0.1", 0)) as server:
        targets = {
            "secrets": [str(tmp_path / "secret"), str(embedded.directory / "gateway.json")],
            "folders": [str(embedded.state_dir), str(HANDLERS.parents[2] / "e2e")],
            "read_only": [str(tmp_path / "data"), str(HANDLERS / "gateway_probe.py")],
            "pids": [embedded.pid, os.getpid()],
            "ports": [server.getsockname()],
            "sockets": [f"{tmp_path}/api"],
            "channel": str(tmp_path / "channel"),
            "bomb": True,
            "only": [] if isolation == "require" else ["read", "list", "write", "see", "signal", "connect"],
        }
        grants = Grants(read=(str(tmp_path / "data"),), write=(str(tmp_path / "channel"),))
        async with open_target(embedded) as target:
            probe = await target.deploy(annotations=grants.annotations())
            gained = json.loads((await probe("attack", json.dumps(targets).encode())).body)
    if isolation == "require":
        assert gained == {}
    else:
        assert len([name for name in gained if not name.startswith("write /proc")]) >= 12


async def test_processes_are_out_of_each_others_sight(sandboxed) -> None:
    async with open_target(sandboxed()) as target:
        probe, other = await target.deploy(), await target.deploy()
        await other("spawn")
        mine = [int(name) for name in json.loads((await probe("list?path=/proc")).body) if name.isdigit()]
        assert len(mine) == 3, "the replica, and the two processes that keep its sandbox"


async def test_function_reaches_what_it_is_granted(sandboxed) -> None:
    """Also under a name, and at an address that changes while it runs."""
    with _greeting(b"first") as first, _greeting(b"second") as second, _greeting(b"other") as other:
        inside = ("127.0.0.100:7000", f"localhost.example:{first}", f"10.20.30.40:{first}", f"127.0.0.1:{first}")
        grants = Grants(egress=dict.fromkeys(inside, f"127.0.0.1:{first}"))
        async with open_target(sandboxed()) as target:
            probe = await target.deploy(annotations=grants.annotations())
            for address in inside:
                assert (await probe(f"hear?from={address}")).body == b"first"
            for address in (f"127.0.0.1:{other}", "127.0.0.100:7001", f"localhost:{second}"):
                assert (await probe(f"hear?from={address}")).body == b"ConnectionRefusedError"
            pid = await probe.pid()
            changed = Grants(egress={**grants.egress, inside[0]: f"127.0.0.1:{second}", inside[1]: ""})
            await target.client.deploy(dataclasses.replace(probe.spec, annotations=changed.annotations()))
            assert (await probe(f"hear?from={inside[0]}")).body == b"second"
            assert (await probe(f"hear?from={inside[1]}")).body == b"ConnectionResetError"
            assert await probe.pid() == pid, "not replaced"


async def test_large_messages_pass_in_both_directions(sandboxed) -> None:
    with _greeting(b"", echoes=True) as port:
        grants = Grants(egress={f"127.0.0.1:{port}": f"127.0.0.1:{port}"})
        async with open_target(sandboxed()) as target:
            probe = await target.deploy(annotations=grants.annotations())
            assert (await probe(f"hear?from=127.0.0.1:{port}&mib=64")).body == b"67108864"


async def test_function_with_the_network_of_the_machine(sandboxed) -> None:
    with _greeting(b"heard") as port:
        async with open_target(sandboxed()) as target:
            probe = await target.deploy(annotations=Grants(host_network=True).annotations())
            assert (await probe(f"hear?from=127.0.0.1:{port}")).body == b"heard"


@pytest.mark.parametrize("end", ["delete", "warm parent", "gateway", "termination", "sandbox"])
async def test_nothing_is_left_of_a_sandbox(sandboxed, end: str) -> None:
    embedded: Embedded = sandboxed()
    async with open_target(embedded) as target:
        probe = await target.deploy(2)
        await probe("spawn")
        family = [one for one in embedded.family() if one.pid != embedded.zygote().pid]
        assert len(family) == 11, "two replicas of five processes each, and one that a replica has started"
        match end:
            case "delete":
                await target.client.delete(probe.name)
            case "warm parent":
                os.kill(embedded.zygote().pid, signal.SIGKILL)
            case "gateway":
                embedded.kill()
            case "termination":
                embedded.stop()
            case "sandbox":
                for one in [one for one in family if one.name() == "bwrap" and one.ppid() == embedded.pid]:
                    one.kill()
        await asyncio.to_thread(until, lambda: gone(family))
        if end in ("warm parent", "sandbox"):
            await target.client.wait_ready(probe.name, 2, SOON)
            assert (await probe("echo", b"again", idempotent=True)).body == b"again"


async def test_answer_names_how_a_replica_in_a_sandbox_ended(sandboxed) -> None:
    async with open_target(sandboxed()) as target:
        probe = await target.deploy(limits={"memory": "64Mi"})
        for do, told in (("crash", "SIGSEGV"), ("exit", "status 3")):
            answer = await target.http.post(f"/function/{probe.name}", headers={"X-Do": do})
            assert told in answer.text
            await target.client.wait_ready(probe.name, 1, SOON)
        with pytest.raises(GeofedError, match="limit of 64 MiB"):
            await probe("eat?mib=160", idempotent=True)


async def test_descriptors_of_sandboxes_do_not_pile_up(sandboxed) -> None:
    with _greeting(b"heard") as port:
        grants = Grants(egress={f"127.0.0.1:{port}": f"127.0.0.1:{port}"})
        embedded = sandboxed()
        async with open_target(embedded) as target:
            probe = await target.deploy(annotations=grants.annotations())
            assert (await probe(f"hear?from=127.0.0.1:{port}")).body == b"heard"
            process = psutil.Process(embedded.pid)
            before = process.num_fds()
            for replicas in (3, 1, 3, 1):
                await target.client.scale(probe.name, replicas)
                await target.client.wait_ready(probe.name, replicas, SOON)
            assert (await probe(f"hear?from=127.0.0.1:{port}")).body == b"heard"
            await asyncio.to_thread(until, lambda: process.num_fds() <= before + 1)
            folder = embedded.state_dir / "r"
            await asyncio.to_thread(until, lambda: len(list(folder.iterdir())) == 1)


@pytest.mark.parametrize("isolation", ["require", "prefer"])
async def test_machine_without_bubblewrap(
    launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    embedded = launch(isolation=isolation)
    async with open_target(embedded) as target:
        told = (await target.client.info())["provider"]["isolation"]
        assert (told["kind"], told["reason"]) == ("none", "bubblewrap is not installed")
        if isolation == "prefer":
            assert (await (await target.deploy())("echo", b"x")).body == b"x"
        else:
            with pytest.raises(GeofedError, match="cannot be isolated on this machine: bubblewrap is not installed"):
                await target.deploy()


async def test_bubblewrap_that_fails_is_named(launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    async with open_target(launch(isolation="require")) as target:
        reason = (await target.client.info())["provider"]["isolation"]["reason"]
        assert reason == "bwrap: No permissions to create new namespace"


@pytest.mark.parametrize(
    "grants", ['{"read": ["/"]}', '{"read": ["data"]}', '{"write": ["/a/../b"]}', "[]", '{"egress": {"x": "y"}}']
)
async def test_invalid_grants_are_refused(shared, grants: str) -> None:
    async with open_target(shared) as target:
        with pytest.raises(GeofedError, match=r"geofed\.grants|not host:port"):
            await target.deploy(annotations={"geofed.grants": grants})


@contextmanager
def _greeting(words: bytes, *, echoes: bool = False) -> Iterator[int]:
    """A server that says so much to each that connects, or says again what it hears; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(words)
                    while echoes and (heard := connection.recv(1 << 20)):
                        connection.sendall(heard)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
