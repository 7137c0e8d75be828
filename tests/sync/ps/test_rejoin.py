"""A region that has lost its state comes back into the running job: no round is lost, none is made in two ways."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from support.server_process import NumpyWorker, Server, wait_until

pytestmark = pytest.mark.processes

Servers = Callable[..., list[Server]]
Workers = Callable[..., NumpyWorker]

ROUNDS = 6
PUSHES = {"east": 1.0, "north": 2.0, "west": 4.0}
EXPECTED = 1.0 + ROUNDS * (ROUNDS + 1) / 2 * sum(PUSHES.values()) / len(PUSHES)
"""Round r moves a region by its push times r; the regions' models are averaged."""
STAR = (("east", "north"), ("east", "west"))

IMPATIENT = {"background": 1.0, "quorum": 1.0}
"""A region begins rounds without the others at once, and not after some seconds of each."""


def _introduce(servers: list[Server], attempt: int = 0, *, finish: bool = False) -> None:
    for server in servers:
        server.configure(*(other for other in servers if other is not server), attempt=attempt, finish=finish)


def _lose(victim: Server, servers: list[Server], *, channel: bool = False) -> None:
    """Its disk is gone; what waited for it is introduced to its next life."""
    victim.kill()
    shutil.rmtree(victim.settings["state_dir"])
    if channel:
        shutil.rmtree(victim.channel_folder)
    victim.launch(begun=True)
    victim.await_ready()
    _introduce(servers)


def _has_state(server: Server) -> bool:
    return "its state is lost" not in server.status().condition


def _end(servers: list[Server], worker_group: list[NumpyWorker]) -> None:
    for worker in worker_group:
        worker.join(60)
        assert not worker.is_alive(), f"{worker.server.region} hangs: {worker.server.status().condition}"
        assert worker.failure is None, (worker.failure, worker.server.log.read_text()[-2000:])
    statuses = [server.status() for server in servers]
    assert {status.phase for status in statuses} == {"finished"}
    assert len({status.model_digest for status in statuses}) == 1
    for place, status in enumerate(statuses):
        assert status.applied_updates == ROUNDS * (len(servers) - 1) + (place > 0)
        assert (status.round, status.step, status.samples) == (ROUNDS, ROUNDS, 10 * ROUNDS)
    for worker in worker_group:
        assert worker.finals[0] == pytest.approx(EXPECTED, rel=1e-5)


