"""Whatever is killed, the job ends with the right number of applied updates."""

from __future__ import annotations

import shutil

import pytest
from support.running import Running, check_succeeded, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(params=["synchronous", "background"])
def long(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Rounds enough to kill something in the middle, and slices short enough for invocations to follow each other."""
    settings = ("train.end.epochs=18", "wan.interval=10", "train.evaluateEvery=0", "function.slice=3s")
    return (*settings, f"wan.exchange={request.param}")


def test_a_job_runs_to_its_model_and_its_account(running: Running) -> None:
    job = running.submit("train.end.epochs=15")
    described = running.wait_end(job)
    check_succeeded(described, accuracy=0.95)
    result = described["result"]
    items = {(line["region"], line["item"].split()[0]) for line in result["money"]}
    for region in ("frankfurt", "shanghai", "virginia"):
        assert {(region, "function-seconds"), (region, "parameter-server"), (region, "egress")} <= items
    assert len(result["wan_bytes"]) == 6
    assert all(count > 0 for count in result["wan_bytes"].values())
    for what in ("seconds", "wan_bytes", "usd"):
        assert result["measured"][what] > 0
        assert result["predicted"][what]["low"] <= result["predicted"][what]["high"]


def test_a_killed_control_plane_finds_the_job_running_and_finishes_it(running: Running, long: tuple[str, ...]) -> None:
    job = running.submit(*long)
    running.wait_round(job, 3)
    running.federation.kill("control-plane")
    running.federation.start_control_plane()
    assert running.describe(job)["state"] in ("running", "finishing", "succeeded")
    check_succeeded(running.wait_end(job))


def test_a_killed_worker_is_replaced(running: Running, long: tuple[str, ...]) -> None:
    job = running.submit(*long)
    running.wait_round(job, 2)

    def missed() -> bool:
        return any(event["kind"] == "worker-failed" for event in running.events(job) if event["region"] == "shanghai")

    def dies_at_work() -> bool:
        """One that dies between two invocations is replaced before anybody misses it."""
        assert running.describe(job)["state"] == "running"
        workers = running.workers("shanghai")
        for worker in workers[:1]:
            worker.kill()
        eventually(lambda: missed() or set(running.workers("shanghai")) - set(workers), "it is missed or replaced")
        return missed()

    eventually(dies_at_work, "a worker dies at work")
    check_succeeded(running.wait_end(job))


def test_a_killed_parameter_server_goes_on_from_its_disk(running: Running, long: tuple[str, ...]) -> None:
    job = running.submit(*long)
    running.wait_round(job, 3)
    (server,) = running.descendants("frankfurt", "sync.ps")
    server.kill()
    check_succeeded(running.wait_end(job))
    assert any(event["kind"] == "ps-ended" and event["region"] == "frankfurt" for event in running.events(job))


def test_a_killed_agent_takes_its_partition_up_again(running: Running, long: tuple[str, ...]) -> None:
    job = running.submit(*long)
    running.wait_round(job, 3)
    children = running.descendants("virginia", "")
    running.federation.kill("virginia")
    eventually(lambda: not any(child.is_running() for child in children), "the killed agent's processes are gone")
    running.federation.start_agent("virginia")
    check_succeeded(running.wait_end(job))


@pytest.mark.parametrize("with_memory", [True, False], ids=["state", "state-and-memory"])
def test_a_region_whose_state_is_deleted_comes_back(running: Running, with_memory: bool) -> None:
    """The parameter server's folder is gone; and what the agent remembers of its partitions as well."""
    job = running.submit("train.end.epochs=12", "wan.interval=10", "wan.exchange=synchronous", "train.evaluateEvery=0")
    running.wait_round(job, 2)
    children = running.descendants("virginia", "")
    running.federation.kill("virginia")
    eventually(lambda: not any(child.is_running() for child in children), "the killed agent's processes are gone")
    state = running.federation.region_state("virginia") / "state"
    shutil.rmtree(state / "jobs" / job)
    if not with_memory:
        for file in state.glob("agent.db*"):
            file.unlink()
    running.federation.start_agent("virginia")
    described = running.wait_end(job)
    check_succeeded(described)
    assert {part["round"] for part in described["partitions"]} == {described["plan"]["rounds"]}
