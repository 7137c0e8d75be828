"""What only the embedded gateway promises: limits, isolation, warm starts, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from support.gateway_client import WholeClient
from support.processes import alive
from support.small_disk import small_disk

from geofed_pb.errors import GeofedError
from region_agent.gateway import FunctionSpec
from region_agent.gateway.embedded.replicas import memory

from .conftest import QUICK, open_target, until

pytestmark = [pytest.mark.anyio, pytest.mark.processes]
SOON = timedelta(seconds=20)
MIB = 2**20


async def in_flight(probe, directory: Path, seconds: float = 60) -> tuple[asyncio.Task, int]:
    """A call that is being worked on, and the pid of its replica."""
    marker = directory / f"started-{os.urandom(4).hex()}"
    task = asyncio.create_task(probe(f"wait?s={seconds}", str(marker).encode()))
    await asyncio.to_thread(until, lambda: marker.exists() and marker.read_text())
    return task, int(marker.read_text())


def gone(processes: list[psutil.Process]) -> bool:
    return not any(alive(process) for process in processes)


# warm starts


async def test_replicas_do_not_share_a_random_state(launch) -> None:
    embedded = launch(preload=["numpy"])
    async with open_target(embedded) as target:
        drawn = set()
        for _ in range(3):
            probe = await target.deploy()
            drawn.add((await probe("random")).body)
        assert len(drawn) == 3


async def test_emulated_cold_start(launch) -> None:
    embedded = launch(cold_start="400ms")
    async with open_target(embedded) as target:
        began = time.perf_counter()
        await target.deploy()
        assert time.perf_counter() - began >= 0.4


# crashes


async def test_kill_9_of_the_gateway_leaves_no_process(launch, tmp_path: Path) -> None:
    embedded = launch()
    async with open_target(embedded) as target:
        probe = await target.deploy(2)
        await probe("spawn")
        family = embedded.family()
        assert len(family) >= 4
        call, _ = await in_flight(probe, tmp_path)
        embedded.kill()
        with pytest.raises(GeofedError):
            await call
    until(lambda: gone(family))


async def test_termination_leaves_no_process_and_no_directory(launch) -> None:
    embedded = launch()
    async with open_target(embedded) as target:
        probe = await target.deploy(2)
        await probe("spawn")
    family = embedded.family()
    embedded.stop()
    assert gone(family)
    assert not (embedded.state_dir / "r").exists()
    assert not (embedded.directory / "ready.json").exists()


async def test_dead_zygote_is_replaced_and_its_replicas_with_it(launch, tmp_path: Path) -> None:
    embedded = launch()
    async with open_target(embedded) as target:
        probe = await target.deploy(2)
        child = int((await probe("spawn")).body)
        call, pid = await in_flight(probe, tmp_path)
        zygote = embedded.zygote()
        os.kill(zygote.pid, signal.SIGKILL)
        with pytest.raises(GeofedError, match="warm parent") as caught:
            await call
        assert caught.value.code == "FUNCTION_FAILED"
        until(lambda: not psutil.pid_exists(pid))
        await target.client.wait_ready(probe.name, 2, SOON)
        assert not psutil.pid_exists(child)
        assert embedded.zygote().pid != zygote.pid
        assert (await probe("echo", b"again")).body == b"again"


async def test_what_a_replica_started_ends_with_it(shared) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy()
        child = int((await probe("spawn")).body)
        await target.client.delete(probe.name)
        until(lambda: not psutil.pid_exists(child))


@pytest.mark.parametrize("end", ["crash", "exit"])
async def test_answer_names_how_the_replica_ended(shared, end: str) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy()
        answer = await target.http.post(f"/function/{probe.name}", headers={"X-Do": end})
        assert answer.status_code == 500
        assert answer.headers["X-OpenFaaS-Internal"] == "proxy"
        assert ("SIGSEGV" if end == "crash" else "status 3") in answer.text


async def test_killed_replica_is_replaced_without_a_call(shared) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy()
        pid = await probe.pid()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(pid))
        assert (await probe("echo", b"x", idempotent=True)).body == b"x"


async def test_timed_out_replica_is_killed(shared, tmp_path: Path) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy(env_vars={"exec_timeout": "1s"})
        call, pid = await in_flight(probe, tmp_path)
        with pytest.raises(GeofedError, match="within 1s"):
            await call
        assert (await probe("echo", b"x")).body == b"x"
        until(lambda: not psutil.pid_exists(pid))


async def test_handler_that_cannot_be_imported_is_reported(launch) -> None:
    embedded = launch(start_timeout="1s")
    async with open_target(embedded) as target:
        await target.client.deploy(FunctionSpec("broken", "broken:1"))
        with pytest.raises(GeofedError, match="exited with status") as caught:
            await target.client.invoke("broken")
        assert caught.value.code == "GATEWAY_UNAVAILABLE"
        texts = [line.text async for line in target.client.logs("broken")]
        assert any("no_such_module" in text for text in texts)


async def test_unknown_image_is_refused(shared) -> None:
    async with open_target(shared) as target:
        with pytest.raises(GeofedError, match="known prefixes: broken, probe"):
            await target.client.deploy(FunctionSpec("other", "some/other:1"))


# draining


async def test_call_in_flight_survives_scaling_down(shared, tmp_path: Path) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy()
        call, _ = await in_flight(probe, tmp_path, seconds=0.5)
        await target.client.delete(probe.name)
        assert (await call).body == b"woke"


async def test_drain_is_bounded(launch, tmp_path: Path) -> None:
    embedded = launch(drain_timeout="200ms")
    async with open_target(embedded) as target:
        probe = await target.deploy()
        call, pid = await in_flight(probe, tmp_path)
        await target.client.delete(probe.name)
        with pytest.raises(GeofedError):
            await call
        until(lambda: not psutil.pid_exists(pid))


async def test_call_wakes_a_function_from_zero(shared) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy(0)
        assert (await probe("echo", b"x")).body == b"x"


# limits


async def test_memory_limit_kills_and_names_itself(shared) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy(limits={"memory": "64Mi"})
        assert (await probe("eat?mib=16&s=0")).status == 200
        with pytest.raises(GeofedError, match="limit of 64 MiB") as caught:
            await probe("eat?mib=160", idempotent=True)
        assert caught.value.code == "FUNCTION_OUT_OF_MEMORY"
        assert (await probe("echo", b"x")).body == b"x"


def test_page_tables_are_walked_once_a_second_while_resident_memory_tells_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident, private, now, walks = 100, 10, 50.0, 0

    def walk(_: object) -> int:
        nonlocal walks
        walks += 1
        return private

    monkeypatch.setattr(memory, "_resident_bytes", lambda _: resident)
    monkeypatch.setattr(memory, "_private_bytes", walk)
    monkeypatch.setattr(memory.time, "monotonic", lambda: now)
    watched = memory.PrivateMemory()
    assert (watched.used([1 << 30], 100), walks) == (100, 0), "not above the limit, whatever is shared"
    assert (watched.used([1 << 30], 50), walks) == (10, 1)
    resident, private = 120, 45
    assert (watched.used([1 << 30], 50), walks) == (30, 1), "what has grown is not shared"
    resident = 145
    assert (watched.used([1 << 30], 50), walks) == (45, 2), "at once where it may be too much"
    private = 60
    assert (watched.used([1 << 30], 50), walks) == (45, 2)
    now += 1.0
    assert (watched.used([1 << 30], 50), walks) == (60, 3), "shared pages that were written"
    resident = 90
    assert (watched.used([1 << 30], 50), walks) == (60, 4)


async def test_function_that_fills_the_disk_is_killed(launch, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", bytes_=64 * MIB) as folder:
        embedded = launch(state_dir=str(folder / "state"))
        async with open_target(embedded) as target:
            probe, other = await target.deploy(), await target.deploy()
            with pytest.raises(GeofedError, match="and the disk is nearly full"):
                await probe("fill", idempotent=True)
            assert (await other.pid()) == (await other.pid())
            until(lambda: shutil.disk_usage(folder).free > 3 * MIB)  # its files go after its call has ended
            assert (await probe("echo", b"x")).body == b"x"
        embedded.stop()


async def test_max_inflight_above_one_runs_calls_side_by_side(shared, tmp_path: Path) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy(env_vars={"max_inflight": "2"})
        first, pid = await in_flight(probe, tmp_path)
        assert await probe.pid() == pid
        second, other = await in_flight(probe, tmp_path)
        assert other == pid
        with pytest.raises(GeofedError, match="max_inflight=2"):
            await probe("echo")
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def test_handlers_run_in_the_main_thread(shared) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy()
        assert json.loads((await probe("describe")).body)["thread"] == "MainThread"


async def test_too_large_a_body_is_refused(launch) -> None:
    embedded = launch(max_body_bytes=1000)
    async with open_target(embedded) as target:
        probe = await target.deploy()
        with pytest.raises(GeofedError) as caught:
            await probe("echo", b"x" * 1001)
        assert caught.value.code == "LIMIT_EXCEEDED"


async def test_community_edition_profile(launch, tmp_path: Path) -> None:
    embedded = launch("--profile", "ce")
    async with open_target(embedded) as target:
        probe = await target.deploy()
        await target.client.scale(probe.name, 9)
        assert (await target.client.get(probe.name)).replicas == 5
        await target.client.scale(probe.name, 0)
        assert (await target.client.get(probe.name)).replicas == 1
        for number in range(14):
            await target.client.deploy(FunctionSpec(f"f{number}", "probe"))
        with pytest.raises(GeofedError, match="15 functions"):
            await target.client.deploy(FunctionSpec("one-too-many", "probe"))
        await target.client.wait_ready(probe.name, 1, SOON)
        with pytest.raises(GeofedError) as caught:
            await target.client.invoke_async(probe.name, b"x" * (256 * 1024 + 1))
        assert caught.value.code == "LIMIT_EXCEEDED"
        call, _ = await in_flight(probe, tmp_path)
        await target.client.invoke_async(probe.name, b"runs")
        for _ in range(10):
            await target.client.invoke_async(probe.name, b"waits")
        with pytest.raises(GeofedError) as caught:
            await target.client.invoke_async(probe.name, b"one too many")
        assert caught.value.code == "FUNCTION_BUSY"
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_waiting_call_can_be_cancelled(launch, tmp_path: Path) -> None:
    embedded = launch(profile="ce")
    async with open_target(embedded) as target:
        probe = await target.deploy()
        call, _ = await in_flight(probe, tmp_path)
        await target.client.invoke_async(probe.name, b"runs")
        waiting = await target.client.invoke_async(probe.name, b"waits")
        assert (await target.http.delete(f"/async-function/{waiting}")).status_code == 200
        assert (await target.http.delete(f"/async-function/{waiting}")).status_code == 404
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_plaintext_callback_beyond_this_machine_is_refused(shared) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy()
        with pytest.raises(GeofedError, match="plaintext"):
            await target.client.invoke_async(probe.name, b"", callback_url="http://198.51.100.1/x")


# isolation


async def test_environment_is_scrubbed(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGION_PASSWORD", "hunter2")
    embedded = launch()
    async with open_target(embedded) as target:
        probe = await target.deploy(env_vars={"OWN": "1"})
        seen = json.loads((await probe("env")).body)
        assert set(seen["environ"]) == {
            *("PATH", "LANG", "HOME", "TMPDIR", "OPENFAAS_SECRETS", "OPENFAAS_NAME"),
            *("OWN", "read_timeout", "write_timeout", "exec_timeout"),
        }
        assert "hunter2" not in seen["initial"]
        assert seen["cwd"] == seen["environ"]["HOME"]


async def test_temporary_files_end_with_their_replica(launch) -> None:
    """Although the warm parent has found a folder for its own before it forks."""
    embedded = launch(preload=["torch"])
    async with open_target(embedded) as target:
        probe = await target.deploy()
        scratch = Path((await probe("scratch")).body.decode())
        home = Path(json.loads((await probe("env")).body)["environ"]["HOME"])
        assert (home / "tmp" / scratch.name).exists()
        await target.client.delete(probe.name)
        until(lambda: not home.exists() and not scratch.parent.exists())


async def test_processes_of_a_function_find_each_other_wherever_the_state_lies(
    launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path is short; the folders for temporary files of the gateway and of its functions need not be."""
    deep = tmp_path / ("deep" * 30)
    (deep / "tmp").mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(deep / "tmp"))
    embedded = launch(state_dir=str(deep / "state"))
    async with open_target(embedded) as target:
        probe = await target.deploy()
        assert (await probe("listen")).body == b"heard"
        short = Path((await probe("scratch")).body.decode()).parent.parent
    embedded.kill()
    assert short.exists()
    embedded.start()
    assert not short.exists()