# East is the first region and the star's hub. The other two stand alike: each is lost in one of the two topologies.
@pytest.mark.parametrize(
    ("lost", "neighbours"),
    [
        pytest.param("east", (), id="east-mesh"),
        pytest.param("west", (), id="west-mesh"),
        pytest.param("east", STAR, id="east-star"),
        pytest.param("north", STAR, id="north-star"),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
def test_the_job_ends_as_if_nothing_had_been_lost(
    servers: Servers, workers: Workers, lost: str, after: int, neighbours: Any
) -> None:
    made = servers(*PUSHES, rounds=ROUNDS, neighbours=neighbours)
    worker_group = [workers(server, PUSHES[server.region], pause=0.1) for server in made]
    victim = next(server for server in made if server.region == lost)
    wait_until(lambda: made[0].status().round >= after and made[0].status().model_digest, "the round")
    _lose(victim, made)
    _end(made, worker_group)
    assert "the state was lost" in victim.log.read_text()


def test_at_any_moment_again_and_again(servers: Servers, workers: Workers) -> None:
    made = servers(*PUSHES, rounds=ROUNDS, codec="int8", wan_policy="diloco", neighbours=STAR)
    # A round that only the lost region had the update of is made again.
    worker_group = [workers(server, PUSHES[server.region], pause=0.15, begins_again=True) for server in made]
    for turn in range(6):
        time.sleep(0.07 * turn)
        victim = made[turn % 3]
        # Somebody has to have the state; two may lack it at a time.
        others = [server for server in made if server is not victim]
        wait_until(lambda others=others: any(map(_has_state, others)), "a state to be left")
        _lose(victim, made)
    for worker in worker_group:
        worker.join(60)
        assert worker.failure is None, worker.failure
    statuses = [server.status() for server in made]
    assert len({status.model_digest for status in statuses}) == 1
    assert {(status.phase, status.round, status.step) for status in statuses} == {("finished", ROUNDS, ROUNDS)}


def test_nothing_is_begun_before_all_others_have_answered(servers: Servers, workers: Workers) -> None:
    """Any of them may be the only one that has an update of the lost region."""
    east, north, west = made = servers(*PUSHES, rounds=ROUNDS)
    worker_group = [workers(server, PUSHES[server.region], pause=0.1) for server in made]
    wait_until(lambda: east.status().round >= 2, "some rounds")
    north.kill()
    _lose(west, [east, west])
    wait_until(lambda: "its state is lost" in west.status().condition, "the question")
    time.sleep(1.5)
    assert west.status().round == 0
    north.launch()
    north.await_ready()
    _introduce(made)
    _end(made, worker_group)


@pytest.mark.parametrize("neighbours", [(), STAR], ids=["mesh", "star"])
def test_what_ended_before_its_plan_has_ended_for_a_region_that_comes_back(
    servers: Servers, workers: Workers, neighbours: Any
) -> None:
    east, _, west = made = servers(*PUSHES, rounds=200, neighbours=neighbours)
    worker_group = [workers(server, PUSHES[server.region], pause=0.05) for server in made]
    wait_until(lambda: east.status().round >= 2, "some rounds")
    _introduce(made, finish=True)
    for worker in worker_group:
        worker.join(30)
    ended = {server.status().round for server in made}
    assert len(ended) == 1
    assert ended < set(range(200))
    _lose(west, made)
    again = workers(west, PUSHES["west"], attempt=2)
    again.join(30)
    assert not again.is_alive(), west.status().condition
    assert again.failure is None
    statuses = [server.status() for server in made]
    assert {(status.phase, status.round) for status in statuses} == {("finished", *ended)}
    assert len({status.model_digest for status in statuses}) == 1
    west.kill()
    west.launch()
    west.await_ready()
    assert (west.status().phase, west.status().round) == ("finished", *ended)


@pytest.mark.parametrize("lost", list(PUSHES))
def test_a_partition_that_had_not_begun_begins(servers: Servers, workers: Workers, lost: str) -> None:
    made = servers(*PUSHES, rounds=ROUNDS)
    _lose(next(server for server in made if server.region == lost), made)
    _end(made, [workers(server, PUSHES[server.region]) for server in made])


@pytest.mark.parametrize(
    "neighbours", [(), (("east", "north"), ("north", "south"), ("south", "west"))], ids=["mesh", "chain"]
)
def test_a_loss_in_all_regions_is_told(servers: Servers, neighbours: Any) -> None:
    made = servers("east", "north", "south", "west", rounds=ROUNDS, neighbours=neighbours)
    for server in made:
        server.kill()
        shutil.rmtree(server.settings["state_dir"])
    for server in made:
        server.launch(begun=True)
    for server in made:
        server.await_ready()
    for server in made:
        peers = [other for other in made if other is not server]
        with contextlib.suppress(grpc.RpcError):  # the first that knows ends
            server.configure(*peers)
    wait_until(lambda: any(server.process.poll() for server in made if server.process), "the end of one")
    told = next(server for server in made if server.process and server.process.poll())
    assert "error[STATE_INVALID]: every region's state is lost" in told.log.read_text()


def test_in_a_chain_whoever_is_between_comes_back_first(servers: Servers, workers: Workers) -> None:
    chain = (("east", "north"), ("north", "west"))
    east, north, west = made = servers(*PUSHES, rounds=ROUNDS, neighbours=chain)
    worker_group = [workers(server, PUSHES[server.region], pause=0.1) for server in made]
    wait_until(lambda: east.status().round >= 2, "some rounds")
    for server in (east, north):
        server.kill()
        shutil.rmtree(server.settings["state_dir"])
        server.launch(begun=True)
    for server in (east, north):
        server.await_ready()
    # Both have lost their state, and east asks none but north.
    for server in (east, west, north):
        server.configure(*(other for other in made if other is not server))
    for worker in worker_group:
        worker.join(60)
        assert worker.failure is None, worker.failure
    statuses = [server.status() for server in made]
    assert len({status.model_digest for status in statuses}) == 1
    assert {(status.phase, status.round, status.step) for status in statuses} == {("finished", ROUNDS, ROUNDS)}


def test_a_region_alone_that_has_lost_its_state_says_so(servers: Servers) -> None:
    (east,) = servers("east", rounds=ROUNDS)
    east.kill()
    shutil.rmtree(east.settings["state_dir"])
    east.launch(begun=True)
    assert east.process is not None
    assert east.process.wait(20) != 0
    assert "error[STATE_INVALID]: the state is lost, and no other region has the model" in east.log.read_text()


def test_a_fresh_partition_asks_nobody(servers: Servers, workers: Workers) -> None:
    east, north = servers("east", "north", rounds=ROUNDS)
    worker_group = [workers(server, PUSHES[server.region]) for server in (east, north)]
    for worker in worker_group:
        worker.join(60)
        assert worker.failure is None
    assert "lost" not in east.log.read_text() + north.log.read_text()


def test_in_the_background_the_loss_is_told(servers: Servers, workers: Workers) -> None:
    east, north = made = servers("east", "north", rounds=ROUNDS, wan_settings={"background": 1.0})
    for server in made:
        workers(server, PUSHES[server.region], pause=0.2)
    wait_until(lambda: east.status().round >= 2, "some rounds")
    north.kill()
    shutil.rmtree(north.settings["state_dir"])
    _comes_back_and_says_that_it_cannot(north, made)


def _comes_back_and_says_that_it_cannot(region: Server, servers: list[Server]) -> None:
    region.launch(begun=True)
    region.await_ready()
    _introduce(servers)
    assert region.process is not None
    assert region.process.wait(20) != 0
    assert "STATE_INVALID" in region.log.read_text()


def test_in_the_background_whoever_has_lost_nothing_begins(servers: Servers, workers: Workers) -> None:
    """The others have the first model and rounds of theirs; nobody has anything of north, nor has it had theirs."""
    east, north, west = made = servers(
        *PUSHES, rounds=ROUNDS, wan_settings={"background": 1.0, "quorum": 1.0, "lead": 4.0}
    )
    for server in (north, west):
        server.kill()
    worker_group = [workers(east, PUSHES["east"], pause=0.05)]
    wait_until(lambda: east.status().round >= 2, "some rounds")
    shutil.rmtree(north.settings["state_dir"])
    for server in (north, west):
        server.launch(begun=server is north)
        server.await_ready()
    _introduce(made)
    worker_group += [workers(server, PUSHES[server.region], pause=0.05) for server in (north, west)]
    for worker in worker_group:
        worker.join(60)
        assert worker.failure is None, worker.failure
    statuses = [server.status() for server in made]
    assert {(status.phase, status.round) for status in statuses} == {("finished", ROUNDS)}
    assert {status.applied_updates for status in statuses[1:]} == {2 * ROUNDS + 1}
    for worker in worker_group[1:]:
        assert worker.finals[0] == pytest.approx(worker_group[0].finals[0], rel=1e-5)


def test_in_the_background_what_others_have_forgotten_is_lost(servers: Servers, workers: Workers) -> None:
    """East's first updates were here, and are nowhere any more although they are merged there."""
    east, north = made = servers(
        "east", "north", rounds=40, wan_settings={"background": 1.0, "quorum": 1.0, "lead": 40.0}
    )
    workers(east, PUSHES["east"], pause=0.05)
    wait_until(lambda: not (east.settings["state_dir"] / "outbox" / "0.json").exists() and east.status().round, "it")
    north.kill()
    shutil.rmtree(north.settings["state_dir"])
    _comes_back_and_says_that_it_cannot(north, made)
