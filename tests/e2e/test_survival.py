"""Whatever is killed, the job ends with the right number of applied updates."""

from __future__ import annotations

import shutil

import pytest
from support.running import UNHURRIED, Running, check_succeeded, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_job_runs_to_its_model_and_its_account(running: Running) -> None:
    job = running.submit("train.end.epochs=15", "wan.topology=mesh")
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


@pytest.mark.parametrize("exchange", ["synchronous", "background"])
def test_whoever_is_killed_the_job_goes_on(running: Running, exchange: str) -> None:
    """A worker, a parameter server, the control plane and an agent, one after the other while a job trains. Slices are
    short enough for invocations to follow each other."""
    long = ("train.end.epochs=200", "wan.interval=10", "train.evaluateEvery=0", "function.slice=3s")
    job = running.submit(*long, f"wan.exchange={exchange}", task=UNHURRIED)
    running.wait_round(job, 3)
    _kill_a_worker(running, job)
    _goes_on(running, job)
    (server,) = running.descendants("frankfurt", "sync.ps")
    server.kill()
    eventually(lambda: _happened(running, job, "ps-ended", "frankfurt"), "the parameter server is missed")
    _goes_on(running, job)
    running.federation.kill("control-plane")
    running.federation.start_control_plane()
    assert running.describe(job)["state"] == "running"
    _goes_on(running, job)
    _kill_agent(running, "virginia")
    running.federation.start_agent("virginia")
    _goes_on(running, job)
    running.federation.control_plane("finish", job, "--reason", "good enough")
    ended = running.wait_end(job)
    # It is finished after a few rounds, in which it has learnt something, and not all that it could.
    check_succeeded(ended, accuracy=0.3)
    assert ended["result"]["ended_early"] == "requested by a user: good enough"
    rounds = {part["region"]: part["round"] for part in ended["partitions"]}
    assert max(rounds.values()) < ended["plan"]["rounds"], rounds


def _goes_on(running: Running, job: str) -> None:
    """Each region completes rounds that it had not begun; in the background one that was away is behind the others."""
    before = {part["region"]: part["round"] for part in running.describe(job)["partitions"]}
    for region, made in before.items():
        running.wait_round(job, made + 2, region, seconds=120.0)


def _happened(running: Running, job: str, kind: str, region: str) -> bool:
    return any((event["kind"], event["region"]) == (kind, region) for event in running.events(job))


def _kill_a_worker(running: Running, job: str) -> None:
    """In the middle of its work: one that dies between two invocations is replaced before anybody misses it."""

    def dies_at_work() -> bool:
        assert running.describe(job)["state"] == "running"
        workers = running.workers("shanghai")
        for worker in workers[:1]:
            worker.kill()
        eventually(lambda: missed() or set(running.workers("shanghai")) - set(workers), "it is missed or replaced")
        return missed()

    def missed() -> bool:
        return _happened(running, job, "worker-failed", "shanghai")

    eventually(dies_at_work, "a worker dies at work")


def _kill_agent(running: Running, region: str) -> None:
    """With all that it has started: they end once it is gone."""
    children = running.descendants(region, "")
    running.federation.kill(region)
    eventually(lambda: not any(child.is_running() for child in children), "the killed agent's processes are gone")


def test_a_region_whose_state_is_deleted_comes_back(running: Running) -> None:
    """First the parameter server's folder is gone, then also what the agent remembers of its partitions."""
    long = ("train.end.epochs=200", "wan.interval=10", "wan.exchange=synchronous", "train.evaluateEvery=0")
    job = running.submit(*long, task=UNHURRIED)
    running.wait_round(job, 2)
    state = running.federation.region_state("virginia") / "state"
    for memory in ("", "agent.db*"):
        _kill_agent(running, "virginia")
        shutil.rmtree(state / "jobs" / job)
        for file in state.glob(memory) if memory else ():
            file.unlink()
        running.federation.start_agent("virginia")
        _goes_on(running, job)
    running.federation.control_plane("finish", job)
    described = running.wait_end(job)
    check_succeeded(described)
    assert len({part["round"] for part in described["partitions"]}) == 1
