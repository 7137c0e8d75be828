"""Background exchange with real parameter servers: nobody waits, everything arrives, and deaths lose nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.server_process import NumpyWorker, Server, wait_until

pytestmark = pytest.mark.processes

Servers = Callable[..., list[Server]]
Workers = Callable[..., NumpyWorker]

ROUNDS = 6
PUSHES = {"east": 1.0, "north": 2.0, "west": 4.0}
SUM = ROUNDS * (ROUNDS + 1) / 2
"""Round r moves a region by its push times r."""


def _settings(**more: float) -> dict[str, Any]:
    return {"rounds": ROUNDS, "wan_settings": {"background": 1.0, "guard": 0.0, **more}}


def _end(servers: list[Server], worker_group: list[NumpyWorker], expected: float) -> None:
    for worker in worker_group:
        worker.join(60)
        assert not worker.is_alive(), f"{worker.server.region} hangs: {worker.server.status().condition}"
        assert worker.failure is None, worker.failure
    for place, server in enumerate(servers):
        status = server.status()
        assert status.phase == "finished"
        assert status.applied_updates == ROUNDS * (len(servers) - 1) + (place > 0)
        assert not status.refused
    for worker in worker_group:
        assert worker.finals[0] == pytest.approx(expected, rel=1e-5), worker.server.region


def _mean() -> float:
    return 1.0 + SUM * sum(PUSHES.values()) / len(PUSHES)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "topk"])
def test_every_region_ends_with_the_sum_of_all_changes(servers: Servers, workers: Workers, codec: str) -> None:
    made = servers(*PUSHES, codec=codec, **_settings())
    _end(made, [workers(server, PUSHES[server.region]) for server in made], _mean())


def test_sums_of_gradients(servers: Servers, workers: Workers) -> None:
    made = servers(*PUSHES, wan_policy="asgd-ga", **_settings())
    _end(made, [workers(s, PUSHES[s.region]) for s in made], 1.0 + SUM * sum(PUSHES.values()))


def test_fragments_take_turns_and_the_last_round_sends_all(servers: Servers, workers: Workers) -> None:
    made = servers(*PUSHES, **_settings(fragments=4.0))
    _end(made, [workers(s, PUSHES[s.region]) for s in made], _mean())


def test_what_is_not_significant_arrives_in_the_end(servers: Servers, workers: Workers) -> None:
    made = servers(*PUSHES, wan_policy="asp", **_settings(significance=3.0))
    _end(made, [workers(s, PUSHES[s.region]) for s in made], 1.0 + SUM * sum(PUSHES.values()))


def test_updates_travel_over_a_relay(servers: Servers, workers: Workers) -> None:
    made = servers(*PUSHES, neighbours=(("east", "north"), ("east", "west")), **_settings())
    _end(made, [workers(s, PUSHES[s.region]) for s in made], _mean())
    east, north, west = ({region for region, sent in s.status().sent_bytes.items() if sent} for s in made)
    assert (east, north, west) == ({"north", "west"}, {"east"}, {"east"})


def test_a_region_that_is_away_is_waited_for_in_the_last_quarter_only(servers: Servers, workers: Workers) -> None:
    east, north, west = servers(*PUSHES, **_settings())
    worker_group = [workers(east, PUSHES["east"]), workers(north, PUSHES["north"])]
    wait_until(lambda: east.status().round >= 1, "the first round")
    west.kill()
    wait_until(lambda: {east.status().round, north.status().round} == {ROUNDS - 1}, "all rounds but the last")
    wait_until(lambda: "waiting for round 4 of west" in east.status().condition, "the last rounds to be made together")
    west.launch()
    west.await_ready()
    for server in (east, north, west):
        server.configure(*(other for other in (east, north, west) if other is not server))
    _end([east, north, west], [*worker_group, workers(west, PUSHES["west"])], _mean())


def _kill_in_turn(made: list[Server], times: int, pause_seconds: float) -> None:
    """Kill one of three servers after the other, each after a pause, and start it again."""
    for turn in range(times):
        time.sleep(pause_seconds)
        victim = made[turn % 3]
        victim.kill()
        victim.launch()
        victim.await_ready()
        for server in made:
            server.configure(*(other for other in made if other is not server))


@pytest.mark.parametrize("codec", ["fp32", "topk"])
def test_killed_again_and_again(servers: Servers, workers: Workers, codec: str) -> None:
    made = servers(*PUSHES, codec=codec, **_settings())
    worker_group = [workers(server, PUSHES[server.region], pause=0.15) for server in made]
    _kill_in_turn(made, 6, 0.1)
    _end(made, worker_group, _mean())


def test_a_quorum_waits_for_its_grace_window_only(servers: Servers, workers: Workers) -> None:
    east, north = servers("east", "north", **_settings(quorum=2.0, grace_seconds=0.3))
    workers(east, 1.0)
    begun = time.monotonic()
    wait_until(lambda: east.status().round >= 3, "rounds without the other region")
    assert time.monotonic() - begun > 0.5
    assert north.status().round == 0


def test_a_region_does_not_run_further_ahead_than_it_may(servers: Servers, workers: Workers) -> None:
    east, north = servers("east", "north", **_settings(quorum=1.0, lead=2.0))
    ahead = workers(east, 1.0)
    wait_until(lambda: "ahead of north" in east.status().condition, "the bound to hold it")
    assert east.status().round <= 3
    _end([east, north], [ahead, workers(north, 2.0)], 1.0 + SUM * 1.5)


def test_a_new_attempt_begins_from_the_model(servers: Servers, workers: Workers) -> None:
    east, north = servers("east", "north", **_settings())
    other = workers(north, 2.0)
    first = workers(east, 1.0, pause=0.2)
    wait_until(lambda: east.status().round >= 2, "some rounds")
    first.stop.set()
    first.join(10)
    east.configure(north, attempt=2)
    second = workers(east, 1.0, attempt=2)
    for worker in (other, second):
        worker.join(60)
        assert worker.failure is None
    assert np.allclose(second.finals[0], other.finals[0], rtol=1e-5)
    assert second.finals[0] == pytest.approx(1.0 + SUM * 1.5, rel=1e-5), "no round counts twice, and none is left out"


def test_a_server_that_comes_back_elsewhere_gets_all_that_it_missed(servers: Servers, workers: Workers) -> None:
    made = servers(*PUSHES, **_settings())
    east, north, west = made
    worker_group = [workers(server, PUSHES[server.region], pause=0.1) for server in made]
    for turn in range(4):
        wait_until(lambda: east.status().round >= 1 + turn, "rounds")  # noqa: B023 - used at once
        west.kill()
        time.sleep(0.3 * turn)
        west.launch(exchange_listen="127.0.0.1:0")
        west.await_ready()
        west.configure(east, north)
        time.sleep(0.2 * turn)
        for server in (east, north):
            server.configure(*(other for other in made if other is not server))
    _end(made, worker_group, _mean())


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_robust_rule_merges_the_same_everywhere_while_servers_die(
    servers: Servers, workers: Workers, codec: str
) -> None:
    """Each round's change of a region is its push times the round: the median, round by round, is north's."""
    settings = _settings(**{"robust/median": 1.0})
    made = servers("east", "north", "west", codec=codec, **settings)
    pushes = {**PUSHES, "west": -50.0}
    worker_group = [workers(server, pushes[server.region], pause=0.15) for server in made]
    _kill_in_turn(made, 4, 0.15)
    for worker in worker_group:
        worker.join(60)
        assert not worker.is_alive(), f"{worker.server.region} hangs: {worker.server.status().condition}"
        assert worker.failure is None, worker.failure
    finals = [worker.finals[0] for worker in worker_group]
    assert len({final.tobytes() for final in finals}) == 1, "the same model, bit for bit"
    change = finals[0] - 1.0
    assert (change <= SUM * 4.0).all(), "west moves no coordinate beyond what east and north do"
    assert (change >= SUM * 0.9).all()
    assert all(server.status().phase == "finished" for server in made)