async def test_isolation_that_is_switched_off_is_reported(launch) -> None:
    embedded = launch()
    async with open_target(embedded) as target:
        isolation = (await target.client.info())["provider"]["isolation"]
        assert (isolation["kind"], isolation["reason"]) == ("none", "it is switched off")
        probe = await target.deploy()
        assert (await probe(f"read?path={embedded.directory / 'gateway.json'}")).status == 200


async def test_descriptors_and_directories_do_not_pile_up(shared) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy()
        await asyncio.gather(*(probe("echo", idempotent=True) for _ in range(4)))
        process = psutil.Process(shared.pid)
        before = process.num_fds()
        for _ in range(5):
            await target.client.scale(probe.name, 3)
            await target.client.wait_ready(probe.name, 3, SOON)
            await asyncio.gather(*(probe("echo", idempotent=True) for _ in range(3)))
            await target.client.scale(probe.name, 1)
            await target.client.wait_ready(probe.name, 1, SOON)
        await asyncio.to_thread(until, lambda: process.num_fds() <= before + 1)


async def test_replica_directory_is_removed(launch) -> None:
    embedded = launch()
    async with open_target(embedded) as target:
        probe = await target.deploy()
        assert len(list((embedded.state_dir / "r").iterdir())) == 1
        await target.client.delete(probe.name)
        until(lambda: not list((embedded.state_dir / "r").iterdir()))


# the process


async def test_metrics_have_openfaas_names(shared) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy(2)
        counter = f'gateway_function_invocation_total{{code="200",function_name="{probe.name}"}} '
        counts = []
        for _ in range(2):
            await probe("echo")
            text = (await target.http.get("/metrics")).text
            counts.append(next(line for line in text.splitlines() if line.startswith(counter)))
        first, second = (float(line.removeprefix(counter)) for line in counts)
        assert second == first + 1
        assert f'gateway_service_count{{function_name="{probe.name}"}} 2.0' in text
        assert "gateway_functions_seconds_bucket" in text
        answer = await target.http.get(f"/system/function/{probe.name}?usage=1")
        assert answer.json()["usage"]["totalMemoryBytes"] > MIB
        assert answer.json()["invocationCount"] == second


async def test_unix_socket(launch, tmp_path: Path) -> None:
    embedded = launch("--listen", f"unix:{tmp_path}/g.sock")
    async with WholeClient(embedded.url, retry=QUICK) as client:
        assert await client.health()
        assert (tmp_path / "g.sock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("listen", ["[::1]:0", "::1:0"])
async def test_ipv6(launch, listen: str) -> None:
    embedded = launch("--listen", listen)
    assert embedded.url.startswith("http://[::1]:")
    async with open_target(embedded) as target:
        probe = await target.deploy()
        assert (await probe("echo", b"x")).body == b"x"


async def test_follower_of_logs_ends_with_the_function(shared) -> None:
    async with open_target(shared) as target:
        probe = await target.deploy()
        await probe("print", b"only")
        texts = []
        async for line in target.client.logs(probe.name, follow=True):
            texts.append(line.text)
            if line.text == "only":
                await target.client.delete(probe.name)
        assert "only" in texts


async def test_unix_socket_with_a_long_path(launch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    embedded = launch("--listen", f"unix:{deep}/g.sock")
    async with WholeClient(embedded.url, retry=QUICK) as client:
        assert await client.health()


async def test_long_state_directory(launch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    embedded = launch("--state-dir", str(deep))
    async with open_target(embedded) as target:
        probe = await target.deploy()
        assert (await probe("echo", b"x")).body == b"x"
